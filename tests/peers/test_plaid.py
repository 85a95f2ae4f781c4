"""PLAID: its terms are the literal ones, targets are seen through their noise alone, and nobody's
neighbours matter.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.peers.diffusion_toys import SEQUENCES
from tests.peers.plaid_toys import SMALL, literal_prior, literal_terms, small_plaid, toy_plaid
from tests.peers.test_ancestral import GIVEN, ROW, SAMPLES, chi_square, conditional
from tests.peers.test_dit import question
from tests.training.helpers import losses, small, story_data
from tracformer.baselines import find_family, load_model
from tracformer.baselines.gaussian import gaussians
from tracformer.baselines.plaid import Plaid, PlaidConfig
from tracformer.cli import main
from tracformer.model.batch import Batch
from tracformer.rng import TIME, derived_seed, uniforms
from tracformer.training.log import read_log

WEIGHTS = torch.linspace(0.5, 2.0, 3 * 9, dtype=torch.float64).view(3, 9)


def weights_of(model: Plaid) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


# ---- the terms


@pytest.mark.parametrize("self_conditioning", [False, True])
def test_the_estimate_is_the_literal_sum(self_conditioning: bool) -> None:
    model = small_plaid(self_conditioning=self_conditioning)
    tokens, context, lengths = question(2, 6)
    w, draws = weights_of(model), 3
    values, _ = model.estimate(Batch(tokens, context, lengths), "diffusion", draws=draws, seed=4)
    seeds = [derived_seed(4, number) for number in range(draws)]
    times = [(number + float(uniforms([s], [0], TIME))) / draws for number, s in enumerate(seeds)]
    for b, n in enumerate(lengths.tolist()):
        row, given = tokens[b, :n].tolist(), context[b, :n].tolist()
        diffused = [
            literal_terms(w, row, given, t, gaussians([s], n, 3, 0)[0], self_conditioning)
            for t, s in zip(times, seeds, strict=True)
        ]
        repeated = [
            literal_terms(w, row, given, None, gaussians([s], n, 3, 1)[0], self_conditioning)
            for s in seeds[:2]
        ]
        for p in range(n):
            expected = (
                sum(x[p] for x in diffused) / 3 + sum(x[p] for x in repeated) / 2 + literal_prior(w)
            )
            assert abs(float(values[b, p]) + (0.0 if given[p] else expected)) < 1e-5 * expected
        assert not values[b, n:].any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_training_loss_is_the_literal_one(weighted: bool, seed: int) -> None:
    model = small_plaid()
    tokens, context, lengths = question(3, 9)
    context[0] = False  # a row without given tokens may get some
    torch.manual_seed(seed)
    found, count = model.nll(
        Batch(tokens, context, lengths), "diffusion", weights=WEIGHTS if weighted else None
    )
    torch.manual_seed(seed)
    shift, offset = float(torch.rand(1, dtype=torch.float64)), int(torch.randint(4, (1,)))
    chance, left, turn = torch.rand(3), torch.rand(3), torch.rand(3, 9)
    noise = torch.randn(3, 9, 3).double()
    w, expected, targets = weights_of(model), 0.0, 0
    for b, n in enumerate(lengths.tolist()):
        u, given, scale = (b / 3 + shift) % 1, context[b, :n].tolist(), 1.0
        targets += n - sum(given)
        if not any(given):
            scale = n / (0.5 * n + 0.5 * (n + 1) / 2)
            if float(chance[b]) < 0.5:
                kept = sorted(range(n), key=lambda p: float(turn[b, p]))[
                    : 1 + int(float(left[b]) * n)
                ]
                given = [p not in kept for p in range(n)]
        t = None if u < 0.125 else (u - 0.125) / 0.875
        terms = literal_terms(
            w, tokens[b, :n].tolist(), given, t, noise[b, :n], (b + offset) % 4 == 0
        )
        for p in range(n):
            if not given[p]:
                term = scale * (terms[p] * (8 if t is None else 8 / 7) + literal_prior(w))
                expected += float(WEIGHTS[b, p]) * term if weighted else term
    assert count == targets
    assert abs(float(found.detach()) / expected - 1) < 1e-5


def test_some_rows_get_given_tokens_and_their_factor_makes_up_for_it() -> None:
    model = small_plaid(given_share=0.6)
    rows = 4000
    targets, bare = torch.ones(rows, 8, dtype=torch.bool), torch.arange(rows) % 2 == 0
    torch.manual_seed(0)
    kept, scale = model._give(targets, bare)
    left = kept.sum(1)
    assert bool((left[~bare] == 8).all())
    assert bool((scale[~bare] == 1).all())
    assert sorted(set(left.tolist())) == list(range(1, 9))
    assert abs(float((left[bare] < 8).double().mean()) - 0.6 * 7 / 8) < 0.04
    assert abs(float((left * scale)[bare].double().mean()) / 8 - 1) < 0.02
    # every position alike
    assert float((kept[bare].double().mean(0) - kept[bare].double().mean()).abs().max()) < 0.04


def test_gradients_reach_every_parameter() -> None:
    model = small_plaid()
    tokens, context, lengths = question(4, 9)
    totals = {name: 0.0 for name, _ in model.named_parameters()}
    # of four rows one is self-conditioned, and some draw of the times has one to reconstruct
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        model.nll(Batch(tokens, context, lengths), "diffusion")[0].backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert bool(torch.isfinite(parameter.grad).all()), name
            totals[name] += float(parameter.grad.abs().sum())
    assert all(total > 0 for total in totals.values()), totals


# ---- who sees what


@pytest.mark.parametrize("self_conditioning", [False, True])
def test_networks_too_give_the_same_in_any_batch(self_conditioning: bool) -> None:
    model = small_plaid(self_conditioning=self_conditioning)
    tokens, context, lengths = question(4, 9)
    tokens[torch.arange(9) >= lengths[:, None]] = 10**6  # padding may hold anything
    together = model.estimate(Batch(tokens, context, lengths), "diffusion", draws=6)
    for b, n in enumerate(lengths.tolist()):
        alone = model.estimate(
            Batch(tokens[b : b + 1, :n], context[b : b + 1, :n]), "diffusion", draws=6
        )
        torch.testing.assert_close(together.values[b, :n], alone.values[0], atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(
            together.standard_error[b], alone.standard_error[0], atol=1e-10, rtol=1e-10
        )


def test_targets_are_seen_through_their_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens with the noise that makes up for them: the network reads the same and says the
    same, down to its guess of itself.
    """
    model = small_plaid()
    tokens, context, lengths = question(3, 9)
    targets = ~context & (torch.arange(9) < lengths[:, None])
    others = torch.where(targets, (tokens + 2) % 7, tokens)
    level = tuple(
        x.detach() for x in model.schedule(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    )
    alpha, sigma = (
        torch.sigmoid(-level[0]).sqrt()[:, None, None],
        torch.sigmoid(level[0]).sqrt()[:, None, None],
    )
    noise = torch.randn(3, 9, 3, dtype=torch.float64)
    shifted = noise + alpha / sigma * (model.table[tokens] - model.table[others])
    shifted[context] += 5.0  # nobody noises what is given
    said, states = [], Plaid.states

    def spy(self: Plaid, *inputs: Tensor) -> Tensor:
        said.append(states(self, *inputs).detach())
        return said[-1]

    monkeypatch.setattr(Plaid, "states", spy)
    yes = torch.ones(3, dtype=torch.bool)
    for row, drawn in ((tokens, noise), (others, shifted)):
        model.terms(row, targets, lengths, level, ~yes, drawn, yes)  # type: ignore[arg-type]
    assert len(said) == 4
    torch.testing.assert_close(said[0], said[2], atol=1e-10, rtol=0)
    torch.testing.assert_close(said[1], said[3], atol=1e-10, rtol=0)
    model.terms(tokens, targets, lengths, level, ~yes, noise + 0.1, yes)  # type: ignore[arg-type]
    assert not torch.allclose(said[0], said[4], atol=1e-3)
    changed = torch.where(context, (tokens + 2) % 7, tokens)
    model.terms(changed, targets, lengths, level, ~yes, noise, yes)  # type: ignore[arg-type]
    assert not torch.allclose(said[0], said[6], atol=1e-3)  # what is given, it reads


def test_logits_at_the_noisiest_time() -> None:
    model = small_plaid()
    tokens, context, lengths = question(3, 9)
    inside = torch.arange(9) < lengths[:, None]
    logits = model(Batch(tokens, context, lengths), "diffusion")
    others = torch.where(context & inside, tokens, (tokens + 1) % 7)
    assert torch.equal(
        model(Batch(others, context, lengths), "diffusion")[~context], logits[~context]
    )
    for b, n in enumerate(lengths.tolist()):
        for t in range(n):
            without, wanted = context[b : b + 1, :n].clone(), torch.zeros(1, n, dtype=torch.bool)
            without[0, t], wanted[0, t] = False, True
            alone = model.logits_at(
                Batch(others[b : b + 1, :n] if t == 1 else tokens[b : b + 1, :n], without),
                "diffusion",
                wanted,
            )[0]
            torch.testing.assert_close(logits[b, t], alone, atol=1e-10, rtol=0)
        assert not logits[b, n:].any()
    # an exact denoiser at so much noise: the marginals given the context
    toy = toy_plaid(gamma_1=12.0)
    found = toy.logits_at(Batch(ROW[None], GIVEN[None]), "diffusion", ~GIVEN[None]).softmax(-1)
    marginals = [[conditional()[SEQUENCES[:, t] == v].sum() for v in range(3)] for t in (0, 2, 3)]
    torch.testing.assert_close(
        found, torch.tensor(marginals, dtype=torch.float64), atol=0.02, rtol=0
    )


# ---- samples


def test_many_steps_follow_the_exact_conditional() -> None:
    rows = (ROW.expand(SAMPLES, -1), GIVEN.expand(SAMPLES, -1))
    tokens, log_probs = toy_plaid().ancestral(
        Batch(*rows), steps=100, seeds=torch.arange(SAMPLES) + 10**6
    )
    assert bool((tokens[:, GIVEN] == ROW[GIVEN]).all())
    assert not log_probs[:, GIVEN].any()
    assert abs(chi_square(tokens, conditional())) < 3.5
    few, _ = toy_plaid().ancestral(Batch(*rows), steps=1, seeds=torch.arange(SAMPLES) + 10**6)
    assert chi_square(few, conditional().clamp(min=1e-12)) > 10  # one step is not enough


@pytest.mark.parametrize("self_conditioning", [False, True])
def test_a_sequence_is_filled_alike_alone_and_in_any_batch(self_conditioning: bool) -> None:
    model = small_plaid(self_conditioning=self_conditioning)
    tokens, context, lengths = question(4, 9)
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
    again = model.ancestral(Batch(tokens, context, lengths), steps=6, seeds=seeds + 1)
    assert not torch.equal(again.tokens[inside], together.tokens[inside])
    cold = model.ancestral(Batch(tokens, context, lengths), steps=6, seeds=seeds, temperature=0.0)
    assert bool((cold.log_probs >= together.log_probs - 1e-12).all())


# ---- as a user meets it


def test_a_sequence_given_whole_costs_nothing_and_stays_as_it_is() -> None:
    model, tokens = small_plaid().float(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    context = torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(model.ancestral(Batch(tokens, context), steps=2).tokens, tokens)
    context[1, 1] = False
    values, error = model.estimate(Batch(tokens, context), "diffusion", draws=4)
    assert not values[context].any()
    assert float(error[0]) == 0.0
    assert float(values[1, 1]) < 0.0


def test_reduced_precision_comes_near() -> None:
    """Products with z are large where there is little noise; autocast must not round them."""
    model = small_plaid().float()
    tokens, context, lengths = question(3, 9)
    plain = model.estimate(Batch(tokens, context, lengths), "diffusion", draws=8).values
    with torch.autocast("cpu", torch.bfloat16):
        cast = model.estimate(Batch(tokens, context, lengths), "diffusion", draws=8).values
        torch.manual_seed(0)
        model.nll(Batch(tokens, context, lengths), "diffusion")[0].backward()
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast.sum(1), plain.sum(1), rtol=0.02, atol=0.0)
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())


