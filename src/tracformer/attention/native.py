"""Attention in C++ for the CPU, with gradients: the default implementation.

It serves float32 and float64, without rearranged copies of the inputs. The forward pass saves its
result and the logsumexp of its scores; the backward pass recomputes the weights. Other dtypes and
devices, and machines without a compiler, are served by `triton`, which runs its kernels on GPUs
and otherwise `blocked`. The code is in `tracformer.native`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tracformer.attention.reference import Layout
from tracformer.attention.triton import Triton
from tracformer.geometry import KeyRun, arithmetic_run
from tracformer.native import available


def strided_attention(
    q: Tensor, k: Tensor, v: Tensor, stride: int, rows: Tensor, lengths: Tensor
) -> Tensor:
    """Return the decoder's attention (N, H, D).

    Args:
        q: (N, H, D) queries.
        k: (readings * B, T, H, D) keys.
        v: (readings * B, T, H, D) values.
        stride: Distance between the keys of a query.
        rows: (N,) flat positions b * T + t of the queries.
        lengths: (B,) true lengths.
    """
    return _NativeStrided.apply(q, k, v, stride, rows, lengths)


class _NativeStrided(torch.autograd.Function):
    """The decoder's attention with its gradient."""

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
    """Return attention over the keys that `run` describes; all tensors are (B, T, H, D)."""
    return _NativeWindow.apply(q, k, v, run)


class _NativeWindow(torch.autograd.Function):
    """The encoder's attention with its gradient."""

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
    """Both attentions in C++; hands tensors that it does not serve to `Triton`."""

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
    """Return whether the C++ code can run on these tensors; compiles it at the first call."""
    on_cpu = q.device.type == k.device.type == v.device.type == "cpu"
    # Compiled before the dtypes are compared: under autocast, queries and keys are float32 only if
    # compiled code has rotated them.
    return (
        on_cpu
        and available()
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float32, torch.float64)
    )
