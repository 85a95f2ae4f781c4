"""A source whose every conditional is known, written as text, and the model that knows it."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tracformer.data import Tokenizer, char_tokenizer
from tracformer.evaluation.exact_sources import HiddenMarkov
from tracformer.evaluation.task import Subject
from tracformer.model.base import EXACT, MARGINAL, ConditionalModel, Estimate
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig

LETTERS = "abcde"


class KnownConfig(ModelConfig):
    model_type = "known"
    possible_modes = ("car", "ac", "ar")
    presets = {}  # noqa: RUF012


class Known(ConditionalModel):
    """The truth of a hidden Markov chain over letters; end of text, the last id, never comes."""

    config_class = KnownConfig
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012

    def __init__(self, source: HiddenMarkov, max_length: int = 64) -> None:
        super().__init__()
        self.source = source
        self.config = KnownConfig(vocab_size=source.symbols + 1, max_length=max_length)
        self.scale = nn.Parameter(torch.eye(source.symbols + 1, dtype=torch.float64))
        self.asked: list[int] = []  # the size of every batch

    @property
    def head(self) -> Tensor:
        return self.scale

    def blocks(self) -> list[nn.Module]:
        return []

    def embedding_tables(self) -> list[Tensor]:
        return []

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def estimate(  # type: ignore[override]
        self, batch: Batch, mode: str = "car", **rest: object
    ) -> Estimate:
        self.asked.append(len(batch))
        x, given = batch.tokens.numpy(), batch.context.numpy()
        T = x.shape[1]
        if mode == "ac":
            log = np.log(
                np.take_along_axis(self.source.marginals(x, given), x[..., None], 2)[..., 0]
            )
        else:
            known = [(given if mode == "car" else False) | (np.arange(T) < t) for t in range(T + 1)]
            mass = [self.source.log_evidence(x, np.broadcast_to(each, x.shape)) for each in known]
            log = np.stack([mass[t + 1] - mass[t] for t in range(T)], axis=1)
        return Estimate(torch.from_numpy(np.where(given, 0.0, log)), None)


def source() -> HiddenMarkov:
    return HiddenMarkov.random(states=4, symbols=len(LETTERS), seed=3)


def tokenizer() -> Tokenizer:
    return char_tokenizer(LETTERS)


def write_lines(path: Path, count: int, length: int, seed: int = 0) -> np.ndarray:
    """Samples of the source, a line each; the tokens are returned."""
    tokens = source().sample(count, length, np.random.default_rng(seed))
    path.write_text("".join("".join(LETTERS[i] for i in row) + "\n" for row in tokens))
    return tokens


def known_subject(mode: str = "car", **changes: object) -> Subject:
    return Subject(Known(source()), tokenizer(), "truth", mode, **changes)  # type: ignore[arg-type]
