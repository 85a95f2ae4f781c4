"""PLAID's bound is the truth where the denoiser is exact, and lies above it where it is not."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.peers.diffusion_toys import SEQUENCES, joint, truth
from tests.peers.plaid_toys import ToyPlaid, toy_plaid
from tests.peers.test_bounds import CONTEXT, TOKENS
from tracformer.baselines import plaid
from tracformer.baselines.plaid import Plaid, PlaidConfig
from tracformer.model.batch import Batch


def integrated(model: ToyPlaid, tokens: Tensor, context: Tensor) -> float:
    """The negative bound of one sequence with a single target, without chance: a grid of noise in
    two dimensions, nodes in time.
    """
    axis = torch.linspace(-5, 5, 33, dtype=torch.float64)
    noise = torch.cartesian_prod(axis, axis)  # (1089, 2)
    weight = torch.exp(-noise.square().sum(1) / 2)
    weight, rows = weight / weight.sum(), len(noise)
    nodes, shares = np.polynomial.legendre.leggauss(24)

    def mean(t: float, first: bool) -> float:
        gamma, slope = (
            x.expand(rows) for x in model.schedule(torch.tensor([t], dtype=torch.float64))
        )
        targets, flag = (~context).expand(rows, -1), torch.ones(rows, dtype=torch.bool)
        drawn = noise[:, None].expand(-1, 4, -1)
        terms = model.terms(
            tokens.expand(rows, -1),
            targets,
            torch.full((rows,), 4),
            (gamma, slope),
            flag & first,
            drawn,
            ~flag,
        )
        return float((terms.sum(1) * weight).sum())

    with torch.no_grad():
        diffusion = sum(
            0.5 * float(share) * mean(0.5 + 0.5 * float(node), False)
            for node, share in zip(nodes, shares, strict=True)
        )
        return diffusion + mean(0.0, True) + float(model.prior())


def test_an_exact_denoiser_gives_the_truth_and_others_lie_above() -> None:
    """One target, averaged over the true conditional. What the exact denoiser leaves is what z_1
    still knows of the token: more, where the noise ends early. Where it begins late nothing is
    lost, for the last step tells all that is left to tell of a single target.
    """
    context = torch.tensor([True, True, False, True])
    rows = torch.tensor([[1, 1, 0, 2], [1, 1, 1, 2], [1, 1, 2, 2]])
    true = truth(rows, context.expand(3, -1))

    def gaps(**changes: float) -> Tensor:
        model = toy_plaid(**changes)
        return (
            torch.tensor([integrated(model, row, context) for row in rows], dtype=torch.float64)
            + true
        )

    exact = gaps()
    assert float(exact.abs().max()) < 2e-3  # for every token
    average = {
        name: float((gap * true.exp()).sum())
        for name, gap in (("exact", exact), ("late", gaps(gamma_0=1.0)))
    }
    assert all(-1e-6 < gap < 1e-3 for gap in average.values()), average
    for changes in ({"warp": 0.3}, {"gamma_1": 0.0}):
        assert float((gaps(**changes) * true.exp()).sum()) > 0.01


def test_an_exact_denoiser_gives_the_true_conditional_of_many_targets() -> None:
    values, error = toy_plaid().estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=4000, seed=1)
    assert bool(((values.sum(1) - truth(TOKENS, CONTEXT)).abs() < 3 * error + 0.01).all())
    assert bool((error < 0.05 * -truth(TOKENS, CONTEXT)).all())


def test_a_wrong_denoiser_costs_more_on_average() -> None:
    context = torch.tensor([False, True, False, False]).expand(len(SEQUENCES), -1)
    entropy = -(joint() * truth(SEQUENCES, context)).sum()

    def gap(**changes: float) -> tuple[float, float]:
        """Above the entropy, and its standard error over seeds: the sequences of a
        call share their noise.
        """
        model = toy_plaid(**changes)
        values = [
            model.estimate(Batch(SEQUENCES, context), "diffusion", draws=50, seed=seed).values.sum(
                1
            )
            for seed in range(6)
        ]
        means = torch.stack([-(joint() * value).sum() - entropy for value in values])
        return float(means.mean()), float(means.std()) / 6**0.5

    for found, above in (
        (gap(), False),
        (gap(warp=0.85), True),
        (gap(gamma_0=0.0, gamma_1=1.0), True),
    ):
        assert found[0] > 3 * found[1] if above else abs(found[0]) < 3 * found[1] + 0.01


def test_a_new_model_is_uniform() -> None:
    """Its network says nothing yet, and the density of z is the exact denoiser of
    independent, uniform tokens.
    """
    torch.manual_seed(0)
    model = Plaid(PlaidConfig.preset("tiny", gamma_0=-8.0, gamma_1=8.0)).eval()
    tokens, context = torch.randint(256, (4, 16)), torch.zeros(4, 16, dtype=torch.bool)
    context[2:, ::2] = True
    values, error = model.estimate(Batch(tokens, context), "diffusion", draws=200)
    expected = math.log(256) * (~context).sum(1)
    assert bool(((-values.sum(1) - expected).abs() < 3 * error).all())
    assert bool((error < 0.08 * expected).all())


def test_the_standard_error_is_honest() -> None:
    model = toy_plaid(warp=0.4)
    estimates = [
        model.estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=16, seed=seed)
        for seed in range(200)
    ]
    spread = torch.stack([estimate.values.sum(1) for estimate in estimates]).std(0)
    claimed = (
        torch.stack([estimate.standard_error.square() for estimate in estimates]).mean(0).sqrt()
    )
    assert bool((claimed > 0.8 * spread).all())
    assert bool((claimed < 1.6 * spread).all())
    assert bool(
        model.estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=1).standard_error.isnan().all()
    )


def test_the_training_loss_is_the_bound_on_average() -> None:
    # little signal, little variance
    model = toy_plaid(warp=0.3, given_share=0.0, gamma_0=-2.0, gamma_1=2.0)
    torch.manual_seed(0)
    with torch.no_grad():
        found = torch.stack(
            [
                model.nll(Batch(TOKENS.repeat(64, 1), CONTEXT.repeat(64, 1)), "diffusion")[0] / 64
                for _ in range(60)
            ]
        )
    values, error = model.estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=8000)
    spread = float(found.std()) / 60**0.5 + float(error.sum())
    assert abs(float(found.mean() + values.sum())) < 3 * spread
    # sharp enough to miss neither a share of the rows nor the prior
    assert spread < 0.03 * float(found.mean())


def test_a_sequence_gives_exactly_the_same_alone_and_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toy_plaid(warp=0.3)
    alone = [
        model.estimate(Batch(TOKENS[b : b + 1], CONTEXT[b : b + 1]), "diffusion", draws=20, seed=9)
        for b in range(3)
    ]
    padded = [torch.cat((x.flip(0), torch.zeros(3, 3).to(x)), 1) for x in (TOKENS, CONTEXT)]
    monkeypatch.setattr(plaid, "TOKENS_AT_ONCE", 64)  # other chunks of draws, too
    together = model.estimate(
        Batch(*padded, torch.tensor([4, 4, 4])), "diffusion", draws=20, seed=9
    )
    for b in range(3):
        assert torch.equal(together.values[2 - b, :4], alone[b].values[0])
        assert torch.equal(together.standard_error[2 - b], alone[b].standard_error[0])
    assert not together.values[:, 4:].any()
    other = model.estimate(Batch(TOKENS, CONTEXT), "diffusion", draws=20, seed=10)
    assert not torch.equal(other.values[0], alone[0].values[0])
