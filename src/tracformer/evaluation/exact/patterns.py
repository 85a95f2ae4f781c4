"""The benchmark's hole patterns, a fixed list: from one missing token to one given, in runs, combs and halves."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches

import numpy as np

from tracformer.contexts import Context, parse, sequence_rng

Pattern = Callable[[int, np.random.Generator], Context]
"""(length, rng) -> (length,) bool, True where given."""


def comb(step: int) -> Pattern:
    """Every `step`-th token is given, the others are targets."""
    return lambda length, rng: np.arange(length) % step == step - 1


def one_missing(length: int, rng: np.random.Generator) -> Context:
    return np.arange(length) != rng.integers(length)


def one_given(length: int, rng: np.random.Generator) -> Context:
    return np.arange(length) == rng.integers(length)


PATTERNS: dict[str, Pattern] = {
    "one": one_missing,
    "spans-20%-short": parse("span:p=0.2,mean=2").draw,
    "spans-20%-long": parse("span:p=0.2,mean=8").draw,
    "spans-50%-short": parse("span:p=0.5,mean=2").draw,
    "spans-50%-long": parse("span:p=0.5,mean=8").draw,
    "spans-80%-short": parse("span:p=0.8,mean=2").draw,
    "spans-80%-long": parse("span:p=0.8,mean=8").draw,
    "scattered-50%": parse("random:0.5").draw,
    "alternating": comb(2),
    "three-of-four": comb(4),
    "first-half": parse("[0.0,0.5]").draw,
    "last-half": parse("prefix:0.5").draw,
    "middle-half": parse("[0.25,0.75]").draw,
    "outer-half": parse("[0.0,0.25]&[0.75,1.0]").draw,
    "two-far": parse("[0.0,0.1]&[0.9,1.0]").draw,
    "all-but-one": one_given,
    "all": parse("empty").draw,
}


def find_patterns(names: Sequence[str]) -> dict[str, Pattern]:
    """Those of the list that are named, in the list's order; all of them if none is."""
    for name in names:
        if name not in PATTERNS:
            close = get_close_matches(name, PATTERNS, n=1)
            guess = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"there is no hole pattern {name!r}{guess}; available: {', '.join(PATTERNS)}")
    return {name: pattern for name, pattern in PATTERNS.items() if not names or name in names}


def draw_pattern(pattern: Pattern, length: int, seed: int, numbers: range) -> Context:
    """(len(numbers), length): sequence i has the context that belongs to (seed, i), whoever draws it."""
    return np.stack([pattern(length, sequence_rng(seed, number)) for number in numbers])
