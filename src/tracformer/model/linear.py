"""The linear layer. A step of generation multiplies few rows by all weights: there memory sets the pace, and compiled code reads faster."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear

from tracformer import native
from tracformer.model.lean import Packed

FEW = 16  # rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in), plus bias (out,)."""
    if x.numel() <= FEW * x.shape[-1] and not torch.is_grad_enabled() and serves(x, weight):
        return torch.ops.tracformer.few_rows(x.reshape(-1, x.shape[-1]), weight, None, bias).view(*x.shape[:-1], len(weight))
    return torch_linear(x, weight, bias)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Nothing is compiled for the sake of one product: the native code is used where it is already there."""
    plain = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return x.device.type == "cpu" and plain and weight.stride(-1) == 1 and native.ready()


class Linear(nn.Linear):
    packed: Packed | None = None  # the weight in fewer bytes, of a lean model

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
