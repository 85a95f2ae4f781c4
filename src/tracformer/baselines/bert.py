"""BERT and BERT-bidir, as published: p(x_t | x_C).

BERT: one encoder reads the text with every target as the mask, and predicts each target from the
given tokens. The network is `BertForMaskedLM` of `transformers`: post-norm layers, and a dense
layer with GELU and LayerNorm before the head. With `norm="pre"` it is
`RobertaPreLayerNormForMaskedLM`, which differs only in the place of the norms.

BERT-bidir, the paper's own baseline: a causal and a reverse-causal encoder with dense attention
read the given text, with targets masked; a two-layer MLP joins the two features of a position:

    f = encoder(x_1 .. x_t), b = encoder(x_T .. x_t),
    state = GELU(W2 GELU(W1 [f; b])),    W1: 2d -> 4d, W2: 4d -> d

Choices where the paper is silent or contradicts itself:

- Its 170M parameters follow from one encoder of 12 layers for both directions, or from two separate
  ones of 6 layers (`separate=True`, as the text says): both have 170.12M with an untied head, so
  the count does not decide.
- The paper mentions no shift: both features of position t include position t itself, where a target
  reads the mask.
- The encoder is GPT-2's (`GPT2Model` of `transformers`), as the names in the paper's configuration
  suggest. Both directions use the true positions, by which the shared weights can tell them apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.baselines.gpt2 import gpt2_network
from tracformer.baselines.transformer import (
    TransformerConfig,
    TransformersModel,
    check_norm,
    pick,
    size_presets,
    start_positions,
    transformers_for,
)
from tracformer.model.base import MARGINAL
from tracformer.model.batch import Batch

PRESETS = size_presets((10, 12, 768), (7, 4, 128, 0.05), (8, 3, 144, 0.05), (9, 4, 256, 0.04))
PRESETS["paper"]["tied"] = False


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """Shape of a `Bert`."""

    model_type = "bert"
    possible_modes = ("ac",)
    presets = PRESETS

    n_layer: int = 10
    tied: bool = True  # whether the head is the embedding; the paper's is not, by its parameters
    norm: str = "post"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.norm)


class Bert(TransformersModel):
    """BERT as published: p(x_t | x_C)."""

    config: BertConfig
    config_class = BertConfig
    answers = {"ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        transformers = transformers_for("bert")
        network, shape = (
            (transformers.RobertaPreLayerNormForMaskedLM, transformers.RobertaPreLayerNormConfig)
            if config.norm == "pre"
            else (transformers.BertForMaskedLM, transformers.BertConfig)
        )
        self.network = network(
            shape(
                vocab_size=config.vocab_size + 1,
                max_position_embeddings=config.max_length,
                hidden_size=config.d_model,
                num_hidden_layers=config.n_layer,
                num_attention_heads=config.n_head,
                intermediate_size=4 * config.d_model,
                hidden_dropout_prob=config.dropout,
                attention_probs_dropout_prob=config.dropout,
                initializer_range=config.init_std,
                type_vocab_size=1,
                tie_word_embeddings=config.tied,
                pad_token_id=None,  # its default would freeze a real token's row
                bos_token_id=None,
                eos_token_id=None,
                attn_implementation="sdpa",
            )
        )
        start_positions(config, self.network.base_model.embeddings.position_embeddings.weight)
        # If untied, `transformers` adds a second bias that nothing reads.
        self.output.bias = self.output.decoder.bias

    @property
    def output(self) -> Any:
        """The layer before the head, and the head."""
        return self.network.lm_head if self.config.norm == "pre" else self.network.cls.predictions

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.output.decoder.weight
        return weight[: self.config.vocab_size]

    @property
    def head_bias(self) -> Tensor:
        bias: Tensor = self.output.decoder.bias
        return bias[: self.config.vocab_size]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.base_model.encoder.layer)

    def embedding_tables(self) -> list[Tensor]:
        embeddings = self.network.base_model.embeddings
        tables = [
            embeddings.word_embeddings.weight,
            embeddings.position_embeddings.weight,
            embeddings.token_type_embeddings.weight,
        ]
        return tables if self.config.tied else [*tables, self.output.decoder.weight]

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        given = batch.tokens.masked_fill(~batch.context, self.config.mask_id)
        positions = torch.arange(batch.width, device=batch.device)[None]
        read = self.network.base_model(
            input_ids=given, attention_mask=batch.inside(), position_ids=positions
        )
        features = pick(read.last_hidden_state, wanted)  # (N, d)
        if self.config.norm == "post":
            return self.output.transform(features)
        return self.output.layer_norm(nn.functional.gelu(self.output.dense(features)))


BIDIR_PRESETS = size_presets((12, 12, 768), (6, 4, 128, 0.05), (7, 3, 144, 0.05), (8, 4, 256, 0.04))
BIDIR_PRESETS["paper"]["tied"] = False
BIDIR_PRESETS["paper-separate"] = {**BIDIR_PRESETS["paper"], "n_layer": 6, "separate": True}


@dataclass(frozen=True)
class BertBidirConfig(TransformerConfig):
    """Shape of a `BertBidir`."""

    model_type = "bert-bidir"
    possible_modes = ("ac",)
    presets = BIDIR_PRESETS

    tied: bool = True  # whether the head is the embedding; the paper's is not, by its parameters
    # Two encoders of n_layer layers each, instead of one for both directions.
    separate: bool = False


class BertBidir(TransformersModel):
    """Two directions of GPT-2, joined by an MLP: p(x_t | x_C)."""

    config: BertBidirConfig
    config_class = BertBidirConfig
    answers = {"ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: BertBidirConfig) -> None:
        super().__init__()
        self.config, d = config, config.d_model
        self.network = gpt2_network(config, config.vocab_size + 1, config.max_length)
        self.backwards = (
            gpt2_network(config, config.vocab_size + 1, config.max_length)
            if config.separate
            else None
        )
        if self.backwards is not None:  # one table of tokens and one of positions for both
            self.backwards.wte, self.backwards.wpe = self.network.wte, self.network.wpe
        self.join = nn.Sequential(
            nn.Linear(2 * d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.GELU()
        )
        self.untied = None if config.tied else nn.Linear(d, config.vocab_size, bias=False)
        for module in (self.join[0], self.join[2], self.untied):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def head(self) -> Tensor:
        if self.untied is not None:
            return self.untied.weight
        table: Tensor = self.network.wte.weight
        return table[: self.config.vocab_size]

    def networks(self) -> list[Any]:
        return [self.network] if self.backwards is None else [self.network, self.backwards]

    def blocks(self) -> list[nn.Module]:
        return [*self.network.h, *([] if self.backwards is None else self.backwards.h)]

    def embedding_tables(self) -> list[Tensor]:
        return [
            self.network.wte.weight,
            self.network.wpe.weight,
            *([] if self.untied is None else [self.untied.weight]),
        ]

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        inside = batch.inside()
        forwards = torch.arange(batch.width, device=batch.device).expand_as(batch.tokens)
        # its own inverse; padding stays on the right
        backwards = torch.where(inside, batch.lengths[:, None] - 1 - forwards, forwards)
        given = batch.tokens.masked_fill(~batch.context, self.config.mask_id)
        before = self._read(self.network, given, forwards, inside)  # (B, T, d)
        after = self._read(
            self.backwards or self.network, given.gather(1, backwards), backwards, inside
        )
        row, position = wanted.nonzero(as_tuple=True)
        return self.join(
            torch.cat((before[row, position], after[row, backwards[row, position]]), dim=1)
        )

    def _read(self, network: Any, ids: Tensor, positions: Tensor, inside: Tensor) -> Tensor:
        """Return the features (B, T, d) of one direction."""
        # Without a mask, transformers takes descending positions for several packed texts.
        read = network(
            input_ids=ids, position_ids=positions, attention_mask=inside, use_cache=False
        )
        features: Tensor = read.last_hidden_state
        return features
