"""SEDD and D3PM: masked diffusion by score entropy, and in discrete time.

**SEDD** (Lou et al., 2024) with absorbing noise: the network estimates ratios of probabilities,
trained by score entropy.

With s_y the log-score of token y at a mask and r = 1/expm1(sigma) its scale, published networks
compute s_y = g_y + log r, g_y = logits_y - log(number of real tokens). Then the score entropy of a
masked target is

    sigma' [ sum_y e^{s_y} - r s_{x_0} + r (log r - 1) ]
        = sigma' r [ sum_y e^{g_y} - 1 - g_{x_0} ],   sigma' r = 1/t,

which is at least -log p(x_0) / t under p = softmax(g), with equality where the scores have the
correct sum. `score_entropy` is the bracket; the bound integrates it over t with weight 1/t
(`diffusion.conditional_bound`).

**D3PM** (Austin et al., 2021) with absorbing noise: T discrete steps, a network that predicts x_0,
and the variational bound.

beta_t = 1/(T-t+1), so that at step i a token is masked with probability t = i/T, and all are at T.
With s = t - 1/T, alpha_t = 1 - t and m the probability that the network assigns to the mask token,
a masked target adds at step i

    KL = (1/(T t)) (log(1 + alpha_t m / t) - log p(x_0))
         + (1 - 1/(T t)) (log(1 + alpha_t m / t) - log(1 + alpha_s m / s)).

At i = 1 the second part is 0 times infinity, and dropped. After the last step the network reads the
clean text at t = 0 and has to repeat it: the reconstruction term.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tracformer.baselines.diffusion import (
    EPSILON,
    DiffusionConfig,
    DiffusionModel,
    over_logits,
    random_masks,
    random_times,
)
from tracformer.baselines.reverse_process import Denoised, Draws, posterior
from tracformer.devices import wide
from tracformer.model.base import Estimate, Passes
from tracformer.model.batch import Batch
from tracformer.model.likelihood import logits_of


def score_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return t times the loss of masked targets (N,): sum_y e^{g_y} - 1 - g_{x_0}.

    Args:
        logits: (N, V), real tokens only; g = logits - log V.
        targets: (N,) true tokens x_0.
    """
    g = logits - math.log(logits.shape[-1])
    return g.logsumexp(-1).expm1() - g.gather(1, targets[:, None])[:, 0]


def leaving(logits: Tensor, t: float, s: float) -> Tensor:
    """Return the probability (N,) that a mask is revealed between t and s.

    It is the analytic (Tweedie) step, for masks with probability t: (e^{sigma(t) - sigma(s)} - 1)
    sum_y e^{s_y} = (1 - s/t) sum_y e^{g_y}. Scores whose sum is too large are cut at 1.
    """
    total = (logits.double() - math.log(logits.shape[-1])).logsumexp(-1).exp()
    return ((1.0 - s / t) * total).clamp(max=1.0)


@dataclass(frozen=True)
class SEDDConfig(DiffusionConfig):
    """Shape of a `SEDD`."""

    model_type = "sedd"


