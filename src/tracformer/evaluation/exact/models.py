"""Two models whose score is known before it is measured: the truth, and the one that knows nothing."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tracformer.evaluation.exact.sources import Floats, Known, Source, Tokens
from tracformer.model.base import EXACT, MARGINAL, ConditionalModel
from tracformer.model.config import MODES, ModelConfig


@dataclass(frozen=True)
class KnownConfig(ModelConfig):
    model_type = "known"
    possible_modes = MODES
    presets = {}  # noqa: RUF012

    source: str = ""
    says: str = ""


class KnownModel(ConditionalModel):
    """Says what it is told to: its hidden states are log-probabilities in float64, and its head is the identity."""

    config: KnownConfig
    config_class = KnownConfig
    says: ClassVar[str]
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.config = KnownConfig(vocab_size=source.symbols, max_length=source.length, source=source.name, says=self.says)
        self.register_buffer("identity", torch.eye(source.symbols, dtype=torch.float64), persistent=False)

    @abstractmethod
    def log_probs(self, tokens: Tokens, context: Known, mode: str) -> Floats:
        """(B, T, V)"""

    def hidden(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        if int(lengths.min()) < self.source.length or tokens.shape[1] != self.source.length:
            raise ValueError(f"sequences are {int(lengths.min())} tokens long; source {self.source.name!r} makes {self.source.length}")
        logs = torch.from_numpy(self.log_probs(tokens.cpu().numpy().astype(np.int64), context.cpu().numpy(), mode)).to(tokens.device)
        return logs[wanted], wanted.flatten().nonzero()[:, 0]

    @property
    def head(self) -> Tensor:
        return self.get_buffer("identity")

    def blocks(self) -> list[nn.Module]:
        return []

    def embedding_tables(self) -> list[Tensor]:
        return []


class TruthModel(KnownModel):
    """The source's own conditionals: no model can do better."""

    says = "truth"

    def log_probs(self, tokens: Tokens, context: Known, mode: str) -> Floats:
        if mode == "car":
            return self.source.log_next(tokens, context)
        return self.source.log_marginal(tokens, context) if mode == "ac" else self.source.log_left(tokens)


class UniformModel(KnownModel):
    """Every symbol alike: its KL at a target is log V less the entropy of the truth there."""

    says = "uniform"

    def log_probs(self, tokens: Tokens, context: Known, mode: str) -> Floats:
        return np.full((*tokens.shape, self.source.symbols), -np.log(self.source.symbols))
