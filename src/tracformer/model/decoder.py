"""The cross-attention-only decoder (section 4.2): coarse scopes first, each layer tiling the whole prefix and the whole suffix.

No position looks at another decoder position, so everything here runs on the wanted rows alone.
"""

from torch import Tensor, nn

from tracformer.attention import Attention, Layout
from tracformer.geometry import decoder_stride
from tracformer.model.config import TracformerConfig
from tracformer.model.feedforward import FeedForward
from tracformer.model.linear import Linear
from tracformer.model.rotary import Angles, split_heads


class DecoderLayer(nn.Module):
    def __init__(self, config: TracformerConfig, layer: int) -> None:
        super().__init__()
        d = config.d_model
        self.n_head = config.n_head
        # The stride of layer 1 reaches past the whole text: its only keys are t-1 and t+1.
        strided = config.decoder == "strided" or (config.decoder == "neighbours" and layer == 1)
        self.stride = decoder_stride(layer, config.n_layer) if strided else 1
        self.norm_query = nn.LayerNorm(d)
        self.norm_feature = nn.LayerNorm(d)
        self.q = Linear(d, d)
        self.k = Linear(d, d)  # keys and values apart: each result is contiguous, so that residue classes are views
        self.v = Linear(d, d)
        self.out = Linear(d, d)
        self.norm_feedforward = nn.LayerNorm(d)
        self.feedforward = FeedForward(d)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, feature: Tensor, query_angles: Angles, key_angles: Angles, layout: Layout, attention: Attention) -> Tensor:
        """x: (N, d) decoder states of `layout.rows`; feature: (readings * B, T, d) of the paired encoder layer."""
        k, v = self.keys(feature, key_angles)  # (rows, T, H, D)
        return self.finish(x, attention.decode(self.query(x, query_angles), k, v, self.stride, layout))

    def query(self, x: Tensor, angles: Angles) -> Tensor:
        """(..., H, D) of decoder states x (..., d)."""
        [q] = split_heads(self.q(self.norm_query(x)), angles, self.n_head)
        return q

    def keys(self, feature: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values (..., H, D) of the paired encoder layer's features (..., d)."""
        feature = self.norm_feature(feature)
        [k] = split_heads(self.k(feature), angles, self.n_head)
        [v] = split_heads(self.v(feature), angles, self.n_head, turned=0)
        return k, v

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer, from what attention mixed (..., H, D)."""
        x = x + self.dropout(self.out(mixed.flatten(-2)))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))
