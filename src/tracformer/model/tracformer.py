"""The Tracformer network: multi-scope encoders, and a decoder that reads only encoder features.

- `EncoderLayer` (section 4.1 of the paper): layer l's feature at t depends on exactly the 2^l
  inputs that end at t, in reading order. A prefix encoder reads the text forwards and a suffix
  encoder reads it mirrored; they share their weights and run as one batch.
- `DecoderLayer` (section 4.2): cross-attention only, coarse scopes first. Each layer reads features
  whose scopes tile the whole prefix and the whole suffix. No decoder position reads another one, so
  the decoder runs on the wanted positions alone.
- `Tracformer`: the model, with its three modes.
- `Needed`: the features on which a few targets depend. Without gradients, only these are computed.

Key positions are in `geometry`, the attention itself in `attention`, generation with a cache in
`model.cache`.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad
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

NEEDED = 0.75  # share of features; if more are needed, all are computed


class EncoderLayer(Block):
    """A block whose queries read keys at a few distances before them."""

    def __init__(self, config: TracformerConfig, layer: int) -> None:
        super().__init__(config.d_model, config.n_head, config.dropout)
        self.offsets = (
            None
            if config.encoder == "full"
            else encoder_offsets(layer, config.n_max, config.key_set)
        )

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        angles: Angles,
        layout: Layout,
        attention: Attention,
        slots: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's features (readings * B, T, d) from those of the layer below.

        Args:
            x: (readings * B, T, d) features of the layer below; (N, d) if only some are computed.
            angles: Their rotary angles.
            layout: Lengths and readings of the batch.
            attention: Implementation to use.
            slots: (N,) places of x, as flat indices into (readings * B, T); None: it has all.
            wanted: (N,) bool, True for those whose features (M, d) are returned.
        """
        q, k, v = self.project(x, angles)
        if slots is None:
            return self.finish(x, attention.encode(q, k, v, self.offsets, layout))
        q, k, v = (spread(each, slots, layout) for each in (q, k, v))
        mixed = attention.encode(q, k, v, self.offsets, layout)
        return self.finish(x[wanted], mixed.flatten(0, 1)[slots[wanted]])


