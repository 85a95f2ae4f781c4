"""The sparse attentions: one interface, several implementations chosen by name.

One interface, several implementations, chosen by name.

The sparse attentions: one interface, several implementations; `reference` is the definition,
`native` the default.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tracformer.attention.blocked import Blocked
from tracformer.attention.layout import Layout
from tracformer.attention.reference import Reference


class Attention(Protocol):
    """The two attentions of a Tracformer, over tensors that already carry their rotary angles."""

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        """Multi-scope self-attention. q, k, v and the result: (readings * B, T, H, D), each row in
        its reading order.

        A query reads the keys at the given distances behind it; `offsets=None` reads all (the full
        encoder).
        """
        ...

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        """Strided cross-attention, prefix and suffix keys in one softmax; zero for a query without
        keys.

        q and the result: (N, H, D), one row for each of `layout.rows`; k, v: (readings * B, T, H,
        D). Stride 1 is the dense decoder.
        """
        ...


_implementations: dict[str, Callable[[], Attention]] = {}


def register(name: str, build: Callable[[], Attention]) -> None:
    _implementations[name] = build


def build_attention(name: str) -> Attention:
    if name not in _implementations:
        raise ValueError(f"attention is {name!r}; available: {', '.join(implementations())}")
    return _implementations[name]()


def implementations() -> tuple[str, ...]:
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
