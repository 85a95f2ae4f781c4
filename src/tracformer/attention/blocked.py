"""The default: exact, linear in T in the encoder, T^2 / s in the decoder, in plain PyTorch operations on any device."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer.attention.layout import Layout
from tracformer.attention.strided import strided_attention
from tracformer.attention.window import window_attention
from tracformer.geometry import arithmetic_run


class Blocked:
    def encode(self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout) -> Tensor:
        if offsets is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return window_attention(q, k, v, arithmetic_run(offsets, layout.length))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        return strided_attention(q, k, v, stride, layout.query_slots)
