"""The aligned model: a bidirectional encoder added to a causal decoder, without cross-attention.

    e_t   the encoder's feature at t, of the text with masks at the targets
    input of the decoder's row for t:  emb(x_{t-1}) + W LN(e_t)

The encoder reads only the given tokens, so it runs once per text; the decoder is a plain causal
transformer, and only it runs for each generated token. Row t of the decoder gives p(x_t | x_C,
x_<t), and the chain rule gives the exact joint.

- `ar`: one feature for all rows, computed from masks alone.
- `ac`: predecessors that are targets are replaced by masks, so that each target is predicted from
  the given tokens alone.

In the encoder's first layers (`neighbours`, 1 by default) the query at t reads only t-1 and t+1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tracformer.baselines.modern import (
    ModernConfig,
    ModernModel,
    causal_mask,
    two_sided,
)
from tracformer.baselines.row_cache import RowCache, compressed
from tracformer.baselines.transformer import attend, pick, shifted_right, size_presets
from tracformer.model.base import EXACT, MARGINAL
from tracformer.model.batch import Batch
from tracformer.model.blocks import initialise, run_blocks
from tracformer.model.fast_step import Linear

PRESETS = size_presets((7, 12, 768), (4, 4, 128, 0.05), (5, 3, 144, 0.05), (5, 4, 256, 0.04))
for _name, _layers in (("paper", 5), ("tiny", 3), ("mini", 3), ("laptop", 4)):
    PRESETS[_name]["n_encoder"] = _layers


@dataclass(frozen=True)
class AlignedConfig(ModernConfig):
    """Shape of an `Aligned` model."""

    model_type = "aligned"
    possible_modes = ("car", "ac", "ar")
    presets = PRESETS

    n_encoder: int = 5  # encoder layers
    n_layer: int = 7  # decoder layers
    neighbours: int = 1  # first layers of the encoder that read only t-1 and t+1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("n_encoder")
        self.check_neighbours(self.neighbours, self.n_encoder)


class Aligned(ModernModel):
    """Bidirectional encoder and causal decoder, joined at each position."""

    config: AlignedConfig
    config_class = AlignedConfig
    extra_rows = 2  # the mask, and the start token
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012
    limits = {"ar": "does not see the text after a blank"}  # noqa: RUF012

    def __init__(self, config: AlignedConfig) -> None:
        super().__init__(config)
        self.encoder = self.stack(config.n_encoder)
        self.norm_feature = nn.LayerNorm(config.d_model)
        self.join = Linear(config.d_model, config.d_model)
        self.layers = self.stack(config.n_layer)  # the decoder
        initialise(self, config.init_std, branches=2 * (config.n_encoder + config.n_layer))

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder, *self.layers]

    @property
    def start_id(self) -> int:
        """The id of the start token, after the mask."""
        return self.config.vocab_size + 1

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        T = batch.width
        given = batch.tokens.masked_fill(~batch.context, self.config.mask_id)
        x = self.embed(shifted_right(given if mode == "ac" else batch.tokens, self.start_id))
        x = x + (self.nothing() if mode == "ar" else self.features(given, batch.lengths))
        mask = causal_mask(T, batch.device)

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask)

        angles = self.angles(torch.arange(T, device=batch.device))
        return self.norm(
            pick(run_blocks(self.layers, x, angles, read, recompute=self.recompute), wanted)
        )

    def features(self, given: Tensor, lengths: Tensor) -> Tensor:
        """Return W LN(e_t) (B, T, d) for ids `given` (B, T) that hold masks at the targets."""
        T = given.shape[1]
        angles = self.angles(torch.arange(T, device=given.device))
        read = two_sided(lengths, T, self.config.neighbours)
        encoded = run_blocks(
            self.encoder, self.embed(given), angles, read, recompute=self.recompute
        )
        joined: Tensor = self.join(self.norm_feature(encoded))
        return joined

    def nothing(self) -> Tensor:
        """Return the feature (d,) used in mode `ar`: that of a mask between two masks.

        It depends neither on the text nor on its length.
        """
        masks = torch.full((1, 3), self.config.mask_id, device=self.embedding.weight.device)
        return self.features(masks, torch.tensor([3], device=masks.device))[0, 1]

    def empty_cache(self, mode: str, rows: int, length: int) -> "AlignedCache | None":
        return AlignedCache(self, mode, rows, length) if mode != "ac" else None


class AlignedCache(RowCache):
    """The encoder's features, and keys and values of the decoder's rows.

    Slot t belongs to the row that predicts token t.
    """

    model: Aligned
    feature: Tensor  # (rows, length, d)

    def slots_for(self, length: int) -> int:
        return length

    def row_state(self, rows: int, length: int, weight: Tensor) -> dict[str, Tensor]:
        return {
            "feature": weight.new_zeros(rows, length if self.mode == "car" else 0, weight.shape[1])
        }

    def read_given(self, rows: Tensor, batch: Batch) -> None:
        if self.mode == "car":
            given = batch.tokens.masked_fill(batch.targets(), self.model.config.mask_id)
            self.feature[rows, : batch.width] = self.model.features(given, batch.lengths)

    def states(self, rows: Tensor, positions: Tensor) -> Tensor:
        row, t, answers = self.pending(
            rows, positions, torch.ones_like(self.tokens, dtype=torch.bool)
        )
        ids = torch.where(t > 0, self.tokens[row, (t - 1).clamp(min=0)], self.model.start_id)
        x = self.model.embed(ids) + (
            self.feature[row, t] if self.mode == "car" else self.model.nothing()
        )
        index, present = compressed(torch.arange(self.length, device=t.device) <= t[:, None])
        flat = row * self.slots + t

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.layers[layer].write(flat, k[0], v[0])
            return self.attend(layer, q, row, index, present)

        x = run_blocks(self.model.layers, x[None], self.model.angles(t[None]), read)[0]
        return self.model.norm(x[answers])