class SEDD(DiffusionModel):
    """Masked diffusion by score entropy, with g = logits - log V.

    -log p(x_A | x_C) <= integral over t in (0, 1] of (1/t) E[ sum over masked targets of
                         sum_y e^{g_y} - 1 - g_{x_0} ] dt

    Mode `ac` normalises the scores over real tokens, at the noise level at which the share of masks
    is that of the sequence.
    """

    config: SEDDConfig
    config_class = SEDDConfig

    def cost(self, hidden: Tensor, targets: Tensor, t: Tensor) -> Tensor:
        """Return `score_entropy` (N,) of masked targets, which is t times their loss."""
        return over_logits(score_entropy, hidden, self.head, self.head_bias, targets)

    def training_loss(
        self, tokens: Tensor, targets: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the sum of weighted score entropies at one uniform t per sequence."""
        t = random_times(len(tokens), tokens.device, stratified=False)
        masked = random_masks(targets, (1 - EPSILON) * t)
        terms = self.costs(tokens, masked, lengths, t)
        terms = terms / t[:, None].to(terms.dtype)
        return (terms if weights is None else terms * weights).sum()

    def reverse(self, batch: Batch, steps: int | None, draws: Draws) -> Passes[Denoised]:
        """Take `steps` equal steps from t = 1 to 0, by default `max_length` of them."""
        steps = self.config.max_length if steps is None else steps
        times = [1.0 - step / steps for step in range(steps)] + [0.0]
        return posterior(self._leave, batch, times, draws)

    def _leave(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: float, s: float, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        time = torch.full((len(tokens),), t, dtype=torch.float64, device=tokens.device)
        logits = logits_of(
            self.states(tokens, masked, lengths, time, wanted), self.head, self.head_bias
        )
        logits = logits.to(wide(logits.dtype))
        return logits, leaving(logits, t, s)


def step_cost(logits: Tensor, targets: Tensor, t: Tensor, steps: int) -> Tensor:
    """Return T t KL (N,) of masked targets; see the module's docstring.

    Args:
        logits: (N, V + 1), the mask last.
        targets: (N,) true tokens x_0.
        t: (N,) times, multiples of 1/steps.
        steps: T.
    """
    log_p = logits.log_softmax(-1)
    m, t = log_p[:, -1].exp(), t.to(log_p.dtype)
    s = (t - 1.0 / steps).clamp(min=0.5 / steps)  # only i = 1 is changed, where its factor is zero
    at_t, at_s = torch.log1p((1 - t) * m / t), torch.log1p((1 - s) * m / s)
    return at_t - log_p.gather(1, targets[:, None])[:, 0] + (steps * t - 1).round() * (at_t - at_s)


def leaving_by_steps(logits: Tensor, t: float, s: float) -> Tensor:
    """Return the probability (N,) that a mask is revealed between t and s.

    It is (t - s) (1 - m) / (t + alpha_t m).
    """
    m = logits.double().softmax(-1)[:, -1]
    return (t - s) * (1 - m) / (t + (1 - t) * m)


@dataclass(frozen=True)
class D3PMConfig(DiffusionConfig):
    """Shape of a `D3PM`."""

    model_type = "d3pm"

    n_step: int = 1000  # T
    cross_entropy: float = 0.01  # weight of the auxiliary loss

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("n_step")
        if not self.cross_entropy >= 0.0:
            raise ValueError(f"cross_entropy is {self.cross_entropy!r}; it must be zero or more")


class D3PM(DiffusionModel):
    """Masked diffusion in T discrete steps, t = i/T.

    -log p(x_A | x_C) <= sum over i = 1..T of E[ sum over masked targets of KL_i ]
                         - sum over targets of log p(x_0 | x at t = 0)

    KL_i is given in the module's docstring. Mode `ac` normalises p(x_0) over real tokens.
    """

    config: D3PMConfig
    config_class = D3PMConfig

    @property
    def steps(self) -> int:
        """The number of steps T."""
        return self.config.n_step

    @property
    def _whole_head(self) -> tuple[Tensor, Tensor]:
        """Weight (V + 1, d) and bias (V + 1,) of the head with the mask, which D3PM can predict."""
        linear = self.dit.output_layer.linear
        return linear.weight, linear.bias

    def time_of(self, share: Tensor) -> Tensor:
        """Return the time (B,) at which this share of the tokens is masked: t = share."""
        return share

    def cost(self, hidden: Tensor, targets: Tensor, t: Tensor) -> Tensor:
        """Return T t KL (N,) of masked targets (`step_cost`)."""

        def of(logits: Tensor, targets: Tensor, t: Tensor) -> Tensor:
            return step_cost(logits, targets, t, self.steps)

        return over_logits(of, hidden, *self._whole_head, targets, t)

    def reconstruction(self, tokens: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Return (B, T) log p(x_0) of the targets, where the clean text is read at t = 0."""
        nothing, start = (
            torch.zeros_like(targets),
            torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device),
        )
        values = over_logits(
            _log_p,
            self.states(tokens, nothing, lengths, start, targets),
            *self._whole_head,
            tokens[targets].long(),
        )
        return values.new_zeros(tokens.shape).masked_scatter(targets, values)

    def estimate(
        self, batch: Batch, mode: str = "diffusion", *, draws: int | None = None, seed: int = 0
    ) -> Estimate:
        """Return each target's share of the bound: -sum over steps of KL, plus reconstruction."""
        estimate = super().estimate(batch, mode, draws=draws, seed=seed)
        if mode != "diffusion":
            return estimate
        with torch.no_grad():
            return Estimate(
                estimate.values + self.reconstruction(batch.tokens, batch.targets(), batch.lengths),
                estimate.standard_error,
            )

    def training_loss(
        self, tokens: Tensor, targets: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the sum of the targets' weighted terms at one uniform step per sequence.

        A term is T KL (zero where unmasked), plus `cross_entropy` times -log p(x_0), plus the
        reconstruction.
        """
        T = self.steps
        t = torch.randint(1, T + 1, (len(tokens),), device=tokens.device).double() / T
        masked = random_masks(targets, t)

        def of(logits: Tensor, x0: Tensor, t: Tensor, hit: Tensor) -> Tensor:
            bound = torch.where(hit, step_cost(logits, x0, t, T) / t.to(logits.dtype), 0.0)
            return bound - self.config.cross_entropy * _log_p(logits, x0)

        hidden = self.states(tokens, masked, lengths, t, targets)
        rows = (tokens[targets].long(), t[:, None].expand_as(targets)[targets], masked[targets])
        terms = over_logits(of, hidden, *self._whole_head, *rows)
        terms = terms - self.reconstruction(tokens, targets, lengths)[targets]
        return (terms if weights is None else terms * weights[targets]).sum()

    def reverse(self, batch: Batch, steps: int | None, draws: Draws) -> Passes[Denoised]:
        """Take `steps` of the T steps, evenly spaced; by default all."""
        T = self.steps
        steps = T if steps is None else steps
        if steps > T:
            raise ValueError(f"steps is {steps}; this process has {T}")
        times = [round(T * (steps - step) / steps) / T for step in range(steps + 1)]
        return posterior(self._leave, batch, times, draws)

    def _leave(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: float, s: float, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        time = torch.full((len(tokens),), t, dtype=torch.float64, device=tokens.device)
        logits = logits_of(self.states(tokens, masked, lengths, time, wanted), *self._whole_head)
        logits = logits.to(wide(logits.dtype))
        return logits[:, :-1], leaving_by_steps(logits, t, s)


def _log_p(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p (N,) of targets (N,) under logits (N, V)."""
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
