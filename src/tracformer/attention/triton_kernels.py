"""Triton kernels of the two attentions, and their gradients.

What the kernels share: tiles of rows in and out of memory, and one tile's part in a softmax and
in its gradient.

A tile is BLOCK rows of one head, (BLOCK, BLOCK_D), of a tensor (..., H, D) whose rows lie `pitch` =
H * D apart. Products need powers of two, at least 16: what BLOCK_D has beyond D is zero. Sums are
taken in the dtype WIDE, float32 for the half precisions.

The multi-scope encoder's window on a GPU: query t reads keys t, t - step, ..., `count` of them, and
a few at single distances.

Positions t = c + step * i of one residue class c form a sequence in which query i reads keys i -
count < j <= i. A program takes one block of one class: of queries in the forward and for dq, of
keys for dk and dv, so that every result has one writer and a sum one order. Tensors are (rows, T,
H, D) and contiguous; lse and delta (rows, T, H); `extra` (extras,) holds the single distances.

The strided decoder on a GPU: query t reads keys t-1, t-1-s, ... before it and t+1, t+1+s, ... after
it, in one softmax.

Queries t = c + s * i of one residue class c read the prefix keys c-1 + s * j that lie before them
and the suffix keys c+1 + s * j that lie after them: the two halves of one row of tiles, whatever
the block, so that all programs have the same work. The suffix key of text position x is row `length
- 1 - x` of the mirrored reading.

`place` (B * T,) names the query at a position, -1 for none; a block without queries is left at
once. q, out and grad are (N, H, D), lse and delta (N, H), k and v (READINGS * B, T, H, D), all
contiguous. As in the window, every result has one writer.
"""

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tracformer.devices import wide
from tracformer.geometry import KeyRun

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def numbered(H, classes, blocks):
    """This program's (sequence, head, residue class, block of the class): one axis of the grid, the
    only one without a small limit.
    """
    program = tl.program_id(0)
    block = program % blocks
    residue = (program // blocks) % classes
    head = (program // (blocks * classes)) % H
    return (program // (blocks * classes * H)).to(tl.int64), head, residue, block


@triton.jit
def load_rows(start, rows, present, pitch, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D), zero where a row is not `present`."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(
        start + rows.to(tl.int64)[:, None] * pitch + d[None, :],
        mask=present[:, None] & (d < D)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(start, rows, present, pitch, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = start + rows.to(tl.int64)[:, None] * pitch + d[None, :]
    tl.store(at, x.to(start.dtype.element_ty), mask=present[:, None] & (d < D)[None, :])


@triton.jit
def product(left, right, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """left right, `left` rounded to the dtype of `right`, summed in WIDE."""
    left = left.to(right.dtype)
    if INTERPRETED:  # it would multiply the bits of bfloat16 numbers; widening changes no number
        left, right = left.to(WIDE), right.to(WIDE)
    return tl.dot(left, right, out_dtype=WIDE, input_precision=PRECISION)


@triton.jit
def scores(q, k, allowed, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """q k' / sqrt(D), (queries, keys); -inf where a query does not read a key."""
    return tl.where(allowed, product(q, tl.trans(k), WIDE, PRECISION) * SCALE, -float("inf"))


@triton.jit
def begun(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """A softmax that has seen no key: sum of values, sum of weights, and the highest score, finite
    so that differences exist.
    """
    return (
        tl.zeros((BLOCK, BLOCK_D), WIDE),
        tl.zeros((BLOCK,), WIDE),
        tl.full((BLOCK,), -3.0e38, WIDE),
    )


@triton.jit
def join_tile(values, weights, top, s, v, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """The softmax after a tile of keys with scores s (queries, keys): all that was summed before is
    rescaled to the new highest score.
    """
    higher = tl.maximum(top, tl.max(s, 1))
    shrink = tl.exp(top - higher)
    p = tl.exp(s - higher[:, None])
    values = values * shrink[:, None] + product(p, v, WIDE, PRECISION)
    return values, weights * shrink + tl.sum(p, 1), higher


@triton.jit
def join_single(values, weights, top, s, v):
    """The same after one key a query: s (queries,), v (queries, BLOCK_D)."""
    higher = tl.maximum(top, s)
    shrink = tl.exp(top - higher)
    p = tl.exp(s - higher)
    return values * shrink[:, None] + p[:, None] * v, weights * shrink + p, higher


@triton.jit
def finished(values, weights, top):
    """The mean value of each query and the logsumexp of its scores; both zero for a
    query without keys.
    """
    some = weights > 0
    weights = tl.where(some, weights, 1.0)
    return values / weights[:, None], tl.where(some, top + tl.log(weights), 0.0)


@triton.jit
def slopes(
    s, grad, v, lse, delta, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr
):
    """Weights p = exp(s - lse) again, and the gradient of the products q k': p (grad v' - delta) /
    sqrt(D), delta = grad . out.

    s: (queries, keys); grad: (queries, BLOCK_D); v: (keys, BLOCK_D); lse, delta: (queries,).
    """
    p = tl.exp(s - lse[:, None])
    return p, p * (product(grad, tl.trans(v), WIDE, PRECISION) - delta[:, None]) * SCALE


@triton.jit
def window_forward(
    q, k, v, out, lse, extra, T, H, step, count, blocks, extras,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, c, block = numbered(H, step, blocks)
    first, pitch = row * T * H + head, H * D
    q, k, v, out, lse = q + first * D, k + first * D, v + first * D, out + first * D, lse + first
    n = tl.cdiv(T - c, step)  # positions in this class
    i = block * BLOCK + tl.arange(0, BLOCK)
    t = c + i * step
    query = load_rows(q, t, t < T, pitch, D, BLOCK_D)
    values, weights, top = begun(BLOCK, BLOCK_D, WIDE)
    for start in range(
        tl.maximum(block * BLOCK - count + 1, 0), tl.minimum(block * BLOCK + BLOCK, n), BLOCK
    ):
        j = start + tl.arange(0, BLOCK)
        behind = i[:, None] - j[None, :]
        key = load_rows(k, c + j * step, j < n, pitch, D, BLOCK_D)
        value = load_rows(v, c + j * step, j < n, pitch, D, BLOCK_D)
        s = scores(query, key, (behind >= 0) & (behind < count), SCALE, WIDE, PRECISION)
        values, weights, top = join_tile(values, weights, top, s, value, WIDE, PRECISION)
    for e in range(extras):
        at = t - tl.load(extra + e)
        there = (at >= 0) & (t < T)
        key = load_rows(k, at, there, pitch, D, BLOCK_D)
        value = load_rows(v, at, there, pitch, D, BLOCK_D)
        s = tl.where(there, tl.sum(query.to(WIDE) * key.to(WIDE), 1) * SCALE, -float("inf"))
        values, weights, top = join_single(values, weights, top, s, value.to(WIDE))
    mean, logsum = finished(values, weights, top)
    store_rows(out, t, t < T, pitch, mean, D, BLOCK_D)
    tl.store(lse + t * H, logsum, mask=t < T)


@triton.jit
def window_backward_queries(
    grad, q, k, v, out, lse, delta, grad_q, extra, T, H, step, count, blocks, extras,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and delta = grad . out, which the gradients of keys want too."""
    row, head, c, block = numbered(H, step, blocks)
    first, pitch = row * T * H + head, H * D
    grad, q, k, v, out, grad_q = (
        grad + first * D,
        q + first * D,
        k + first * D,
        v + first * D,
        out + first * D,
        grad_q + first * D,
    )
    n = tl.cdiv(T - c, step)
    i = block * BLOCK + tl.arange(0, BLOCK)
    t = c + i * step
    query = load_rows(q, t, t < T, pitch, D, BLOCK_D)
    slope = load_rows(grad, t, t < T, pitch, D, BLOCK_D)
    inner = tl.sum(slope.to(WIDE) * load_rows(out, t, t < T, pitch, D, BLOCK_D).to(WIDE), 1)
    tl.store(delta + first + t * H, inner, mask=t < T)
    logsum = tl.load(lse + first + t * H, mask=t < T, other=0.0)
    total = tl.zeros((BLOCK, BLOCK_D), WIDE)
    for start in range(
        tl.maximum(block * BLOCK - count + 1, 0), tl.minimum(block * BLOCK + BLOCK, n), BLOCK
    ):
        j = start + tl.arange(0, BLOCK)
        behind = i[:, None] - j[None, :]
        key = load_rows(k, c + j * step, j < n, pitch, D, BLOCK_D)
        value = load_rows(v, c + j * step, j < n, pitch, D, BLOCK_D)
        allowed = (behind >= 0) & (behind < count) & (t < T)[:, None]
        _, ds = slopes(
            scores(query, key, allowed, SCALE, WIDE, PRECISION),
            slope,
            value,
            logsum,
            inner,
            SCALE,
            WIDE,
            PRECISION,
        )
        total += product(ds, key, WIDE, PRECISION)
    for e in range(extras):
        at = t - tl.load(extra + e)
        there = (at >= 0) & (t < T)
        key = load_rows(k, at, there, pitch, D, BLOCK_D).to(WIDE)
        value = load_rows(v, at, there, pitch, D, BLOCK_D).to(WIDE)
        s = tl.where(there, tl.sum(query.to(WIDE) * key, 1) * SCALE, -float("inf"))
        ds = tl.exp(s - logsum) * (tl.sum(slope.to(WIDE) * value, 1) - inner) * SCALE
        total += ds[:, None] * key
    store_rows(grad_q, t, t < T, pitch, total, D, BLOCK_D)


@triton.jit
def window_backward_keys(
    grad, q, k, v, lse, delta, grad_k, grad_v, extra, T, H, step, count, blocks, extras,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv: key j is read by the queries j <= i < j + count of its class, and by those at the
    single distances after it.
    """
    row, head, c, block = numbered(H, step, blocks)
    first, pitch = row * T * H + head, H * D
    grad, q, k, v, grad_k, grad_v = (
        grad + first * D,
        q + first * D,
        k + first * D,
        v + first * D,
        grad_k + first * D,
        grad_v + first * D,
    )
    lse, delta = lse + first, delta + first
    n = tl.cdiv(T - c, step)
    j = block * BLOCK + tl.arange(0, BLOCK)
    t = c + j * step
    key = load_rows(k, t, t < T, pitch, D, BLOCK_D)
    value = load_rows(v, t, t < T, pitch, D, BLOCK_D)
    total_k, total_v = tl.zeros((BLOCK, BLOCK_D), WIDE), tl.zeros((BLOCK, BLOCK_D), WIDE)
    for start in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK + count - 1, n), BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = c + i * step
        behind = i[:, None] - j[None, :]
        query = load_rows(q, at, i < n, pitch, D, BLOCK_D)
        slope = load_rows(grad, at, i < n, pitch, D, BLOCK_D)
        logsum = tl.load(lse + at * H, mask=i < n, other=0.0)
        inner = tl.load(delta + at * H, mask=i < n, other=0.0)
        allowed = (behind >= 0) & (behind < count) & (i < n)[:, None]
        p, ds = slopes(
            scores(query, key, allowed, SCALE, WIDE, PRECISION),
            slope,
            value,
            logsum,
            inner,
            SCALE,
            WIDE,
            PRECISION,
        )
        total_k += product(tl.trans(ds), query, WIDE, PRECISION)
        total_v += product(tl.trans(p), slope, WIDE, PRECISION)
    for e in range(extras):
        at = t + tl.load(extra + e)
        query = load_rows(q, at, at < T, pitch, D, BLOCK_D).to(WIDE)
        slope = load_rows(grad, at, at < T, pitch, D, BLOCK_D).to(WIDE)
        logsum = tl.load(lse + at * H, mask=at < T, other=0.0)
        inner = tl.load(delta + at * H, mask=at < T, other=0.0)
        s = tl.where(at < T, tl.sum(query * key.to(WIDE), 1) * SCALE, -float("inf"))
        p = tl.exp(s - logsum)
        ds = p * (tl.sum(slope * value.to(WIDE), 1) - inner) * SCALE
        total_k += ds[:, None] * query
        total_v += p[:, None] * slope
    store_rows(grad_k, t, t < T, pitch, total_k, D, BLOCK_D)
    store_rows(grad_v, t, t < T, pitch, total_v, D, BLOCK_D)


@triton.jit
def strided_forward(
    q, k, v, out, lse, place, lengths, B, T, H, stride, blocks,
    READINGS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, head, c, block = numbered(H, stride, blocks)
    pitch = H * D
    t = c + (block * BLOCK + tl.arange(0, BLOCK)) * stride
    n = tl.load(place + b * T + t, mask=t < T, other=-1)
    if tl.max(n, 0) < 0:
        return
    query = load_rows(q + head * D, n, n >= 0, pitch, D, BLOCK_D)
    values, weights, top = begun(BLOCK, BLOCK_D, WIDE)
    prefix = (b * T * H + head) * D
    for start in range(0, block * BLOCK + BLOCK, BLOCK):
        at = c - 1 + (start + tl.arange(0, BLOCK)) * stride
        there = (at >= 0) & (at < T)
        key = load_rows(k + prefix, at, there, pitch, D, BLOCK_D)
        value = load_rows(v + prefix, at, there, pitch, D, BLOCK_D)
        s = scores(query, key, there[None, :] & (at[None, :] < t[:, None]), SCALE, WIDE, PRECISION)
        values, weights, top = join_tile(values, weights, top, s, value, WIDE, PRECISION)
    if READINGS == 2:
        length = tl.load(lengths + b).to(tl.int32)
        suffix = ((B + b) * T * H + head) * D
        for start in range(block * BLOCK, tl.cdiv(tl.maximum(length - 1 - c, 0), stride), BLOCK):
            at = c + 1 + (start + tl.arange(0, BLOCK)) * stride
            key = load_rows(k + suffix, length - 1 - at, at < length, pitch, D, BLOCK_D)
            value = load_rows(v + suffix, length - 1 - at, at < length, pitch, D, BLOCK_D)
            s = scores(
                query,
                key,
                (at < length)[None, :] & (at[None, :] > t[:, None]),
                SCALE,
                WIDE,
                PRECISION,
            )
            values, weights, top = join_tile(values, weights, top, s, value, WIDE, PRECISION)
    mean, logsum = finished(values, weights, top)
    store_rows(out + head * D, n, n >= 0, pitch, mean, D, BLOCK_D)
    tl.store(lse + n.to(tl.int64) * H + head, logsum, mask=n >= 0)


@triton.jit
def strided_backward_queries(
    grad, q, k, v, out, lse, delta, grad_q, place, lengths, B, T, H, stride, blocks,
    READINGS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and delta = grad . out, which the gradients of keys want too."""
    b, head, c, block = numbered(H, stride, blocks)
    pitch = H * D
    t = c + (block * BLOCK + tl.arange(0, BLOCK)) * stride
    n = tl.load(place + b * T + t, mask=t < T, other=-1)
    if tl.max(n, 0) < 0:
        return
    asked = n >= 0
    query = load_rows(q + head * D, n, asked, pitch, D, BLOCK_D)
    slope = load_rows(grad + head * D, n, asked, pitch, D, BLOCK_D)
    inner = tl.sum(
        slope.to(WIDE) * load_rows(out + head * D, n, asked, pitch, D, BLOCK_D).to(WIDE), 1
    )
    numbers = n.to(tl.int64) * H + head
    tl.store(delta + numbers, inner, mask=asked)
    logsum = tl.load(lse + numbers, mask=asked, other=0.0)
    total = tl.zeros((BLOCK, BLOCK_D), WIDE)
    prefix = (b * T * H + head) * D
    for start in range(0, block * BLOCK + BLOCK, BLOCK):
        at = c - 1 + (start + tl.arange(0, BLOCK)) * stride
        there = (at >= 0) & (at < T)
        key = load_rows(k + prefix, at, there, pitch, D, BLOCK_D)
        value = load_rows(v + prefix, at, there, pitch, D, BLOCK_D)
        allowed = asked[:, None] & there[None, :] & (at[None, :] < t[:, None])
        s = scores(query, key, allowed, SCALE, WIDE, PRECISION)
        _, ds = slopes(s, slope, value, logsum, inner, SCALE, WIDE, PRECISION)
        total += product(ds, key, WIDE, PRECISION)
    if READINGS == 2:
        length = tl.load(lengths + b).to(tl.int32)
        suffix = ((B + b) * T * H + head) * D
        for start in range(block * BLOCK, tl.cdiv(tl.maximum(length - 1 - c, 0), stride), BLOCK):
            at = c + 1 + (start + tl.arange(0, BLOCK)) * stride
            key = load_rows(k + suffix, length - 1 - at, at < length, pitch, D, BLOCK_D)
            value = load_rows(v + suffix, length - 1 - at, at < length, pitch, D, BLOCK_D)
            allowed = asked[:, None] & (at < length)[None, :] & (at[None, :] > t[:, None])
            s = scores(query, key, allowed, SCALE, WIDE, PRECISION)
            _, ds = slopes(s, slope, value, logsum, inner, SCALE, WIDE, PRECISION)
            total += product(ds, key, WIDE, PRECISION)
    store_rows(grad_q + head * D, n, asked, pitch, total, D, BLOCK_D)


@triton.jit
def strided_backward_keys(
    grad, q, k, v, lse, delta, grad_k, grad_v, place, lengths, B, T, H, stride, blocks,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a reading's slots c-1 + s * j, in the reading's own order: read by its queries c
    + s * i, i >= j.

    The classes c = 0 .. s-1 hold each slot once, so that a key that nobody reads is written too:
    zero.
    """
    row, head, c, block = numbered(H, stride, blocks)
    pitch = H * D
    b = row % B
    length = tl.load(lengths + b).to(tl.int32)
    first = (row * T * H + head) * D
    at = c - 1 + (block * BLOCK + tl.arange(0, BLOCK)) * stride
    there = (at >= 0) & (at < T)
    key = load_rows(k + first, at, there, pitch, D, BLOCK_D)
    value = load_rows(v + first, at, there, pitch, D, BLOCK_D)
    total_k, total_v = tl.zeros((BLOCK, BLOCK_D), WIDE), tl.zeros((BLOCK, BLOCK_D), WIDE)
    for start in range(block * BLOCK, tl.cdiv(tl.maximum(length - c, 0), stride), BLOCK):
        u = c + (start + tl.arange(0, BLOCK)) * stride
        # the text position that stands at u in this reading
        t = tl.where(row < B, u, length - 1 - u)
        n = tl.load(place + b * T + t, mask=u < length, other=-1)
        asked = n >= 0
        query = load_rows(q + head * D, n, asked, pitch, D, BLOCK_D)
        slope = load_rows(grad + head * D, n, asked, pitch, D, BLOCK_D)
        numbers = n.to(tl.int64) * H + head
        logsum = tl.load(lse + numbers, mask=asked, other=0.0)
        inner = tl.load(delta + numbers, mask=asked, other=0.0)
        allowed = asked[:, None] & there[None, :] & (at[None, :] < u[:, None])
        s = scores(query, key, allowed, SCALE, WIDE, PRECISION)
        p, ds = slopes(s, slope, value, logsum, inner, SCALE, WIDE, PRECISION)
        total_k += product(tl.trans(ds), query, WIDE, PRECISION)
        total_v += product(tl.trans(p), slope, WIDE, PRECISION)
    store_rows(grad_k + first, at, there, pitch, total_k, D, BLOCK_D)
    store_rows(grad_v + first, at, there, pitch, total_v, D, BLOCK_D)


TILE = 2**13  # bytes; a kernel holds up to six tiles in shared memory


def window_attention(q: Tensor, k: Tensor, v: Tensor, run: KeyRun) -> Tensor:
    """Attention over the keys that `run` describes. All (B, T, H, D); rows read left to right."""
    return _TritonWindow.apply(q, k, v, run)


def strided_attention(
    q: Tensor, k: Tensor, v: Tensor, stride: int, rows: Tensor, lengths: Tensor
) -> Tensor:
    """q: (N, H, D), the queries at `rows` (N,); k, v: (readings * B, T, H, D); lengths: (B,).

    Returns (N, H, D).
    """
    return _TritonStrided.apply(q, k, v, stride, rows, lengths)


def tile_options(n: int, D: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a kernel is compiled for, over classes of n positions: tiles of 16 to 64 rows, where
    possible within TILE bytes.
    """
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
    # newer versions of PyTorch; the older question may fail there
    if hasattr(matmul, "fp32_precision"):
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@lru_cache(maxsize=256)
def _distances(extra: tuple[int, ...], device: torch.device) -> Tensor:
    # never empty: a kernel wants an address
    return torch.tensor(extra or (0,), dtype=torch.int32, device=device)


class _TritonWindow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: KeyRun) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide(q.dtype))
        _launch_window(window_forward, (q, k, v, out, lse), q, run)
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
            window_backward_queries, (grad, q, k, v, out, lse, delta, grad_q), q, ctx.run
        )
        _launch_window(
            window_backward_keys, (grad, q, k, v, lse, delta, grad_k, grad_v), q, ctx.run
        )
        return grad_q, grad_k, grad_v, None


def _launch_window(kernel: Any, tensors: tuple[Tensor, ...], q: Tensor, run: KeyRun) -> None:
    rows, T, H, D = q.shape
    n = -(-T // run.step)
    options = tile_options(n, D, q.dtype)
    blocks = -(-n // options["BLOCK"])
    extra = _distances(run.extra, q.device)
    with torch.cuda.device_of(q):
        kernel[(rows * H * run.step * blocks,)](
            *tensors, extra, T, H, run.step, run.count, blocks, len(run.extra), **options
        )


class _TritonStrided(torch.autograd.Function):
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
            strided_forward,
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
        _launch_strided(strided_backward_queries, tensors, k, ctx.stride, READINGS=readings)
        _launch_strided(
            strided_backward_keys,
            (grad, q, k, v, lse, delta, grad_k, grad_v, *where),
            k,
            ctx.stride,
            slots=readings,
        )
        return grad_q, grad_k, grad_v, None, None, None


def _launch_strided(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    k: Tensor,
    stride: int,
    slots: int = 0,
    **constants: int,
) -> None:
    """One program a block of queries of a sequence, or with `slots` one a block of slots of each of
    so many readings.
    """
    T, H, D = k.shape[1:]
    B = len(tensors[-1])
    stride = min(stride, T)  # more classes than positions would be empty
    n = T // stride + 1  # class 0 of the slots begins one before the first
    options = tile_options(n, D, k.dtype)
    blocks = -(-n // options["BLOCK"])
    with torch.cuda.device_of(k):
        kernel[((slots or 1) * B * H * stride * blocks,)](
            *tensors, B, T, H, stride, blocks, **constants, **options
        )
