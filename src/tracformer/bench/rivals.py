"""What the attentions are compared with: PyTorch's own attention under dense masks, dense causal attention, and `blocked` compiled."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer.attention import Attention, Layout, build_attention, masks
from tracformer.attention.layout import mirrored

NAMES = ("dense mask", "causal", "compiled")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """All (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


class DenseMasks:
    """What one writes without this package: the same key sets as boolean masks in PyTorch's attention."""

    def encode(self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout) -> Tensor:
        mask = masks.prefix_encoder_mask(layout.length, offsets).to(q.device)
        return attend(q, k, v, mask)  # rows are in reading order: one mask serves both readings

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        B, T = layout.batch, layout.length
        queries = q.new_zeros(B * T, *q.shape[1:]).index_copy(0, layout.rows, q).unflatten(0, (B, T))
        mask = masks.prefix_decoder_mask(T, stride).to(q.device)
        if layout.readings == 2:
            k, v = (torch.cat((x[:B], mirrored(x[B:], layout.mirror)), dim=1) for x in (k, v))
            mask = torch.cat((mask, masks.suffix_decoder_mask(T, stride).to(q.device)), dim=1)
        return attend(queries, k, v, mask).flatten(0, 1)[layout.rows]


class Causal:
    """Dense causal attention over as many rows: not the same answer, but the same service to a left-to-right model."""

    def encode(self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout) -> Tensor:
        return attend(q, k, v, None, causal=True)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        """Over the forward reading's keys alone, every position a query."""
        B, T = layout.batch, layout.length
        return attend(q.unflatten(0, (B, T)), k[:B], v[:B], None, causal=True).flatten(0, 1)


class Compiled:
    """`blocked` through torch.compile, each layer by itself."""

    def __init__(self) -> None:
        self.blocked = build_attention("blocked")
        self.made: dict[Any, Callable[..., Tensor]] = {}

    def encode(self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout) -> Tensor:
        return self._made(("encode", offsets, layout.length), self.blocked.encode)(q, k, v, offsets, layout)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        layout.query_slots  # noqa: B018  computed once, outside
        return self._made(("decode", stride, layout.length), self.blocked.decode)(q, k, v, stride, layout)

    def _made(self, key: Any, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if key not in self.made:
            self.made[key] = torch.compile(function, dynamic=False)
        return self.made[key]


def attention_of(name: str) -> Attention:
    """A rival or an implementation of ours, by name."""
    kinds: dict[str, Callable[[], Attention]] = {"dense mask": DenseMasks, "causal": Causal, "compiled": Compiled}
    return kinds[name]() if name in kinds else build_attention(name)
