"""KV cache of models that compute each input row once: AC-GPT, Compact, AS-ARM, sigma-GPT, Aligned.

`RowCache` holds keys and values of every layer for several sequences and implements the session
interface (`generation.scheduler.Session`). A subclass says how given tokens are read when a
sequence is admitted, and which rows must be computed before a position can be predicted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tracformer.model.batch import Batch
from tracformer.model.cache import Slots
from tracformer.model.likelihood import logits_of


class RowCache(ABC):
    """Cached keys and values for left-to-right generation of at most `rows` sequences.

    Args:
        model: A model with `layers` (its blocks), `embedding` and `head`.
        mode: Mode of generation.
        rows: Maximum number of sequences.
        length: Maximum length of a sequence.
    """

    state_names: tuple[str, ...] = ()  # further tensors of a subclass, one row per sequence

    def __init__(self, model: Any, mode: str, rows: int, length: int) -> None:
        self.model, self.mode, self.length = model, mode, length
        weight = model.embedding.weight
        self.slots = self.slots_for(length)
        self.free = list(range(rows))  # ascending
        self.fed = [0] * rows  # first position of each sequence whose row was not computed yet
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=weight.device)
        for name, state in self.row_state(rows, length, weight).items():
            setattr(self, name, state)
            self.state_names = (*self.state_names, name)
        self.layers = self.make_layers(rows, weight)

    def make_layers(self, rows: int, weight: Tensor) -> list[Any]:
        """Return the keys and values of each layer; they can `select` rows."""
        return [Slots(weight, rows, self.slots) for _ in self.model.layers]

    # ---- implemented by a subclass

    @abstractmethod
    def slots_for(self, length: int) -> int:
        """Return the number of keys that a sequence of this length can have."""

    @abstractmethod
    def row_state(self, rows: int, length: int, weight: Tensor) -> dict[str, Tensor]:
        """Return further tensors by name, one row per sequence; they become attributes."""

    @abstractmethod
    def read_given(self, rows: Tensor, batch: Batch) -> None:
        """Compute the given tokens of new sequences.

        Args:
            rows: (N,) places of the sequences in the cache.
            batch: The sequences, with token 0 at targets.
        """

    @abstractmethod
    def states(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the final states (N, d) that predict one position in each of some sequences."""

    # ---- a session

    @torch.no_grad()
    def admit(self, batch: Batch) -> Tensor:
        """Add sequences to free rows of the cache, and return the rows (N,) that they occupy."""
        N, T = len(batch), int(batch.lengths.max())
        if N > len(self.free) or T > self.length:
            raise ValueError(
                f"{N} sequences of {T} tokens do not fit: {len(self.free)} rows are free, each of "
                f"{self.length} tokens"
            )
        rows = torch.tensor(self.free[:N], device=batch.device)
        given = batch.given()[:, :T]
        tokens = batch.tokens[:, :T].masked_fill(~given, 0).long()
        for name in self.state_names:
            getattr(self, name)[rows] = 0
        self.tokens[rows, :T] = tokens
        for row in self.free[:N]:
            self.fed[row] = 0
        self.read_given(rows, Batch.unchecked(tokens, given, batch.lengths))
        self.free = self.free[N:]
        return rows

    def release(self, rows: Tensor | Sequence[int]) -> None:
        """Free rows for other sequences."""
        gone = torch.as_tensor(rows).tolist()
        if wrong := [row for row in gone if row in self.free or not 0 <= row < len(self.fed)]:
            raise ValueError(f"row {wrong[0]} holds no sequence")
        self.free = sorted([*self.free, *gone])

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Set the token of one position in each of some sequences."""
        self.tokens[rows, positions] = tokens.to(self.tokens.dtype)

    @torch.no_grad()
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return (N, vocab_size) logits of one target in each of some sequences.

        Every token before the target must be known.
        """
        return logits_of(self.states(rows, positions), self.model.head, self.model.head_bias)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return an independent copy of some of the sequences, in any order and number."""
        index = torch.as_tensor(rows, device=self.tokens.device)
        chosen = object.__new__(type(self))
        for name in ("model", "mode", "length", "slots"):
            setattr(chosen, name, getattr(self, name))
        chosen.free, chosen.fed = [], [self.fed[row] for row in index.tolist()]
        chosen.tokens = self.tokens[index].clone()
        chosen.state_names = self.state_names
        for name in self.state_names:
            setattr(chosen, name, getattr(self, name)[index].clone())
        chosen.layers = [kept.select(index) for kept in self.layers]
        return chosen

    def rearrange(self, sources: Sequence[int], since: int) -> None:
        """Let row i continue row sources[i]; other rows are dropped."""
        vars(self).update(vars(self.select(sources)))

    def attend(self, layer: int, q: Tensor, row: Tensor, index: Tensor, present: Tensor) -> Tensor:
        """Return the attention of queries over cached slots.

        Args:
            layer: Number of the layer.
            q: Queries (1, N, H, D).
            row: (N,) sequence of each query.
            index: (N, K) slots that each query reads.
            present: (N, K) bool, False where `index` holds only a filler.
        """
        index = index.masked_fill(~present, 0)  # other slots may hold uninitialised memory
        return self.layers[layer].attend(q[0], row[:, None] * self.slots + index, present)[None]

    def pending(
        self, rows: Tensor, positions: Tensor, has_row: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows to compute before some positions can be predicted, their own included.

        Args:
            rows: (N,) sequences.
            positions: (N,) position to predict in each.
            has_row: (rows, length) bool, whether a sequence has a row for a position.

        Returns:
            (M,) sequences and (M,) positions to compute, ascending in each sequence; and (N,) the
                indices of the requested positions among them.
        """
        pairs: list[tuple[int, int]] = []
        answers: list[int] = []
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            if self.fed[row] < position:
                flags = has_row[row, self.fed[row] : position].tolist()
                pairs += [(row, t) for t, fed in enumerate(flags, start=self.fed[row]) if fed]
            pairs.append((row, position))
            answers.append(len(pairs) - 1)
            self.fed[row] = max(self.fed[row], position + 1)
        row_of, place = torch.tensor(pairs, device=self.tokens.device).T.contiguous()
        return row_of, place, torch.tensor(answers, device=self.tokens.device)


