"""Sessions: logits of some positions, given all tokens known so far.

A session has a fixed number of rows. Each holds one sequence; sequences are admitted and released.
If a model has a cache for the mode, the cache is the session; `WholePasses` serves any other model.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from tracformer.model.base import EXACT, ConditionalModel
from tracformer.model.batch import Batch

AT_ONCE = 16  # sequences per whole pass


class Session(Protocol):
    """What the scheduler and the search need of a model."""

    def admit(self, batch: Batch) -> Tensor:
        """Take in sequences and return the rows (N,) that hold them, ascending."""
        ...

    def release(self, rows: Tensor | Sequence[int]) -> None:
        """Free these rows."""
        ...

    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return logits (N, vocab_size) at N pairs of a row and a position, ascending."""
        ...

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Make tokens known at N pairs of a row and a position."""
        ...

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return an independent session of some of the sequences, which may be repeated."""
        ...


class WholePasses:
    """A session that runs the whole model for each question; for any model and mode.

    Where a mode is not a chain rule itself, tokens that become known count as given.
    """

    def __init__(self, model: ConditionalModel, mode: str, rows: int, length: int) -> None:
        self.model, self.mode = model, mode
        device = model.head.device
        self.free = list(range(rows))  # ascending
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.context = torch.zeros(rows, length, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)

    def admit(self, batch: Batch) -> Tensor:
        N, T = batch.tokens.shape
        if N > len(self.free):
            raise ValueError(f"{N} sequences do not fit: {len(self.free)} rows are free")
        rows = torch.tensor(self.free[:N], device=batch.device)
        given = batch.given()
        # zero unknown tokens, so that they cannot matter
        self.tokens[rows, :T] = batch.tokens.masked_fill(~given, 0).to(self.tokens.dtype)
        self.context[rows, :T], self.lengths[rows] = given, batch.lengths
        self.free = self.free[N:]
        return rows

    def release(self, rows: Tensor | Sequence[int]) -> None:
        self.free = sorted([*self.free, *torch.as_tensor(rows).tolist()])

    @torch.no_grad()
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        asked, which = rows.unique(return_inverse=True)  # ascending, as rows are
        parts = []
        for start in range(0, len(asked), AT_ONCE):
            some = asked[start : start + AT_ONCE]
            mine = (which >= start) & (which < start + AT_ONCE)
            width = int(self.lengths[some].max())
            wanted = torch.zeros(len(some), width, dtype=torch.bool, device=rows.device)
            wanted[which[mine] - start, positions[mine]] = True
            tokens, context = self.tokens[some, :width], self.context[some, :width]
            batch = Batch(tokens, context, self.lengths[some])
            parts.append(self.model.logits_at(batch, self.mode, wanted))
        return torch.cat(parts)

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self.tokens[rows, positions] = tokens.to(self.tokens.dtype)
        if self.model.answers.get(self.mode) != EXACT:
            self.context[rows, positions] = True

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        index = torch.as_tensor(rows, device=self.tokens.device)
        chosen = type(self)(self.model, self.mode, 0, 0)
        chosen.tokens, chosen.context, chosen.lengths = (
            x[index] for x in (self.tokens, self.context, self.lengths)
        )
        return chosen


def empty_session(
    model: ConditionalModel, mode: str, rows: int, length: int, *, cached: bool = True
) -> Session:
    """Return an empty session: the model's cache, if it has one for the mode, or whole passes.

    The caller checks that the weights were trained for the mode.
    """
    session: Session | None = model.empty_cache(mode, rows, length) if cached else None
    return session or WholePasses(model, mode, rows, length)


def open_session(
    model: ConditionalModel, batch: Batch, mode: str, *, cached: bool = True
) -> Session:
    """Return a session that holds these sequences, in their order."""
    session = empty_session(model, mode, *batch.tokens.shape, cached=cached)
    session.admit(batch)
    return session