def test_wrong_requests_are_refused() -> None:
    model, row, nothing = (
        small_plaid(),
        torch.zeros(1, 3, dtype=torch.long),
        torch.zeros(1, 3, dtype=torch.bool),
    )
    with pytest.raises(ValueError, match="mode is 'ac'; allowed for plaid: diffusion"):
        model.estimate(Batch(row, nothing), "ac")
    with pytest.raises(ValueError, match="draws is 0"):
        model.estimate(Batch(row, nothing), "diffusion", draws=0)
    with pytest.raises(ValueError, match="steps is 0"):
        model.ancestral(Batch(row, nothing), steps=0)
    with pytest.raises(ValueError, match=r"gamma_0 is 2\.0 and gamma_1 2\.0"):
        PlaidConfig(**SMALL, gamma_0=2.0, gamma_1=2.0)
    with pytest.raises(ValueError, match=r"given_share is 1\.5"):
        PlaidConfig(**SMALL, given_share=1.5)


def test_sizes() -> None:
    def count(preset: str) -> tuple[int, int]:
        with torch.device("meta"):
            model = Plaid(PlaidConfig.preset(preset))
        return model.num_parameters(), model.num_parameters(embeddings=False)

    assert abs(count("laptop")[0] / 8e6 - 1) < 0.05
    assert abs(count("mini")[1] / 2e6 - 1) < 0.1
    assert (PlaidConfig.preset("mini").vocab_size, PlaidConfig.preset("mini").max_length) == (
        4096,
        256,
    )


