"""The reverse process of masked diffusion: reveal masked positions as t runs from 1 to 0.

A revealed position keeps its token. `scheduled` is for models that reveal at the rate of the
forward process (MDLM); `posterior` for models that answer themselves how probably a position is
revealed (SEDD, D3PM). `Draws` holds the random numbers: each is a function of a sequence's seed,
the position and the step, so that a sequence is filled alike alone and in any batch.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tracformer.model.base import Passes, targets_of
from tracformer.rng import SAMPLE, TIME, inverse_cdf, uniforms

REVEAL = 1024  # stream of step 0's decisions, the next step's follows

Predict = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tokens, masked, lengths, t (B,), wanted (B, T)) -> logits (N, V) of the wanted positions.

Over real tokens, in row-major order.
"""

Leave = Callable[[Tensor, Tensor, Tensor, float, float, Tensor], tuple[Tensor, Tensor]]
"""(tokens, masked, lengths, t, s, wanted) -> those logits, and probabilities (N,).

The latter are those of each position to be revealed between t and s.
"""


Restrict = Callable[[Tensor, Tensor], Tensor]
"""(where (B, T), logits (N, V) of its True positions in row-major order) -> scores (N, V).

Minus infinity at what may not stand there.
"""


class Denoised(NamedTuple):
    """Tokens (B, T), and what the model thought of each one (B, T) when it was revealed: log p
    before temperature, zero where given.
    """

    tokens: Tensor
    log_probs: Tensor


@torch.no_grad()
def scheduled(
    predict: Predict,
    tokens: Tensor,
    context: Tensor,
    lengths: Tensor,
    steps: int | None,
    draws: "Draws",
) -> Passes[Denoised]:
    """For models that reveal at the forward process's own rate, a masked position with probability
    1 - s/t between t and s: the time of each is uniform, so all are drawn ahead and the network
    runs only where one of them comes due. `steps` None: one position at a time, the limit of many
    steps.
    """
    B = len(tokens)
    targets = targets_of(context, lengths)
    when = draws.uniforms(TIME).to(tokens.device)  # (B, T), how far into the process
    turn = (
        torch.where(targets, when, torch.inf).argsort(1).argsort(1)
        if steps is None
        else (when * steps).long()
    )
    turn = torch.where(targets, turn, -1)
    masked, filled = targets.clone(), untouched(tokens)
    for number in turn[targets].unique().tolist():
        rows = (turn == number).any(1).nonzero()[:, 0]
        now = turn[rows] == number
        t = (
            1.0 - when[rows][now]
            if steps is None
            else torch.full((len(rows),), 1.0 - number / steps, dtype=torch.float64)
        )
        logits = predict(filled.tokens[rows], masked[rows], lengths[rows], t.to(tokens.device), now)
        draws.reveal(filled, logits, _at(now, rows, B))
        masked[rows] &= ~now
        yield
    return filled


@torch.no_grad()
def posterior(
    leave: Leave,
    tokens: Tensor,
    context: Tensor,
    lengths: Tensor,
    times: Sequence[float],
    draws: "Draws",
) -> Passes[Denoised]:
    """For models that say themselves how probably a position is revealed between times[j] and
    times[j + 1]; `times` falls from 1 to 0. What is still masked at the end is revealed in the last
    step.
    """
    B = len(tokens)
    masked, filled = targets_of(context, lengths), untouched(tokens)
    last = len(times) - 2
    for step, (t, s) in enumerate(pairwise(times)):
        rows = masked.any(1).nonzero()[:, 0]
        if len(rows) == 0:
            break
        logits, chance = leave(filled.tokens[rows], masked[rows], lengths[rows], t, s, masked[rows])
        where = _at(masked[rows], rows, B)
        chosen = draws.uniforms(REVEAL + step).to(tokens.device)[where] < chance
        if step == last:
            chosen = torch.ones_like(chosen)
        now = torch.zeros_like(masked)
        now[where] = chosen
        draws.reveal(filled, logits[chosen], now)
        masked = masked & ~now
        yield
    return filled


class Draws:
    """How the tokens of sequences with these seeds (B,) are drawn: their random numbers, the
    temperature, what may stand where.
    """

    def __init__(
        self, seeds: Tensor, length: int, temperature: float = 1.0, restrict: Restrict | None = None
    ) -> None:
        self.seeds, self.temperature, self.restrict = seeds, temperature, restrict
        # seed and position, row by row
        self._each = seeds.cpu().repeat_interleave(length), torch.arange(length).repeat(len(seeds))

    def uniforms(self, stream: int) -> Tensor:
        """(B, T)"""
        return uniforms(*self._each, stream).view(len(self.seeds), -1)

    def reveal(self, filled: Denoised, logits: Tensor, where: Tensor) -> None:
        """Put a token at each True of where (B, T), whose logits are (N, V)."""
        scores = logits if self.restrict is None else self.restrict(where, logits)
        picked, log_probs = pick(
            logits, self.uniforms(SAMPLE).to(where.device)[where], self.temperature, scores
        )
        filled.tokens[where] = picked.to(filled.tokens.dtype)
        filled.log_probs[where] = log_probs


def untouched(tokens: Tensor) -> Denoised:
    return Denoised(
        tokens.clone(), torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    )


def _at(wanted: Tensor, rows: Tensor, batch: int) -> Tensor:
    """(B, T) from the wanted positions (len(rows), T) of some rows."""
    whole = torch.zeros(batch, wanted.shape[1], dtype=torch.bool, device=wanted.device)
    whole[rows] = wanted
    return whole


def pick(
    logits: Tensor, u: Tensor, temperature: float, scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative probability passes u (N,), the likeliest where temperature
    is 0; and log p at temperature 1.

    `scores` (N, V), where given, are drawn from instead; log p stays that of the logits.
    """
    own = logits.double().log_softmax(-1)  # (N, V)
    scores = own if scores is None else scores.double()
    if temperature == 0.0:
        picked = scores.argmax(-1)
    else:
        # 0 / temperature stays finite
        odds = ((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)
        picked = inverse_cdf(odds, u)
    return picked, own.gather(1, picked[:, None])[:, 0]
