"""What the filling loop asks of a model: the logits of some positions, given all that is known so far.

Where a model has a cache for the mode, that is its session; any other model answers by whole passes.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from tracformer.model.base import EXACT, ConditionalModel


class Session(Protocol):
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """(N, vocab_size) at N pairs of a sequence and a position, ascending."""
        ...

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None: ...

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """A session of some of the sequences, in any order and number; what happens to it does not touch this one."""
        ...


class WholePasses:
    """Any model, any mode. Unless the mode is a chain rule of its own, what is revealed counts as given."""

    def __init__(
        self, model: ConditionalModel, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, batch: int, insist: bool
    ) -> None:
        self.model, self.mode, self.lengths, self.batch, self.insist = model, mode, lengths, batch, insist
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        self.tokens = tokens.masked_fill(~(context & inside), 0)  # what is not known yet must not matter
        self.context = context.clone()

    @torch.no_grad()
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        asked, which = rows.unique(return_inverse=True)  # ascending, as rows are
        parts = []
        for start in range(0, len(asked), self.batch):
            some = asked[start : start + self.batch]
            mine = (which >= start) & (which < start + self.batch)
            width = int(self.lengths[some].max())
            wanted = torch.zeros(len(some), width, dtype=torch.bool, device=rows.device)
            wanted[which[mine] - start, positions[mine]] = True
            tokens, context = self.tokens[some, :width], self.context[some, :width]
            parts.append(self.model.logits_at(tokens, context, self.mode, self.lengths[some], wanted, insist=self.insist))
        return torch.cat(parts)

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self.tokens[rows, positions] = tokens.to(self.tokens.dtype)
        if self.model.answers.get(self.mode) != EXACT:
            self.context[rows, positions] = True

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        index = torch.as_tensor(rows, device=self.tokens.device)
        tokens, context, lengths = (x[index] for x in (self.tokens, self.context, self.lengths))
        chosen = type(self)(self.model, tokens, context, self.mode, lengths, self.batch, self.insist)
        chosen.tokens = tokens  # with what was revealed
        return chosen


def open_session(
    model: ConditionalModel,
    tokens: Tensor,
    context: Tensor,
    mode: str,
    lengths: Tensor,
    *,
    cached: bool = True,
    batch: int = 16,
    insist: bool = False,
) -> Session:
    """The model's cache where it has one for the mode and `cached` allows, else whole passes, `batch` sequences at once."""
    session = model.cache(tokens, context, mode, lengths, insist=insist) if cached else None
    return session or WholePasses(model, tokens, context, mode, lengths, batch, insist)


def without_targets(tokens: Tensor, context: Tensor) -> Tensor:
    """Zero wherever a token is not given, so that anything may stand there. A context that does not fit is left to the batch's check."""
    fits = context.shape == tokens.shape and context.dtype == torch.bool and context.device == tokens.device
    return tokens.masked_fill(~context, 0) if fits else tokens
