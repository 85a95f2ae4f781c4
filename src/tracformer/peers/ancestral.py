"""The reverse process of masked diffusion: masked positions are revealed as t runs from 1 to 0, and stay as they are once revealed.

All randomness is a function of (a sequence's seed, position, step): a sequence is filled alike alone and in any batch.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tracformer.generation.randomness import SAMPLE, TIME, uniforms
from tracformer.model.base import targets_of

REVEAL = 1024  # stream of step 0's decisions, the next step's follows

Predict = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tokens, masked, lengths, t (B,), wanted (B, T)) -> logits (N, V) over real tokens of the wanted positions, in row-major order."""

Leave = Callable[[Tensor, Tensor, Tensor, float, float, Tensor], tuple[Tensor, Tensor]]
"""(tokens, masked, lengths, t, s, wanted) -> those logits, and each position's probability (N,) of being revealed between t and s."""


class Filled(NamedTuple):
    """Tokens (B, T), and what the model thought of each one (B, T) when it was revealed: log p before temperature, zero where given."""

    tokens: Tensor
    log_probs: Tensor


@torch.no_grad()
def scheduled(
    predict: Predict, tokens: Tensor, context: Tensor, lengths: Tensor, steps: int | None, seeds: Tensor, temperature: float
) -> Filled:
    """For models that reveal at the forward process's own rate, a masked position with probability 1 - s/t between t and s: the time of
    each is uniform, so all are drawn ahead and the network runs only where one of them comes due. `steps` None: one position at a time,
    the limit of many steps.
    """
    B, T = tokens.shape
    draw = _Draws(seeds, T, temperature)
    targets = targets_of(context, lengths)
    when = draw.uniforms(TIME).to(tokens.device)  # (B, T), how far into the process
    turn = torch.where(targets, when, torch.inf).argsort(1).argsort(1) if steps is None else (when * steps).long()
    turn = torch.where(targets, turn, -1)
    masked, filled = targets.clone(), _start(tokens)
    for number in turn[targets].unique().tolist():
        rows = (turn == number).any(1).nonzero()[:, 0]
        now = turn[rows] == number
        t = 1.0 - when[rows][now] if steps is None else torch.full((len(rows),), 1.0 - number / steps, dtype=torch.float64)
        logits = predict(filled.tokens[rows], masked[rows], lengths[rows], t.to(tokens.device), now)
        _reveal(filled, logits, _at(now, rows, B), draw)
        masked[rows] &= ~now
    return filled


@torch.no_grad()
def posterior(
    leave: Leave, tokens: Tensor, context: Tensor, lengths: Tensor, times: Sequence[float], seeds: Tensor, temperature: float
) -> Filled:
    """For models that say themselves how probably a position is revealed between times[j] and times[j + 1]; `times` falls from 1 to 0.
    What is still masked at the end is revealed in the last step.
    """
    B, T = tokens.shape
    draw = _Draws(seeds, T, temperature)
    masked, filled = targets_of(context, lengths), _start(tokens)
    last = len(times) - 2
    for step, (t, s) in enumerate(pairwise(times)):
        rows = masked.any(1).nonzero()[:, 0]
        if len(rows) == 0:
            break
        logits, chance = leave(filled.tokens[rows], masked[rows], lengths[rows], t, s, masked[rows])
        where = _at(masked[rows], rows, B)
        chosen = draw.uniforms(REVEAL + step).to(tokens.device)[where] < chance
        if step == last:
            chosen = torch.ones_like(chosen)
        now = torch.zeros_like(masked)
        now[where] = chosen
        _reveal(filled, logits[chosen], now, draw)
        masked = masked & ~now
    return filled


class _Draws:
    def __init__(self, seeds: Tensor, length: int, temperature: float) -> None:
        self.temperature = temperature
        self.seeds = seeds.cpu().repeat_interleave(length)
        self.positions = torch.arange(length).repeat(len(seeds))
        self.shape = (len(seeds), length)

    def uniforms(self, stream: int) -> Tensor:
        """(B, T)"""
        return uniforms(self.seeds, self.positions, stream).view(self.shape)


def _start(tokens: Tensor) -> Filled:
    return Filled(tokens.clone(), torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device))


def _at(wanted: Tensor, rows: Tensor, batch: int) -> Tensor:
    """(B, T) from the wanted positions (len(rows), T) of some rows."""
    whole = torch.zeros(batch, wanted.shape[1], dtype=torch.bool, device=wanted.device)
    whole[rows] = wanted
    return whole


def _reveal(filled: Filled, logits: Tensor, where: Tensor, draw: _Draws) -> None:
    """Put a token at each True of where (B, T), whose logits are (N, V)."""
    picked, log_probs = pick(logits, draw.uniforms(SAMPLE).to(where.device)[where], draw.temperature)
    filled.tokens[where] = picked.to(filled.tokens.dtype)
    filled.log_probs[where] = log_probs


def pick(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The token at which the cumulative probability passes u (N,), the likeliest where temperature is 0; and log p at temperature 1."""
    own = logits.double().log_softmax(-1)  # (N, V)
    if temperature == 0.0:
        picked = own.argmax(-1)
    else:
        reached = ((own - own.amax(-1, keepdim=True)) / temperature).softmax(-1).cumsum(-1)  # 0 / temperature stays finite
        picked = torch.searchsorted(reached, (u[:, None] * reached[:, -1:]).contiguous(), right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return picked, own.gather(1, picked[:, None])[:, 0]
