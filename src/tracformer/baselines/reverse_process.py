"""The reverse process of masked diffusion: reveal masked positions as t runs from 1 to 0.

A revealed position keeps its token. `scheduled` is for models that reveal at the rate of the
forward process (MDLM); `posterior` for models that answer themselves how probably a position is
revealed (SEDD, D3PM). `Draws` holds the random numbers: each is a function of a sequence's seed,
the position and the step, so that a sequence gets the same tokens alone and in any batch.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tracformer.model.base import Passes
from tracformer.model.batch import Batch
from tracformer.rng import SAMPLE, TIME, inverse_cdf, uniforms

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
