"""Samples of an exact denoiser follow the exact distribution, in any batch."""

import pytest
import torch
from torch import Tensor

from tests.baselines.exact_denoisers import (
    GIVEN,
    LENGTH,
    LETTERS,
    ROW,
    SAMPLES,
    SEQUENCES,
    chi_square,
    conditional,
    toy,
    truth,
)
from tests.toys import SYSTEMS, TRACFORMER, random_question, small_diffusion
from tracformer.baselines.reverse_process import pick
from tracformer.generation.decode import fill
from tracformer.generation.orders import Ancestral, RandomOrder
from tracformer.generation.samplers import Sampler
from tracformer.model.batch import Batch

MANY_STEPS = {"mdlm": None, "sedd": 100, "d3pm": None}  # of MDLM: one token at a time; of D3PM: all


def sampled(system: str, steps: int | None, **changes: int) -> tuple[Tensor, Tensor]:
    model = toy(system, **changes)
    rows = (ROW.expand(SAMPLES, -1), GIVEN.expand(SAMPLES, -1))
    tokens, log_probs = model.ancestral(
        Batch(*rows), steps=steps, seeds=torch.arange(SAMPLES) + 10**6
    )
    return tokens, log_probs


@pytest.mark.parametrize("system", SYSTEMS)
def test_many_steps_follow_the_exact_conditional(system: str) -> None:
    tokens, log_probs = sampled(
        system, MANY_STEPS[system], **({"n_step": 100} if system == "d3pm" else {})
    )
    assert bool((tokens[:, GIVEN] == ROW[GIVEN]).all())
    assert not log_probs[:, GIVEN].any()
    assert abs(chi_square(tokens, conditional())) < 3.5
    if system == "mdlm":  # one at a time: the chain rule along the order drawn
        torch.testing.assert_close(
            log_probs.sum(1), truth(tokens, GIVEN.expand(SAMPLES, -1)), atol=1e-8, rtol=0
        )


@pytest.mark.parametrize("system", SYSTEMS)
def test_one_step_draws_every_target_from_its_own_marginal(system: str) -> None:
    tokens, _ = sampled(system, 1)
    marginals = [
        torch.stack([conditional()[SEQUENCES[:, t] == v].sum() for v in range(LETTERS)])
        for t in range(LENGTH)
    ]
    product = torch.stack([marginals[t][SEQUENCES[:, t]] for t in range(LENGTH)]).prod(0)
    assert abs(chi_square(tokens, product)) < 3.5
    assert chi_square(tokens, conditional().clamp(min=1e-12)) > 10  # and that is not the joint


@pytest.mark.parametrize(("system", "changes"), [*((s, {}) for s in SYSTEMS), ("mdlm", TRACFORMER)])
def test_a_sequence_is_filled_alike_alone_and_in_any_batch(
    system: str, changes: dict[str, object]
) -> None:
    model = small_diffusion(system, **changes)
    tokens, context, lengths = random_question(4, 9)
    seeds = torch.tensor([11, 12, 13, 14])
    together = model.ancestral(Batch(tokens, context, lengths), steps=6, seeds=seeds)
    inside = torch.arange(9) < lengths[:, None]
    assert torch.equal(together.tokens[context & inside], tokens[context & inside])
    for b, n in enumerate(lengths.tolist()):
        alone = model.ancestral(
            Batch(tokens[b : b + 1, :n], context[b : b + 1, :n]), steps=6, seeds=seeds[b : b + 1]
        )
        assert torch.equal(alone.tokens[0], together.tokens[b, :n])
        torch.testing.assert_close(
            alone.log_probs[0], together.log_probs[b, :n], atol=1e-10, rtol=0
        )
    others = torch.where(context, tokens, (tokens + 3) % 7)  # what stands at a target is ignored
    assert torch.equal(
        model.ancestral(Batch(others, context, lengths), steps=6, seeds=seeds).tokens[inside],
        together.tokens[inside],
    )


