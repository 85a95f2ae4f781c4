"""Rotary position encoding by true positions, so that shared weights can tell a prefix from a suffix."""

from typing import NamedTuple

import torch
from torch import Tensor


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
