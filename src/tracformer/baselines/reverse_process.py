"""The reverse processes of masked and of Gaussian diffusion, as t runs from 1 to 0.

**Masked diffusion** reveals masked positions. A revealed position keeps its token. `scheduled` is
for models that reveal at the rate of the forward process (MDLM); `posterior` for models that answer
themselves how probably a position is revealed (SEDD, D3PM). `Draws` holds the random numbers: each
is a function of a sequence's seed, the position and the step, so that a sequence gets the same
tokens alone and in any batch.

**Gaussian diffusion** in continuous time (Kingma et al., 2021, "Variational Diffusion Models")
makes noise into embeddings (PLAID). With x the data, z_t = alpha_t x + sigma_t eps,
alpha_t^2 = sigmoid(-gamma(t)) and sigma_t^2 = sigmoid(gamma(t)), so that the signal-to-noise ratio
is SNR(t) = exp(-gamma(t)). gamma rises from gamma_0 at t = 0 to gamma_1 at t = 1. For a denoiser
that predicts x^ from z_t,

    -log p(x) <= -log p(x | z_0) + KL(q(z_1 | x) || N(0, I))
                 - 1/2 integral of SNR'(t) E |x - x^(z_t, t)|^2 dt.

`Schedule` is gamma, `prior_kl` the KL term, `step_back` a step of the reverse process, `gaussians`
its noise. `plaid.py` computes the bound.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from tracformer.model.base import Passes
from tracformer.model.batch import Batch
from tracformer.rng import SAMPLE, TIME, Integers, inverse_cdf, uniforms

REVEAL = 1024  # random stream of the decisions of step 0; later steps use the following ones

Predict = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tokens, masked, lengths, t (B,), wanted (B, T)) -> logits (N, V) of the wanted positions.

They are over real tokens, in row-major order.
"""

Leave = Callable[[Tensor, Tensor, Tensor, float, float, Tensor], tuple[Tensor, Tensor]]
"""(tokens, masked, lengths, t, s, wanted) -> logits (N, V), and probabilities (N,).

The probabilities are those that each wanted position is revealed between t and s.
"""


Restrict = Callable[[Tensor, Tensor], Tensor]
"""(where (B, T), logits (N, V) of its True positions in row-major order) -> scores (N, V).

Tokens that are not allowed get minus infinity.
"""


class Denoised(NamedTuple):
    """What a reverse process returns.

    Attributes:
        tokens: (B, T) ids.
        log_probs: (B, T) log p of each token when it was revealed, before temperature; zero where
            given.
    """

    tokens: Tensor
    log_probs: Tensor


@torch.no_grad()
def scheduled(
    predict: Predict,
    batch: Batch,
    steps: int | None,
    draws: "Draws",
) -> Passes[Denoised]:
    """Reveal masked positions at the rate of the forward process.

    Between t and s a masked position is revealed with probability 1 - s/t. Then the time at which
    it is revealed is uniform, so all times are drawn in advance and the network runs only when a
    position is due.

    Args:
        predict: Computes the logits of the positions to reveal.
        batch: Sequences whose targets are replaced.
        steps: Number of equal time steps; None reveals one position at a time, the limit of many
            steps.
        draws: Random numbers, temperature and allowed tokens.
    """
    B = len(batch)
    targets = batch.targets()
    when = draws.uniforms(TIME).to(batch.device)  # (B, T), time since the start of the process
    turn = (
        torch.where(targets, when, torch.inf).argsort(1).argsort(1)
        if steps is None
        else (when * steps).long()
    )
    turn = torch.where(targets, turn, -1)
    masked, filled = targets.clone(), untouched(batch.tokens)
    for number in turn[targets].unique().tolist():
        rows = (turn == number).any(1).nonzero()[:, 0]
        now = turn[rows] == number
        t = (
            1.0 - when[rows][now]
            if steps is None
            else torch.full((len(rows),), 1.0 - number / steps, dtype=torch.float64)
        )
        logits = predict(
            filled.tokens[rows], masked[rows], batch.lengths[rows], t.to(batch.device), now
        )
        draws.reveal(filled, logits, _at(now, rows, B))
        masked[rows] &= ~now
        yield
    return filled