def test_the_network_runs_only_when_something_is_revealed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_diffusion("mdlm")
    calls: list[int] = []
    states = type(model).states

    def counted(self: object, tokens: Tensor, *rest: Tensor) -> Tensor:
        calls.append(len(tokens))
        return states(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model), "states", counted)
    model.ancestral(
        Batch(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.bool)),
        steps=10_000,
    )
    assert sum(calls) == 10  # a run for each revealed token, though there are ten thousand steps


def test_temperature_zero_takes_the_likeliest_and_log_probs_are_the_models_own() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    u = torch.tensor([0.999, 0.999], dtype=torch.float64)
    picked, log_probs = pick(logits, u, 0.0)
    assert picked.tolist() == [1, 0]
    _, warm = pick(logits, u, 5.0)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(log_probs, expected[[0, 1], [1, 0]])
    torch.testing.assert_close(warm, expected[[0, 1], [2, 2]])


def test_wrong_requests_are_refused() -> None:
    model, row = small_diffusion("d3pm"), torch.zeros(1, 3, dtype=torch.long)
    empty = torch.zeros(1, 3, dtype=torch.bool)
    for words, changes in (
        ("steps is 0", {"steps": 0}),
        ("steps is 1001; this process has 1000", {"steps": 1001}),
        ("seeds has shape", {"seeds": torch.arange(2)}),
        ("temperature is -1", {"temperature": -1.0}),
    ):
        with pytest.raises(ValueError, match=words):
            model.ancestral(Batch(row, empty), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="context is"):
        model.ancestral(Batch(row, empty[:, :2]))


def test_the_filling_loop_runs_the_reverse_process() -> None:
    """Mode `diffusion` of `fill` is the system's own sampler."""
    tokens, context, lengths = random_question(3, 10)
    for name in ("mdlm", "sedd", "d3pm"):
        model = small_diffusion(name)
        sampled = fill(
            model, Batch(tokens, context, lengths), "diffusion", seed=[1, 2, 3], order=Ancestral(4)
        )
        expected = model.ancestral(Batch(tokens, context, lengths), 4, torch.tensor([1, 2, 3]))
        assert torch.equal(sampled.tokens, expected.tokens)
        assert torch.allclose(sampled.log_probs, expected.log_probs)
    with pytest.raises(ValueError, match="required have no meaning there"):
        fill(model, Batch(tokens, context, lengths), "diffusion", sampler=Sampler(required=(2,)))
    with pytest.raises(ValueError, match="repetition_penalty"):
        fill(
            model,
            Batch(tokens, context, lengths),
            "diffusion",
            sampler=Sampler(repetition_penalty=2.0),
        )
    # three ways to the likeliest
    rules = [Sampler(top_k=1), Sampler(temperature=0.0), Sampler(top_p=1e-9, temperature=3.0)]
    coldest = fill(
        model,
        Batch(tokens, context, lengths),
        "diffusion",
        seed=[1, 2, 3],
        order=Ancestral(4),
        sampler=rules,
    )
    expected = model.ancestral(Batch(tokens, context, lengths), 4, torch.tensor([1, 2, 3]), 0.0)
    assert torch.equal(coldest.tokens, expected.tokens)
    warm = fill(
        model,
        Batch(tokens, context, lengths),
        "diffusion",
        seed=[1, 2, 3],
        order=Ancestral(4),
        sampler=Sampler(temperature=2.0),
    )
    assert torch.equal(
        warm.tokens,
        model.ancestral(Batch(tokens, context, lengths), 4, torch.tensor([1, 2, 3]), 2.0).tokens,
    )
    with pytest.raises(ValueError, match="Ancestral"):
        fill(model, Batch(tokens, context, lengths), "diffusion", order=RandomOrder())


def test_the_coldest_draw_is_the_likeliest_token() -> None:
    logits, u = (
        torch.tensor([[1.0, 3.0, 2.0]] * 3),
        torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64),
    )
    for temperature in (0.0, 1e-310, 1e-5):
        assert pick(logits, u, temperature)[0].tolist() == [1, 1, 1]
