"""BART, BERT and BERT-bidir with today's blocks, to compare with the published networks.

All three differ from the published systems in the same way: pre-norm blocks and a final norm before
the tied head, rotary positions in self- and cross-attention instead of a learned table, a softmax
in float32, no GELU before the head. BERT-bidir reads its two features at t-1 and t+1, so that a
target does not spend them on its own mask.

With `neighbours=1` the first layer of each stack reads only the neighbours of its position: in an
encoder t-1 and t+1; in BART's decoder, whose row for t holds x_{t-1}, that row itself and the
encoder's features at t-1 and t+1. It shows the network its neighbours, which it otherwise has to
learn to find.

`ModernConfig` and `ModernModel` are also the base of the later systems (`given_first.py`,
`as_arm.py`, `sigma_gpt.py`, `aligned.py`).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tracformer.baselines.transformer import (
    DenseModel,
    attend,
    attend_at,
    pick,
    shifted_right,
    size_presets,
)
from tracformer.model.base import EXACT, MARGINAL
from tracformer.model.batch import Batch
from tracformer.model.blocks import (
    Angles,
    Block,
    Read,
    initialise,
    rotary_angles,
    run_blocks,
    split_heads,
)
from tracformer.model.config import ModelConfig
from tracformer.model.fast_step import Linear


@dataclass(frozen=True)
class ModernConfig(ModelConfig):
    """Shape of a stack of `Block`s."""

    n_layer: int = 12
    n_head: int = 12
    d_model: int = 768
    dropout: float = 0.0  # on embeddings and residual branches, never inside attention
    rotary_base: float = 10000.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("n_layer", "n_head", "d_model")
        if self.d_model % self.n_head or (self.d_model // self.n_head) % 2:
            raise ValueError(
                f"d_model is {self.d_model} and n_head {self.n_head}; d_model must be n_head times "
                "an even head size"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout!r}; it must lie in [0, 1)")
        for field in ("rotary_base", "init_std"):
            if not getattr(self, field) > 0.0:
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be positive")

    @property
    def head_size(self) -> int:
        """The width of an attention head."""
        return self.d_model // self.n_head

    def check_neighbours(self, value: int, layers: int) -> None:
        """Raise a ValueError unless `value` is a number of layers in 0..`layers`."""
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= layers:
            raise ValueError(
                f"neighbours is {value!r}; it must be a number of layers in 0..{layers}"
            )


class ModernModel(DenseModel):
    """Base of models made of `Block`s: one embedding, which is also the head, and a final norm."""

    config: ModernConfig
    extra_rows: ClassVar[int] = 1  # rows of the embedding after the vocabulary, the mask first

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size + self.extra_rows, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.d_model)

    def stack(self, layers: int) -> nn.ModuleList:
        """Return `layers` blocks of the configured shape."""
        config = self.config
        return nn.ModuleList(
            Block(config.d_model, config.n_head, config.dropout) for _ in range(layers)
        )

    @property
    def head(self) -> Tensor:
        return self.embedding.weight[: self.config.vocab_size]

    def embedding_tables(self) -> list[Tensor]:
        return [self.embedding.weight]

    def angles(self, positions: Tensor) -> Angles:
        """Return the rotary angles of positions (...)."""
        return rotary_angles(
            positions, self.config.head_size, self.config.rotary_base, self.embedding.weight.dtype
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids, with dropout."""
        embedded: Tensor = self.dropout(self.embedding(ids))
        return embedded

    @property
    def recompute(self) -> bool:
        """Whether to recompute blocks in the backward pass."""
        return self.checkpoint_activations and self.training


