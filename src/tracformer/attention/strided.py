"""Decoder attention at cost T^2 / s: causal attention over residue classes, prefix and mirrored suffix in one softmax.

Decoder query t reads keys t-1, t-1-s, t-1-2s, ... of the forward reading, and the same of the mirrored one. Put each query on the slot
of its nearest key, and the keys of slot p are p, p-s, p-2s, ...: plain causal attention within the class p mod s. Classes are extra
heads: (T, H) seen as (T/s, s*H) is a view, not a copy. Both readings run as one batch and are merged by their logsumexp.

A large batch is taken one head at a time, so that the working buffers stay a fraction of the inputs.
"""

from typing import Any

import torch
from torch import Tensor

from tracformer.attention.causal import causal_attention, causal_attention_backward
from tracformer.precision import wide

ALL_HEADS = 2**22  # elements of k up to which all heads are taken at once


def strided_attention(q: Tensor, k: Tensor, v: Tensor, stride: int, slots: Tensor) -> Tensor:
    """q: (N, H, D); k, v: (readings * B, T, H, D); slots: (readings, N), see `Layout.query_slots`. Returns (N, H, D)."""
    return _StridedAttention.apply(q, k, v, stride, slots)


class _Classes:
    """The view (rows, T, H, D) <-> (rows, s*H, T/s, D), and where the queries stand in it."""

    def __init__(self, k: Tensor, stride: int, slots: Tensor) -> None:
        self.rows, self.T, self.H, self.D = k.shape
        self.stride = min(stride, self.T)
        self.n = -(-self.T // self.stride)
        self.padded = self.n * self.stride
        self.end = self.rows * self.padded  # one spare slot behind the last, for queries without keys
        shifted = slots + slots.div(self.T, rounding_mode="floor") * (self.padded - self.T)
        self.slots = torch.where(slots < 0, self.end, shifted)
        self.empty = slots < 0  # (readings, N)

    def split(self, x: Tensor) -> Tensor:
        """(rows, T, H, D) -> (rows, s*H, n, D)"""
        if self.padded != self.T:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.padded - self.T))
        return x.reshape(self.rows, self.n, self.stride * self.H, self.D).transpose(1, 2)

    def unsplit(self, x: Tensor) -> Tensor:
        """(rows, s*H, n, D) -> (rows, T, H, D)"""
        return x.transpose(1, 2).reshape(self.rows, self.padded, self.H, self.D)[:, : self.T]

    def scatter(self, x: Tensor) -> Tensor:
        """(N, H, ...) -> (rows, s*H, n, ...): each query's value on its slot in every reading, zero elsewhere."""
        buffer = x.new_zeros(self.end + 1, *x.shape[1:])
        for slots in self.slots:
            buffer.index_copy_(0, slots, x)
        return buffer[: self.end].view(self.rows, self.n, self.stride * self.H, *x.shape[2:]).transpose(1, 2)

    def gather(self, x: Tensor, reading: int) -> Tensor:
        """(rows, s*H, n, ...) -> (N, H, ...): what stands on the queries' slots; arbitrary for a query without one."""
        flat = x.transpose(1, 2).reshape(self.end, self.H, *x.shape[3:])
        return flat.index_select(0, self.slots[reading].clamp(max=self.end - 1))


class _StridedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, stride: int, slots: Tensor) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        for heads in _head_groups(k.shape):
            out[:, heads], lse[:, heads] = _forward(q[:, heads], k[:, :, heads], v[:, :, heads], stride, slots)
        ctx.stride = stride
        ctx.save_for_backward(q, k, v, out, lse, slots)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse, slots = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        for h in _head_groups(k.shape):
            grad_q[:, h], grad_k[:, :, h], grad_v[:, :, h] = _backward(
                grad_out[:, h], q[:, h], out[:, h], lse[:, h], k[:, :, h], v[:, :, h], ctx.stride, slots
            )
        return grad_q, grad_k, grad_v, None, None


def _head_groups(shape: torch.Size) -> list[slice]:
    """All heads at once, or one by one: only then are residue classes a view."""
    heads = shape[2]
    return [slice(h, h + 1) for h in range(heads)] if shape.numel() > ALL_HEADS else [slice(0, heads)]


def _forward(q: Tensor, k: Tensor, v: Tensor, stride: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The output (N, H, D), and its logsumexp (N, H): 0 where a query has no key."""
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


def _backward(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, stride: int, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    classes = _Classes(k, stride, slots)
    # Slots without a query hold zeros everywhere: weight exp(0 - 0) = 1, gradient 0.
    on_slots = [classes.scatter(x) for x in (grad_out, q, out, lse)]
    grads = causal_attention_backward(on_slots[0], on_slots[1], classes.split(k), classes.split(v), on_slots[2], on_slots[3])
    parts = [classes.gather(grads[0], r).masked_fill_(empty[:, None, None], 0.0) for r, empty in enumerate(classes.empty)]
    grad_q = parts[0] if len(parts) == 1 else parts[0].add_(parts[1])
    return grad_q, classes.unsplit(grads[1]), classes.unsplit(grads[2])
