"""Training objectives and batches: mode, given tokens and weight of each sequence.

An objective is a mixture of parts; each sequence draws one part, keyed by (seed, its number in the
stream), so the mixture does not depend on batch size, workers or ranks. Every loss term is -log p
of a target; the parts differ in mode, context strategy and weight:

- `car` (Eq. 7) and `ac` (Eq. 8): span contexts as in the paper's small-scale runs.
- `paper-mix`: the paper's OpenWebText objective, CAR with the contexts of Algorithm 2.
- `all-modes`: one model for every task: CAR, AC and AR rows.
- `ar`: plain left to right.
- `fim`: fill in the middle for left-to-right models: half of the rows are reordered around one
  blank, some around several.
- `diffusion`: masked diffusion on the AC network. With k targets of n drawn uniformly and weight
  n/k, the expected sum is the continuous-time NELBO of the sequence. k follows a low-discrepancy
  sequence along the stream, which lowers the variance of every batch.
- `denoise`: every token is a target, and the model draws its own noise (SEDD, MDLM, D3PM, PLAID);
  tokens given by `contexts` are never noised.

`Stream` is the stream of training batches: a position maps to this rank's rows with their maskings.
The position, one integer, is all that a resumed run needs to continue with the same batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.contexts import Strategy, sequence_rng
from tracformer.contexts import parse as parse_strategy
from tracformer.data.examples import ExampleOrder, Examples
from tracformer.devices import Ranks
from tracformer.model.batch import Batch

SPANS = "span:p=0.5,mean=50"


@dataclass(frozen=True)
class Part:
    """One component of an objective."""

    share: float  # share of the sequences
    mode: str  # car, ac, ar or diffusion
    contexts: str  # strategy that draws the given tokens
    # "targets": each target counts once; "nelbo": n/k each, and the sequence counts n
    weighting: str = "targets"


@dataclass(frozen=True)
class Objective:
    """A mixture of parts."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Masking:
    """The mode, the given tokens and the weight of one sequence."""

    mode: str
    context: NDArray[np.bool_]  # (T,), True where given
    weight: float  # weight of each target's term
    count: int  # what the sequence adds to the divisor of the loss


OBJECTIVES: dict[str, tuple[Part, ...]] = {
    "car": (Part(1.0, "car", SPANS),),
    "ac": (Part(1.0, "ac", SPANS),),
    "ar": (Part(1.0, "ar", "empty"),),
    "paper-mix": (Part(1.0, "car", "mixed"),),
    "all-modes": (
        Part(0.5, "car", "mixed"),
        Part(0.25, "ac", "uniform"),
        Part(0.25, "ar", "empty"),
    ),
    "fim": (Part(0.5, "car", f"0.8*middle+0.2*{SPANS}"), Part(0.5, "ar", "empty")),
    "diffusion": (Part(1.0, "ac", "uniform", weighting="nelbo"),),
    "denoise": (Part(1.0, "diffusion", "empty"),),
}


def parse_objective(name: str, contexts: str = "") -> Objective:
    """Return an objective by its name.

    Args:
        name: One of `OBJECTIVES`.
        contexts: Strategy that replaces those of the parts, except AR and `nelbo` parts; empty
            keeps them.

    Raises:
        ValueError: The name is unknown, or the objective fixes its contexts.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective is {name!r}; available: {', '.join(OBJECTIVES)}")
    parts = OBJECTIVES[name]
    if contexts:
        parse_strategy(contexts)
        if all(part.mode == "ar" or part.weighting == "nelbo" for part in parts):
            raise ValueError(
                f"contexts is {contexts!r}, but objective {name!r} fixes its own contexts; leave "
                "contexts empty"
            )
        parts = tuple(
            Part(p.share, p.mode, contexts) if p.mode != "ar" and p.weighting == "targets" else p
            for p in parts
        )
    return Objective(name, parts)


class MaskSampler:
    """Draws mode, given tokens and weight for any sequence of the stream.

    Args:
        objective: The mixture to draw from.
        seed: Random seed; draws depend on it and on the number of the sequence only.
    """

    def __init__(self, objective: Objective, seed: int) -> None:
        self.objective = objective
        self.seed = seed
        self._strategies: list[Strategy] = [
            parse_strategy(part.contexts) for part in objective.parts
        ]
        self._shares = np.cumsum([part.share for part in objective.parts])

    def draw(self, number: int, length: int) -> Masking:
        """Draw for sequence `number` of the stream, which has `length` tokens."""
        rng = sequence_rng(self.seed, number)
        chosen = min(
            int(np.searchsorted(self._shares, rng.random(), side="right")),
            len(self._strategies) - 1,
        )
        part = self.objective.parts[chosen]
        if part.weighting == "nelbo":
            k = 1 + int(low_discrepancy(self.seed, number) * length)
            context = np.ones(length, dtype=np.bool_)
            context[rng.permutation(length)[:k]] = False
            return Masking(part.mode, context, weight=length / k, count=length)
        context = self._strategies[chosen].draw(length, rng)
        return Masking(part.mode, context, weight=1.0, count=int(length - context.sum()))

    def draw_all(self, numbers: Sequence[int], lengths: Sequence[int]) -> list[Masking]:
        """Draw for several sequences."""
        return [self.draw(number, length) for number, length in zip(numbers, lengths, strict=True)]


def low_discrepancy(seed: int, number: int) -> float:
    """Return point `number` of a Kronecker sequence in [0, 1).

    Any consecutive points cover the interval evenly.
    """
    golden = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
    start = int(np.random.Generator(np.random.Philox(key=seed)).integers(2**63))
    return ((start + number * golden) % 2**64) / 2**64


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