def compressed(present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns where `present` is True, packed to the left.

    Args:
        present: (N, M) bool.

    Returns:
        Columns (N, K), and (N, K) bool: False where a column is only a filler.
    """
    counts = present.sum(1)
    width = max(1, int(counts.max()))
    index = (~present).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return index, torch.arange(width, device=present.device) < counts[:, None]


class LayerMemory:
    """Keys and values of one layer, (rows, H, slots, D), which grow as slots are used."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def write(self, rows: Tensor, slots: Tensor, width: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values (N, H, Q, D) at the slots (N, Q) < width of some rows (N,)."""
        self.keys, self.values = (
            self._grown(self.keys, k, width),
            self._grown(self.values, v, width),
        )
        for kept, new in ((self.keys, k), (self.values, v)):
            kept[rows[:, None], :, slots] = new.transpose(1, 2).to(kept.dtype)

    def read(self, rows: Tensor | slice, width: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (N, H, width, D) of some rows; a slice copies nothing."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[rows, :, :width], self.values[rows, :, :width]

    def _grown(self, kept: Tensor | None, like: Tensor, width: int) -> Tensor:
        old = 0 if kept is None else kept.shape[2]
        if kept is not None and old >= width:
            return kept
        # zeroed: a slot that is not read has weight zero, but zero times NaN is NaN
        more = like.new_zeros(self.rows, like.shape[1], max(width, 2 * old) - old, like.shape[3])
        return more if kept is None else torch.cat((kept, more), dim=2)

    def select(self, rows: Tensor) -> "LayerMemory":
        """Return a copy with some of the rows."""
        chosen = LayerMemory(len(rows))
        if self.keys is not None and self.values is not None:
            chosen.keys, chosen.values = self.keys[rows], self.values[rows]
        return chosen
