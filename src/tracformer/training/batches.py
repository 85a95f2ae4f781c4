"""The stream of training batches: a position maps to this rank's rows with their maskings.

The position, one integer, is all that a resumed run needs to continue with the same batches.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.data.examples import ExampleOrder, Examples
from tracformer.devices import Ranks
from tracformer.model.batch import Batch
from tracformer.training.objectives import Masking, MaskSampler


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one mode that the model processes at once."""

    mode: str
    batch: Batch
    weights: Tensor | None  # (B, T); None if every target counts once

    def to(self, device: torch.device) -> "MicroBatch":
        """Return this micro-batch on a device."""
        weights = None if self.weights is None else self.weights.to(device, non_blocking=True)
        return MicroBatch(self.mode, self.batch.to(device), weights)


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of a global batch."""

    numbers: range  # positions in the stream
    indices: list[int]  # row numbers in the data
    micro_batches: list[MicroBatch]
    count: int  # this rank's part of the divisor of the loss
    tokens: int


class Stream:
    """Training batches of a rank, by their position in the stream.

    Args:
        rows: Training data.
        masks: Draws mode and given tokens of each row.
        batch: Rows of a global batch.
        micro_batch: Rows of a micro-batch; 0: all of the rank's part.
        seed: Seed of the order of the rows.
        ranks: Ranks that share a batch.
        lockstep: Give every rank micro-batches of the same modes in the same order, as sharded
            weights require. For a mode that none of a rank's rows drew, one row with weight zero is
            added.
    """

    def __init__(
        self,
        rows: Examples,
        masks: MaskSampler,
        batch: int,
        micro_batch: int,
        seed: int,
        ranks: Ranks,
        lockstep: bool = False,
    ) -> None:
        self.rows, self.masks, self.ranks = rows, masks, ranks
        self.order = ExampleOrder(len(rows), seed, rows.weights)
        self.batch = batch
        self.micro_batch = micro_batch
        self.every_mode = sorted({part.mode for part in masks.objective.parts}) if lockstep else []

    def at(self, position: int) -> RankBatch:
        """Return the batch whose first row is number `position` of the stream."""
        numbers = self.ranks.share(position, self.batch)
        indices = self.order.indices(numbers.start, len(numbers))
        tokens, lengths = self.rows.get(indices)
        maskings = self.masks.draw_all(numbers, lengths.tolist())
        # Sorted by mode and length, micro-batches have little padding and few forward passes. The
        # sum over the batch does not change.
        order = sorted(range(len(numbers)), key=lambda i: (maskings[i].mode, int(lengths[i])))
        tokens, lengths, maskings = tokens[order], lengths[order], [maskings[i] for i in order]
        size = self.micro_batch or len(numbers)
        parts = [slice(start, start + size) for start in range(0, len(numbers), size)]
        return RankBatch(
            numbers,
            indices.tolist(),
            [
                micro_batch
                for part in parts
                for micro_batch in group_by_mode(
                    tokens[part], lengths[part], maskings[part], self.every_mode
                )
            ],
            count=sum(masking.count for masking in maskings),
            tokens=int(lengths.sum()),
        )


def group_by_mode(
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    maskings: list[Masking],
    every_mode: list[str],
) -> list[MicroBatch]:
    """Return one micro-batch for each mode.

    Args:
        tokens: Token ids, (B, T).
        lengths: Lengths of the rows, (B,).
        maskings: Mode, given tokens and weight of each row.
        every_mode: Modes to return even if no row has them; empty: only those that occur.
    """
    groups = []
    for mode in every_mode or sorted({masking.mode for masking in maskings}):
        rows = [i for i, masking in enumerate(maskings) if masking.mode == mode]
        if not rows:
            groups.append(_without_weight(mode, tokens[:1, : lengths[0]]))
            continue
        width = int(lengths[rows].max())
        context = np.ones((len(rows), width), dtype=np.bool_)
        weights = np.ones((len(rows), width), dtype=np.float32)
        for row, i in enumerate(rows):
            context[row, : lengths[i]] = maskings[i].context
            weights[row] = maskings[i].weight
        batch = Batch(
            torch.from_numpy(tokens[rows, :width]),
            torch.from_numpy(context),
            torch.from_numpy(lengths[rows]),
        )
        weighted = bool((weights != 1.0).any())
        groups.append(MicroBatch(mode, batch, torch.from_numpy(weights) if weighted else None))
    return groups


def _without_weight(mode: str, tokens: NDArray[np.int64]) -> MicroBatch:
    """Return a micro-batch that adds nothing to the loss."""
    nothing = torch.zeros(tokens.shape)
    return MicroBatch(mode, Batch(torch.from_numpy(tokens), nothing.bool()), nothing)
