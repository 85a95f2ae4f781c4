"""Triton kernels of the two attentions and their gradients; `attention.triton` launches them.

Tiles. A tile is BLOCK rows of one head, (BLOCK, BLOCK_D), of a tensor (..., H, D) whose rows lie
`pitch` = H * D apart. Matrix products need powers of two of at least 16, so the columns of BLOCK_D
beyond D are zero. Sums are computed in the dtype WIDE: float32 for float16 and bfloat16.

Encoder window (`window_*`). Query t reads `count` keys t, t - step, t - 2 step, ..., and a few keys
at single distances. The positions t = c + step * i of one residue class c form a sequence in which
query i reads the keys i - count < j <= i. A program handles one block of one class: a block of
queries in the forward pass and for dq, of keys for dk and dv. Each result then has one writer, and
each sum a fixed order. Tensors are (rows, T, H, D) and contiguous; lse and delta are (rows, T, H);
`extra` (extras,) holds the single distances.

Strided decoder (`strided_*`). Query t reads keys t-1, t-1-s, ... before it and t+1, t+1+s, ...
after it, in one softmax. The queries t = c + s * i of one residue class c read the prefix keys
c-1 + s * j before them and the suffix keys c+1 + s * j after them. Together these fill one row of
tiles, whichever the block, so all programs have equal work. The suffix key of text position x is
row `length - 1 - x` of the mirrored reading. `place` (B * T,) is the number of the query at a
position, or -1; a block without queries is skipped. q, out and grad are (N, H, D), lse and delta
(N, H), k and v (READINGS * B, T, H, D), all contiguous.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def numbered(H, classes, blocks):
    """Return this program's sequence, head, residue class and block of the class.

    All are numbered along the first axis of the grid, the only one without a small limit.
    """
    program = tl.program_id(0)
    block = program % blocks
    residue = (program // blocks) % classes
    head = (program // (blocks * classes)) % H
    return (program // (blocks * classes * H)).to(tl.int64), head, residue, block


@triton.jit
def load_rows(start, rows, present, pitch, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows (BLOCK, BLOCK_D); zero where a row is not `present`."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(
        start + rows.to(tl.int64)[:, None] * pitch + d[None, :],
        mask=present[:, None] & (d < D)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(start, rows, present, pitch, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store x (BLOCK, BLOCK_D) to the rows that are `present`."""
    d = tl.arange(0, BLOCK_D)
    at = start + rows.to(tl.int64)[:, None] * pitch + d[None, :]
    tl.store(at, x.to(start.dtype.element_ty), mask=present[:, None] & (d < D)[None, :])


@triton.jit
def product(left, right, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Return left @ right, with `left` rounded to the dtype of `right`, summed in WIDE."""
    left = left.to(right.dtype)
    if INTERPRETED:  # it would multiply the bits of bfloat16 numbers; widening is exact
        left, right = left.to(WIDE), right.to(WIDE)
    return tl.dot(left, right, out_dtype=WIDE, input_precision=PRECISION)


@triton.jit
def scores(q, k, allowed, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Return q k' / sqrt(D), (queries, keys); -inf where a query does not read a key."""
    return tl.where(allowed, product(q, tl.trans(k), WIDE, PRECISION) * SCALE, -float("inf"))


@triton.jit
def begun(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Return the state of a softmax without keys: sum of values, sum of weights, highest score.

    The score is finite, so that differences are defined.
    """
    return (
        tl.zeros((BLOCK, BLOCK_D), WIDE),
        tl.zeros((BLOCK,), WIDE),
        tl.full((BLOCK,), -3.0e38, WIDE),
    )


@triton.jit
def join_tile(values, weights, top, s, v, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile of keys with scores s (queries, keys) to a softmax.

    Earlier sums are rescaled to the new highest score.
    """
    higher = tl.maximum(top, tl.max(s, 1))
    shrink = tl.exp(top - higher)
    p = tl.exp(s - higher[:, None])
    values = values * shrink[:, None] + product(p, v, WIDE, PRECISION)
    return values, weights * shrink + tl.sum(p, 1), higher


@triton.jit
def join_single(values, weights, top, s, v):
    """Add one key for each query to a softmax: s (queries,), v (queries, BLOCK_D)."""
    higher = tl.maximum(top, s)
    shrink = tl.exp(top - higher)
    p = tl.exp(s - higher)
    return values * shrink[:, None] + p[:, None] * v, weights * shrink + p, higher


@triton.jit
def finished(values, weights, top):
    """Return the mean value of each query and the logsumexp of its scores.

    Both are zero for a query without keys.
    """
    some = weights > 0
    weights = tl.where(some, weights, 1.0)
    return values / weights[:, None], tl.where(some, top + tl.log(weights), 0.0)


@triton.jit
def slopes(
    s, grad, v, lse, delta, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the weights p = exp(s - lse) and the gradient of the products q k'.

    The gradient is p (grad v' - delta) / sqrt(D) with delta = grad . out. Shapes: s (queries,
    keys), grad (queries, BLOCK_D), v (keys, BLOCK_D), lse and delta (queries,).
    """
    p = tl.exp(s - lse[:, None])
    return p, p * (product(grad, tl.trans(v), WIDE, PRECISION) - delta[:, None]) * SCALE


@triton.jit
def window_forward(
    q, k, v, out, lse, extra, T, H, step, count, blocks, extras,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a block of queries, and the logsumexp of their scores."""
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
        distance = i[:, None] - j[None, :]
        key = load_rows(k, c + j * step, j < n, pitch, D, BLOCK_D)
        value = load_rows(v, c + j * step, j < n, pitch, D, BLOCK_D)
        s = scores(query, key, (distance >= 0) & (distance < count), SCALE, WIDE, PRECISION)
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
    """Compute dq, and delta = grad . out, which the gradients of keys need too."""
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
        distance = i[:, None] - j[None, :]
        key = load_rows(k, c + j * step, j < n, pitch, D, BLOCK_D)
        value = load_rows(v, c + j * step, j < n, pitch, D, BLOCK_D)
        allowed = (distance >= 0) & (distance < count) & (t < T)[:, None]
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
    """Compute dk and dv.

    Key j is read by the queries j <= i < j + count of its class, and by those at the single
    distances after it.
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
        distance = i[:, None] - j[None, :]
        query = load_rows(q, at, i < n, pitch, D, BLOCK_D)
        slope = load_rows(grad, at, i < n, pitch, D, BLOCK_D)
        logsum = tl.load(lse + at * H, mask=i < n, other=0.0)
        inner = tl.load(delta + at * H, mask=i < n, other=0.0)
        allowed = (distance >= 0) & (distance < count) & (i < n)[:, None]
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
    """Compute the attention of a block of queries, and the logsumexp of their scores."""
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
    """Compute dq, and delta = grad . out, which the gradients of keys need too."""
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
    """Compute dk and dv of the slots c-1 + s * j of a reading, in its own order.

    They are read by the queries c + s * i with i >= j. The classes c = 0 .. s-1 hold each slot
    once, so that the gradient of a key without queries is written too, as zero.
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
