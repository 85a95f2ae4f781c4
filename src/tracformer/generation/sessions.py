"""What the filling loop asks of a model: the logits of some positions, given all that is known so far.

Where a model has a cache for the mode, that is its session; any other model answers by whole passes.
"""

from typing import Protocol

import torch
from torch import Tensor

from tracformer.model.base import ConditionalModel


class Session(Protocol):
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """(N, vocab_size) at N pairs of a sequence and a position, ascending."""
        ...

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None: ...


class WholePasses:
    """Any model, any mode. Under `ac` what is revealed counts as given."""

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
        if self.mode == "ac":
            self.context[rows, positions] = True


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
