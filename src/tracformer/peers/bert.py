"""BERT: one encoder reads the text with every target as the mask, and predicts each target from what is given: p(x_t | x_C).

The network is `BertForMaskedLM` of `transformers`: post-norm layers, and a dense layer with GELU and LayerNorm before the head. With
`norm="pre"` it is `RobertaPreLayerNormForMaskedLM`, the same but for the place of the norms.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.model.base import MARGINAL
from tracformer.peers.transformer import (
    TransformerConfig,
    TransformerPeer,
    check_norm,
    inside_of,
    pick,
    start_positions,
    transformers_for,
)

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"vocab_size": 50257, "max_length": 1024, "n_layer": 10, "n_head": 12, "d_model": 768, "dropout": 0.1, "tied": False},
    "tiny": {"vocab_size": 256, "max_length": 128, "n_layer": 7, "n_head": 4, "d_model": 128, "init_std": 0.05},  # 1.5M
    "mini": {"vocab_size": 4096, "max_length": 256, "n_layer": 8, "n_head": 3, "d_model": 144, "init_std": 0.05},  # 2.0M less embeddings
    "laptop": {"vocab_size": 4096, "max_length": 256, "n_layer": 9, "n_head": 4, "d_model": 256, "init_std": 0.04},  # 8.3M
}


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    model_type = "bert"
    possible_modes = ("ac",)
    presets = PRESETS

    n_layer: int = 10
    tied: bool = True  # is the head the embedding? The paper's count of parameters says no (docs/peers.md)
    norm: str = "post"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.norm)


class Bert(TransformerPeer):
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
        self.output.bias = self.output.decoder.bias  # untied, `transformers` leaves a second bias that nothing reads

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
        tables = [embeddings.word_embeddings.weight, embeddings.position_embeddings.weight, embeddings.token_type_embeddings.weight]
        return tables if self.config.tied else [*tables, self.output.decoder.weight]

    def states(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, asked: Tensor) -> Tensor:
        given = tokens.masked_fill(~context, self.config.mask_id)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        read = self.network.base_model(input_ids=given, attention_mask=inside_of(tokens, lengths), position_ids=positions)
        features = pick(read.last_hidden_state, asked)  # (N, d)
        if self.config.norm == "post":
            return self.output.transform(features)
        return self.output.layer_norm(nn.functional.gelu(self.output.dense(features)))
