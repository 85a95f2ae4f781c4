"""A model whose every answer is known: a Markov chain over a few letters and end of text.

`ar` is the chain itself. `car` is its exact conditional given what is known before and after, or a
distortion of it.
"""

from itertools import product

import torch
from torch import Tensor, nn

from tracformer.model.base import EXACT, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig


class ChainConfig(ModelConfig):
    model_type = "chain"
    possible_modes = ("car", "ar")
    presets = {}  # noqa: RUF012


class Chain(ConditionalModel):
    config_class = ChainConfig
    answers = {"car": EXACT, "ar": EXACT}  # noqa: RUF012

    def __init__(
        self, letters: int = 3, max_length: int = 12, distortion: float = 0.0, seed: int = 0
    ) -> None:
        """The last token is end of text; after it the chain starts anew.

        `distortion`: how far `car` is from the truth.
        """
        super().__init__()
        V = letters + 1
        self.config = ChainConfig(vocab_size=V, max_length=max_length)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(V, V, generator=generator, dtype=torch.float64)
        logits[-1, -1] = -3.0  # few empty documents
        self.steps = logits.log_softmax(1)  # (V, V): log p(next | token)
        self.skew = distortion * torch.randn(V, generator=generator, dtype=torch.float64)
        self.scale = nn.Parameter(torch.eye(V, dtype=torch.float64))

    @property
    def head(self) -> Tensor:
        return self.scale

    def blocks(self) -> list[nn.Module]:
        return []

    def embedding_tables(self) -> list[Tensor]:
        return []

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        tokens, context, lengths = batch.tokens, batch.context, batch.lengths
        before = torch.cat((torch.full_like(tokens[:, :1], len(self.steps) - 1), tokens[:, :-1]), 1)
        logits = self.steps[before]  # (B, T, V): the chain starts as after an end of text
        if mode == "car":
            logits = (logits + self._ahead(tokens, context, lengths)).log_softmax(-1) + self.skew
        rows = wanted.flatten().nonzero()[:, 0]
        return logits.flatten(0, 1)[rows], rows

    def _ahead(self, tokens: Tensor, context: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, V): log p(all that is given behind t | x_t = v)."""
        B, T = tokens.shape
        V = len(self.steps)
        ahead = torch.zeros(B, T, V, dtype=torch.float64)
        for t in range(T - 2, -1, -1):
            # log 1 or log 0: which x_{t+1} agree with what is given
            fits = torch.zeros(B, V, dtype=torch.float64)
            known = context[:, t + 1]
            fits[known] = -torch.inf
            fits[known, tokens[known, t + 1]] = 0.0
            message = (self.steps + (fits + ahead[:, t + 1])[:, None, :]).logsumexp(-1)
            ahead[:, t] = message * (t + 1 < lengths)[:, None]
        return ahead

    def log_mass(self, tokens: list[int], context: list[bool], letters: int | None = None) -> float:
        """log of the sum of p(text) over all ways to fill what is not given, with the first
        `letters` tokens (None: all).
        """
        allowed = range(self.config.vocab_size if letters is None else letters)
        holes = [i for i, given in enumerate(context) if not given]
        rows = torch.tensor([tokens] * len(allowed) ** len(holes))
        rows[:, holes] = torch.tensor(list(product(allowed, repeat=len(holes))), dtype=rows.dtype)
        before = torch.cat((torch.full_like(rows[:, :1], len(self.steps) - 1), rows[:, :-1]), 1)
        return float(self.steps[before, rows].sum(1).logsumexp(0))
