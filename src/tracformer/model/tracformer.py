"""The Tractable Transformer: multi-scope encoder, cross-attention-only decoder, and the model.

The multi-scope encoder (section 4.1):

layer l's feature at t depends on exactly the 2^l inputs that end at t in its reading.

The cross-attention-only decoder (section 4.2): coarse scopes first, each layer tiling the whole
prefix and the whole suffix.

No position looks at another decoder position, so everything here runs on the wanted rows alone.

The Tractable Transformer: a pair of encoders that share weights, and a decoder that answers any
subset from its complement.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tracformer.attention import Attention, Layout, build_attention
from tracformer.geometry import decoder_stride, encoder_offsets, paired_encoder_layer
from tracformer.model.base import EXACT, MARGINAL, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.blocks import (
    Angles,
    Block,
    FeedForward,
    initialise,
    rotary_angles,
    split_heads,
)
from tracformer.model.cache import Cache
from tracformer.model.config import TracformerConfig
from tracformer.model.fast_step import Linear, Packed, round_weights


class EncoderLayer(Block):
    def __init__(self, config: TracformerConfig, layer: int) -> None:
        super().__init__(config.d_model, config.n_head, config.dropout)
        self.offsets = (
            None
            if config.encoder == "full"
            else encoder_offsets(layer, config.n_max, config.key_set)
        )

    def forward(self, x: Tensor, angles: Angles, layout: Layout, attention: Attention) -> Tensor:  # type: ignore[override]
        """x: (readings * B, T, d)"""
        q, k, v = self.project(x, angles)
        return self.finish(x, attention.encode(q, k, v, self.offsets, layout))


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
        # keys and values apart: each result is contiguous, so that residue classes are views
        self.k = Linear(d, d)
        self.v = Linear(d, d)
        self.out = Linear(d, d)
        self.norm_feedforward = nn.LayerNorm(d)
        self.feedforward = FeedForward(d)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        feature: Tensor,
        query_angles: Angles,
        key_angles: Angles,
        layout: Layout,
        attention: Attention,
    ) -> Tensor:
        """x: (N, d) decoder states of `layout.rows`; feature: (readings * B, T, d)
        of the paired encoder layer.
        """
        k, v = self.keys(feature, key_angles)  # (rows, T, H, D)
        return self.finish(
            x, attention.decode(self.query(x, query_angles), k, v, self.stride, layout)
        )

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


class Tracformer(ConditionalModel):
    """Three modes, one set of weights. For a target t and the given set C:

    - `car`: p(x_t | x_C, x_<t). The prefix encoder reads the text as it is, the suffix encoder only
      what is given (Eq. 7).
    - `ac`: p(x_t | x_C). Both encoders read only what is given (Eq. 8).
    - `ar`: p(x_t | x_<t). No suffix keys at all, so not even the length is known.

    `tokens` is (B, T) integers, `context` (B, T) bool, True where given; `lengths` (B,) where
    sequences are padded on the right. What stands in the padding is never looked at.
    """

    config: TracformerConfig
    config_class = TracformerConfig
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012
    limits = {"ar": "does not see what follows a hole"}  # noqa: RUF012
    packed_embedding: Packed | None = None  # of a lean model

    def __init__(self, config: TracformerConfig, attention: str = "native") -> None:
        super().__init__()
        self.config = config
        self.attention = build_attention(attention)
        # the last row is the mask
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        layers = range(1, config.n_layer + 1)
        self.encoder = nn.ModuleList(EncoderLayer(config, layer) for layer in layers)
        self.decoder = nn.ModuleList(DecoderLayer(config, layer) for layer in layers)
        self.norm = nn.LayerNorm(config.d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's: normal(init_std); projections back into the residual stream shrink with the
        number of branches, 2 per layer.
        """
        std = self.config.init_std
        initialise(self, std, branches=2 * self.config.n_layer)
        # A target without any key would stay zero through every norm, and each would multiply its
        # gradient by 1/sqrt(eps). Drawn last.
        nn.init.normal_(self.get_parameter("decoder.0.out.bias"), std=std)

    @property
    def head(self) -> Tensor:
        """(vocab_size, d): the output head is the embedding, less the mask, which is
        never predicted.
        """
        return self.embedding.weight[: self.config.vocab_size]

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder, *self.decoder]

    def embedding_tables(self) -> list[Tensor]:
        return [self.embedding.weight]

    def lean(self, kind: str) -> Self:
        if kind != self.weights:
            self._check_lean(kind)
            layers = [module for module in self.modules() if isinstance(module, Linear)]
            self.packed_embedding, *packed = round_weights(
                [self.embedding.weight, *(layer.weight for layer in layers)], kind
            )
            for layer, stored in zip(layers, packed, strict=True):
                layer.packed = stored
            self.weights = kind
        return self

    def empty_cache(self, mode: str, rows: int, length: int) -> Cache | None:
        """For `car` and `ar`, which go from left to right; the caller holds it."""
        return Cache(self, mode, rows, length) if mode != "ac" else None

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        rows = wanted.flatten().nonzero()[:, 0]
        layout = Layout(batch.lengths, batch.width, readings=1 if mode == "ar" else 2, rows=rows)
        angles = rotary_angles(
            layout.positions,
            self.config.head_size,
            self.config.rotary_base,
            self.embedding.weight.dtype,
        )
        readings = self._readings(batch, mode, layout)
        features = (
            self._encode(readings, angles, layout)
            if self.training
            else self._encode_once(readings, angles, layout)
        )
        return self._decode(features, angles, layout), rows

    def _readings(self, batch: Batch, mode: str, layout: Layout) -> Tensor:
        """(readings * B, T) what the encoders read: the prefix encoder's input, then the suffix
        encoder's, mirrored.
        """
        tokens = batch.tokens.masked_fill(~batch.inside(), self.config.mask_id)
        if mode == "ar":
            return tokens
        given = tokens.masked_fill(~batch.context, self.config.mask_id)
        return torch.cat((given if mode == "ac" else tokens, given.gather(1, layout.mirror)))

    def _encode(self, readings: Tensor, angles: Angles, layout: Layout) -> list[Tensor]:
        """Features of layers 1..L, each (readings * B, T, d)."""
        x = self.dropout(self.embedding(readings))
        features = []
        for layer in self.encoder:
            x = self._run(layer, x, angles, layout, self.attention)
            features.append(x)
        return features

    def _encode_once(self, readings: Tensor, angles: Angles, layout: Layout) -> list[Tensor]:
        """`_encode`, where a row that reads forwards what the row before it reads takes over its
        features.

        Several contexts of one sequence, side by side in a batch, so share the prefix encoding of
        mode `car` and all of mode `ar`.
        """
        B, forwards = layout.batch, readings[: layout.batch]
        new = torch.ones(len(readings), dtype=torch.bool, device=readings.device)
        new[1:B] = (forwards[1:] != forwards[:-1]).any(1) | (
            layout.lengths[1:] != layout.lengths[:-1]
        )
        if new.all():
            return self._encode(readings, angles, layout)
        # Rows of both readings look back alone, so one reading of more rows says the same.
        rows = Layout(
            layout.lengths.repeat(layout.readings)[new], layout.length, readings=1, rows=layout.rows
        )
        features = self._encode(readings[new], Angles(angles.cos[new], angles.sin[new]), rows)
        source = new.cumsum(0) - 1
        return [feature[source] for feature in features]

    def _run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        if self.checkpoint_activations and self.training:
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)

    def _decode(self, features: list[Tensor], angles: Angles, layout: Layout) -> Tensor:
        query_angles = angles.at(layout.rows)  # forward rows come first, so text rows index them
        x = features[0].new_zeros(len(layout.rows), self.config.d_model)
        for number, layer in enumerate(self.decoder, start=1):
            feature = features[paired_encoder_layer(number, self.config.n_layer) - 1]
            x = self._run(layer, x, feature, query_angles, angles, layout, self.attention)
        return self.norm(x)
