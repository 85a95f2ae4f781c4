"""A source as training data: sequences as documents of letters, one letter a symbol, in a prepared folder like any other.

    tracformer prepare exact:hmm-16 --out data/hmm-16
    tracformer prepare exact:hmm-16,sequences=50000,seed=1 --out data/hmm-16

A document and its end of text fill length + 1 tokens, so `length=49` in training makes each packed row one sequence of hmm-16. The
benchmark puts the same end of text behind each sequence, as given.
"""

import string
from dataclasses import dataclass

from tracformer.data import Source, TextSource, Tokenizer, char_tokenizer
from tracformer.evaluation.exact.catalogue import VERSION, draw_sequences, find_source
from tracformer.evaluation.exact.sources import Source as Law

PREFIX = "exact:"
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
SEQUENCES, SHARE_HELD = 20_000, 20  # a twentieth as many again for validation


@dataclass(frozen=True)
class Drawn:
    """What `exact:NAME,sequences=N,seed=S` asks for."""

    source: Law
    sequences: int = SEQUENCES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences is {self.sequences}; at least one must be drawn")

    @property
    def tokenizer(self) -> Tokenizer:
        return char_tokenizer(LETTERS[: self.source.symbols])

    @property
    def sizes(self) -> dict[str, int]:
        """Sequences of each split."""
        return {"train": self.sequences, "validation": max(1, self.sequences // SHARE_HELD)}

    def splits(self) -> dict[str, Source]:
        """Training and validation sequences, apart from each other and from those of the benchmark."""
        return {purpose: self._texts(purpose, count) for purpose, count in self.sizes.items()}

    def _texts(self, purpose: str, count: int) -> TextSource:
        tokens = draw_sequences(self.source, purpose, count, self.seed)
        texts = ["".join(LETTERS[symbol] for symbol in row) for row in tokens.tolist()]
        return TextSource(texts, f"{PREFIX}{self.source.name}, version {VERSION}, {purpose}, seed {self.seed}")


def parse_exact(text: str) -> Drawn:
    name, *words = (part.strip() for part in text.removeprefix(PREFIX).split(","))
    options: dict[str, int] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in ("sequences", "seed") or not equals or not value.isdecimal():
            raise ValueError(f"{text!r}: {word!r} is not sequences=NUMBER or seed=NUMBER")
        options[key] = int(value)
    return Drawn(find_source(name), **options)
