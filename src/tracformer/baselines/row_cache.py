"""What left-to-right generation keeps for models whose rows are computed once: keys and values of
every layer.

A subclass says how given tokens are read when a sequence is admitted, and which rows must be fed
before a position can be predicted. See `generation.sessions.Session` for the interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tracformer.model.cache import Slots
from tracformer.model.likelihood import logits_of


class RowCache(ABC):
    """Generation from left to right: at most `rows` sequences at a time, each of at most `length`
    tokens.

    Args:
        model: A model with `layers` (its blocks), `embedding` and `head`.
        mode: Mode of generation.
        rows: Number of sequences that the cache holds.
        length: Longest sequence.
    """

    state_names: tuple[str, ...] = ()  # further tensors of a subclass, with a row a sequence

    def __init__(self, model: Any, mode: str, rows: int, length: int) -> None:
        self.model, self.mode, self.length = model, mode, length
        weight = model.embedding.weight
        self.slots = self.slots_for(length)
        self.free = list(range(rows))  # ascending
        self.fed = [0] * rows  # the first position whose row was not fed yet, of each sequence
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=weight.device)
        for name, state in self.row_state(rows, length, weight).items():
            setattr(self, name, state)
            self.state_names = (*self.state_names, name)
        self.layers = [Slots(weight, rows, self.slots) for _ in model.layers]

    # ---- what a subclass says

    @abstractmethod
    def slots_for(self, length: int) -> int:
        """Return the number of keys that a sequence can have."""

    @abstractmethod
    def row_state(self, rows: int, length: int, weight: Tensor) -> dict[str, Tensor]:
        """Return further tensors by name, each with a row a sequence; they become attributes."""

    @abstractmethod
    def read_given(self, rows: Tensor, tokens: Tensor, context: Tensor, lengths: Tensor) -> None:
        """Read what is given in new sequences. tokens, context: (N, T); lengths: (N,)."""

    @abstractmethod
    def states(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the final states (N, d) that predict one position in each of some sequences."""

    # ---- a session

    @torch.no_grad()
    def admit(self, tokens: Tensor, context: Tensor, lengths: Tensor) -> Tensor:
        N, T = len(tokens), int(lengths.max())
        if N > len(self.free) or T > self.length:
            raise ValueError(
                f"{N} sequences of {T} tokens do not fit: {len(self.free)} rows are free, each of "
                f"{self.length} tokens"
            )
        rows = torch.tensor(self.free[:N], device=tokens.device)
        context = context[:, :T] & (torch.arange(T, device=tokens.device) < lengths[:, None])
        tokens = tokens[:, :T].masked_fill(~context, 0).long()
        for name in self.state_names:
            getattr(self, name)[rows] = 0
        self.tokens[rows, :T] = tokens
        for row in self.free[:N]:
            self.fed[row] = 0
        self.read_given(rows, tokens, context, lengths)
        self.free = self.free[N:]
        return rows

    def release(self, rows: Tensor | Sequence[int]) -> None:
        gone = torch.as_tensor(rows).tolist()
        if wrong := [row for row in gone if row in self.free or not 0 <= row < len(self.fed)]:
            raise ValueError(f"row {wrong[0]} holds no sequence")
        self.free = sorted([*self.free, *gone])

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self.tokens[rows, positions] = tokens.to(self.tokens.dtype)

    @torch.no_grad()
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return (N, vocab_size) at one target in each of some sequences;

        every token before it must be known.
        """
        return logits_of(self.states(rows, positions), self.model.head, self.model.head_bias)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return a cache of some of the sequences, in any order and number, that shares nothing
        with this one.
        """
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

    def attend(self, layer: int, q: Tensor, row: Tensor, index: Tensor, present: Tensor) -> Tensor:
        """Attention of queries q (1, N, H, D) of sequences `row` (N,) over the slots `index` (N, K)
        where `present`.
        """
        index = index.masked_fill(~present, 0)  # memory of other slots may never have been written
        return self.layers[layer].attend(q[0], row[:, None] * self.slots + index, present)[None]

    def pending(
        self, rows: Tensor, positions: Tensor, has_row: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows to feed before some positions are answered, theirs included.

        Args:
            rows: (N,) sequences.
            positions: (N,) position to answer in each.
            has_row: (rows, length) bool, whether a sequence has a row for a position.

        Returns: (M,) sequences and (M,) positions to feed, ascending in each sequence; and (N,) the
            places of the asked ones among them.
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
    """Return the columns (N, K) where present (N, M) is True, and which of these K
    are not filler.
    """
    counts = present.sum(1)
    width = max(1, int(counts.max()))
    index = (~present).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return index, torch.arange(width, device=present.device) < counts[:, None]
