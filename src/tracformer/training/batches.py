"""The stream of training batches: step -> this rank's sequences, each with its question.

One integer says where it stands.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.data.examples import ExampleOrder, Examples
from tracformer.distributed import Ranks
from tracformer.model.batch import Batch
from tracformer.training.objectives import Question, Questioner


@dataclass(frozen=True)
class Group:
    """Sequences that are asked in one mode."""

    mode: str
    batch: Batch
    weights: Tensor | None  # (B, T), None where every target counts once

    def to(self, device: torch.device) -> "Group":
        weights = None if self.weights is None else self.weights.to(device, non_blocking=True)
        return Group(self.mode, self.batch.to(device), weights)


@dataclass(frozen=True)
class MicroBatch:
    """A rank's part of a global batch, cut into micro-batches, each of one mode."""

    numbers: range  # places in the stream
    indices: list[int]  # row numbers in the data
    micro: list[Group]
    count: int  # the divisor's share of this rank
    tokens: int


class Stream:
    """With `lockstep`, every rank asks in the same modes in the same order, as sharded weights
    require: a mode that none of a rank's sequences drew is asked of one of them with weight zero.
    """

    def __init__(
        self,
        rows: Examples,
        questioner: Questioner,
        batch: int,
        micro_batch: int,
        seed: int,
        ranks: Ranks,
        lockstep: bool = False,
    ) -> None:
        self.rows, self.questioner, self.ranks = rows, questioner, ranks
        self.order = ExampleOrder(len(rows), seed, rows.weights)
        self.batch = batch
        self.micro_batch = micro_batch
        self.every_mode = (
            sorted({part.mode for part in questioner.objective.parts}) if lockstep else []
        )

    def at(self, position: int) -> MicroBatch:
        """The batch whose first sequence is number `position` of the stream."""
        numbers = self.ranks.share(position, self.batch)
        indices = self.order.indices(numbers.start, len(numbers))
        tokens, lengths = self.rows.get(indices)
        questions = self.questioner.ask_all(numbers, lengths.tolist())
        # Like modes and like lengths together: micro-batches have little padding and few passes.
        # The sum over the batch is the same.
        order = sorted(range(len(numbers)), key=lambda i: (questions[i].mode, int(lengths[i])))
        tokens, lengths, questions = tokens[order], lengths[order], [questions[i] for i in order]
        size = self.micro_batch or len(numbers)
        parts = [slice(start, start + size) for start in range(0, len(numbers), size)]
        return MicroBatch(
            numbers,
            indices.tolist(),
            [
                group
                for part in parts
                for group in group_by_mode(
                    tokens[part], lengths[part], questions[part], self.every_mode
                )
            ],
            count=sum(question.count for question in questions),
            tokens=int(lengths.sum()),
        )


def group_by_mode(
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    questions: list[Question],
    every_mode: list[str],
) -> list[Group]:
    groups = []
    for mode in every_mode or sorted({question.mode for question in questions}):
        rows = [i for i, question in enumerate(questions) if question.mode == mode]
        if not rows:
            groups.append(_silent(mode, tokens[:1, : lengths[0]]))
            continue
        width = int(lengths[rows].max())
        context = np.ones((len(rows), width), dtype=np.bool_)
        weights = np.ones((len(rows), width), dtype=np.float32)
        for row, i in enumerate(rows):
            context[row, : lengths[i]] = questions[i].context
            weights[row] = questions[i].weight
        groups.append(
            Group(
                mode,
                Batch(
                    torch.from_numpy(tokens[rows, :width]),
                    torch.from_numpy(context),
                    torch.from_numpy(lengths[rows]),
                ),
                torch.from_numpy(weights) if (weights != 1.0).any() else None,
            )
        )
    return groups


def _silent(mode: str, tokens: NDArray[np.int64]) -> Group:
    """A question that counts for nothing."""
    nothing = torch.zeros(tokens.shape)
    return Group(mode, Batch(torch.from_numpy(tokens), nothing.bool()), nothing)
