"""Toys for the tests of evaluation: sources written as text, models that know them, and ranks.

- `chain_source`: letters of a hidden Markov chain; `known_subject` answers with its conditionals.
- `small_source`: the same with five symbols and sequences of one length, for `TruthModel`.
- `random_mdlm`: a diffusion model, whose answers are bounds.
- `on_ranks`: run a function on several ranks, which are threads.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.data import TextSource, Tokenizer, char_tokenizer, prepare
from tracformer.evaluation.exact_sources import ChainSource, HiddenMarkov, mixing_chain
from tracformer.evaluation.task import Subject
from tracformer.model.base import EXACT, MARGINAL, ConditionalModel, Estimate
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig

LETTERS = "abcde"
SMALL_LETTERS, SMALL_LENGTH = "ABCDE", 5


class KnownConfig(ModelConfig):
    model_type = "known"
    possible_modes = ("car", "ac", "ar")
    presets = {}  # noqa: RUF012


class Known(ConditionalModel):
    """Answers with the conditionals of a chain; end of text, the last id, never occurs."""

    config_class = KnownConfig
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012

    def __init__(self, source: ChainSource, max_length: int = 64) -> None:
        super().__init__()
        self.source = source
        self.config = KnownConfig(vocab_size=source.symbols + 1, max_length=max_length)
        self.scale = nn.Parameter(torch.eye(source.symbols + 1, dtype=torch.float64))
        self.batches: list[int] = []  # the size of every batch

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
        self.batches.append(len(batch))
        x, given = batch.tokens.numpy(), batch.context.numpy()
        known = {"car": np.ones_like(given), "ac": given, "ar": np.ones_like(given)}[mode]
        after = np.zeros_like(given) if mode == "ar" else given
        logs = self.source.log_conditionals(x, known, after)
        log_probs = np.take_along_axis(logs, x[..., None], 2)[..., 0]
        return Estimate(torch.from_numpy(np.where(given, 0.0, log_probs)), None)


def chain_source(length: int = 20) -> ChainSource:
    chain = HiddenMarkov.random(states=4, symbols=len(LETTERS), seed=3)
    return ChainSource("letters", length, chain)


def chain_tokenizer() -> Tokenizer:
    return char_tokenizer(LETTERS)


def write_lines(path: Path, count: int, length: int, seed: int = 0) -> np.ndarray:
    """Write samples of the source, one on each line; return the tokens."""
    tokens = chain_source(length).sample(count, np.random.default_rng(seed))
    path.write_text("".join("".join(LETTERS[i] for i in row) + "\n" for row in tokens))
    return tokens


def known_subject(mode: str = "car", **changes: object) -> Subject:
    model = Known(chain_source())
    return Subject(model, chain_tokenizer(), "truth", mode, **changes)  # type: ignore[arg-type]


def small_source() -> ChainSource:
    return ChainSource("small", SMALL_LENGTH, mixing_chain(4, len(SMALL_LETTERS), 0, 0.3))


def small_tokenizer() -> Tokenizer:
    return char_tokenizer(SMALL_LETTERS)


def write_prepared(folder: Path, sequences: int) -> Path:
    """Write a prepared folder whose documents are sequences of `small_source`."""
    tokens = small_source().sample(sequences, np.random.default_rng(0))
    texts = ["".join(SMALL_LETTERS[i] for i in row) for row in tokens.tolist()]
    prepare(folder / "data", {"validation": TextSource(texts)}, small_tokenizer(), quiet=True)
    return folder / "data"


def random_mdlm(vocab_size: int = 6, max_length: int = 16, std: float = 0.5) -> MDLM:
    """Return a small MDLM in float64 with normal random weights."""
    shape = {"n_layer": 1, "n_head": 2, "d_model": 8, "d_condition": 4}
    torch.manual_seed(0)
    config = MDLMConfig(vocab_size=vocab_size, max_length=max_length, **shape)
    model = MDLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


Found = TypeVar("Found")


class ThreadRanks:
    """What tasks use of `Ranks`, with sums over threads."""

    def __init__(self, rank: int, barrier: Barrier, board: dict[int, list[float]]) -> None:
        self.rank, self.world, self.device = rank, barrier.parties, torch.device("cpu")
        self._barrier, self._board = barrier, board

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        self._board[self.rank] = values
        self._barrier.wait(60)
        summed = [sum(each) for each in zip(*self._board.values(), strict=True)]
        self._barrier.wait(60)
        return summed

    def barrier(self) -> None:
        self._barrier.wait(60)


def on_ranks(world: int, work: Callable[[Any], Found]) -> list[Found]:
    """Return work(ranks) of every rank; they run at once."""
    barrier, board = Barrier(world), dict[int, list[float]]()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: work(ThreadRanks(rank, barrier, board)), range(world)))
