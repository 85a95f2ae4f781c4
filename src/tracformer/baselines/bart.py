"""BART: a bidirectional encoder over the given tokens, and a left-to-right decoder over the text.

The encoder reads every target as the mask. The decoder reads the true text shifted right by one and
attends to the encoder, which gives p(x_t | x_C, x_<t); the chain rule gives the exact joint of the
targets. The mask is also the decoder's first input, where it cannot be confused with a target. The
network is `BartModel` of `transformers`; one table embeds the input of both halves. With
`norm="pre"` it is `MBartModel`.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from tracformer.baselines.transformer import (
    TransformerConfig,
    TransformersModel,
    check_norm,
    pick,
    shifted_right,
    size_presets,
    start_positions,
    transformers_for,
)
from tracformer.model.base import EXACT
from tracformer.model.batch import Batch

PRESETS = size_presets((8, 9, 576), (6, 3, 96, 0.06), (8, 3, 96, 0.06), (7, 3, 192, 0.04))
PRESETS["paper"]["d_feedforward"] = 4096


@dataclass(frozen=True)
class BartConfig(TransformerConfig):
    """Shape of a `Bart`."""

    model_type = "bart"
    possible_modes = ("car",)
    presets = PRESETS

    n_layer: int = 8  # encoder layers, and as many decoder layers
    n_head: int = 9
    d_model: int = 576
    # Width of the feed-forward layers; 0: 4 d_model. The paper's 138M parameters imply BART's own
    # 4096.
    d_feedforward: int = 0
    tied: bool = True  # whether the head is the embedding
    norm: str = "post"  # "pre": as in mBART

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.norm)
        if not isinstance(self.d_feedforward, int) or self.d_feedforward < 0:
            raise ValueError(
                f"d_feedforward is {self.d_feedforward!r}; it must be a positive integer, or 0 for "
                "4 d_model"
            )


class Bart(TransformersModel):
    """BART as published: p(x_t | x_C, x_<t)."""

    config: BartConfig
    config_class = BartConfig
    answers = {"car": EXACT}  # noqa: RUF012

    def __init__(self, config: BartConfig) -> None:
        super().__init__()
        self.config = config
        transformers = transformers_for("bart")
        network, shape = (
            (transformers.MBartModel, transformers.MBartConfig)
            if config.norm == "pre"
            else (transformers.BartModel, transformers.BartConfig)
        )
        self.network = network(
            shape(
                vocab_size=config.vocab_size + 1,
                max_position_embeddings=config.max_length,
                d_model=config.d_model,
                encoder_layers=config.n_layer,
                decoder_layers=config.n_layer,
                encoder_attention_heads=config.n_head,
                decoder_attention_heads=config.n_head,
                encoder_ffn_dim=config.d_feedforward or 4 * config.d_model,
                decoder_ffn_dim=config.d_feedforward or 4 * config.d_model,
                dropout=config.dropout,
                init_std=config.init_std,
                tie_word_embeddings=True,  # the two inputs; the head is ours
                pad_token_id=None,  # its default would freeze a real token's row
                bos_token_id=None,
                eos_token_id=None,
                forced_eos_token_id=None,
                decoder_start_token_id=config.mask_id,
                attn_implementation="sdpa",
            )
        )
        halves = (self.network.encoder, self.network.decoder)
        start_positions(
            config, *(half.embed_positions.weight[half.embed_positions.offset :] for half in halves)
        )
        self.untied = (
            None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )
        if self.untied is not None:
            nn.init.normal_(self.untied.weight, std=config.init_std)

    @property
    def head(self) -> Tensor:
        if self.untied is not None:
            return self.untied.weight
        table: Tensor = self.network.shared.weight
        return table[: self.config.vocab_size]

    def blocks(self) -> list[nn.Module]:
        return [*self.network.encoder.layers, *self.network.decoder.layers]

    def embedding_tables(self) -> list[Tensor]:
        positions = [
            half.embed_positions.weight for half in (self.network.encoder, self.network.decoder)
        ]
        return [
            self.network.shared.weight,
            *positions,
            *([] if self.untied is None else [self.untied.weight]),
        ]

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        inside = batch.inside()
        given = batch.tokens.masked_fill(~batch.context, self.config.mask_id)
        # (B, T, d)
        memory = self.network.encoder(input_ids=given, attention_mask=inside).last_hidden_state
        decoded = self.network.decoder(  # causal, so padding on the right has no effect
            input_ids=shifted_right(batch.tokens, self.config.mask_id),
            encoder_hidden_states=memory,
            encoder_attention_mask=inside,
            use_cache=False,
        )
        return pick(decoded.last_hidden_state, wanted)
