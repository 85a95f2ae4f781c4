"""Token frequencies: p(x_t), independent of the given tokens.

A model that is not better than this has learned nothing from its input. It is trained like every
other system; the loss is convex, and its minimum is at the frequencies of the targets in training.
AdamW with a short memory of squared gradients (`optimizer.beta2`) ends elsewhere: it makes rare
tokens rarer than they are. 0.9999 works.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.model.base import EXACT, MARGINAL, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.config import MODES, ModelConfig

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"vocab_size": 50257, "max_length": 1024},
    "tiny": {"vocab_size": 256, "max_length": 128},
    "mini": {"vocab_size": 4096, "max_length": 256},
    "laptop": {"vocab_size": 4096, "max_length": 256},
}
# Factor of the scores: frequencies differ by many nats, and learning rates that suit networks move
# a score only slowly.
STRETCH = 10.0


@dataclass(frozen=True)
class FrequenciesConfig(ModelConfig):
    """Vocabulary and length; there is nothing else to choose."""

    model_type = "frequencies"
    possible_modes = MODES
    presets = PRESETS


class Frequencies(ConditionalModel):
    """One learned score per token."""

    config: FrequenciesConfig
    config_class = FrequenciesConfig
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012
    limits = dict.fromkeys(MODES, "does not see the given tokens")

    def __init__(self, config: FrequenciesConfig) -> None:
        super().__init__()
        self.config = config
        self.scores = nn.Parameter(
            torch.zeros(config.vocab_size)
        )  # log-frequencies over STRETCH, up to a constant; a vector, so not decayed

    @property
    def head(self) -> Tensor:
        return self.scores[:, None]

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        rows = wanted.flatten().nonzero()[:, 0]
        return self.scores.new_full((len(rows), 1), STRETCH), rows

    def blocks(self) -> list[nn.Module]:
        return []

    def embedding_tables(self) -> list[Tensor]:
        return [self.scores]
