"""The same attentions in C++ with their gradients; the default on CPUs.

The compiled operations with their gradients. Each forward leaves its result and the logsumexp of
its scores; weights are recomputed.

The same attentions in C++ for the CPU: float32 and float64, forward and backward, without
rearranged copies or saved weights.

Other dtypes and devices, and machines without a compiler, are served by `triton`: its kernels on a
GPU that has them, else `blocked`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tracformer.attention.layout import Layout
from tracformer.attention.triton import Triton
from tracformer.geometry import KeyRun, arithmetic_run
from tracformer.native import available


def strided_attention(
    q: Tensor, k: Tensor, v: Tensor, stride: int, rows: Tensor, lengths: Tensor
) -> Tensor:
    """q: (N, H, D), the queries at `rows` (N,); k, v: (readings * B, T, H, D); lengths: (B,).

    Returns (N, H, D).
    """
    return _NativeStrided.apply(q, k, v, stride, rows, lengths)


class _NativeStrided(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, stride: int, rows: Tensor, lengths: Tensor
    ) -> Tensor:
        out, lse = torch.ops.tracformer.strided_forward(q, k, v, rows, lengths, stride)
        ctx.stride = stride
        ctx.save_for_backward(q, k, v, out, lse, rows, lengths)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.tracformer.strided_backward(grad_out, *ctx.saved_tensors, ctx.stride)
        return *grads, None, None, None


def window_attention(q: Tensor, k: Tensor, v: Tensor, run: KeyRun) -> Tensor:
    """Attention over the keys that `run` describes. All (B, T, H, D); rows read left to right."""
    return _NativeWindow.apply(q, k, v, run)


class _NativeWindow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: KeyRun) -> Tensor:
        out, lse = torch.ops.tracformer.window_forward(q, k, v, run.step, run.count, run.extra)
        ctx.run = run
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        run: KeyRun = ctx.run
        grads = torch.ops.tracformer.window_backward(
            grad_out, *ctx.saved_tensors, run.step, run.count, run.extra
        )
        return *grads, None


class Native:
    """Attention in C++ on CPUs; other devices and types are left to Triton."""

    def __init__(self) -> None:
        self.otherwise = Triton()

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        if offsets is None or not serves(q, k, v):
            return self.otherwise.encode(q, k, v, offsets, layout)
        return window_attention(q, k, v, arithmetic_run(offsets, layout.length))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        if not serves(q, k, v):
            return self.otherwise.decode(q, k, v, stride, layout)
        return strided_attention(q, k, v, stride, layout.rows, layout.lengths)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the compiled operations can compute this."""
    on_cpu = q.device.type == k.device.type == v.device.type == "cpu"
    # Built before the dtype is looked at: under autocast queries and keys come in float32 only
    # where compiled code has turned them.
    return (
        on_cpu
        and available()
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float32, torch.float64)
    )
