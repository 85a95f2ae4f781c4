"""Encoder attention in linear time: a sliding window over each residue class.

Keys `step` apart turn one sequence of length T into `step` independent sequences of length n = T / step, in which a query reads the
`count` nearest keys behind it, itself included. Cut into blocks of c >= count - 1, a block reads itself and the block before: two
c x c products in place of a T x T one. Keys off the grid (the far end, where the step does not divide the reach) are single
shifted products that join the same softmax.

Blocks of all classes lie behind one another in memory, so that a block and its predecessor are one strided view, without a copy.
A class's first block sees the end of another class there; its weights are masked.

Sequences and heads are taken a few at a time, so that a group's blocks stay in cache at any length.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tracformer.geometry import Run
from tracformer.precision import wide

MIN_BLOCK = 16  # smaller products run far below the machine's matmul rate
GROUP = 2**19  # elements of q worked on at once


def window_attention(q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    """softmax(q k' / sqrt(D)) v over the keys that `run` describes. All (B, T, H, D); rows read left to right."""
    return _WindowAttention.apply(q, k, v, run)


class _Blocks:
    """The rearrangement (B, T, H, D) <-> (N, c, D), N = B * step * H * blocks."""

    def __init__(self, shape: torch.Size, run: Run) -> None:
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
        """(B, T, H, D) -> (N, c, D); with `lead`, one zero block stands before the first."""
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
        """(N, c, D) -> (B, T, H, D), written into `into`"""
        by_class = blocks.view(self.B, self.step, self.H, self.blocks * self.c, blocks.shape[-1])
        whole, rest = divmod(self.T, self.step)
        rows = into[:, : whole * self.step].unflatten(1, (whole, self.step))
        rows.copy_(by_class[:, :, :, :whole].permute(0, 3, 1, 2, 4))
        if rest:
            into[:, whole * self.step :] = by_class[:, :rest, :, whole]

    def with_previous(self, led: Tensor) -> Tensor:
        """(N + 1, c, D) with a leading block -> (N, keys, D): each block behind its predecessor, a view."""
        if not self.reads_previous:
            return led[1:]
        c, D = led.shape[1:]
        return led.as_strided((led.shape[0] - 1, 2 * c, D), (c * D, D, 1))

    def bias(self, like: Tensor) -> Tensor:
        """(c, keys): 0 where a block's query reads a key, -inf elsewhere."""
        i = torch.arange(self.c, device=like.device)[:, None]
        j = torch.arange(self.keys, device=like.device) - (self.keys - self.c)
        allowed = (i - j >= 0) & (i - j < self.count)
        return torch.zeros(self.c, self.keys, dtype=like.dtype, device=like.device).masked_fill_(~allowed, -torch.inf)

    def add_transposed(self, weights: Tensor, x: Tensor, alpha: float) -> Tensor:
        """alpha * weights' x, each block's share of its predecessor added there: gradients of keys or values, (N, c, D)."""
        own = weights[:, :, self.keys - self.c : self.keys].transpose(1, 2)
        total = torch.baddbmm(x, own, x, beta=0, alpha=alpha)
        if self.reads_previous:
            previous = weights[1:, :, : self.c].transpose(1, 2)
            total[:-1].baddbmm_(previous, x[1:], alpha=alpha)
        return total


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        kept = [tensor for group in _groups(q.shape) for tensor in _forward(q[group], k[group], v[group], run, out[group])]
        ctx.run = run
        ctx.save_for_backward(*((q, k, v) if run.extra else ()), *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        split = 3 if ctx.run.extra else 0
        saved = ctx.saved_tensors  # once: recomputation under a checkpoint allows no second look
        inputs, kept = saved[:split], saved[split:]
        grads = [torch.empty_like(grad_out, memory_format=torch.contiguous_format) for _ in range(3)]
        for i, group in enumerate(_groups(grad_out.shape)):
            blocks = kept[KEPT * i : KEPT * (i + 1)]
            _backward(blocks, [x[group] for x in inputs], ctx.run, grad_out[group], *(grad[group] for grad in grads))
        return grads[0], grads[1], grads[2], None


KEPT = 4  # tensors that a group's forward leaves for its backward


def _groups(shape: torch.Size) -> Iterator[tuple[slice, slice, slice]]:
    """Slices (sequences, all positions, heads) of about GROUP elements each."""
    B, T, H, D = shape
    rows = max(1, GROUP // (T * H * D))
    heads = H if rows * T * H * D <= GROUP else min(H, max(1, GROUP // (T * D)))
    for b in range(0, B, rows):
        for h in range(0, H, heads):
            yield slice(b, b + rows), slice(None), slice(h, h + heads)


def _forward(q: Tensor, k: Tensor, v: Tensor, run: Run, out: Tensor) -> tuple[Tensor, ...]:
    """Writes `out`; returns what the backward wants again."""
    cut = _Blocks(q.shape, run)
    scale = q.shape[-1] ** -0.5
    qb, kb, vb = cut.cut(q), cut.cut(k, lead=True), cut.cut(v, lead=True)
    scores = torch.baddbmm(cut.bias(q), qb, cut.with_previous(kb).transpose(1, 2), alpha=scale)  # (N, c, keys)
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


def _backward(
    kept: tuple[Tensor, ...], inputs: list[Tensor], run: Run, grad_out: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
) -> None:
    """Writes the three gradients. `inputs` are q, k, v where some keys lie off the grid, else empty."""
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
    cut.join(torch.baddbmm(qb, grad_scores[:, :, : cut.keys], cut.with_previous(kb), beta=0, alpha=scale), into=grad_q)
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