@torch.no_grad()
def posterior(
    leave: Leave,
    batch: Batch,
    times: Sequence[float],
    draws: "Draws",
) -> Passes[Denoised]:
    """Reveal masked positions with the probabilities that the model computes.

    Args:
        leave: Computes logits, and the probability that a position is revealed between two times.
        batch: Sequences whose targets are replaced.
        times: Descending from 1 to 0; one step leads from each to the next. The last step reveals
            what is still masked.
        draws: Random numbers, temperature and allowed tokens.
    """
    B = len(batch)
    masked, filled = batch.targets(), untouched(batch.tokens)
    last = len(times) - 2
    for step, (t, s) in enumerate(pairwise(times)):
        rows = masked.any(1).nonzero()[:, 0]
        if len(rows) == 0:
            break
        logits, chance = leave(
            filled.tokens[rows], masked[rows], batch.lengths[rows], t, s, masked[rows]
        )
        where = _at(masked[rows], rows, B)
        chosen = draws.uniforms(REVEAL + step).to(batch.device)[where] < chance
        if step == last:
            chosen = torch.ones_like(chosen)
        now = torch.zeros_like(masked)
        now[where] = chosen
        draws.reveal(filled, logits[chosen], now)
        masked = masked & ~now
        yield
    return filled


class Draws:
    """How tokens are drawn: random numbers, temperature, allowed tokens.

    Args:
        seeds: (B,) one seed per sequence.
        length: Padded length T.
        temperature: Of the token distribution; 0 takes the most likely token.
        restrict: Which tokens are allowed where; None allows all.
    """

    def __init__(
        self, seeds: Tensor, length: int, temperature: float = 1.0, restrict: Restrict | None = None
    ) -> None:
        self.seeds, self.temperature, self.restrict = seeds, temperature, restrict
        # Seed and position of each random number, row by row.
        self._each = seeds.cpu().repeat_interleave(length), torch.arange(length).repeat(len(seeds))

    def uniforms(self, stream: int) -> Tensor:
        """Return (B, T) uniform numbers, each a function of (seed, position, stream)."""
        return uniforms(*self._each, stream).view(len(self.seeds), -1)

    def reveal(self, filled: Denoised, logits: Tensor, where: Tensor) -> None:
        """Draw a token from logits (N, V) at each True of `where` (B, T), into `filled`."""
        scores = logits if self.restrict is None else self.restrict(where, logits)
        picked, log_probs = pick(
            logits, self.uniforms(SAMPLE).to(where.device)[where], self.temperature, scores
        )
        filled.tokens[where] = picked.to(filled.tokens.dtype)
        filled.log_probs[where] = log_probs


def untouched(tokens: Tensor) -> Denoised:
    """Return a copy of the tokens with log-probabilities of zero."""
    return Denoised(
        tokens.clone(), torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    )


def _at(wanted: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Return (B, T) flags from those (len(rows), T) of some rows."""
    whole = torch.zeros(batch, wanted.shape[1], dtype=torch.bool, device=wanted.device)
    whole[rows] = wanted
    return whole


def pick(
    logits: Tensor, u: Tensor, temperature: float, scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw tokens by inverse CDF, and return them with their log-probabilities.

    Args:
        logits: (N, V).
        u: (N,) uniform numbers: the token at which the cumulative probability passes u is drawn.
        temperature: 0 takes the most likely token.
        scores: (N, V) to draw from instead of the logits, for example with some tokens excluded.

    Returns:
        Tokens (N,), and log p (N,) of each under `logits` at temperature 1.
    """
    own = logits.double().log_softmax(-1)  # (N, V)
    scores = own if scores is None else scores.double()
    if temperature == 0.0:
        picked = scores.argmax(-1)
    else:
        # The maximum is subtracted first: 0 / temperature stays finite.
        odds = ((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)
        picked = inverse_cdf(odds, u)
    return picked, own.gather(1, picked[:, None])[:, 0]


# ---- Gaussian diffusion

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
