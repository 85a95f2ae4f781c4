"""The Gaussian process of PLAID: a schedule that only rises, steps that keep the marginals, noise
that no batch can change.
"""

import torch

from tracformer.baselines.gaussian import Schedule, alpha_sigma, gaussians, prior_kl, step_back


def schedule(seed: int = 0) -> Schedule:
    torch.manual_seed(seed)
    built = Schedule(-4.0, 5.0).double()
    with torch.no_grad():
        for parameter in (built.a, built.b, built.c):
            parameter.mul_(3.0)  # far from a straight line
    return built


def test_gamma_rises_from_end_to_end_with_the_slope_it_claims() -> None:
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


def test_noise_is_a_function_of_its_coordinates() -> None:
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
