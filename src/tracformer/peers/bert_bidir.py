"""BERT-bidir, the paper's own baseline: a causal and a reverse-causal encoder with dense attention read the given text, targets masked;
a two-layer MLP joins the two features of a position: p(x_t | x_C).

    f = encoder(x_1 .. x_t), b = encoder(x_T .. x_t), state = GELU(W2 GELU(W1 [f; b]))    W1: 2d -> 4d, W2: 4d -> d

Readings, where the paper is silent or contradicts itself:
- "two separate encoders" would give 255M parameters; its 170M is one set of weights for both directions, and a head of its own.
- No shift is told of: both features of position t include position t itself, where a target reads the mask.
- The encoder is GPT-2's (`GPT2Model` of `transformers`), as the names of the paper's configuration suggest. Both directions use the
  true positions, by which the shared weights can tell them apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.model.base import MARGINAL
from tracformer.peers.gpt2 import gpt2_network
from tracformer.peers.transformer import TransformerConfig, TransformerPeer, inside_of

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"vocab_size": 50257, "max_length": 1024, "n_layer": 12, "n_head": 12, "d_model": 768, "dropout": 0.1, "tied": False},
    "tiny": {"vocab_size": 256, "max_length": 128, "n_layer": 6, "n_head": 4, "d_model": 128, "init_std": 0.05},  # 1.4M
    "mini": {"vocab_size": 4096, "max_length": 256, "n_layer": 7, "n_head": 3, "d_model": 144, "init_std": 0.05},  # 2.0M less embeddings
    "laptop": {"vocab_size": 4096, "max_length": 256, "n_layer": 8, "n_head": 4, "d_model": 256, "init_std": 0.04},  # 8.2M
}


@dataclass(frozen=True)
class BertBidirConfig(TransformerConfig):
    model_type = "bert-bidir"
    possible_modes = ("ac",)
    presets = PRESETS

    tied: bool = True  # is the head the embedding? The paper's count of parameters says no (docs/peers.md)


class BertBidir(TransformerPeer):
    config: BertBidirConfig
    config_class = BertBidirConfig
    answers = {"ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: BertBidirConfig) -> None:
        super().__init__()
        self.config, d = config, config.d_model
        self.network = gpt2_network(config, config.vocab_size + 1, config.max_length)
        self.join = nn.Sequential(nn.Linear(2 * d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.GELU())
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

    def blocks(self) -> list[nn.Module]:
        return list(self.network.h)

    def embedding_tables(self) -> list[Tensor]:
        return [self.network.wte.weight, self.network.wpe.weight, *([] if self.untied is None else [self.untied.weight])]

    def states(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, asked: Tensor) -> Tensor:
        inside = inside_of(tokens, lengths)
        forwards = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        backwards = torch.where(inside, lengths[:, None] - 1 - forwards, forwards)  # its own inverse; padding stays on the right
        given = tokens.masked_fill(~context, self.config.mask_id)
        features: Tensor = self.network(
            input_ids=torch.cat((given, given.gather(1, backwards))),
            position_ids=torch.cat((forwards, backwards)),
            attention_mask=inside.repeat(2, 1),  # without one, descending positions are taken for many packed texts
            use_cache=False,
        ).last_hidden_state  # (2B, T, d)
        row, position = asked.nonzero(as_tuple=True)
        before, after = features[row, position], features[len(tokens) + row, backwards[row, position]]
        return self.join(torch.cat((before, after), dim=1))
