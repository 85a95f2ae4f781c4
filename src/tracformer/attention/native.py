"""The same attentions in C++ for the CPU: float32 and float64, forward and backward, without rearranged copies or saved weights.

Other dtypes and devices, and machines without a compiler, are served by `triton`: its kernels on a GPU that has them, else `blocked`.
"""

import torch
from torch import Tensor

from tracformer.attention.compiled import strided_attention, window_attention
from tracformer.attention.layout import Layout
from tracformer.attention.triton import Triton
from tracformer.geometry import arithmetic_run
from tracformer.native import available


class Native:
    def __init__(self) -> None:
        self.otherwise = Triton()

    def encode(self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout) -> Tensor:
        if offsets is None or not serves(q, k, v):
            return self.otherwise.encode(q, k, v, offsets, layout)
        return window_attention(q, k, v, arithmetic_run(offsets, layout.length))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        if not serves(q, k, v):
            return self.otherwise.decode(q, k, v, stride, layout)
        return strided_attention(q, k, v, stride, layout.rows, layout.lengths)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    on_cpu = q.device.type == k.device.type == v.device.type == "cpu"
    # Built before the dtype is looked at: under autocast queries and keys come in float32 only where compiled code has turned them.
    return on_cpu and available() and q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.float64)
