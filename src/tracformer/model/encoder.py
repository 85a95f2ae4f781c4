"""The multi-scope encoder (section 4.1): layer l's feature at t depends on exactly the 2^l inputs that end at t in its reading."""

from torch import Tensor, nn

from tracformer.attention import Attention, Layout
from tracformer.geometry import encoder_offsets
from tracformer.model.config import TracformerConfig
from tracformer.model.feedforward import FeedForward
from tracformer.model.linear import Linear
from tracformer.model.rotary import Angles, split_heads


class EncoderLayer(nn.Module):
    def __init__(self, config: TracformerConfig, layer: int) -> None:
        super().__init__()
        d = config.d_model
        self.n_head = config.n_head
        self.offsets = None if config.encoder == "full" else encoder_offsets(layer, config.n_max, config.key_set)
        self.norm_attention = nn.LayerNorm(d)
        self.qkv = Linear(d, 3 * d)
        self.out = Linear(d, d)
        self.norm_feedforward = nn.LayerNorm(d)
        self.feedforward = FeedForward(d)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, angles: Angles, layout: Layout, attention: Attention) -> Tensor:
        """x: (readings * B, T, d)"""
        q, k, v = self.project(x, angles)
        return self.finish(x, attention.encode(q, k, v, self.offsets, layout))

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (..., H, D) of states x (..., d), turned to their positions."""
        q, k, v = split_heads(self.qkv(self.norm_attention(x)), angles, self.n_head, parts=3, turned=2)
        return q, k, v

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer, from what attention mixed (..., H, D)."""
        x = x + self.dropout(self.out(mixed.flatten(-2)))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))
