"""Masked diffusion: the network, the training losses, the bound and the reverse process."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.baselines.literal import (
    CONTEXT,
    GIVEN,
    LENGTH,
    LETTERS,
    ROW,
    SAMPLES,
    SEQUENCES,
    TOKENS,
    chi_square,
    conditional,
    d3pm_loss,
    dit_logits,
    joint,
    mdlm_loss,
    sedd_loss,
    sigma_of,
    subs_log_probs,
    toy,
    truth,
)
from tests.toys import SYSTEMS, TRACFORMER, random_question, small_diffusion
from tracformer.baselines import diffusion as bounds
from tracformer.baselines import find_family
from tracformer.baselines.diffusion import DiffusionModel, draw_noise
from tracformer.baselines.reverse_process import pick
from tracformer.evaluation.consistency import order_log_prob
from tracformer.generation.decode import fill
from tracformer.generation.orders import Ancestral, RandomOrder
from tracformer.generation.samplers import Sampler
from tracformer.model.batch import Batch


def literal_logits(
    model: DiffusionModel, tokens: list[int], masked: list[bool], sigma: float
) -> torch.Tensor:
    weights = {name: tensor.detach() for name, tensor in model.backbone.state_dict().items()}
    read = [
        model.config.mask_id if hidden else token
        for token, hidden in zip(tokens, masked, strict=True)
    ]
    return dit_logits(weights, model.config.n_head, read, sigma)


@pytest.mark.parametrize("system", SYSTEMS)
def test_marginals_equal_the_literal_network_and_padding_is_invisible(system: str) -> None:
    model = small_diffusion(system)
    tokens, context, lengths = random_question(3, 9)
    values = model.log_prob(Batch(tokens, context, lengths), "ac")
    for b, n in enumerate(lengths.tolist()):
        masked = (~context[b, :n]).tolist()
        share = sum(masked) / n
        sigma = {"mdlm": 0.0, "sedd": sigma_of(min(1.0, share / 0.999)), "d3pm": sigma_of(share)}[
            system
        ]
        logits = literal_logits(model, tokens[b, :n].tolist(), masked, sigma)
        for t in range(n):
            expected = subs_log_probs(logits[t])[tokens[b, t]] if masked[t] else torch.tensor(0.0)
            assert abs(float(values[b, t].detach()) - float(expected)) < 1e-10
        assert not values[b, n:].any()


def test_a_time_conditioned_mdlm_reads_the_noise_level() -> None:
    model = small_diffusion("mdlm", time_conditioning=True)
    tokens, masked, lengths = (
        torch.tensor([[1, 2, 3]]),
        torch.tensor([[True, False, True]]),
        torch.tensor([3]),
    )
    costs = model.costs(tokens, masked, lengths, torch.tensor([0.4], dtype=torch.float64))
    logits = literal_logits(model, [1, 2, 3], [True, False, True], sigma_of(0.4))
    assert abs(float(costs[0, 2].detach() + subs_log_probs(logits[2])[3])) < 1e-10


@pytest.mark.parametrize(("system", "changes"), [*((s, {}) for s in SYSTEMS), ("mdlm", TRACFORMER)])
def test_targets_and_padding_are_ignored(system: str, changes: dict[str, Any]) -> None:
    model = small_diffusion(system, **changes)
    tokens, context, lengths = random_question(3, 9)
    inside = torch.arange(9) < lengths[:, None]
    other = torch.where(context & inside, tokens, (tokens + 1) % 7)
    assert not torch.equal(tokens, other)
    given, changed = (
        model.logits_at(Batch(x, context, lengths), "ac", ~context & inside)
        for x in (tokens, other)
    )
    assert torch.equal(given, changed)


@pytest.mark.parametrize(("system", "changes"), [*((s, {}) for s in SYSTEMS), ("mdlm", TRACFORMER)])
def test_a_given_position_is_predicted_as_a_single_target(
    system: str, changes: dict[str, Any]
) -> None:
    model = small_diffusion(system, **changes)
    tokens, context, lengths = random_question(2, 6)
    logits = model(Batch(tokens, context, lengths), "ac")
    for b, n in enumerate(lengths.tolist()):
        for t in range(n):
            without, wanted = context[b : b + 1, :n].clone(), torch.zeros(1, n, dtype=torch.bool)
            without[0, t], wanted[0, t] = False, True
            alone = model.logits_at(Batch(tokens[b : b + 1, :n], without), "ac", wanted)[0]
            torch.testing.assert_close(logits[b, t], alone, atol=1e-10, rtol=0)
        assert not logits[b, n:].any()


def test_the_tracformer_backbone_is_its_ac_network() -> None:
    model = small_diffusion("mdlm", **TRACFORMER)
    tokens, context, lengths = random_question(3, 9)
    torch.testing.assert_close(
        model.log_prob(Batch(tokens, context, lengths), "ac"),
        model.backbone.log_prob(Batch(tokens, context, lengths), "ac"),
        atol=1e-12,
        rtol=0,
    )


WEIGHTS = torch.linspace(0.5, 2.0, 3 * 9, dtype=torch.float64).view(3, 9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_training_losses_equal_the_literal_ones(system: str, weighted: bool) -> None:
    model = small_diffusion(system, **({"n_step": 5} if system == "d3pm" else {}))
    tokens, context, lengths = random_question(3, 9)
    weights = WEIGHTS if weighted else torch.ones(3, 9, dtype=torch.float64)
    torch.manual_seed(3)
    found, count = model.nll(
        Batch(tokens, context, lengths), "diffusion", weights=WEIGHTS if weighted else None
    )
    torch.manual_seed(3)
    u = torch.randint(1, 6, (3,)) / 5.0 if system == "d3pm" else torch.rand(3, dtype=torch.float64)
    noise = torch.rand(3, 9)
    expected, targets, hits = 0.0, 0, 0
    for b, n in enumerate(lengths.tolist()):
        t = {
            "mdlm": 1e-3 + 0.999 * (b + float(u[b])) / 3,
            "sedd": 1e-3 + 0.999 * float(u[b]),
            "d3pm": float(u[b].double()),
        }[system]
        probability = t if system == "d3pm" else 0.999 * t
        row = tokens[b, :n].tolist()
        masked = [not bool(context[b, p]) and float(noise[b, p]) < probability for p in range(n)]
        sigma = 0.0 if system == "mdlm" else sigma_of(t)
        logits, clean = (
            literal_logits(model, row, masked, sigma),
            literal_logits(model, row, [False] * n, 0.0),
        )
        for p in range(n):
            if context[b, p]:
                continue
            targets += 1
            term = torch.tensor(0.0, dtype=torch.float64)
            if masked[p]:
                hits += 1
                if system == "d3pm":
                    term = term + d3pm_loss(logits[p], row[p], round(5 * t), 5)
                else:
                    term = term + (mdlm_loss if system == "mdlm" else sedd_loss)(
                        logits[p], row[p], t
                    )
            if system == "d3pm":
                term = (
                    term - 0.01 * logits[p].log_softmax(0)[row[p]] - clean[p].log_softmax(0)[row[p]]
                )
            expected += float(weights[b, p] * term)
    assert hits > 2
    assert count == targets
    assert abs(float(found.detach()) / expected - 1) < 1e-5


def test_the_tracformer_backbone_trains_on_the_same_loss() -> None:
    model = small_diffusion("mdlm", **TRACFORMER)
    tokens, context, lengths = random_question(3, 9)
    torch.manual_seed(3)
    found, _ = model.nll(Batch(tokens, context, lengths), "diffusion")
    torch.manual_seed(3)
    t = 1e-3 + 0.999 * (torch.arange(3) + torch.rand(3, dtype=torch.float64)) / 3
    masked = ~context & (torch.rand(3, 9) < 0.999 * t[:, None])
    values = model.backbone.log_prob(Batch(tokens, ~masked, lengths), "ac")
    assert abs(float((found + (values / t[:, None]).sum()).detach())) < 1e-5 * float(found.detach())


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_new_model_is_uniform(system: str) -> None:
    """The published initialisation has zero output, so every token is equally probable."""
    kind = find_family(system).model_class
    model = kind(kind.config_class.preset("tiny")).eval()
    tokens = torch.randint(256, (2, 16))
    values = model.log_prob(
        Batch(tokens, torch.zeros(2, 16, dtype=torch.bool)), "diffusion", draws=16
    )
    expected = 16 * math.log(256)
    if system == "d3pm":  # a mask's share of probability, and the clean text to be repeated
        expected += 16 * math.log(257)
    torch.testing.assert_close(-values.sum(1), torch.full((2,), expected), rtol=0.01, atol=0.0)


def modes_of(**changes: Any) -> tuple[str, ...]:
    return small_diffusion("mdlm", **changes).config.modes


def test_a_denoiser_also_has_mode_ac() -> None:
    assert modes_of(modes=("diffusion",)) == ("diffusion", "ac")
    assert modes_of(modes=("ac",)) == ("ac",)


STEPS = 50


def enumerated(system: str, warp: float, tokens: Tensor, context: Tensor) -> float:
    """Return the negative bound of one sequence, over all subsets of targets and all times."""
    model = toy(system, warp)
    targets = (~context).nonzero()[:, 0].tolist()
    nodes = (
        torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS
        if system == "d3pm"
        else (torch.arange(400).double() + 0.5) / 400
    )
    total = 0.0
    for k in range(1, len(targets) + 1):
        for subset in itertools.combinations(targets, k):
            masked = torch.zeros(len(nodes), LENGTH, dtype=torch.bool)
            masked[:, list(subset)] = True
            logits = model.states(tokens.expand(len(nodes), -1), masked, None, nodes, masked).view(
                len(nodes), k, -1
            )  # type: ignore[arg-type]
            chance = nodes**k * (1 - nodes) ** (len(targets) - k) / len(nodes)
            for row, position in enumerate(subset):
                x0, rows = int(tokens[position]), logits[:, row]
                if system == "mdlm":
                    cost = -rows.log_softmax(1)[:, x0] / nodes
                elif system == "sedd":
                    g = rows - math.log(LETTERS)
                    cost = (g.exp().sum(1) - 1 - g[:, x0]) / nodes
                else:
                    cost = torch.stack(
                        [d3pm_loss(rows[i - 1], x0, i, STEPS) for i in range(1, STEPS + 1)]
                    )
                total += float((chance * cost).sum())
    return total


@pytest.mark.parametrize("warp", [0.0, 0.6])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_estimate_is_the_enumerated_bound(system: str, warp: float) -> None:
    model = toy(system, warp, **({"n_step": STEPS} if system == "d3pm" else {}))
    values, error = model.estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=2000, seed=5)
    assert not values[CONTEXT].any()
    assert bool((values <= 1e-6).all())
    for b in range(len(TOKENS)):
        exact = enumerated(system, warp, TOKENS[b], CONTEXT[b])
        assert abs(float(-values[b].sum()) - exact) < 3 * float(error[b]) + 1e-3
        assert float(error[b]) < 0.05 * exact


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_exact_denoiser_gives_the_true_conditional(system: str) -> None:
    values, error = toy(system).estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=2000, seed=1)
    slack = 5e-3 if system == "d3pm" else 0.0  # of order 1/T
    assert bool(((values.sum(1) - truth(TOKENS, CONTEXT)).abs() < 3 * error + slack).all())


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_wrong_denoiser_costs_more_on_average(system: str) -> None:
    """On average over the true distribution, no model has a better likelihood than the truth."""
    context = torch.tensor([False, True, False, False]).expand(len(SEQUENCES), -1)
    entropy = -(joint() * truth(SEQUENCES, context)).sum()
    right, wrong = (
        toy(system, warp).estimate(Batch(SEQUENCES, context), "diffusion", draws=100)
        for warp in (0.0, 0.9)
    )
    # all sequences share their noise, so their errors add up
    error = float((joint() * wrong.standard_error).sum())
    assert (
        abs(float(-(joint() * right.values.sum(1)).sum() - entropy))
        < 3 * float((joint() * right.standard_error).sum()) + 5e-3
    )
    assert float(-(joint() * wrong.values.sum(1)).sum() - entropy) > 3 * error


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_sequence_gives_exactly_the_same_alone_and_in_any_batch(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy(system, warp=0.3)
    alone = [
        model.estimate(Batch(TOKENS[b : b + 1], CONTEXT[b : b + 1]), "diffusion", draws=20, seed=9)
        for b in range(3)
    ]
    padded = [torch.cat((x.flip(0), torch.zeros(3, 3).to(x)), 1) for x in (TOKENS, CONTEXT)]
    monkeypatch.setattr(bounds, "TOKENS_AT_ONCE", 64)  # other chunks of draws, too
    together = model.estimate(
        Batch(*padded, torch.tensor([4, 4, 4])), "diffusion", draws=20, seed=9
    )
    for b in range(3):
        assert torch.equal(together.values[2 - b, :4], alone[b].values[0])
        assert torch.equal(together.standard_error[2 - b], alone[b].standard_error[0])
    assert not together.values[:, 4:].any()
    other = model.estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=20, seed=10)
    assert not torch.equal(other.values[0], alone[0].values[0])


@pytest.mark.parametrize("system", SYSTEMS)
def test_networks_give_the_same_in_any_batch(system: str) -> None:
    model = small_diffusion(system)
    tokens, context, lengths = random_question(3, 9)
    together = model.estimate(Batch(tokens, context, lengths), "diffusion", draws=6, seed=2)
    for b, n in enumerate(lengths.tolist()):
        alone = model.estimate(
            Batch(tokens[b : b + 1, :n], context[b : b + 1, :n]), "diffusion", draws=6, seed=2
        )
        torch.testing.assert_close(together.values[b, :n], alone.values[0], atol=1e-11, rtol=0)
        torch.testing.assert_close(
            together.standard_error[b], alone.standard_error[0], atol=1e-11, rtol=0
        )


def test_a_network_estimate_is_the_mean_over_all_orders() -> None:
    """With a network that ignores time, the bound is the mean over all orders of their
    log-probability.
    """
    model = small_diffusion("mdlm")
    tokens, context = (
        torch.tensor([[1, 5, 3, 0, 6]]),
        torch.tensor([[False, True, False, False, False]]),
    )
    orders = torch.tensor([[1, *order] for order in itertools.permutations([0, 2, 3, 4])])
    exact = (
        order_log_prob(model, Batch(tokens.expand(24, -1), context.expand(24, -1)), orders)
        .sum(1)
        .mean()
    )
    estimate = model.estimate(Batch(tokens, context), "diffusion", draws=1500)
    assert abs(float(estimate.values.sum() - exact)) < 3 * float(estimate.standard_error)


def test_the_standard_error_matches_the_spread() -> None:
    model = toy("mdlm", warp=0.4)
    estimates = [
        model.estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=16, seed=seed)
        for seed in range(150)
    ]
    spread = torch.stack([estimate.values.sum(1) for estimate in estimates]).std(0)
    claimed = (
        torch.stack([estimate.standard_error.square() for estimate in estimates]).mean(0).sqrt()
    )
    assert bool((claimed > 0.85 * spread).all())
    assert bool((claimed < 2.0 * spread).all())
    assert bool(
        model.estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=1).standard_error.isnan().all()
    )


def test_counts_are_stratified_and_times_follow_them() -> None:
    targets = torch.ones(1, 8, dtype=torch.bool)
    masked, t, weight = draw_noise(targets, range(16), 16, seed=0, steps=None)
    counts = masked.sum(-1)[:, 0]
    assert sorted(counts.tolist()) == sorted([*range(1, 9)] * 2)
    assert torch.equal(weight[:, 0], 8.0 / counts.double())
    many, times, _ = draw_noise(targets, range(4000), 4000, seed=0, steps=None)
    for k in (1, 4, 8):  # Beta(k, R - k + 1) has mean k / (R + 1)
        assert abs(float(times[many.sum(-1) == k].mean()) - k / 9) < 0.02
    frequency = many.double().mean((0, 1))  # every position alike: on average (R + 1) / (2 R)
    assert float((frequency - 9 / 16).abs().max()) < 0.03
    _, steps, weights = draw_noise(targets, range(16), 16, seed=0, steps=4000)
    assert bool((steps > 0).all())
    # many steps are continuous time
    torch.testing.assert_close(weights, weight, rtol=2e-3, atol=0.0)
    assert bool((t <= 1).all())


@pytest.mark.parametrize(("system", "changes"), [*((s, {}) for s in SYSTEMS), ("mdlm", TRACFORMER)])
def test_given_sequences_and_single_targets(system: str, changes: dict[str, object]) -> None:
    model = small_diffusion(system, **changes)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    context = torch.tensor([[True, True, True], [True, False, True]])
    values, error = model.estimate(Batch(tokens, context), "diffusion", draws=4)
    assert not values[0].any()
    assert float(error[0]) == 0.0
    if system == "mdlm":  # one target: the bound is the marginal, without any noise
        torch.testing.assert_close(
            values, model.log_prob(Batch(tokens, context), "ac"), atol=1e-11, rtol=0
        )
        assert float(error[1]) < 1e-11


def test_draws_must_be_positive() -> None:
    with pytest.raises(ValueError, match="draws is 0"):
        toy("mdlm").estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=0)


# ---- the reverse process

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
def test_a_sequence_is_filled_the_same_alone_and_in_any_batch(
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
