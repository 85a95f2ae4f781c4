"""Linear-memory attention in plain PyTorch operations, on any device: the fallback of `native`.

It is exact. Its cost is linear in T in the encoder and T^2 / s in the decoder. Three parts:

Causal attention with logsumexp (`causal_attention`). Attention over a union of disjoint key sets is
the average of the parts, weighted by exp(lse_part - lse_union). Its gradient is each part's own
gradient formula with the merged output and the merged logsumexp, since exp(score - lse_union) are
the joint weights. So the backward pass takes an output and a logsumexp. Shapes: q, k, v, out
(B, H, n, D); lse (B, H, n). No n x n buffer is ever held whole.

Encoder window (`window_attention`). Keys `step` apart split a sequence of length T into `step`
independent ones of length n = T / step, in which a query reads the `count` nearest keys up to
itself. Cut into blocks of c >= count - 1, a block reads itself and the previous block: two c x c
products in place of one T x T product. Keys off the grid (the farthest one, where the step does not
divide the distance) are single shifted products in the same softmax. All blocks are stored one
after another, so that a block and its predecessor are one strided view without a copy; the first
block of a class then has the end of another class as its predecessor, which is masked. Sequences
and heads are processed in groups, so that the blocks of a group stay in cache at any length.

Strided decoder (`strided_attention`). Query t reads keys t-1, t-1-s, t-1-2s, ... of the forward
reading, and likewise of the mirrored one. Put each query on the slot of its nearest key; then the
keys of slot p are p, p-s, p-2s, ...: plain causal attention within the class p mod s. Classes act
as extra heads: (T, H) seen as (T/s, s*H) is a view, not a copy. Both readings run as one batch and
are merged by their logsumexp. A large batch is processed one head at a time, so that the working
buffers stay a fraction of the inputs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer.attention.reference import Layout
from tracformer.devices import wide
from tracformer.geometry import KeyRun, arithmetic_run

CHUNK = 128  # queries processed together in the plain version


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention (B, H, n, D) and the logsumexp (B, H, n) of its scores."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse
    return plain_causal_attention(q, k, v)


def plain_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `causal_attention` in plain products, a few queries at a time.

    For devices on which PyTorch has no operation that returns the logsumexp.
    """
    B, H, n, D = q.shape
    q, k, v = (x.reshape(B * H, n, D) for x in (q, k, v))
    chunks = _Chunks(q, k)
    out, lse = torch.empty_like(q), q.new_empty(B * H, n, dtype=chunks.dtype)
    for start, stop in chunks:
        weights = chunks.scores(start, stop)
        highest = weights.amax(-1, keepdim=True)
        total = weights.sub_(highest).exp_().sum(-1, keepdim=True)
        out[:, start:stop] = torch.bmm(weights.to(v.dtype), v[:, :stop]).div_(total)
        lse[:, start:stop] = highest.add_(total.log_())[..., 0]
    return out.view(B, H, n, D), lse.view(B, H, n)


def causal_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    `out` and `lse` may belong to a larger softmax of which these keys are a part.
    """
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, True
        )
        return grads[0], grads[1], grads[2]
    return plain_causal_attention_backward(grad_out, q, k, v, out, lse)


def plain_causal_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_attention_backward` in plain products, a few queries at a time."""
    B, H, n, D = q.shape
    grad_out, q, k, v, out = (x.reshape(B * H, n, D) for x in (grad_out, q, k, v, out))
    lse = lse.reshape(B * H, n, 1)
    delta = (grad_out * out).sum(-1, keepdim=True, dtype=lse.dtype)  # (B * H, n, 1)
    chunks = _Chunks(q, k)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in chunks:
        rows = slice(start, stop)
        weights = chunks.scores(start, stop).sub_(lse[:, rows]).exp_()
        slopes = torch.bmm(grad_out[:, rows], v[:, :stop].transpose(1, 2)).to(lse.dtype)
        slopes = slopes.sub_(delta[:, rows]).mul_(weights).to(q.dtype)
        grad_q[:, rows] = torch.bmm(slopes, k[:, :stop])
        grad_k[:, :stop].baddbmm_(slopes.transpose(1, 2), q[:, rows], alpha=chunks.scale)
        grad_v[:, :stop].baddbmm_(weights.to(v.dtype).transpose(1, 2), grad_out[:, rows])
    grad_q.mul_(chunks.scale)
    return grad_q.view(B, H, n, D), grad_k.view(B, H, n, D), grad_v.view(B, H, n, D)


