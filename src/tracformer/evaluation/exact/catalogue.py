"""The benchmark's sources by name. Whoever changes one of them, or how it is drawn from, counts VERSION on: figures then don't compare."""

import zlib
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache

import numpy as np

from tracformer.evaluation.exact.chains import ChainSource, mixing_chain, second_order_chain
from tracformer.evaluation.exact.copies import CopySource
from tracformer.evaluation.exact.grammar import GrammarSource, bracket_grammar
from tracformer.evaluation.exact.sources import Source, Tokens

VERSION = 1
PURPOSES = ("train", "validation", "test")

_BUILDERS: dict[str, tuple[str, Callable[[str], Source]]] = {
    "hmm-4": ("4 hidden states, 8 symbols", lambda name: ChainSource(name, mixing_chain(4, 8, 2, 0.2), 48)),
    "hmm-16": ("16 hidden states, 16 symbols", lambda name: ChainSource(name, mixing_chain(16, 16, 2, 0.1), 48)),
    "hmm-64": ("64 hidden states, 32 symbols", lambda name: ChainSource(name, mixing_chain(64, 32, 3, 0.05), 48)),
    "hmm-16-slow": (
        "16 hidden states that stay for about 16 symbols",
        lambda name: ChainSource(name, mixing_chain(16, 16, 4, 0.3, stay=15 / 16), 48),
    ),
    "hmm-8-second": (
        "8 hidden states, each drawn from the two before",
        lambda name: ChainSource(name, second_order_chain(8, 12, 5, 0.1), 48),
    ),
    "grammar": ("nested clauses that close as they opened", lambda name: GrammarSource(name, bracket_grammar(), 24)),
    "copies": ("a noisy block that comes back every 24 symbols", lambda name: CopySource(name, 16, 72, (24,), 0.1)),
    "copies-mixed": ("a noisy block that comes back every 17, 20 or 23 symbols", lambda name: CopySource(name, 16, 72, (17, 20, 23), 0.1)),
}


def source_names() -> tuple[str, ...]:
    return tuple(_BUILDERS)


def describe_source(name: str) -> str:
    find_source(name)
    return _BUILDERS[name][0]


@cache
def find_source(name: str) -> Source:
    if name not in _BUILDERS:
        close = get_close_matches(name, _BUILDERS, n=1)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"there is no exact source {name!r}{guess}; available: {', '.join(_BUILDERS)}")
    return _BUILDERS[name][1](name)


def draw_sequences(source: Source, purpose: str, count: int, seed: int) -> Tokens:
    """(count, length): the sequences of one purpose and seed, apart from those of any other; the same on every machine."""
    if purpose not in PURPOSES:
        raise ValueError(f"purpose is {purpose!r}; allowed: {', '.join(PURPOSES)}")
    key = (seed, zlib.crc32(source.name.encode()), PURPOSES.index(purpose), VERSION)
    return source.sample(count, np.random.default_rng(key))
