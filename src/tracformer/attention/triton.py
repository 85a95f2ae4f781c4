"""Attention in Triton kernels for GPUs: which tensors they serve, launches, and gradients.

Forward and backward run without a T x T buffer; sums are float32 at least, and weights are
recomputed in the backward pass. The kernels themselves are in `attention.triton_kernels`, which is
imported at the first launch because it needs the package `triton`.

Tensors on other devices, the full encoder, and machines without `triton` are served by `blocked`.
Under Triton's interpreter (TRITON_INTERPRET=1 from the start of the process) the kernels run on CPU
tensors: slow, but it is how they are tested without a GPU.
"""

import os
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tracformer.attention.blocked import Blocked
from tracformer.attention.reference import Layout
from tracformer.devices import wide
from tracformer.geometry import KeyRun, arithmetic_run

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TILE = 2**13  # bytes; a kernel holds up to six tiles in shared memory


class Triton:
    """Both attentions on GPUs; hands tensors that it does not serve to `Blocked`."""

    def __init__(self) -> None:
        self.otherwise = Blocked()

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
    """Return whether the kernels can run on these tensors."""
    alike = q.device == k.device == v.device and q.dtype == k.dtype == v.dtype
    return alike and q.dtype in DTYPES and usable(q.device)


def usable(device: torch.device) -> bool:
    """Return whether the kernels run on this device.

    They do on NVIDIA GPUs from compute capability 8.0 on (A100), for which the tests compile them,
    and on any device in the interpreter.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return installed()
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and installed()
    )


@cache
def installed() -> bool:
    """Return whether the package `triton` is installed."""
    return find_spec("triton") is not None


def window_attention(q: Tensor, k: Tensor, v: Tensor, run: KeyRun) -> Tensor:
    """Return attention over the keys that `run` describes; all tensors are (B, T, H, D)."""
    return _TritonWindow.apply(q, k, v, run)


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
    return _TritonStrided.apply(q, k, v, stride, rows, lengths)


def tile_options(n: int, D: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of a kernel for residue classes of n positions.

    Tiles have 16 to 64 rows, within TILE bytes where possible.
    """
    from triton import language as tl

    block_d = max(16, _power_of_2(D))
    largest = max(16, min(64, TILE // (block_d * dtype.itemsize)))
    return {
        "D": D,
        "BLOCK": max(16, min(largest, _power_of_2(n))),
        "BLOCK_D": block_d,
        "SCALE": D**-0.5,
        "WIDE": tl.float64 if dtype == torch.float64 else tl.float32,
        "PRECISION": product_precision(),
    }


def _power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _kernel(name: str) -> Any:
    """Return a kernel; imported here because it needs the package `triton`."""
    from tracformer.attention import triton_kernels

    return getattr(triton_kernels, name)


def product_precision() -> str:
    """Return how float32 products are computed: exactly, unless PyTorch's settings allow TF32."""
    matmul = torch.backends.cuda.matmul
    # newer versions of PyTorch, in which the other function may fail
    if hasattr(matmul, "fp32_precision"):
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@lru_cache(maxsize=256)
def _distances(extra: tuple[int, ...], device: torch.device) -> Tensor:
    # never empty: a kernel needs an address
    return torch.tensor(extra or (0,), dtype=torch.int32, device=device)


class _TritonWindow(torch.autograd.Function):
    """The encoder's attention with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: KeyRun) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide(q.dtype))
        _launch_window("window_forward", (q, k, v, out, lse), q, run)
        ctx.run = run
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad, delta = grad.contiguous(), torch.empty_like(lse)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        _launch_window(
            "window_backward_queries", (grad, q, k, v, out, lse, delta, grad_q), q, ctx.run
        )
        _launch_window(
            "window_backward_keys", (grad, q, k, v, lse, delta, grad_k, grad_v), q, ctx.run
        )
        return grad_q, grad_k, grad_v, None


def _launch_window(name: str, tensors: tuple[Tensor, ...], q: Tensor, run: KeyRun) -> None:
    rows, T, H, D = q.shape
    n = -(-T // run.step)
    options = tile_options(n, D, q.dtype)
    blocks = -(-n // options["BLOCK"])
    extra = _distances(run.extra, q.device)
    with torch.cuda.device_of(q):
        _kernel(name)[(rows * H * run.step * blocks,)](
            *tensors, extra, T, H, run.step, run.count, blocks, len(run.extra), **options
        )


class _TritonStrided(torch.autograd.Function):
    """The decoder's attention with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, stride: int, rows: Tensor, lengths: Tensor
    ) -> Tensor:
        q, k, v, lengths = (x.contiguous() for x in (q, k, v, lengths))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        place = rows.new_full((len(lengths) * k.shape[1],), -1, dtype=torch.int32)
        place[rows] = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        ctx.stride = stride
        _launch_strided(
            "strided_forward",
            (q, k, v, out, lse, place, lengths),
            k,
            stride,
            READINGS=len(k) // len(lengths),
        )
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
        _launch_strided("strided_backward_queries", tensors, k, ctx.stride, READINGS=readings)
        _launch_strided(
            "strided_backward_keys",
            (grad, q, k, v, lse, delta, grad_k, grad_v, *where),
            k,
            ctx.stride,
            slots=readings,
        )
        return grad_q, grad_k, grad_v, None, None, None


def _launch_strided(
    name: str,
    tensors: tuple[Tensor, ...],
    k: Tensor,
    stride: int,
    slots: int = 0,
    **constants: int,
) -> None:
    """Launch one program for each block of queries of a sequence.

    With `slots`, launch one for each block of key slots of each of `slots` readings instead.
    """
    T, H, D = k.shape[1:]
    B = len(tensors[-1])
    stride = min(stride, T)  # more classes than positions would be empty
    n = T // stride + 1  # class 0 of the slots begins one slot before the first
    options = tile_options(n, D, k.dtype)
    blocks = -(-n // options["BLOCK"])
    with torch.cuda.device_of(k):
        _kernel(name)[((slots or 1) * B * H * stride * blocks,)](
            *tensors, B, T, H, stride, blocks, **constants, **options
        )