class _Chunks:
    """Scaled scores of a few queries at a time, against all keys up to the last query.

    q, k: (C, n, D).
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k = q, k
        self.n = q.shape[1]
        self.nothing = q.new_zeros(())
        self.scale = q.shape[-1] ** -0.5
        self.size = min(self.n, CHUNK)
        self.dtype = wide(q.dtype)
        above = torch.ones(self.size, self.size, dtype=torch.bool, device=q.device).triu_(1)
        self.bias = torch.zeros_like(above, dtype=self.dtype).masked_fill_(above, -torch.inf)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((start, min(start + self.size, self.n)) for start in range(0, self.n, self.size))

    def scores(self, start: int, stop: int) -> Tensor:
        """Return scores (C, stop - start, stop); -inf above the diagonal."""
        queries, keys = self.q[:, start:stop], self.k[:, :stop]
        scores = torch.baddbmm(
            self.nothing, queries, keys.transpose(1, 2), beta=0, alpha=self.scale
        ).to(self.dtype)
        scores[:, :, start:] += self.bias[: stop - start, : stop - start]
        return scores


MIN_BLOCK = 16  # smaller matrix products are much slower per operation
GROUP = 2**19  # elements of q processed together


def window_attention(q: Tensor, k: Tensor, v: Tensor, run: KeyRun) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v over the keys that `run` describes; all (B, T, H, D)."""
    return _WindowAttention.apply(q, k, v, run)


