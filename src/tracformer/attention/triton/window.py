"""The multi-scope encoder's window on a GPU: query t reads keys t, t - step, ..., `count` of them, and a few at single distances.

Positions t = c + step * i of one residue class c form a sequence in which query i reads keys i - count < j <= i. A program takes one
block of one class: of queries in the forward and for dq, of keys for dk and dv, so that every result has one writer and a sum one
order. Tensors are (rows, T, H, D) and contiguous; lse and delta (rows, T, H); `extra` (extras,) holds the single distances.
"""

import triton
import triton.language as tl

from tracformer.attention.triton.tiles import (
    begun,
    finished,
    join_single,
    join_tile,
    load_rows,
    numbered,
    product,
    scores,
    slopes,
    store_rows,
)


@triton.jit
def window_forward(
    q, k, v, out, lse, extra, T, H, step, count, blocks, extras,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, c, block = numbered(H, step, blocks)
    first, pitch = row * T * H + head, H * D
    q, k, v, out, lse = q + first * D, k + first * D, v + first * D, out + first * D, lse + first
    n = tl.cdiv(T - c, step)  # positions in this class
    i = block * BLOCK + tl.arange(0, BLOCK)
    t = c + i * step
    query = load_rows(q, t, t < T, pitch, D, BLOCK_D)
    values, weights, top = begun(BLOCK, BLOCK_D, WIDE)
    for start in range(tl.maximum(block * BLOCK - count + 1, 0), tl.minimum(block * BLOCK + BLOCK, n), BLOCK):
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
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and delta = grad . out, which the gradients of keys want too."""
    row, head, c, block = numbered(H, step, blocks)
    first, pitch = row * T * H + head, H * D
    grad, q, k, v, out, grad_q = grad + first * D, q + first * D, k + first * D, v + first * D, out + first * D, grad_q + first * D
    n = tl.cdiv(T - c, step)
    i = block * BLOCK + tl.arange(0, BLOCK)
    t = c + i * step
    query = load_rows(q, t, t < T, pitch, D, BLOCK_D)
    slope = load_rows(grad, t, t < T, pitch, D, BLOCK_D)
    inner = tl.sum(slope.to(WIDE) * load_rows(out, t, t < T, pitch, D, BLOCK_D).to(WIDE), 1)
    tl.store(delta + first + t * H, inner, mask=t < T)
    logsum = tl.load(lse + first + t * H, mask=t < T, other=0.0)
    total = tl.zeros((BLOCK, BLOCK_D), WIDE)
    for start in range(tl.maximum(block * BLOCK - count + 1, 0), tl.minimum(block * BLOCK + BLOCK, n), BLOCK):
        j = start + tl.arange(0, BLOCK)
        behind = i[:, None] - j[None, :]
        key = load_rows(k, c + j * step, j < n, pitch, D, BLOCK_D)
        value = load_rows(v, c + j * step, j < n, pitch, D, BLOCK_D)
        allowed = (behind >= 0) & (behind < count) & (t < T)[:, None]
        _, ds = slopes(scores(query, key, allowed, SCALE, WIDE, PRECISION), slope, value, logsum, inner, SCALE, WIDE, PRECISION)
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
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv: key j is read by the queries j <= i < j + count of its class, and by those at the single distances after it."""
    row, head, c, block = numbered(H, step, blocks)
    first, pitch = row * T * H + head, H * D
    grad, q, k, v, grad_k, grad_v = grad + first * D, q + first * D, k + first * D, v + first * D, grad_k + first * D, grad_v + first * D
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
        p, ds = slopes(scores(query, key, allowed, SCALE, WIDE, PRECISION), slope, value, logsum, inner, SCALE, WIDE, PRECISION)
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
