"""Conditional perplexity on held-out text, on fixed sequences and fixed contexts, and a first look
at what the model fills in.
"""

import math

import numpy as np
import torch
from torch import Tensor

from tracformer.contexts import draw_contexts
from tracformer.contexts import parse as parse_strategy
from tracformer.data.examples import Examples
from tracformer.distributed import Ranks
from tracformer.generation.decode import fill
from tracformer.model import ConditionalModel
from tracformer.model.base import BOUND
from tracformer.model.batch import Batch

CONTEXT_SEED = 20250  # held-out contexts are the same in every run
BOUND_DRAWS = 8  # of noise for each sequence, where the model answers with a bound


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
    """exp of the negative log-likelihood per target; a marginal's where the mode is `ac`, a bound's
    where the model answers with one.
    """
    sequences = min(sequences, len(rows))
    # Equal shares, so that sharded ranks call the model equally often; too few to share are done by
    # every rank.
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
        questions = Batch(*(torch.from_numpy(x) for x in (tokens, context, lengths)))
        nll, targets = _nll(model, questions.to(ranks.device), mode)
        total, count = total + float(nll), count + targets
    total, count_all = ranks.total([total, float(count)])
    return math.exp(min(total / count_all, 700.0))


def _nll(model: ConditionalModel, batch: Batch, mode: str) -> tuple[Tensor, int]:
    if model.answers[mode] != BOUND:
        return model.nll(batch, mode)
    # `nll` is a training loss there
    values = model.log_prob(batch, mode, draws=BOUND_DRAWS, seed=CONTEXT_SEED)
    return -values.sum(), int(batch.targets().sum())


@torch.no_grad()
def sample_hole(
    model: ConditionalModel,
    rows: Examples,
    mode: str,
    seed: int,
    device: torch.device,
    hole: int = 12,
) -> tuple[list[int], int, int, list[int]]:
    """The first held-out row with a hole in its middle, filled: tokens, start, stop
    and the fill.
    """
    tokens, lengths = rows.get(np.array([0]))
    length = int(lengths[0])
    start, stop = max(0, length // 2 - hole // 2), min(length, length // 2 + hole // 2)
    row = torch.from_numpy(tokens[:, :length]).to(device)
    context = torch.ones_like(row, dtype=torch.bool)
    context[:, start:stop] = False
    # under it keys would have another dtype than the cache's store
    with torch.autocast(device.type, enabled=False):
        filled = fill(model, Batch(row, context), mode, seed=seed)
    return row[0].tolist(), start, stop, filled.tokens[0, start:stop].tolist()
