"""The two sparse attentions of a Tracformer: one interface, several implementations.

Implementations are chosen by name: `reference` is the definition, by dense masks; `blocked` is
linear in memory, in plain PyTorch; `native` is C++ for the CPU, the default; `triton` is for GPUs.
`Layout` says how a padded batch is read. Which keys a query reads is in `tracformer.geometry`.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tracformer.attention.blocked import Blocked
from tracformer.attention.reference import Layout, Reference


class Attention(Protocol):
    """The two attentions of a Tracformer, over tensors that are already rotated."""

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        """Return the encoder's self-attention.

        Args:
            q: (readings * B, T, H, D) queries, each row in reading order. So are all others.
            k: Keys.
            v: Values.
            offsets: Distances from a query to its keys; None: all keys up to the query (the full
                encoder).
            layout: Lengths and readings of the batch.
        """
        ...

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        """Return the decoder's cross-attention: prefix and suffix keys in one softmax.

        Args:
            q: (N, H, D) queries, one for each of `layout.rows`; the result has the same shape, and
                is zero for a query without keys.
            k: (readings * B, T, H, D) keys.
            v: (readings * B, T, H, D) values.
            stride: Distance between the keys of a query; 1 is the dense decoder.
            layout: Lengths, readings and queries of the batch.
        """
        ...


_implementations: dict[str, Callable[[], Attention]] = {}


def register(name: str, build: Callable[[], Attention]) -> None:
    """Add an implementation; `build` makes it when it is first chosen."""
    _implementations[name] = build


def build_attention(name: str) -> Attention:
    """Return the implementation of this name."""
    if name not in _implementations:
        raise ValueError(f"attention is {name!r}; available: {', '.join(implementations())}")
    return _implementations[name]()


def implementations() -> tuple[str, ...]:
    """Return the names of all implementations."""
    return tuple(sorted(_implementations))


def _native() -> Attention:
    from tracformer.attention.native import Native

    return Native()


def _triton() -> Attention:
    from tracformer.attention.triton import Triton

    return Triton()


register("reference", Reference)
register("blocked", Blocked)
register("native", _native)
register("triton", _triton)


__all__ = ["Attention", "Layout", "build_attention", "implementations", "register"]
