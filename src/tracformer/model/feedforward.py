"""The position-wise network of every block: d -> 4d -> d with GELU."""

from torch import Tensor, nn
from torch.nn.functional import gelu

from tracformer.model.linear import Linear


class FeedForward(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up = Linear(d, 4 * d)
        self.out = Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gelu(self.up(x)))
