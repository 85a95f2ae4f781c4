"""Gaussian diffusion in continuous time (Kingma et al., 2021, "Variational Diffusion Models").

With x the data, z_t = alpha_t x + sigma_t eps, alpha_t^2 = sigmoid(-gamma(t)) and
sigma_t^2 = sigmoid(gamma(t)), so that the signal-to-noise ratio is SNR(t) = exp(-gamma(t)). gamma
rises from gamma_0 at t = 0 to gamma_1 at t = 1. For a denoiser that predicts x^ from z_t,

    -log p(x) <= -log p(x | z_0) + KL(q(z_1 | x) || N(0, I))
                 - 1/2 integral of SNR'(t) E |x - x^(z_t, t)|^2 dt.

`Schedule` is gamma, `prior_kl` the KL term, `step_back` a step of the reverse process, `gaussians`
its noise. `plaid.py` computes the bound.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from tracformer.rng import Integers, uniforms

UNITS = 1024  # hidden units of the schedule
RATE = 7.0  # factor by which the ends of the schedule learn faster than the network
GAUSS = 2**32  # first stream of Gaussian numbers


class Schedule(nn.Module):
    """The learned schedule gamma(t), in float64.

    gamma(t) = gamma_0 + (gamma_1 - gamma_0) (h(t) - h(0)) / (h(1) - h(0)), where
    h(t) = sum over k of softplus(c_k) tanh(softplus(a_k) (t - 1/2) + b_k)

    rises with t for any weights.
    """

    def __init__(self, gamma_0: float, gamma_1: float) -> None:
        super().__init__()
        self.bounds = nn.Parameter(torch.tensor([gamma_0, gamma_1]) / RATE)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(UNITS)) for _ in range(3))

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return gamma_0 and gamma_1."""
        low, high = (self.bounds.double() * RATE).unbind()
        return low, high

    def forward(self, t: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return gamma and its derivative at times t (N,).

        The ends change the bound; the shape between them changes only the variance of its estimate.

        Args:
            t: Times (N,).
            factor: (N,) multiplies the gradient that the shape gets from each time. With twice that
                time's loss, filled in before the backward pass, the shape descends on the mean
                square of the losses, while all else descends on their mean.
        """
        low, high = self.ends()
        start, stop = (self._shape(torch.full_like(t[:1], end))[0] for end in (0.0, 1.0))
        value, slope = self._shape(t)
        value, slope = (value - start) / (stop - start), slope / (stop - start)
        if factor is not None and value.requires_grad:
            value.register_hook(lambda gradient: gradient * factor)
            slope.register_hook(lambda gradient: gradient * factor)
        return low + (high - low) * value, (high - low) * slope

    def _shape(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and h' at times t (N,).

        Sums of products are used rather than matrix products, whose last bits depend on N.
        """
        a, b, c = softplus(self.a.double()), self.b.double(), softplus(self.c.double())
        bent = torch.tanh((t[:, None] - 0.5) * a + b)  # (N, UNITS)
        return (bent * c).sum(-1), ((1 - bent.square()) * a * c).sum(-1)


def alpha_sigma(gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and sigma at noise levels gamma."""
    return torch.sigmoid(-gamma).sqrt(), torch.sigmoid(gamma).sqrt()


def prior_kl(gamma_1: Tensor, size: int) -> Tensor:
    """Return KL(N(alpha_1 x, sigma_1^2 I) || N(0, I)) for x of norm 1 in `size` dimensions.

    It is the same for all such x.
    """
    alpha_square = torch.sigmoid(-gamma_1)
    # softplus(-gamma) = -log sigma^2
    return 0.5 * (size * (softplus(-gamma_1) - alpha_square) + alpha_square)


def step_back(z: Tensor, guess: Tensor, gamma_t: Tensor, gamma_s: Tensor, noise: Tensor) -> Tensor:
    """Return z_s given z_t for s < t, where x is the guess.

    With c = 1 - exp(gamma_s - gamma_t): mean (alpha_s / alpha_t) (1 - c) z_t + alpha_s c x,
    variance sigma_s^2 c.
    """
    c = -torch.expm1(gamma_s - gamma_t)
    (alpha_t, _), (alpha_s, sigma_s) = alpha_sigma(gamma_t), alpha_sigma(gamma_s)
    return alpha_s / alpha_t * (1 - c) * z + alpha_s * c * guess + sigma_s * c.sqrt() * noise


def gaussians(seeds: Integers, length: int, size: int, number: int) -> Tensor:
    """Return (N, length, size) standard normal numbers, float64.

    Each is a function of (its seed, position, dimension, number) alone.
    """
    N = len(seeds)
    places = torch.arange(length)[:, None] * 2**20 + torch.arange(size)  # (length, size)
    repeated = torch.as_tensor(seeds).cpu().repeat_interleave(length * size)
    u = uniforms(repeated, places.flatten().repeat(N), GAUSS + number).view(N, length, size)
    return torch.special.ndtri(u.clamp(min=2.0**-54))
