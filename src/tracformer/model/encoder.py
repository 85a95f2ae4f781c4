"""The multi-scope encoder (section 4.1):

layer l's feature at t depends on exactly the 2^l inputs that end at t in its reading.
"""

from torch import Tensor

from tracformer.attention import Attention, Layout
from tracformer.geometry import encoder_offsets
from tracformer.model.block import Block
from tracformer.model.config import TracformerConfig
from tracformer.model.rotary import Angles


class EncoderLayer(Block):
    def __init__(self, config: TracformerConfig, layer: int) -> None:
        super().__init__(config.d_model, config.n_head, config.dropout)
        self.offsets = None if config.encoder == "full" else encoder_offsets(layer, config.n_max, config.key_set)

    def forward(self, x: Tensor, angles: Angles, layout: Layout, attention: Attention) -> Tensor:  # type: ignore[override]
        """x: (readings * B, T, d)"""
        q, k, v = self.project(x, angles)
        return self.finish(x, attention.encode(q, k, v, self.offsets, layout))