class _Blocks:
    """The rearrangement (B, T, H, D) <-> (N, c, D), N = B * step * H * blocks."""

    def __init__(self, shape: torch.Size, run: KeyRun) -> None:
        self.B, self.T, self.H, _ = shape
        self.step = min(run.step, self.T)
        self.n = -(-self.T // self.step)
        self.count = min(run.count, self.n)
        self.blocks = max(1, self.n // max(self.count - 1, MIN_BLOCK))
        self.c = -(-self.n // self.blocks)
        self.classes = self.B * self.step * self.H
        self.reads_previous = self.blocks > 1
        self.keys = 2 * self.c if self.reads_previous else self.c

    def cut(self, x: Tensor, lead: bool = False, fill: float = 0.0) -> Tensor:
        """Rearrange (B, T, H, D) to (N, c, D); `lead` puts one zero block before the first."""
        B, T, H, D = x.shape
        N = self.classes * self.blocks
        buffer = x.new_empty(N + lead, self.c, D)
        if lead:
            buffer[0] = 0
        by_class = buffer[lead:].view(B, self.step, H, self.blocks * self.c, D)
        whole, rest = divmod(T, self.step)
        rows = x[:, : whole * self.step].unflatten(1, (whole, self.step))  # (B, whole, step, H, D)
        by_class[:, :, :, :whole] = rows.permute(0, 2, 3, 1, 4)
        by_class[:, :, :, whole:] = fill
        if rest:
            by_class[:, :rest, :, whole] = x[:, whole * self.step :]
        return buffer

    def join(self, blocks: Tensor, into: Tensor) -> None:
        """Rearrange (N, c, D) to (B, T, H, D), written to `into`."""
        by_class = blocks.view(self.B, self.step, self.H, self.blocks * self.c, blocks.shape[-1])
        whole, rest = divmod(self.T, self.step)
        rows = into[:, : whole * self.step].unflatten(1, (whole, self.step))
        rows.copy_(by_class[:, :, :, :whole].permute(0, 3, 1, 2, 4))
        if rest:
            into[:, whole * self.step :] = by_class[:, :rest, :, whole]

    def with_previous(self, led: Tensor) -> Tensor:
        """Return a view (N, keys, D) of each block with its predecessor, of (N + 1, c, D)."""
        if not self.reads_previous:
            return led[1:]
        c, D = led.shape[1:]
        return led.as_strided((led.shape[0] - 1, 2 * c, D), (c * D, D, 1))

    def bias(self, like: Tensor) -> Tensor:
        """Return (c, keys): 0 where a block's query reads a key, -inf elsewhere."""
        i = torch.arange(self.c, device=like.device)[:, None]
        j = torch.arange(self.keys, device=like.device) - (self.keys - self.c)
        allowed = (i - j >= 0) & (i - j < self.count)
        return torch.zeros(self.c, self.keys, dtype=like.dtype, device=like.device).masked_fill_(
            ~allowed, -torch.inf
        )

    def add_transposed(self, weights: Tensor, x: Tensor, alpha: float) -> Tensor:
        """Return alpha * weights' x, the gradients (N, c, D) of keys or values.

        The part that belongs to a block's predecessor is added to the predecessor.
        """
        own = weights[:, :, self.keys - self.c : self.keys].transpose(1, 2)
        total = torch.baddbmm(x, own, x, beta=0, alpha=alpha)
        if self.reads_previous:
            previous = weights[1:, :, : self.c].transpose(1, 2)
            total[:-1].baddbmm_(previous, x[1:], alpha=alpha)
        return total


class _WindowAttention(torch.autograd.Function):
    """The encoder's attention with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: KeyRun) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        kept = [
            tensor
            for group in _groups(q.shape)
            for tensor in _window_forward(q[group], k[group], v[group], run, out[group])
        ]
        ctx.run = run
        ctx.save_for_backward(*((q, k, v) if run.extra else ()), *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        split = 3 if ctx.run.extra else 0
        saved = ctx.saved_tensors  # read once: under a checkpoint, a second access is an error
        inputs, kept = saved[:split], saved[split:]
        grads = [
            torch.empty_like(grad_out, memory_format=torch.contiguous_format) for _ in range(3)
        ]
        for i, group in enumerate(_groups(grad_out.shape)):
            blocks = kept[KEPT * i : KEPT * (i + 1)]
            _window_backward(
                blocks,
                [x[group] for x in inputs],
                ctx.run,
                grad_out[group],
                *(grad[group] for grad in grads),
            )
        return grads[0], grads[1], grads[2], None


KEPT = 4  # tensors that the forward pass of a group saves


def _groups(shape: torch.Size) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices (sequences, all positions, heads) of about GROUP elements each."""
    B, T, H, D = shape
    rows = max(1, GROUP // (T * H * D))
    heads = H if rows * T * H * D <= GROUP else min(H, max(1, GROUP // (T * D)))
    for b in range(0, B, rows):
        for h in range(0, H, heads):
            yield slice(b, b + rows), slice(None), slice(h, h + heads)


def _window_forward(
    q: Tensor, k: Tensor, v: Tensor, run: KeyRun, out: Tensor
) -> tuple[Tensor, ...]:
    """Write the attention to `out` and return the tensors that the backward pass needs."""
    cut = _Blocks(q.shape, run)
    scale = q.shape[-1] ** -0.5
    qb, kb, vb = cut.cut(q), cut.cut(k, lead=True), cut.cut(v, lead=True)
    # (N, c, keys)
    scores = torch.baddbmm(cut.bias(q), qb, cut.with_previous(kb).transpose(1, 2), alpha=scale)
    if cut.reads_previous:
        scores.view(cut.classes, cut.blocks, cut.c, cut.keys)[:, 0, :, : cut.c] = -torch.inf
    if run.extra:
        extra = q.new_full((*q.shape[:3], len(run.extra)), -torch.inf)  # (B, T, H, E)
        for e, offset in enumerate(run.extra):
            extra[:, offset:, :, e] = (q[:, offset:] * k[:, :-offset]).sum(-1).mul_(scale)
        scores = torch.cat((scores, cut.cut(extra, fill=-torch.inf)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=wide(q.dtype)).to(q.dtype)  # (N, c, keys + E)
    cut.join(torch.bmm(weights[:, :, : cut.keys], cut.with_previous(vb)), into=out)
    if run.extra:
        shares = torch.empty_like(extra)
        cut.join(weights[:, :, cut.keys :].contiguous(), into=shares)
        for e, offset in enumerate(run.extra):
            out[:, offset:].addcmul_(shares[:, offset:, :, e, None], v[:, :-offset])
    return qb, kb, vb, weights


def _window_backward(
    kept: tuple[Tensor, ...],
    inputs: list[Tensor],
    run: KeyRun,
    grad_out: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    """Write the three gradients; `inputs` are q, k, v if some keys lie off the grid, else empty."""
    qb, kb, vb, weights = kept
    cut = _Blocks(grad_out.shape, run)
    scale = grad_out.shape[-1] ** -0.5
    gb = cut.cut(grad_out)
    grad_weights = torch.bmm(gb, cut.with_previous(vb).transpose(1, 2))
    if run.extra:
        q, k, v = inputs
        extra = q.new_zeros(*q.shape[:3], len(run.extra))
        for e, offset in enumerate(run.extra):
            extra[:, offset:, :, e] = (grad_out[:, offset:] * v[:, :-offset]).sum(-1)
        grad_weights = torch.cat((grad_weights, cut.cut(extra)), dim=-1)
    grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    cut.join(
        torch.baddbmm(
            qb, grad_scores[:, :, : cut.keys], cut.with_previous(kb), beta=0, alpha=scale
        ),
        into=grad_q,
    )
    cut.join(cut.add_transposed(grad_scores, qb, scale), into=grad_k)
    cut.join(cut.add_transposed(weights, gb, 1.0), into=grad_v)
    if run.extra:
        shares, slopes = torch.empty_like(extra), torch.empty_like(extra)
        cut.join(weights[:, :, cut.keys :].contiguous(), into=shares)
        cut.join(grad_scores[:, :, cut.keys :].contiguous(), into=slopes)
        slopes.mul_(scale)
        for e, offset in enumerate(run.extra):
            share, slope = shares[:, offset:, :, e, None], slopes[:, offset:, :, e, None]
            grad_q[:, offset:].addcmul_(slope, k[:, :-offset])
            grad_k[:, :-offset].addcmul_(slope, q[:, offset:])
            grad_v[:, :-offset].addcmul_(share, grad_out[:, offset:])


ALL_HEADS = 2**22  # elements of k up to which all heads are processed together


def strided_attention(q: Tensor, k: Tensor, v: Tensor, stride: int, slots: Tensor) -> Tensor:
    """Return the decoder's attention (N, H, D).

    Args:
        q: (N, H, D) queries.
        k: (readings * B, T, H, D) keys.
        v: (readings * B, T, H, D) values.
        stride: Distance between the keys of a query.
        slots: (readings, N) slot of each query, see `Layout.query_slots`.
    """
    return _StridedAttention.apply(q, k, v, stride, slots)


class _Classes:
    """The view (rows, T, H, D) <-> (rows, s*H, T/s, D), and the places of the queries in it."""

    def __init__(self, k: Tensor, stride: int, slots: Tensor) -> None:
        self.rows, self.T, self.H, self.D = k.shape
        self.stride = min(stride, self.T)
        self.n = -(-self.T // self.stride)
        self.padded = self.n * self.stride
        # one spare slot after the last, for queries without keys
        self.end = self.rows * self.padded
        shifted = slots + slots.div(self.T, rounding_mode="floor") * (self.padded - self.T)
        self.slots = torch.where(slots < 0, self.end, shifted)
        self.empty = slots < 0  # (readings, N)

    def split(self, x: Tensor) -> Tensor:
        """Rearrange (rows, T, H, D) to (rows, s*H, n, D)."""
        if self.padded != self.T:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.padded - self.T))
        return x.reshape(self.rows, self.n, self.stride * self.H, self.D).transpose(1, 2)

    def unsplit(self, x: Tensor) -> Tensor:
        """Rearrange (rows, s*H, n, D) to (rows, T, H, D)."""
        return x.transpose(1, 2).reshape(self.rows, self.padded, self.H, self.D)[:, : self.T]

    def scatter(self, x: Tensor) -> Tensor:
        """Put the values of queries (N, H, ...) on their slots (rows, s*H, n, ...) in all readings.

        Slots without a query are zero.
        """
        buffer = x.new_zeros(self.end + 1, *x.shape[1:])
        for slots in self.slots:
            buffer.index_copy_(0, slots, x)
        return (
            buffer[: self.end]
            .view(self.rows, self.n, self.stride * self.H, *x.shape[2:])
            .transpose(1, 2)
        )

    def gather(self, x: Tensor, reading: int) -> Tensor:
        """Return the values (N, H, ...) on the queries' slots of (rows, s*H, n, ...).

        A query without a slot gets an arbitrary value.
        """
        flat = x.transpose(1, 2).reshape(self.end, self.H, *x.shape[3:])
        return flat.index_select(0, self.slots[reading].clamp(max=self.end - 1))


class _StridedAttention(torch.autograd.Function):
    """The decoder's attention with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, stride: int, slots: Tensor) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        for heads in _head_groups(k.shape):
            out[:, heads], lse[:, heads] = _strided_forward(
                q[:, heads], k[:, :, heads], v[:, :, heads], stride, slots
            )
        ctx.stride = stride
        ctx.save_for_backward(q, k, v, out, lse, slots)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse, slots = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        for h in _head_groups(k.shape):
            grad_q[:, h], grad_k[:, :, h], grad_v[:, :, h] = _strided_backward(
                grad_out[:, h],
                q[:, h],
                out[:, h],
                lse[:, h],
                k[:, :, h],
                v[:, :, h],
                ctx.stride,
                slots,
            )
        return grad_q, grad_k, grad_v, None, None


def _head_groups(shape: torch.Size) -> list[slice]:
    """Return all heads as one slice, or one by one: then residue classes are a view."""
    heads = shape[2]
    return (
        [slice(h, h + 1) for h in range(heads)] if shape.numel() > ALL_HEADS else [slice(0, heads)]
    )


def _strided_forward(
    q: Tensor, k: Tensor, v: Tensor, stride: int, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output (N, H, D) and its logsumexp (N, H), 0 where a query has no key."""
    classes = _Classes(k, stride, slots)
    out, lse = causal_attention(classes.scatter(q), classes.split(k), classes.split(v))
    readings = range(len(slots))
    part_lse = torch.stack([classes.gather(lse, r) for r in readings])  # (readings, N, H)
    part_lse.masked_fill_(classes.empty[..., None], -torch.inf)
    joint_lse = torch.logsumexp(part_lse, dim=0)  # (N, H); -inf where no reading has a key
    shares = torch.exp(part_lse - joint_lse).masked_fill_(classes.empty[..., None], 0.0).to(q.dtype)
    merged = shares[0, ..., None] * classes.gather(out, 0)
    for r in readings[1:]:
        merged.addcmul_(shares[r, ..., None], classes.gather(out, r))
    return merged, joint_lse.masked_fill_(classes.empty.all(0)[:, None], 0.0)


def _strided_backward(
    grad_out: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    stride: int,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    classes = _Classes(k, stride, slots)
    # Slots without a query hold zeros everywhere: weight exp(0 - 0) = 1, gradient 0.
    on_slots = [classes.scatter(x) for x in (grad_out, q, out, lse)]
    grads = causal_attention_backward(
        on_slots[0], on_slots[1], classes.split(k), classes.split(v), on_slots[2], on_slots[3]
    )
    parts = [
        classes.gather(grads[0], r).masked_fill_(empty[:, None, None], 0.0)
        for r, empty in enumerate(classes.empty)
    ]
    grad_q = parts[0] if len(parts) == 1 else parts[0].add_(parts[1])
    return grad_q, classes.unsplit(grads[1]), classes.unsplit(grads[2])


class Blocked:
    """Both attentions in plain PyTorch; serves all devices and dtypes."""

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        if offsets is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return window_attention(q, k, v, arithmetic_run(offsets, layout.length))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        return strided_attention(q, k, v, stride, layout.query_slots)
