"""PLAID: the Gaussian process, the terms of the bound, samples."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.baselines.literal import (
    CONTEXT,
    GIVEN,
    ROW,
    SAMPLES,
    SEQUENCES,
    TOKENS,
    ToyPlaid,
    chi_square,
    conditional,
    joint,
    literal_prior,
    literal_terms,
    toy_plaid,
    truth,
)
from tests.toys import PLAID_SHAPE, random_question, small_plaid
from tracformer.baselines import load_model, plaid
from tracformer.baselines.plaid import Plaid, PlaidConfig
from tracformer.baselines.reverse_process import (
    Schedule,
    alpha_sigma,
    gaussians,
    prior_kl,
    step_back,
)
from tracformer.model.batch import Batch
from tracformer.rng import TIME, derived_seed, uniforms


def schedule(seed: int = 0) -> Schedule:
    torch.manual_seed(seed)
    built = Schedule(-4.0, 5.0).double()
    with torch.no_grad():
        for parameter in (built.a, built.b, built.c):
            parameter.mul_(3.0)  # far from a straight line
    return built


def test_gamma_rises_with_the_stated_slope() -> None:
    built = schedule()
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    gamma, slope = built(t)
    assert abs(float(gamma[0].detach()) + 4.0) < 1e-6
    assert abs(float(gamma[-1].detach()) - 5.0) < 1e-6
    assert bool((gamma.diff() > 0).all())
    assert bool((slope > 0).all())
    numeric = (built(t + 1e-5)[0] - built(t - 1e-5)[0]) / 2e-5
    torch.testing.assert_close(slope, numeric, rtol=1e-6, atol=0.0)
    assert float((slope.max() / slope.min()).detach()) > 1.3


def test_the_shape_descends_on_the_mean_square_and_the_ends_on_the_mean() -> None:
    built, t = schedule(), torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)

    def cost(gamma: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return slope * torch.exp(-0.3 * gamma) + gamma.cos()

    factor = torch.ones(3, dtype=torch.float64)
    found = cost(*built(t, factor))
    factor.copy_(2 * found.detach())
    found.sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in built.named_parameters()}
    for name in got:
        built.zero_grad()
        values = cost(*built(t))
        (values if name == "bounds" else values.square()).sum().backward()
        torch.testing.assert_close(got[name], dict(built.named_parameters())[name].grad)


def test_steps_back_keep_the_marginals() -> None:
    """With x known, z_t ~ N(alpha_t x, sigma_t^2) leads to z_s ~ N(alpha_s x, sigma_s^2): means and
    variances, exactly.
    """
    gamma_t, gamma_s = torch.tensor(1.3).double(), torch.tensor(-0.4).double()
    (alpha_t, sigma_t), (alpha_s, sigma_s) = alpha_sigma(gamma_t), alpha_sigma(gamma_s)
    x, zero, one = (
        torch.tensor([0.6, -0.8]).double(),
        torch.zeros(2).double(),
        torch.ones(2).double(),
    )
    torch.testing.assert_close(step_back(alpha_t * x, x, gamma_t, gamma_s, zero), alpha_s * x)
    kept, fresh = (
        step_back(one, zero, gamma_t, gamma_s, zero),
        step_back(zero, zero, gamma_t, gamma_s, one),
    )
    torch.testing.assert_close(
        (kept * sigma_t).square() + fresh.square(), sigma_s.square().expand(2)
    )
    torch.testing.assert_close(alpha_t.square() + sigma_t.square(), torch.tensor(1.0).double())


def test_the_divergence_from_the_prior() -> None:
    gamma, x = torch.tensor(2.5).double(), torch.tensor([0.6, 0.0, -0.8]).double()
    alpha, sigma = alpha_sigma(gamma)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(alpha * x, sigma),
        torch.distributions.Normal(torch.zeros(3).double(), 1.0),
    ).sum()
    torch.testing.assert_close(prior_kl(gamma, 3), expected)


def test_noise_is_a_function_of_seed_position_and_dimension() -> None:
    noise = gaussians([3, 4], 50, 16, 0)
    assert torch.equal(gaussians(torch.tensor([4]), 20, 5, 0)[0], noise[1, :20, :5])
    assert not torch.equal(gaussians([3], 50, 16, 1)[0], noise[0])
    many = gaussians(range(100), 30, 16, 7)
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.std()) - 1) < 0.02
    flat = many.reshape(100, -1)
    # neighbouring dimensions and positions
    assert abs(float((flat[:, :-1] * flat[:, 1:]).mean())) < 0.02
    assert abs(float((flat[:-1] * flat[1:]).mean())) < 0.02  # neighbouring seeds
    tail = float((many.abs() > 1.96).double().mean())
    assert abs(tail - 0.05) < 0.005


WEIGHTS = torch.linspace(0.5, 2.0, 3 * 9, dtype=torch.float64).view(3, 9)


def weights_of(model: Plaid) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("self_conditioning", [False, True])
def test_the_estimate_is_the_literal_sum(self_conditioning: bool) -> None:
    model = small_plaid(self_conditioning=self_conditioning)
    tokens, context, lengths = random_question(2, 6)
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
    tokens, context, lengths = random_question(3, 9)
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
    tokens, context, lengths = random_question(4, 9)
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


@pytest.mark.parametrize("self_conditioning", [False, True])
def test_networks_give_the_same_in_any_batch(self_conditioning: bool) -> None:
    model = small_plaid(self_conditioning=self_conditioning)
    tokens, context, lengths = random_question(4, 9)
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


def test_targets_are_visible_only_through_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens, with noise that cancels the difference, give the same states and guesses."""
    model = small_plaid()
    tokens, context, lengths = random_question(3, 9)
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
    shifted[context] += 5.0  # given tokens are not noised
    message, states = [], Plaid.states

    def spy(self: Plaid, *inputs: Tensor) -> Tensor:
        message.append(states(self, *inputs).detach())
        return message[-1]

    monkeypatch.setattr(Plaid, "states", spy)
    yes = torch.ones(3, dtype=torch.bool)
    for row, drawn in ((tokens, noise), (others, shifted)):
        model.terms(row, targets, lengths, level, ~yes, drawn, yes)  # type: ignore[arg-type]
    assert len(message) == 4
    torch.testing.assert_close(message[0], message[2], atol=1e-10, rtol=0)
    torch.testing.assert_close(message[1], message[3], atol=1e-10, rtol=0)
    model.terms(tokens, targets, lengths, level, ~yes, noise + 0.1, yes)  # type: ignore[arg-type]
    assert not torch.allclose(message[0], message[4], atol=1e-3)
    changed = torch.where(context, (tokens + 2) % 7, tokens)
    model.terms(changed, targets, lengths, level, ~yes, noise, yes)  # type: ignore[arg-type]
    assert not torch.allclose(message[0], message[6], atol=1e-3)  # what is given, it reads


