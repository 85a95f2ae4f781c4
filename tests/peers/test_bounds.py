"""The estimated bound is the bound: enumerated where that is possible, and the truth where the
denoiser is exact.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.peers.diffusion_literal import d3pm_loss
from tests.peers.diffusion_toys import LENGTH, LETTERS, SEQUENCES, joint, toy, truth
from tests.peers.test_dit import SYSTEMS, TRACFORMER, question, small_diffusion
from tracformer.baselines import diffusion as bounds
from tracformer.baselines.diffusion import draw_noise
from tracformer.evaluation.order_consistency import order_log_prob
from tracformer.model.batch import Batch

TOKENS = torch.tensor([[0, 2, 1, 1], [1, 1, 0, 2], [2, 0, 0, 1]])
CONTEXT = torch.tensor(
    [[False, False, False, False], [True, False, False, True], [False, False, True, False]]
)
STEPS = 50


def enumerated(system: str, warp: float, tokens: Tensor, context: Tensor) -> float:
    """The negative bound of one sequence: all subsets of targets, all times."""
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
    """Over the true distribution, no model codes better than the truth."""
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
def test_networks_too_give_the_same_in_any_batch(system: str) -> None:
    model = small_diffusion(system)
    tokens, context, lengths = question(3, 9)
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
    """Masked diffusion with a network blind to time is the any-order model: its bound averages the
    orders' log-probabilities.
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


def test_the_standard_error_is_honest() -> None:
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