def test_a_folder_gives_the_model_back(tmp_path: Path) -> None:
    model = small_plaid()
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype=torch.float64)
    tokens, context, lengths = question(2, 6)
    assert again.config == model.config
    first, second = (
        m.estimate(Batch(tokens, context, lengths), "diffusion", draws=2) for m in (model, again)
    )
    assert torch.equal(first.values, second.values)


def test_a_short_run(tmp_path: Path) -> None:
    data, run = story_data(tmp_path, stories=40), tmp_path / "run"
    words = small(
        "model.family=plaid",
        "model.n_layer=2",
        "batch=16",
        "steps=40",
        "optimizer.lr=1e-2",
        "eval_every=40",
        "ema=0.5",
    )
    assert (
        main(["train", f"data={data}", f"run={run}", *words, "eval_contexts=span:p=0.5,mean=5"])
        == 0
    )
    found = losses(run)
    assert len(found) == 40
    assert sum(found[-10:]) < 0.9 * sum(found[:10])
    evaluation = next(record for record in read_log(run / "log.jsonl") if record["kind"] == "eval")
    assert 1 < evaluation["diffusion span:p=0.5,mean=5"] < 256
    model = load_model(run / "model")
    assert (model.config.model_type, model.config.modes, find_family("plaid").objective) == (
        "plaid",
        ("diffusion",),
        "denoise",
    )
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    # the ends are learnt
    assert not torch.equal(model.schedule.bounds, torch.tensor([-3.0, 6.0]) / 7)
