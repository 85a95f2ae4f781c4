"""The pre-norm transformer block with rotary positions that every network of this package is built
from, and its initialisation.

    x + W_out Attention(LN(x)),  then  x + FFN(LN(x))

A block does not decide which keys a query reads: it projects, the caller attends, the block
finishes.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tracformer.model.feedforward import FeedForward
from tracformer.model.linear import Linear
from tracformer.model.rotary import Angles, split_heads

Read = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v) -> mixed values (..., H, D): which keys the queries of a layer read."""


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

    def forward(self, x: Tensor, angles: Angles, read: Callable[..., Tensor], answer_from: int = 0) -> Tensor:
        """Run rows x (B, S, d);

        `read(q, k, v)` is their attention. Rows before `answer_from` are keys only, and not
        returned.
        """
        q, k, v = self.project(x, angles)
        if answer_from:
            x, q = x[:, answer_from:], q[:, answer_from:]
        return self.finish(x, read(q, k, v))

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (..., H, D) of states x (..., d), rotated to their
        positions.
        """
        q, k, v = split_heads(self.qkv(self.norm_attention(x)), angles, self.n_head, parts=3, turned=2)
        return q, k, v

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the block's output for states x (..., d) and attention results `mixed` (..., H,
        D).
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

    Args: blocks: `Block` modules. x: Input states. angles: Rotary angles of the rows. read:
        Attention of each layer; in the last layer it gets all keys, but queries from `answer_from`
        on only. answer_from: First row whose output is needed; earlier rows are only read by
        others. recompute: Recompute each block in the backward pass instead of keeping its
        activations.

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
