"""Validation during training: conditional perplexity on held-out rows, and a sample.

Rows and contexts are the same at every validation and in every run.
"""

import math

import numpy as np
import torch
from torch import Tensor

from tracformer.contexts import draw_contexts
from tracformer.contexts import parse as parse_strategy
from tracformer.data.examples import Examples
from tracformer.devices import Ranks
from tracformer.generation.decode import fill
from tracformer.model import ConditionalModel
from tracformer.model.base import BOUND
from tracformer.model.batch import Batch

CONTEXT_SEED = 20250  # of the held-out contexts
BOUND_DRAWS = 8  # noise draws per sequence if the model computes a bound


@torch.no_grad()
def conditional_perplexity(
    model: ConditionalModel,
    rows: Examples,
    mode: str,
    strategy: str,
    sequences: int,
    ranks: Ranks,
    batch: int = 16,
) -> float:
    """Return exp of the negative log-likelihood per target.

    It is that of the marginals in mode `ac`, and a bound if the model computes one.

    Args:
        model: Model to validate, in eval mode.
        rows: Held-out rows.
        mode: Mode of the model.
        strategy: Context strategy.
        sequences: Number of rows; all if there are fewer.
        ranks: Ranks that share the rows.
        batch: Rows per forward pass.
    """
    sequences = min(sequences, len(rows))
    # Equal shares, because sharded ranks must call the model equally often. Too few rows to share
    # are processed by every rank.
    mine = (
        ranks.share(0, sequences - sequences % ranks.world)
        if sequences >= ranks.world
        else range(sequences)
    )
    total, count = 0.0, 0
    for start in range(mine.start, mine.stop, batch):
        numbers = np.arange(start, min(start + batch, mine.stop))
        tokens, lengths = rows.get(numbers)
        context = draw_contexts(
            parse_strategy(strategy), lengths, CONTEXT_SEED, numbers, width=tokens.shape[1]
        )
        masked = Batch(*(torch.from_numpy(x) for x in (tokens, context, lengths)))
        nll, targets = _nll(model, masked.to(ranks.device), mode)
        total, count = total + float(nll), count + targets
    total, count_all = ranks.total([total, float(count)])
    return math.exp(min(total / count_all, 700.0))


def _nll(model: ConditionalModel, batch: Batch, mode: str) -> tuple[Tensor, int]:
    if model.answers[mode] != BOUND:
        return model.nll(batch, mode)
    # for bounds, `nll` is the training loss
    values = model.log_prob(batch, mode, draws=BOUND_DRAWS, seed=CONTEXT_SEED)
    return -values.sum(), int(batch.targets().sum())


@torch.no_grad()
def sample_blank(
    model: ConditionalModel,
    rows: Examples,
    mode: str,
    seed: int,
    device: torch.device,
    number: int = 0,
    blank: int = 12,
) -> tuple[list[int], int, int, list[int]]:
    """Fill a blank in the middle of a held-out row, by default the first.

    Returns:
        The tokens of the row, start and stop of the blank, and the sampled tokens.
    """
    tokens, lengths = rows.get(np.array([number]))
    length = int(lengths[0])
    start, stop = max(0, length // 2 - blank // 2), min(length, length // 2 + blank // 2)
    row = torch.from_numpy(tokens[:, :length]).to(device)
    context = torch.ones_like(row, dtype=torch.bool)
    context[:, start:stop] = False
    # under autocast, keys would have another dtype than the cache
    with torch.autocast(device.type, enabled=False):
        filled = fill(model, Batch(row, context), mode, seed=seed)
    return row[0].tolist(), start, stop, filled.tokens[0, start:stop].tolist()
