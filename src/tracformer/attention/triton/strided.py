"""The strided decoder on a GPU: query t reads keys t-1, t-1-s, ... before it and t+1, t+1+s, ... after it, in one softmax.

Queries t = c + s * i of one residue class c read the prefix keys c-1 + s * j that lie before them and the suffix keys c+1 + s * j that
lie after them: the two halves of one row of tiles, whatever the block, so that all programs have the same work. The suffix key
of text position x is row `length - 1 - x` of the mirrored reading.

`place` (B * T,) names the query at a position, -1 for none; a block without queries is left at once. q, out and grad are (N, H, D),
lse and delta (N, H), k and v (READINGS * B, T, H, D), all contiguous. As in the window, every result has one writer.
"""

import triton
import triton.language as tl

from tracformer.attention.triton.tiles import begun, finished, join_tile, load_rows, numbered, product, scores, slopes, store_rows


@triton.jit
def strided_forward(
    q, k, v, out, lse, place, lengths, B, T, H, stride, blocks,
    READINGS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
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
            s = scores(query, key, (at < length)[None, :] & (at[None, :] > t[:, None]), SCALE, WIDE, PRECISION)
            values, weights, top = join_tile(values, weights, top, s, value, WIDE, PRECISION)
    mean, logsum = finished(values, weights, top)
    store_rows(out + head * D, n, n >= 0, pitch, mean, D, BLOCK_D)
    tl.store(lse + n.to(tl.int64) * H + head, logsum, mask=n >= 0)


@triton.jit
def strided_backward_queries(
    grad, q, k, v, out, lse, delta, grad_q, place, lengths, B, T, H, stride, blocks,
    READINGS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
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
    inner = tl.sum(slope.to(WIDE) * load_rows(out + head * D, n, asked, pitch, D, BLOCK_D).to(WIDE), 1)
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
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a reading's slots c-1 + s * j, in the reading's own order: read by its queries c + s * i, i >= j.

    The classes c = 0 .. s-1 hold each slot once, so that a key that nobody reads is written too: zero.
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
        t = tl.where(row < B, u, length - 1 - u)  # the text position that stands at u in this reading
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
