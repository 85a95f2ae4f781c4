"""The kernels with their gradients. Each forward leaves its result and the logsumexp of its scores; weights are recomputed.

Block sizes follow from what fits shared memory; no GPU was there to search for faster ones (docs/kernels.md).
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tracformer.attention.triton import strided, window
from tracformer.geometry import Run
from tracformer.precision import wide

TILE = 2**13  # bytes; a kernel holds up to six tiles in shared memory


def window_attention(q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    """Attention over the keys that `run` describes. All (B, T, H, D); rows read left to right."""
    return _WindowAttention.apply(q, k, v, run)


def strided_attention(q: Tensor, k: Tensor, v: Tensor, stride: int, rows: Tensor, lengths: Tensor) -> Tensor:
    """q: (N, H, D), the queries at `rows` (N,); k, v: (readings * B, T, H, D); lengths: (B,). Returns (N, H, D)."""
    return _StridedAttention.apply(q, k, v, stride, rows, lengths)


def tile_options(n: int, D: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a kernel is compiled for, over classes of n positions: tiles of 16 to 64 rows, where possible within TILE bytes."""
    block_d = max(16, triton.next_power_of_2(D))
    largest = max(16, min(64, TILE // (block_d * dtype.itemsize)))
    return {
        "D": D,
        "BLOCK": max(16, min(largest, triton.next_power_of_2(n))),
        "BLOCK_D": block_d,
        "SCALE": D**-0.5,
        "WIDE": tl.float64 if dtype == torch.float64 else tl.float32,
        "PRECISION": product_precision(),
    }


def product_precision() -> str:
    """How float32 products are taken: exactly, unless PyTorch's own setting allows TF32."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # newer versions of PyTorch; the older question may fail there
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@lru_cache(maxsize=256)
def _distances(extra: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(extra or (0,), dtype=torch.int32, device=device)  # never empty: a kernel wants an address


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide(q.dtype))
        _launch_window(window.window_forward, (q, k, v, out, lse), q, run)
        ctx.run = run
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad, delta = grad.contiguous(), torch.empty_like(lse)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        _launch_window(window.window_backward_queries, (grad, q, k, v, out, lse, delta, grad_q), q, ctx.run)
        _launch_window(window.window_backward_keys, (grad, q, k, v, lse, delta, grad_k, grad_v), q, ctx.run)
        return grad_q, grad_k, grad_v, None


def _launch_window(kernel: Any, tensors: tuple[Tensor, ...], q: Tensor, run: Run) -> None:
    rows, T, H, D = q.shape
    n = -(-T // run.step)
    options = tile_options(n, D, q.dtype)
    blocks = -(-n // options["BLOCK"])
    extra = _distances(run.extra, q.device)
    with torch.cuda.device_of(q):
        kernel[(rows * H * run.step * blocks,)](*tensors, extra, T, H, run.step, run.count, blocks, len(run.extra), **options)


class _StridedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, stride: int, rows: Tensor, lengths: Tensor) -> Tensor:
        q, k, v, lengths = (x.contiguous() for x in (q, k, v, lengths))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        place = rows.new_full((len(lengths) * k.shape[1],), -1, dtype=torch.int32)
        place[rows] = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        ctx.stride = stride
        _launch_strided(strided.strided_forward, (q, k, v, out, lse, place, lengths), k, stride, READINGS=len(k) // len(lengths))
        ctx.save_for_backward(q, k, v, out, lse, place, lengths)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *where = ctx.saved_tensors
        grad, delta = grad.contiguous(), torch.empty_like(lse)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        readings = len(k) // len(where[1])
        tensors = (grad, q, k, v, out, lse, delta, grad_q, *where)
        _launch_strided(strided.strided_backward_queries, tensors, k, ctx.stride, READINGS=readings)
        _launch_strided(strided.strided_backward_keys, (grad, q, k, v, lse, delta, grad_k, grad_v, *where), k, ctx.stride, slots=readings)
        return grad_q, grad_k, grad_v, None, None, None


def _launch_strided(kernel: Any, tensors: tuple[Tensor, ...], k: Tensor, stride: int, slots: int = 0, **constants: int) -> None:
    """One program a block of queries of a sequence, or with `slots` one a block of slots of each of so many readings."""
    T, H, D = k.shape[1:]
    B = len(tensors[-1])
    stride = min(stride, T)  # more classes than positions would be empty
    n = T // stride + 1  # class 0 of the slots begins one before the first
    options = tile_options(n, D, k.dtype)
    blocks = -(-n // options["BLOCK"])
    with torch.cuda.device_of(k):
        kernel[((slots or 1) * B * H * stride * blocks,)](*tensors, B, T, H, stride, blocks, **constants, **options)