def next_to(lengths: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the indices (B, T, 2) of t-1 and t+1 for each position t, and which of them exist."""
    t = torch.arange(length, device=lengths.device)
    index = torch.stack((t - 1, t + 1), dim=1).expand(len(lengths), -1, -1)
    return index.clamp(0, length - 1), (index >= 0) & (index < lengths[:, None, None])


def two_sided(lengths: Tensor, length: int, neighbours: int) -> Read:
    """Return a read function in which every position reads all others.

    In the first `neighbours` layers a position reads only those next to it.
    """
    inside = torch.arange(length, device=lengths.device) < lengths[:, None]
    mask = None if bool(inside.all()) else inside[:, None]  # (B, 1, T)
    near = next_to(lengths, length)

    def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_at(q, k, v, *near) if layer < neighbours else attend(q, k, v, mask)

    return read


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return (1, T, T) bool: each position reads itself and those before it."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).tril()


# ---- BERT


@dataclass(frozen=True)
class BertModernConfig(ModernConfig):
    """Shape of a `BertModern`."""

    model_type = "bert-modern"
    possible_modes = ("ac",)
    presets = size_presets((10, 12, 768), (7, 4, 128, 0.05), (8, 3, 144, 0.05), (9, 4, 256, 0.04))

    n_layer: int = 10
    neighbours: int = 0  # first layers that read only t-1 and t+1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_neighbours(self.neighbours, self.n_layer)


class BertModern(ModernModel):
    """A bidirectional encoder reads the text with every target as the mask: p(x_t | x_C)."""

    config: BertModernConfig
    config_class = BertModernConfig
    answers = {"ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: BertModernConfig) -> None:
        super().__init__(config)
        self.layers = self.stack(config.n_layer)
        initialise(self, config.init_std, branches=2 * config.n_layer)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        T = batch.width
        x = self.embed(batch.tokens.masked_fill(~batch.context, self.config.mask_id))
        angles = self.angles(torch.arange(T, device=batch.device))
        read = two_sided(batch.lengths, T, self.config.neighbours)
        return self.norm(
            pick(run_blocks(self.layers, x, angles, read, recompute=self.recompute), wanted)
        )


# ---- BART


@dataclass(frozen=True)
class BartModernConfig(ModernConfig):
    """Shape of a `BartModern`."""

    model_type = "bart-modern"
    possible_modes = ("car",)
    presets = size_presets((8, 9, 576), (6, 3, 96, 0.06), (8, 3, 96, 0.06), (7, 3, 192, 0.04))

    n_layer: int = 8  # encoder layers, and as many decoder layers
    n_head: int = 9
    d_model: int = 576
    neighbours: int = 0  # first layers of each stack that read only the neighbours

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_neighbours(self.neighbours, self.n_layer)


class CrossBlock(Block):
    """A decoder block: causal self-attention, attention to the encoder, feed-forward."""

    def __init__(self, d_model: int, n_head: int, dropout: float) -> None:
        super().__init__(d_model, n_head, dropout)
        self.norm_cross = nn.LayerNorm(d_model)
        self.cross_q = Linear(d_model, d_model)
        self.cross_kv = Linear(d_model, 2 * d_model)
        self.cross_out = Linear(d_model, d_model)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        angles: Angles,
        near: tuple[Tensor, Tensor] | None,
        inside: Tensor,
    ) -> Tensor:
        """Return decoder states (B, T, d).

        Args:
            x: Decoder states (B, T, d).
            memory: Encoder features (B, T, d).
            angles: Rotary angles.
            near: Keys of a neighbours layer, else None.
            inside: (B, 1, T) bool, False in the padding of `memory`.
        """
        q, k, v = self.project(x, angles)
        mixed = v if near is not None else attend(q, k, v, causal_mask(x.shape[1], x.device))
        x = x + self.dropout(self.out(mixed.flatten(-2)))
        (q,) = split_heads(self.cross_q(self.norm_cross(x)), angles, self.n_head)
        k, v = split_heads(self.cross_kv(memory), angles, self.n_head, parts=2, turned=1)
        mixed = attend(q, k, v, inside) if near is None else attend_at(q, k, v, *near)
        x = x + self.dropout(self.cross_out(mixed.flatten(-2)))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))


class BartModern(ModernModel):
    """A bidirectional encoder and a causal decoder: p(x_t | x_C, x_<t).

    The encoder reads the given tokens. The decoder's row for t holds x_{t-1} at position
    t; its first row holds the mask.
    """

    config: BartModernConfig
    config_class = BartModernConfig
    answers = {"car": EXACT}  # noqa: RUF012

    def __init__(self, config: BartModernConfig) -> None:
        super().__init__(config)
        self.encoder = self.stack(config.n_layer)
        self.norm_memory = nn.LayerNorm(config.d_model)
        self.decoder = nn.ModuleList(
            CrossBlock(config.d_model, config.n_head, config.dropout) for _ in range(config.n_layer)
        )
        initialise(self, config.init_std, branches=3 * config.n_layer)

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder, *self.decoder]

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        T = batch.width
        angles = self.angles(torch.arange(T, device=batch.device))
        memory = self.embed(batch.tokens.masked_fill(~batch.context, self.config.mask_id))
        read = two_sided(batch.lengths, T, self.config.neighbours)
        memory = self.norm_memory(
            run_blocks(self.encoder, memory, angles, read, recompute=self.recompute)
        )
        near, inside = next_to(batch.lengths, T), batch.inside()[:, None]
        x = self.embed(shifted_right(batch.tokens, self.config.mask_id))
        for number, block in enumerate(self.decoder):
            inputs = (x, memory, angles, near if number < self.config.neighbours else None, inside)
            x = (
                checkpoint(block, *inputs, use_reentrant=False)
                if self.recompute
                else block(*inputs)
            )
        return self.norm(pick(x, wanted))


# ---- BERT-bidir


@dataclass(frozen=True)
class BertBidirModernConfig(ModernConfig):
    """Shape of a `BertBidirModern`."""

    model_type = "bert-bidir-modern"
    possible_modes = ("ac",)
    presets = size_presets((12, 12, 768), (6, 4, 128, 0.05), (7, 3, 144, 0.05), (8, 4, 256, 0.04))


class BertBidirModern(ModernModel):
    """A causal and a reverse-causal pass with shared weights, joined by an MLP: p(x_t | x_C).

        state = LN(W2 GELU(W1 [f_{t-1}; b_{t+1}])),  f of x_1 .. x_{t-1}, b of x_T .. x_{t+1},
            targets read as masks

    A feature beyond the ends of the text is zero.
    """

    config: BertBidirModernConfig
    config_class = BertBidirModernConfig
    answers = {"ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: BertBidirModernConfig) -> None:
        super().__init__(config)
        d = config.d_model
        self.layers = self.stack(config.n_layer)
        self.norm_feature = nn.LayerNorm(d)
        self.join = nn.Sequential(Linear(2 * d, 4 * d), nn.GELU(), Linear(4 * d, d))
        initialise(self, config.init_std, branches=2 * config.n_layer)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        B, T = batch.tokens.shape
        given = batch.tokens.masked_fill(~batch.context, self.config.mask_id)
        t = torch.arange(T, device=batch.device)
        # its own inverse; padding stays on the right
        mirror = torch.where(t < batch.lengths[:, None], batch.lengths[:, None] - 1 - t, t)
        x = self.embed(torch.cat((given, given.gather(1, mirror))))
        mask = causal_mask(T, batch.device)

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask)

        angles = self.angles(torch.cat((t.expand(B, -1), mirror)))
        features = self.norm_feature(
            run_blocks(self.layers, x, angles, read, recompute=self.recompute)
        )
        # column 0: nothing; the feature at slot s is in column s + 1
        features = nn.functional.pad(features, (0, 0, 1, 0))
        row, position = wanted.nonzero(as_tuple=True)
        before, after = features[row, position], features[B + row, mirror[row, position]]
        return self.norm(self.join(torch.cat((before, after), dim=1)))
