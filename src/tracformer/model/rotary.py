"""Rotary position encoding by true positions, so that shared weights can tell a prefix from a suffix."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tracformer import native


class Angles(NamedTuple):
    """cos and sin of position * base^(-2i/D), each (..., 1, D/2), with the head dimension left to broadcast."""

    cos: Tensor
    sin: Tensor

    def at(self, rows: Tensor) -> "Angles":
        """The angles of some flat rows of (B, T): (N, 1, D/2)."""
        return Angles(self.cos.flatten(0, 1)[rows], self.sin.flatten(0, 1)[rows])


def rotary_angles(positions: Tensor, head_size: int, base: float, dtype: torch.dtype) -> Angles:
    """Taken in float64, then rounded once: position 30000 keeps its digits."""
    i = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64)
    angle = positions[..., None, None] * base ** (-i / head_size)
    return Angles(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """x (..., H, D) with the pair (x_i, x_{i+D/2}) turned by its angle; in the angles' precision, returned in x's."""
    a, b = x.to(angles.cos.dtype).chunk(2, dim=-1)
    cos, sin = angles
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1).to(x.dtype)


def split_heads(x: Tensor, angles: Angles, n_head: int, parts: int = 1, turned: int = 1) -> tuple[Tensor, ...]:
    """`parts` tensors (..., H, D) of a projection's output x (..., parts * H * D), the first `turned` of them at their angles.

    Compiled code does it in one pass and returns the angles' dtype: under autocast on a CPU float32, in which the attentions are exact.
    Otherwise x's.
    """
    if _serves(x, angles):
        flat = Angles(*(each.expand(*x.shape[:-1], 1, -1).flatten(0, -3).contiguous() for each in angles))
        outs = _SplitHeads.apply(x.flatten(0, -2), *flat, n_head, parts, turned)
        return tuple(out.view(*x.shape[:-1], *out.shape[1:]) for out in outs)
    split = x.unflatten(-1, (parts, n_head, -1)).unbind(-3)
    return *(rotate(part, angles) for part in split[:turned]), *split[turned:]


def _serves(x: Tensor, angles: Angles) -> bool:
    widened = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    computed = widened in (torch.float32, torch.float64) and angles.cos.dtype == widened
    return computed and x.device.type == angles.cos.device.type == "cpu" and native.ready()


class _SplitHeads(torch.autograd.Function):
    """A rotation's transpose is the rotation by the opposite angle, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, n_head: int, parts: int, turned: int) -> tuple[Tensor, ...]:
        ctx.turned, ctx.dtype = turned, x.dtype
        ctx.save_for_backward(cos, sin)
        return tuple(torch.ops.tracformer.heads_forward(x, cos, sin, n_head, parts, turned))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x = torch.ops.tracformer.heads_backward(grads, *ctx.saved_tensors, ctx.turned, ctx.dtype)
        return x, None, None, None, None, None
