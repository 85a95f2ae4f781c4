"""What the kernels share: tiles of rows in and out of memory, and one tile's part in a softmax and in its gradient.

A tile is BLOCK rows of one head, (BLOCK, BLOCK_D), of a tensor (..., H, D) whose rows lie `pitch` = H * D apart. Products need powers
of two, at least 16: what BLOCK_D has beyond D is zero. Sums are taken in the dtype WIDE, float32 for the half precisions.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def numbered(H, classes, blocks):
    """This program's (sequence, head, residue class, block of the class): one axis of the grid, the only one without a small limit."""
    program = tl.program_id(0)
    block = program % blocks
    residue = (program // blocks) % classes
    head = (program // (blocks * classes)) % H
    return (program // (blocks * classes * H)).to(tl.int64), head, residue, block


@triton.jit
def load_rows(start, rows, present, pitch, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D), zero where a row is not `present`."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(start + rows.to(tl.int64)[:, None] * pitch + d[None, :], mask=present[:, None] & (d < D)[None, :], other=0.0)


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
    """A softmax that has seen no key: sum of values, sum of weights, and the highest score, finite so that differences exist."""
    return tl.zeros((BLOCK, BLOCK_D), WIDE), tl.zeros((BLOCK,), WIDE), tl.full((BLOCK,), -3.0e38, WIDE)


@triton.jit
def join_tile(values, weights, top, s, v, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """The softmax after a tile of keys with scores s (queries, keys): all that was summed before is rescaled to the new highest score."""
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
    """The mean value of each query and the logsumexp of its scores; both zero for a query without keys."""
    some = weights > 0
    weights = tl.where(some, weights, 1.0)
    return values / weights[:, None], tl.where(some, top + tl.log(weights), 0.0)


@triton.jit
def slopes(s, grad, v, lse, delta, SCALE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Weights p = exp(s - lse) again, and the gradient of the products q k': p (grad v' - delta) / sqrt(D), delta = grad . out.

    s: (queries, keys); grad: (queries, BLOCK_D); v: (keys, BLOCK_D); lse, delta: (queries,).
    """
    p = tl.exp(s - lse[:, None])
    return p, p * (product(grad, tl.trans(v), WIDE, PRECISION) - delta[:, None]) * SCALE