def test_logits_at_the_noisiest_time() -> None:
    model = small_plaid()
    tokens, context, lengths = random_question(3, 9)
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
def test_a_sequence_is_filled_the_same_alone_and_in_any_batch(self_conditioning: bool) -> None:
    model = small_plaid(self_conditioning=self_conditioning)
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
    again = model.ancestral(Batch(tokens, context, lengths), steps=6, seeds=seeds + 1)
    assert not torch.equal(again.tokens[inside], together.tokens[inside])
    cold = model.ancestral(Batch(tokens, context, lengths), steps=6, seeds=seeds, temperature=0.0)
    assert bool((cold.log_probs >= together.log_probs - 1e-12).all())


def test_a_sequence_given_whole_costs_nothing_and_stays_as_it_is() -> None:
    model, tokens = small_plaid().float(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    context = torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(model.ancestral(Batch(tokens, context), steps=2).tokens, tokens)
    context[1, 1] = False
    values, error = model.estimate(Batch(tokens, context), "diffusion", draws=4)
    assert not values[context].any()
    assert float(error[0]) == 0.0
    assert float(values[1, 1]) < 0.0


def test_reduced_precision_is_close() -> None:
    """Products with z are large where there is little noise; autocast must not round them."""
    model = small_plaid().float()
    tokens, context, lengths = random_question(3, 9)
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
        PlaidConfig(**PLAID_SHAPE, gamma_0=2.0, gamma_1=2.0)
    with pytest.raises(ValueError, match=r"given_share is 1\.5"):
        PlaidConfig(**PLAID_SHAPE, given_share=1.5)


def test_a_saved_model_loads_unchanged(tmp_path: Path) -> None:
    model = small_plaid()
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype=torch.float64)
    tokens, context, lengths = random_question(2, 6)
    assert again.config == model.config
    first, second = (
        m.estimate(Batch(tokens, context, lengths), "diffusion", draws=2) for m in (model, again)
    )
    assert torch.equal(first.values, second.values)


def integrated(model: ToyPlaid, tokens: Tensor, context: Tensor) -> float:
    """Return the negative bound of one sequence with a single target, without sampling.

    The noise is a grid in two dimensions, the times are Gauss-Legendre nodes.
    """
    axis = torch.linspace(-5, 5, 25, dtype=torch.float64)
    noise = torch.cartesian_prod(axis, axis)  # (625, 2)
    weight = torch.exp(-noise.square().sum(1) / 2)
    weight, rows = weight / weight.sum(), len(noise)
    nodes, shares = np.polynomial.legendre.leggauss(16)

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


def test_an_exact_denoiser_gives_the_truth_and_others_cost_more() -> None:
    """One target, averaged over the true conditional.

    The gap of the exact denoiser is what z_1 still reveals about the token: more, if gamma_1 is
    small. If gamma_0 is large nothing is lost, since the reconstruction term has all the
    information about a single target.
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
    """A new network outputs zero, and the density of z is the exact denoiser of uniform tokens."""
    torch.manual_seed(0)
    model = Plaid(PlaidConfig.preset("tiny", gamma_0=-8.0, gamma_1=8.0)).eval()
    tokens, context = torch.randint(256, (4, 16)), torch.zeros(4, 16, dtype=torch.bool)
    context[2:, ::2] = True
    values, error = model.estimate(Batch(tokens, context), "diffusion", draws=200)
    expected = math.log(256) * (~context).sum(1)
    assert bool(((-values.sum(1) - expected).abs() < 3 * error).all())
    assert bool((error < 0.08 * expected).all())


def test_the_standard_error_matches_the_spread() -> None:
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
