"""BERT-bidir, the paper's own baseline: a causal and a reverse-causal encoder with dense attention read the given text, targets masked;
a two-layer MLP joins the two features of a position: p(x_t | x_C).

    f = encoder(x_1 .. x_t), b = encoder(x_T .. x_t), state = GELU(W2 GELU(W1 [f; b]))    W1: 2d -> 4d, W2: 4d -> d

Readings, where the paper is silent or contradicts itself:
- Its 170M parameters follow from one encoder of 12 layers for both directions, or from two separate ones of 6 layers
  (`separate=True`, which the text says): 170.12M both, with a head of its own. The count cannot decide.
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
    "paper-separate": {"vocab_size": 50257, "max_length": 1024, "n_layer": 6, "dropout": 0.1, "tied": False, "separate": True},
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

    tied: bool = True  # whether the head is the embedding; the paper's count of parameters says no
    separate: bool = False  # two encoders of n_layer layers each, instead of one for both directions


class BertBidir(TransformerPeer):
    config: BertBidirConfig
    config_class = BertBidirConfig
    answers = {"ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: BertBidirConfig) -> None:
        super().__init__()
        self.config, d = config, config.d_model
        self.network = gpt2_network(config, config.vocab_size + 1, config.max_length)
        self.backwards = gpt2_network(config, config.vocab_size + 1, config.max_length) if config.separate else None
        if self.backwards is not None:  # one table of tokens and one of positions for both
            self.backwards.wte, self.backwards.wpe = self.network.wte, self.network.wpe
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

    def networks(self) -> list[Any]:
        return [self.network] if self.backwards is None else [self.network, self.backwards]

    def blocks(self) -> list[nn.Module]:
        return [*self.network.h, *([] if self.backwards is None else self.backwards.h)]

    def embedding_tables(self) -> list[Tensor]:
        return [self.network.wte.weight, self.network.wpe.weight, *([] if self.untied is None else [self.untied.weight])]

    def states(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, asked: Tensor) -> Tensor:
        inside = inside_of(tokens, lengths)
        forwards = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        backwards = torch.where(inside, lengths[:, None] - 1 - forwards, forwards)  # its own inverse; padding stays on the right
        given = tokens.masked_fill(~context, self.config.mask_id)
        before = self._read(self.network, given, forwards, inside)  # (B, T, d)
        after = self._read(self.backwards or self.network, given.gather(1, backwards), backwards, inside)
        row, position = asked.nonzero(as_tuple=True)
        return self.join(torch.cat((before[row, position], after[row, backwards[row, position]]), dim=1))

    def _read(self, network: Any, ids: Tensor, positions: Tensor, inside: Tensor) -> Tensor:
        # Without a mask, descending positions are taken for many packed texts.
        read = network(input_ids=ids, position_ids=positions, attention_mask=inside, use_cache=False)
        features: Tensor = read.last_hidden_state
        return features
