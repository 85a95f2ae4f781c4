"""The pre-norm transformer block with rotary positions, and its initialisation.

    x + W_out Attention(LN(x)),  then  x + FFN(LN(x))

A `Block` does not decide which keys a query reads: it projects, the caller runs the attention, and
the block finishes. Rotary angles are those of true text positions, also in a mirrored reading, so
that shared weights can tell a prefix from a suffix.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from tracformer import native
from tracformer.model.fast_step import Linear


class FeedForward(nn.Module):
    """The position-wise network of a block: d -> 4d -> d with GELU."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up = Linear(d, 4 * d)
        self.out = Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gelu(self.up(x)))


class Angles(NamedTuple):
    """cos and sin of position * base^(-2i/D), each (..., 1, D/2); the 1 broadcasts over heads."""

    cos: Tensor
    sin: Tensor

    def at(self, rows: Tensor) -> "Angles":
        """Return the angles (N, 1, D/2) of some flat indices into (B, T)."""
        return Angles(self.cos.flatten(0, 1)[rows], self.sin.flatten(0, 1)[rows])


def rotary_angles(positions: Tensor, head_size: int, base: float, dtype: torch.dtype) -> Angles:
    """Return the rotary angles of integer positions.

    They are computed in float64 and rounded once, so that large positions keep their precision.
    """
    i = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64)
    angle = positions[..., None, None] * base ** (-i / head_size)
    return Angles(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate each pair (x_i, x_{i+D/2}) of x (..., H, D) by its angle.

    Computed in the dtype of the angles and returned in that of x.
    """
    a, b = x.to(angles.cos.dtype).chunk(2, dim=-1)
    cos, sin = angles
    return torch.cat(
        (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1
    ).to(x.dtype)


def split_heads(
    x: Tensor, angles: Angles, n_head: int, parts: int = 1, turned: int = 1
) -> tuple[Tensor, ...]:
    """Split a projection's output x (..., parts * H * D) into `parts` tensors (..., H, D).

    The first `turned` of them are rotated by their angles. Compiled code does both in one pass and
    returns the dtype of the angles: under autocast on a CPU this is float32, in which attention is
    computed there. Otherwise the result has the dtype of x.
    """
    if _serves(x, angles):
        flat = Angles(
            *(each.expand(*x.shape[:-1], 1, -1).flatten(0, -3).contiguous() for each in angles)
        )
        outs = _SplitHeads.apply(x.flatten(0, -2), *flat, n_head, parts, turned)
        return tuple(out.view(*x.shape[:-1], *out.shape[1:]) for out in outs)
    split = x.unflatten(-1, (parts, n_head, -1)).unbind(-3)
    return *(rotate(part, angles) for part in split[:turned]), *split[turned:]


def _serves(x: Tensor, angles: Angles) -> bool:
    widened = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    computed = widened in (torch.float32, torch.float64) and angles.cos.dtype == widened
    return computed and x.device.type == angles.cos.device.type == "cpu" and native.ready()


class _SplitHeads(torch.autograd.Function):
    """The compiled split, with its gradient.

    The transpose of a rotation is the rotation by the opposite angle, so only angles are saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, n_head: int, parts: int, turned: int
    ) -> tuple[Tensor, ...]:
        ctx.turned, ctx.dtype = turned, x.dtype
        ctx.save_for_backward(cos, sin)
        return tuple(torch.ops.tracformer.heads_forward(x, cos, sin, n_head, parts, turned))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x = torch.ops.tracformer.heads_backward(grads, *ctx.saved_tensors, ctx.turned, ctx.dtype)
        return x, None, None, None, None, None


Read = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The attention of each layer: (layer, q, k, v) -> mixed values (..., H, D)."""


class Block(nn.Module):
    """Self-attention and feed-forward, each added to the residual stream.

    Args:
        d_model: Width of the residual stream.
        n_head: Number of attention heads.
        dropout: Dropout rate on the two residual branches.
    """

    def __init__(self, d_model: int, n_head: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm_attention = nn.LayerNorm(d_model)
        self.qkv = Linear(d_model, 3 * d_model)
        self.out = Linear(d_model, d_model)
        self.norm_feedforward = nn.LayerNorm(d_model)
        self.feedforward = FeedForward(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, angles: Angles, read: Callable[..., Tensor], answer_from: int = 0
    ) -> Tensor:
        """Run rows x (B, S, d) through the block.

        Args:
            x: (B, S, d) states.
            angles: Rotary angles of the rows.
            read: `read(q, k, v)` computes their attention.
            answer_from: Rows before this one serve as keys only and are not returned.
        """
        q, k, v = self.project(x, angles)
        if answer_from:
            x, q = x[:, answer_from:], q[:, answer_from:]
        return self.finish(x, read(q, k, v))

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (..., H, D) of states x (..., d).

        Queries and keys are rotated to their positions.
        """
        q, k, v = split_heads(
            self.qkv(self.norm_attention(x)), angles, self.n_head, parts=3, turned=2
        )
        return q, k, v

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the block's output.

        Args:
            x: (..., d) states.
            mixed: (..., H, D) results of attention.
        """
        x = x + self.dropout(self.out(mixed.flatten(-2)))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))


def run_blocks(
    blocks: nn.ModuleList,
    x: Tensor,
    angles: Angles,
    read: Read,
    *,
    answer_from: int = 0,
    recompute: bool = False,
) -> Tensor:
    """Run rows x (B, S, d) through all blocks.

    Args:
        blocks: `Block` modules.
        x: Input states.
        angles: Rotary angles of the rows.
        read: Attention of each layer. In the last layer it gets all keys, but only the queries
            from `answer_from` on.
        answer_from: First row whose output is needed; earlier rows are only read by others.
        recompute: Recompute each block in the backward pass instead of keeping its activations.

    Returns:
        The final states (B, S - answer_from, d), before the final norm.
    """
    for number, block in enumerate(blocks):
        inputs = (x, angles, partial(read, number), answer_from if number == len(blocks) - 1 else 0)
        x = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
    return x


def initialise(module: nn.Module, std: float, branches: int) -> None:
    """Draw weights as GPT-2 does.

    Matrices are normal(std); projections back into the residual stream shrink with the number of
    branches.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith("out.weight")
            nn.init.normal_(parameter, std=std / branches**0.5 if residual else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)
