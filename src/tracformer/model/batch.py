"""A batch of token sequences in which some tokens are given and the others are to be predicted.

Every public method of a model takes a `Batch`. Shapes, dtypes, devices and lengths are checked when
it is made; whether its token ids and its width fit a model is checked by that model, once per call
(`model.base.check_batch`).
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tracformer.model.config import ModelConfig

IDS = (torch.int32, torch.int64)  # dtypes that embeddings accept
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False, init=False)
class Batch:
    """Token sequences, and which of their tokens are given.

    The tokens that are not given are the targets: a model predicts them. Sequences of different
    lengths are padded on the right; the padding is never read.

    Args:
        tokens: (B, T) token ids, int64 or int32. Models that score or train read the true tokens at
            the targets; generation ignores them.
        context: (B, T) bool, True where a token is given.
        lengths: (B,) true lengths, integers in 1..T. None: no sequence is padded.

    Raises:
        ValueError: A tensor has a wrong shape, dtype or device, the batch is empty, or a length
            lies outside 1..T.

    Example:
        >>> batch = Batch(torch.tensor([[3, 1, 4]]), torch.tensor([[True, False, True]]))
        >>> batch.targets().tolist()
        [[False, True, False]]
    """

    tokens: Tensor
    context: Tensor
    lengths: Tensor

    def __init__(self, tokens: Tensor, context: Tensor, lengths: Tensor | None = None) -> None:
        if tokens.dim() != 2 or tokens.dtype not in IDS:
            raise ValueError(
                f"tokens is {_describe(tokens)}; it must be a (B, T) tensor of int64 or int32"
            )
        B, T = tokens.shape
        if B == 0 or T == 0:
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}: an empty batch; give at least one "
                "sequence of at least one token"
            )
        if context.shape != tokens.shape or context.dtype != torch.bool:
            raise ValueError(
                f"context is {_describe(context)}; it must be a bool tensor of tokens' shape "
                f"{tuple(tokens.shape)}"
            )
        if context.device != tokens.device:
            raise ValueError(
                f"context is on {context.device} and tokens on {tokens.device}; they must be on "
                "one device"
            )
        self._set(tokens, context, _checked_lengths(lengths, tokens))

    @classmethod
    def unchecked(cls, tokens: Tensor, context: Tensor, lengths: Tensor) -> Self:
        """Make a batch from parts of a checked one, without checking them again."""
        batch = object.__new__(cls)
        batch._set(tokens, context, lengths)
        return batch

    def __len__(self) -> int:
        """Return the number of sequences, B."""
        return len(self.tokens)

    @property
    def width(self) -> int:
        """The padded length T."""
        return self.tokens.shape[1]

    @property
    def device(self) -> torch.device:
        """The device that holds the batch."""
        return self.tokens.device

    def check_length(self, config: ModelConfig) -> None:
        """Raise a ValueError if a sequence is shorter than a model requires."""
        if config.fixed_length and (short := int(self.lengths.min())) < config.max_length:
            raise ValueError(
                f"a sequence has {short} tokens; this model reads rows of an alignment, which all "
                f"have {config.max_length}: align the sequence to its columns, with gaps"
            )

    def inside(self) -> Tensor:
        """Return (B, T) bool, False in the padding."""
        return torch.arange(self.width, device=self.device) < self.lengths[:, None]

    def given(self) -> Tensor:
        """Return (B, T) bool, True where a token is given; False in the padding."""
        return self.context & self.inside()

    def targets(self) -> Tensor:
        """Return (B, T) bool, True where a token is to be predicted; False in the padding."""
        return ~self.context & self.inside()

    def without_targets(self) -> Self:
        """Return the batch with token 0 wherever no token is given."""
        return self.unchecked(self.tokens.masked_fill(~self.context, 0), self.context, self.lengths)

    def with_context(self, context: Tensor) -> Self:
        """Return the same sequences with other given tokens; `context` (B, T) bool."""
        return self.unchecked(self.tokens, context, self.lengths)

    def with_padding(self, token: int) -> Self:
        """Return the batch with int64 ids and `token` in the padding."""
        tokens = self.tokens.long().masked_fill(~self.inside(), token)
        return self.unchecked(tokens, self.context, self.lengths)

    def select(self, rows: Tensor | slice) -> Self:
        """Return some of the sequences: a slice, or a tensor of row numbers or flags."""
        return self.unchecked(self.tokens[rows], self.context[rows], self.lengths[rows])

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on `device`."""
        moved = (x.to(device) for x in (self.tokens, self.context, self.lengths))
        return self.unchecked(*moved)

    def _set(self, tokens: Tensor, context: Tensor, lengths: Tensor) -> None:
        for name, value in (("tokens", tokens), ("context", context), ("lengths", lengths)):
            object.__setattr__(self, name, value)


def _checked_lengths(lengths: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the lengths as int64 on the device of `tokens` (B, T), T for each where None."""
    B, T = tokens.shape
    if lengths is None:
        return torch.full((B,), T, device=tokens.device)
    if lengths.shape != (B,) or lengths.dtype not in INTEGERS:
        raise ValueError(f"lengths is {_describe(lengths)}; it must be a ({B},) tensor of integers")
    # contiguous: compiled code walks over them
    lengths = lengths.to(tokens.device, torch.int64).contiguous()
    low, high = (int(x) for x in lengths.aminmax())
    if low < 1 or high > T:
        raise ValueError(
            f"lengths range from {low} to {high}; each must lie in 1..{T}, the padded length"
        )
    return lengths


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
