"""SEDD (Lou et al., 2024) with absorbing noise: the network estimates ratios of probabilities, trained by score entropy.

With s_y the log-score of token y behind a mask and r = 1/expm1(sigma) its scale, published networks answer
s_y = g_y + log r, g_y = logits_y - log(number of real tokens). Then a masked target's score entropy

    sigma' [ sum_y e^{s_y} - r s_{x_0} + r (log r - 1) ] = sigma' r [ sum_y e^{g_y} - 1 - g_{x_0} ],   sigma' r = 1/t,

which is at least -log p(x_0) / t under p = softmax(g), with equality where the scores sum as they should.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tracformer.generation.passes import Passes
from tracformer.model.likelihood import logits_of
from tracformer.peers.ancestral import Draws, Filled, posterior
from tracformer.peers.diffusion import EPSILON, DiffusionConfig, DiffusionModel, over_logits, random_masks, random_times
from tracformer.precision import wide


def score_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """t times the loss of masked targets: sum_y e^{g_y} - 1 - g_{x_0}. logits: (N, V), real tokens only; targets: (N,)"""
    g = logits - math.log(logits.shape[-1])
    return g.logsumexp(-1).expm1() - g.gather(1, targets[:, None])[:, 0]


def leaving(logits: Tensor, t: float, s: float) -> Tensor:
    """(N,): probability that a mask is left between t and s, (e^{sigma(t) - sigma(s)} - 1) sum_y e^{s_y} = (1 - s/t) sum_y e^{g_y}.

    It is the analytic (Tweedie) step, for masks with probability t; scores that sum to too much are cut at 1.
    """
    total = (logits.double() - math.log(logits.shape[-1])).logsumexp(-1).exp()
    return ((1.0 - s / t) * total).clamp(max=1.0)


@dataclass(frozen=True)
class SEDDConfig(DiffusionConfig):
    model_type = "sedd"


class SEDD(DiffusionModel):
    """Mode `ac` normalises the scores over real tokens, at the noise whose share of masks is that of the sequence."""

    config: SEDDConfig
    config_class = SEDDConfig

    def cost(self, hidden: Tensor, targets: Tensor, t: Tensor) -> Tensor:
        return over_logits(score_entropy, hidden, self.head, self.head_bias, targets)

    def training_loss(self, tokens: Tensor, targets: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """Score entropy at one uniform t a sequence."""
        t = random_times(len(tokens), tokens.device, stratified=False)
        masked = random_masks(targets, (1 - EPSILON) * t)
        terms = self.costs(tokens, masked, lengths, t)
        terms = terms / t[:, None].to(terms.dtype)
        return (terms if weights is None else terms * weights).sum()

    def reverse(self, tokens: Tensor, context: Tensor, lengths: Tensor, steps: int | None, draws: Draws) -> Passes[Filled]:
        """`steps` equal steps from t = 1 to 0; by default as many as the longest sequence takes tokens."""
        steps = self.config.max_length if steps is None else steps
        times = [1.0 - step / steps for step in range(steps)] + [0.0]
        return posterior(self._leave, tokens, context, lengths, times, draws)

    def _leave(self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: float, s: float, wanted: Tensor) -> tuple[Tensor, Tensor]:
        time = torch.full((len(tokens),), t, dtype=torch.float64, device=tokens.device)
        logits = logits_of(self.states(tokens, masked, lengths, time, wanted), self.head, self.head_bias)
        logits = logits.to(wide(logits.dtype))
        return logits, leaving(logits, t, s)
