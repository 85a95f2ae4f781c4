"""Weights in fewer bytes, for generation: a step multiplies few rows by all weights, so the bytes of the weights set its pace.

`bfloat16` keeps the upper half of a float32. `int8` keeps, of an output row w, the integers q = round(w / s) with s = max |w| / 127: one
scale a row, since a scale for every 64 or 128 weights was measured to lose no less. Biases and norms stay float32. What is lost, and how to
measure it: docs/kernels.md.

A lean model is one model: its matrices are rounded where they stand, so that whole passes, which read them as float32, and the compiled
step, which reads the packed copy, speak of the same numbers. All sums are float32.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tracformer import native

KINDS = ("float32", "bfloat16", "int8")
ALIGNED = 64  # bytes: a cache line
SMALLEST = torch.finfo(torch.float32).tiny  # of a row of zeros


class Packed(NamedTuple):
    """A weight (out, in) as a step reads it: data * scale, row by row."""

    data: Tensor  # (out, in) bfloat16 or int8
    scale: Tensor | None  # (out,) float32, of int8


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"weights is {kind!r}; allowed: {', '.join(KINDS)}")


def packed(weight: Tensor, kind: str) -> Packed:
    if kind == "bfloat16":
        return Packed(weight.bfloat16(), None)
    scale = (weight.abs().amax(1) / 127).float()
    return Packed((weight / scale.clamp(min=SMALLEST)[:, None]).round().to(torch.int8), scale)


def unpacked(stored: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    data = stored.data.to(dtype)
    return data if stored.scale is None else data * stored.scale.to(dtype)[:, None]


@torch.no_grad()
def round_weights(weights: Sequence[Tensor], kind: str) -> list[Packed]:
    """Round matrices where they stand; what they now are, packed.

    The packed copies lie in one block of memory, in large pages where the system has them: it is read from end to end for every token.
    """
    if unfit := next((weight.dtype for weight in weights if weight.dtype not in (torch.float32, torch.float64)), None):
        raise ValueError(f"the weights are {unfit}; {kind} is rounded from float32 or float64")
    widths = [weight.numel() * (1 if kind == "int8" else 2) for weight in weights]
    ends = list(accumulate(-(-width // ALIGNED) * ALIGNED for width in widths))
    block = torch.empty(ends[-1], dtype=torch.uint8, device=weights[0].device)
    moved = []
    for weight, width, start in zip(weights, widths, [0, *ends], strict=False):
        stored = packed(weight, kind)
        weight.copy_(unpacked(stored, weight.dtype))
        data = block[start : start + width].view(stored.data.dtype).view(weight.shape)
        moved.append(Packed(data.copy_(stored.data), stored.scale))
    if block.device.type == "cpu" and native.ready():
        torch.ops.tracformer.large_pages([block])
    return moved
