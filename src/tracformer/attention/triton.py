"""The same attentions as Triton kernels for GPUs: forward and backward, sums in float32, no T x T
buffer, weights recomputed.

Other devices, the full encoder, and machines without the package `triton` are served by `blocked`.
Under Triton's interpreter (TRITON_INTERPRET=1 from the start of the process) the kernels serve CPU
tensors: slow, and how they are compared with the definition where there is no GPU.
"""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from tracformer.attention.blocked import Blocked
from tracformer.attention.layout import Layout
from tracformer.geometry import arithmetic_run

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Triton:
    def __init__(self) -> None:
        self.otherwise = Blocked()

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        if offsets is None or not serves(q, k, v):
            return self.otherwise.encode(q, k, v, offsets, layout)
        from tracformer.attention.triton_kernels import window_attention

        return window_attention(q, k, v, arithmetic_run(offsets, layout.length))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        if not serves(q, k, v):
            return self.otherwise.decode(q, k, v, stride, layout)
        from tracformer.attention.triton_kernels import strided_attention

        return strided_attention(q, k, v, stride, layout.rows, layout.lengths)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    alike = q.device == k.device == v.device and q.dtype == k.dtype == v.dtype
    return alike and q.dtype in DTYPES and usable(q.device)


def usable(device: torch.device) -> bool:
    """NVIDIA GPUs from compute capability 8.0 on (A100), for which the kernels are known to
    compile; any device in the interpreter.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return installed()
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and installed()
    )


@cache
def installed() -> bool:
    return find_spec("triton") is not None
