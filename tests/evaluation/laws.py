"""A law of five symbols as text, as a tokeniser and as the model that knows it."""

from pathlib import Path

import numpy as np

from tracformer.data import TextSource, Tokenizer, char_tokenizer, prepare
from tracformer.evaluation.exact_sources import ChainSource, mixing_chain

LETTERS, LENGTH = "ABCDE", 5


def small_law() -> ChainSource:
    return ChainSource("small", mixing_chain(4, len(LETTERS), 0, 0.3), LENGTH)


def tokenizer() -> Tokenizer:
    return char_tokenizer(LETTERS)


def write_text(folder: Path, sequences: int) -> Path:
    """A prepared folder, each document one sequence of the law, all of them in one split."""
    tokens = small_law().sample(sequences, np.random.default_rng(0))
    texts = ["".join(LETTERS[i] for i in row) for row in tokens.tolist()]
    prepare(folder / "data", {"validation": TextSource(texts)}, tokenizer(), quiet=True)
    return folder / "data"