class DecoderLayer(nn.Module):
    """Cross-attention to the features of one encoder layer, and a feed-forward network."""

    def __init__(self, config: TracformerConfig, layer: int) -> None:
        super().__init__()
        d = config.d_model
        self.n_head = config.n_head
        # The stride of layer 1 is at least the text's length: its only keys are t-1 and t+1.
        strided = config.decoder == "strided" or (config.decoder == "neighbours" and layer == 1)
        self.stride = decoder_stride(layer, config.n_layer) if strided else 1
        self.norm_query = nn.LayerNorm(d)
        self.norm_feature = nn.LayerNorm(d)
        self.q = Linear(d, d)
        # separate projections make keys and values contiguous, so that residue classes are views
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
        slots: Tensor | None = None,
    ) -> Tensor:
        """Return new decoder states (N, d).

        Args:
            x: (N, d) states of the positions `layout.rows`.
            feature: (readings * B, T, d) features of the paired encoder layer; (M, d) if only some
                were computed.
            query_angles: Rotary angles of the rows.
            key_angles: Rotary angles of the features.
            layout: Lengths and readings of the batch.
            attention: Implementation to use.
            slots: (M,) places of the features, as flat indices; None: there are all.
        """
        k, v = self.keys(feature, key_angles)  # (rows, T, H, D)
        if slots is not None:
            k, v = spread(k, slots, layout), spread(v, slots, layout)
        return self.finish(
            x, attention.decode(self.query(x, query_angles), k, v, self.stride, layout)
        )

    def query(self, x: Tensor, angles: Angles) -> Tensor:
        """Return queries (..., H, D) of decoder states x (..., d)."""
        [q] = split_heads(self.q(self.norm_query(x)), angles, self.n_head)
        return q

    def keys(self, feature: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return keys and values (..., H, D) of the paired encoder layer's features (..., d)."""
        feature = self.norm_feature(feature)
        [k] = split_heads(self.k(feature), angles, self.n_head)
        [v] = split_heads(self.v(feature), angles, self.n_head, turned=0)
        return k, v

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output from its attention result `mixed` (..., H, D)."""
        x = x + self.dropout(self.out(mixed.flatten(-2)))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))


class Needed(NamedTuple):
    """The slots (readings * B, T) on which the predictions of some rows depend, as flags.

    Attributes:
        features: For the embedding and each encoder layer, the features that are needed.
        keys: For each encoder layer, those of them that the decoder reads.
    """

    features: list[Tensor]
    keys: list[Tensor]

    @property
    def share(self) -> float:
        """Return the share of the features that are needed."""
        return float(torch.stack(self.features).float().mean())


def spread(x: Tensor, slots: Tensor, layout: Layout) -> Tensor:
    """Return x (N, ...) at flat slots of (readings * B, T, ...), and zero at all others."""
    shape = (layout.readings * layout.batch, layout.length)
    return (
        x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy_(0, slots, x).unflatten(0, shape)
    )


def before(slots: Tensor, distance: int) -> Tensor:
    """Return flags (B, T) of the slots at a distance before the given ones."""
    return pad(slots[:, distance:], (0, distance))


def every(slots: Tensor, stride: int) -> Tensor:
    """Return flags (B, T) of the given slots, and of every stride-th slot before each of them."""
    while stride < slots.shape[1]:
        slots = slots | before(slots, stride)
        stride *= 2
    return slots


class Columns(nn.Module):
    """What a model learns for each column of an alignment, beside what all columns share.

    Without it, positions are known only relative to each other, and the decoder's input is zero: a
    target does not know which column it is.
    """

    def __init__(self, config: TracformerConfig) -> None:
        super().__init__()
        T, V, d = config.max_length, config.vocab_size, config.d_model
        self.letters = nn.Embedding(T * (V + 1), d)  # the encoders' input: each letter, the mask
        self.queries = nn.Embedding(T, d)  # the decoder's input
        self.head = nn.Parameter(torch.zeros(T * V, d))  # output matrix of each column
        self.bias = nn.Parameter(torch.zeros(T * V))  # flat like other biases: it is not decayed

    def tables(self) -> list[Tensor]:
        """Return the tables with a row for each column."""
        return [self.letters.weight, self.queries.weight, self.head]

    def logits(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the columns' part of the logits (N, V) from states (N, d) at positions (N,)."""
        T = self.queries.num_embeddings
        head, bias = self.head.unflatten(0, (T, -1)), self.bias.unflatten(0, (T, -1))
        return torch.einsum("nd,nvd->nv", x, head[positions]) + bias[positions]


class Tracformer(ConditionalModel):
    """A model of any subset of tokens given any other, in three modes with one set of weights.

    For a target t and the set C of given tokens:

    - `car`: p(x_t | x_C, x_<t). The prefix encoder reads all tokens, the suffix encoder only the
      given ones (Eq. 7). The product over targets is the exact joint.
    - `ac`: p(x_t | x_C). Both encoders read only the given tokens (Eq. 8).
    - `ar`: p(x_t | x_<t). There are no suffix keys, so not even the length is known.

    Args:
        config: Sizes and switches of the network.
        attention: Name of the attention implementation, see `attention.implementations`.

    Example:
        >>> import torch
        >>> from tracformer import Batch, Tracformer, TracformerConfig
        >>> model = Tracformer(TracformerConfig.preset("tiny")).eval()
        >>> batch = Batch(torch.tensor([[7, 8, 9]]), torch.tensor([[True, False, True]]))
        >>> model.log_prob(batch, mode="car").shape  # zero at the two given tokens
        torch.Size([1, 3])
    """

    config: TracformerConfig
    config_class = TracformerConfig
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012
    limits = {"ar": "does not see the text after a blank"}  # noqa: RUF012
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
        if config.columns:
            self.columns = Columns(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as GPT-2 does (`blocks.initialise`), with 2 branches per layer."""
        std = self.config.init_std
        initialise(self, std, branches=2 * self.config.n_layer)
        # With a zero bias, a target without any key would stay zero through every norm, and each
        # norm would multiply its gradient by 1/sqrt(eps). Drawn last, so that other weights of a
        # seed stay the same.
        nn.init.normal_(self.get_parameter("decoder.0.out.bias"), std=std)

    @torch.no_grad()
    def start_columns(self, shares: Tensor) -> None:
        """Set the bias of each column to the logarithm of its shares of tokens (T, vocab_size)."""
        self.columns.bias.copy_(shares.log().flatten())

    @property
    def head(self) -> Tensor:
        """The output matrix (vocab_size, d): the embedding without the mask.

        With `columns` it is the identity (vocab_size, vocab_size): every column has its own output
        matrix, so the final states are logits already.
        """
        tokens = self.embedding.weight[: self.config.vocab_size]
        return torch.eye(len(tokens)).to(tokens) if self.config.columns else tokens

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder, *self.decoder]

    def embedding_tables(self) -> list[Tensor]:
        tables = [self.embedding.weight]
        return [*tables, *self.columns.tables()] if self.config.columns else tables

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
        """Return a cache for `car` and `ar`, which generate from left to right; None for `ac`."""
        return Cache(self, mode, rows, length) if mode != "ac" else None

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        x, rows = self.states(batch, mode, wanted)
        return self.final(x, rows % batch.width), rows

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decoder's states (N, d) where `wanted`, and their flat indices (N,)."""
        rows = wanted.flatten().nonzero()[:, 0]
        layout = Layout(batch.lengths, batch.width, readings=1 if mode == "ar" else 2, rows=rows)
        angles = rotary_angles(
            layout.positions,
            self.config.head_size,
            self.config.rotary_base,
            self.embedding.weight.dtype,
        )
        readings = self._readings(batch, mode, layout)
        if not (self.training or torch.is_grad_enabled() or 4 * len(rows) > readings.numel()):
            needed = self.needed(layout)
            if needed.share < NEEDED:
                features, slots = self._encode_needed(readings, angles, layout, needed)
                return self._decode(features, angles, layout, slots), rows
        features = (
            self._encode(readings, angles, layout)
            if self.training
            else self._encode_once(readings, angles, layout)
        )
        return self._decode(features, angles, layout), rows

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the encoders' input (..., d) of token ids that stand at these positions."""
        x: Tensor = self.embedding(tokens)
        if self.config.columns:
            x = x + self.columns.letters(positions * (self.config.vocab_size + 1) + tokens)
        return x

    def queries(self, positions: Tensor) -> Tensor:
        """Return the decoder's input (N, d) at positions (N,): zero, but for `columns`."""
        if self.config.columns:
            x: Tensor = self.columns.queries(positions)
            return x
        return self.embedding.weight.new_zeros(len(positions), self.config.d_model)

    def final(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return what `head` is applied to, from the decoder's states (N, d) at positions (N,)."""
        if not self.config.columns:
            return x
        shared = torch_linear(x, self.embedding.weight[: self.config.vocab_size])
        return shared + self.columns.logits(x, positions)

    def needed(self, layout: Layout) -> Needed:
        """Return the slots on which the rows of a layout depend, by the geometry of all layers."""
        slots = layout.query_slots
        queries = torch.zeros_like(layout.positions, dtype=torch.bool)
        queries.view(-1)[slots[slots >= 0]] = True
        everything = every(queries, 1)
        decoder: list[Any] = [*self.decoder]
        keys = [every(queries, layer.stride) for layer in reversed(decoder)]  # by encoder layer
        features = [keys[-1]]
        encoder: list[Any] = [*self.encoder]
        for number in range(len(encoder) - 1, -1, -1):
            above, offsets = features[-1], encoder[number].offsets
            if offsets is None or above.equal(everything):
                below = everything  # and so on all layers below
            else:
                below = above | keys[number - 1] if number else above
                for offset in offsets[1:]:
                    if offset < layout.length:
                        below = below | before(above, offset)
            features.append(below)
        return Needed(features[::-1], keys)

    def _encode_needed(
        self, readings: Tensor, angles: Angles, layout: Layout, needed: Needed
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the features of layers 1..L that the decoder reads, (M, d), and their slots."""
        flags = [each.flatten() for each in needed.features]
        slots = flags[0].nonzero()[:, 0]
        x = self.embed(readings.flatten()[slots], layout.positions.flatten()[slots])
        features, places = [], []
        for layer, above, keys in zip(self.encoder, flags[1:], needed.keys, strict=True):
            wanted = above[slots]
            x = self._run(layer, x, angles.at(slots), layout, self.attention, slots, wanted)
            slots = slots[wanted]
            read = keys.flatten()[slots]
            features.append(x[read])
            places.append(slots[read])
        return features, places

    def _readings(self, batch: Batch, mode: str, layout: Layout) -> Tensor:
        """Return the encoders' inputs (readings * B, T): forwards, then mirrored for the suffix."""
        tokens = batch.tokens.masked_fill(~batch.inside(), self.config.mask_id)
        if mode == "ar":
            return tokens
        given = tokens.masked_fill(~batch.context, self.config.mask_id)
        return torch.cat((given if mode == "ac" else tokens, given.gather(1, layout.mirror)))

    def _encode(
        self, readings: Tensor, angles: Angles, layout: Layout, positions: Tensor | None = None
    ) -> list[Tensor]:
        """Return the features of layers 1..L, each (readings * B, T, d).

        `positions` of the readings are those of the layout, if they are not given.
        """
        x = self.embed(readings, layout.positions if positions is None else positions)
        x = self.dropout(x)
        features = []
        for layer in self.encoder:
            x = self._run(layer, x, angles, layout, self.attention)
            features.append(x)
        return features

    def _encode_once(self, readings: Tensor, angles: Angles, layout: Layout) -> list[Tensor]:
        """Return what `_encode` returns, but encode equal neighbouring forward rows only once.

        When a batch holds one sequence under several contexts side by side, these rows share their
        prefix features in mode `car`, and all features in mode `ar`.
        """
        B, forwards = layout.batch, readings[: layout.batch]
        new = torch.ones(len(readings), dtype=torch.bool, device=readings.device)
        new[1:B] = (forwards[1:] != forwards[:-1]).any(1) | (
            layout.lengths[1:] != layout.lengths[:-1]
        )
        if new.all():
            return self._encode(readings, angles, layout)
        # Rows of both readings read only earlier slots, so they can run as rows of one reading.
        rows = Layout(
            layout.lengths.repeat(layout.readings)[new], layout.length, readings=1, rows=layout.rows
        )
        turned = Angles(angles.cos[new], angles.sin[new])
        features = self._encode(readings[new], turned, rows, layout.positions[new])
        source = new.cumsum(0) - 1
        return [feature[source] for feature in features]

    def _run(self, layer: nn.Module, *inputs: Any) -> Tensor:
        if self.checkpoint_activations and self.training:
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)

    def _decode(
        self,
        features: list[Tensor],
        angles: Angles,
        layout: Layout,
        slots: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the decoder's states (N, d) from features, of all slots or of some."""
        query_angles = angles.at(layout.rows)  # the first B rows of angles are the text's
        x = self.queries(layout.rows % layout.length).to(features[0].dtype)
        for number, layer in enumerate(self.decoder, start=1):
            paired = paired_encoder_layer(number, self.config.n_layer) - 1
            places = None if slots is None else slots[paired]
            key_angles = angles if places is None else angles.at(places)
            x = self._run(
                layer, x, features[paired], query_angles, key_angles, layout, self.attention, places
            )
        return self.norm(x)
