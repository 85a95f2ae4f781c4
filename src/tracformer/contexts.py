"""Context strategies: laws of which tokens of a sequence are given, and the names of these laws.

A context is (T,) bool, True where the token is given; the others are the targets, of which there is
always at least one. `parse` reads a strategy from a string, as configurations and the command line
write it; `Strategy.name` is that string again:

empty                                        nothing is given
span:p=0.5,mean=50                           Algorithm 1, geometric span lengths
span:p=0.5,mean=15,sd=3,law=dlogistic        Algorithm 1, discretised logistic span lengths
mixed                                        Algorithm 2
[0.1,0.4]&[0.6,0.9]                          these fractions of the sequence are targets
prefix:0.5                                   the first half is given
middle                                       the targets are one run between two uniform cuts
random:0.3                                   30% of the tokens are targets, at random positions
tokens:1                                     one target at a random position
uniform                                      a uniform number of targets at random positions
0.7*span:p=0.5,mean=50+0.3*uniform           a mixture; the weights sum to 1

Numbers are read as the decimals that they print as, so that 0.29 of 100 tokens is 29, not
floor(28.999...). `draw_contexts` draws a batch from a seed: sequence i of the stream has its own
generator (`sequence_rng`), so its context does not depend on the rest of the batch.
"""

import math
import numbers
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tracformer.options import did_you_mean
from tracformer.spans import DLogistic, Geometric, LengthLaw, draw_spans, target_count

Context = NDArray[np.bool_]


class Strategy(ABC):
    """A law of contexts. Strategies are immutable and comparable."""

    def draw(self, length: int, rng: np.random.Generator) -> Context:
        """Draw a context (length,), bool, True where given."""
        if not isinstance(length, numbers.Integral) or length < 1:
            raise ValueError(f"length is {length!r}; a context needs at least one token")
        return self._draw(int(length), rng)

    @property
    @abstractmethod
    def name(self) -> str:
        """The canonical string, for which `parse(strategy.name) == strategy`."""

    @abstractmethod
    def _draw(self, length: int, rng: np.random.Generator) -> Context: ...

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Empty(Strategy):
    """Nothing is given."""

    @property
    def name(self) -> str:
        return "empty"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        return np.zeros(length, np.bool_)


@dataclass(frozen=True)
class Spans(Strategy):
    """Exactly max(1, round(pT)) targets, in spans whose lengths follow a law (Algorithm 1)."""

    p: float
    law: LengthLaw

    def __post_init__(self) -> None:
        _check_ratio(self.p)

    @property
    def name(self) -> str:
        start = f"span:p={_decimal(self.p)},mean={_decimal(self.law.mean)}"
        return (
            start
            if isinstance(self.law, Geometric)
            else f"{start},sd={_decimal(self.law.sd)},law=dlogistic"
        )

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        _, masked = draw_spans(length, target_count(length, self.p), self.law, rng)
        return ~masked


@dataclass(frozen=True)
class RandomRatio(Strategy):
    """Exactly max(1, round(pT)) targets; all such sets are equally probable."""

    p: float

    def __post_init__(self) -> None:
        _check_ratio(self.p)

    @property
    def name(self) -> str:
        return f"random:{_decimal(self.p)}"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        return _random_subset(length, target_count(length, self.p), rng)


@dataclass(frozen=True)
class RandomTokens(Strategy):
    """Exactly `count` targets; all such sets are equally probable.

    In a shorter sequence, all tokens are targets.
    """

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"tokens is {self.count!r}; it must be a positive integer")

    @property
    def name(self) -> str:
        return f"tokens:{self.count}"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        return _random_subset(length, min(self.count, length), rng)


@dataclass(frozen=True)
class UniformRatio(Strategy):
    """The masking of diffusion models: k targets for k uniform on 1..T, at random positions.

    Masking each token with probability u for u ~ U(0, 1) has this law, given that at least one
    token is masked.
    """

    @property
    def name(self) -> str:
        return "uniform"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        return _random_subset(length, int(rng.integers(1, length + 1)), rng)


@dataclass(frozen=True)
class Prefix(Strategy):
    """The first floor(fT) tokens are given and the rest are targets."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(
                f"the prefix is {self.fraction!r} of the sequence; it must lie in [0, 1), so that "
                "a target is left"
            )

    @property
    def name(self) -> str:
        return f"prefix:{_decimal(self.fraction)}"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        return np.arange(length) < _floor(self.fraction, length)


@dataclass(frozen=True)
class Ranges(Strategy):
    """Fixed targets: floor(aT) <= t < floor(bT), zero-based, for each range (a, b).

    Ranges are sorted. A range that would hold no position of a short sequence holds the position
    of its middle.
    """

    ranges: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("no range is given; write at least one, such as [0.25,0.75]")
        for a, b in self.ranges:
            if not 0 <= a < b <= 1:
                raise ValueError(
                    f"the range {_range_name(a, b)} is out of order; a range [a,b] of targets "
                    "needs 0 <= a < b <= 1"
                )
        ordered = tuple(sorted((a, b) for a, b in self.ranges))
        for before, after in pairwise(ordered):
            if after[0] < before[1]:
                raise ValueError(
                    f"the ranges {_range_name(*before)} and {_range_name(*after)} overlap; they "
                    "may touch at most"
                )
        object.__setattr__(self, "ranges", ordered)

    @property
    def name(self) -> str:
        return "&".join(_range_name(a, b) for a, b in self.ranges)

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        given = np.ones(length, np.bool_)
        for a, b in self.ranges:
            low, high = _floor(a, length), _floor(b, length)
            if low == high:
                low = math.floor((Fraction(_decimal(a)) + Fraction(_decimal(b))) / 2 * length)
            given[low : max(high, low + 1)] = False
        return given


@dataclass(frozen=True)
class Middle(Strategy):
    """One run of targets between two distinct cuts; all pairs of cuts are equally probable."""

    @property
    def name(self) -> str:
        return "middle"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        first, last = sorted(rng.choice(length + 1, 2, replace=False, shuffle=False).tolist())
        position = np.arange(length)
        return (position < first) | (position >= last)


@dataclass(frozen=True)
class Mixture(Strategy):
    """Draw one of the parts by weight for each sequence, then the context from that part.

    Mixtures among the parts are flattened.
    """

    weights: tuple[float, ...]
    parts: tuple[Strategy, ...]

    def __post_init__(self) -> None:
        if not self.parts or len(self.weights) != len(self.parts):
            raise ValueError(
                f"a mixture has {len(self.weights)} weights and {len(self.parts)} parts; it needs "
                "at least one part, each with a weight"
            )
        flat: list[tuple[float, Strategy]] = []
        for weight, part in zip(self.weights, self.parts, strict=True):
            if isinstance(part, Mixture):
                flat += (
                    (weight * inner, leaf)
                    for inner, leaf in zip(part.weights, part.parts, strict=True)
                )
            else:
                flat.append((weight, part))
        object.__setattr__(self, "weights", tuple(weight for weight, _ in flat))
        object.__setattr__(self, "parts", tuple(part for _, part in flat))
        for weight in self.weights:
            if not 0 < weight <= 1:
                raise ValueError(
                    f"a weight is {weight!r}; the weights of a mixture must lie in (0, 1]"
                )
        total = math.fsum(self.weights)
        if abs(total - 1) > 1e-9:
            raise ValueError(
                f"the weights {', '.join(map(_decimal, self.weights))} sum to {total:.10g}; they "
                "must sum to 1"
            )

    @property
    def name(self) -> str:
        if self == MIXED:
            return "mixed"
        return "+".join(
            f"{_decimal(weight)}*{part.name}"
            for weight, part in zip(self.weights, self.parts, strict=True)
        )

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        part = bisect_right(list(accumulate(self.weights)), rng.random())
        # rounded weights may end just below 1
        return self.parts[min(part, len(self.parts) - 1)].draw(length, rng)


def _random_subset(length: int, targets: int, rng: np.random.Generator) -> Context:
    given = np.ones(length, np.bool_)
    given[rng.choice(length, targets, replace=False, shuffle=False)] = False
    return given


@lru_cache(maxsize=4096)
def _floor(fraction: float, length: int) -> int:
    """Return floor(fraction * length), exact for the decimal that the fraction prints as."""
    return math.floor(Fraction(_decimal(fraction)) * length)


def _decimal(value: float) -> str:
    """Return the shortest decimal that reads back as this number."""
    return repr(float(value)).removesuffix(".0")


def _range_name(a: float, b: float) -> str:
    return f"[{_decimal(a)},{_decimal(b)}]"


def _check_ratio(p: float) -> None:
    if not 0 < p <= 1:
        raise ValueError(f"p is {p!r}; the share of targets must lie in (0, 1]")


# Algorithm 2: r < 0.3, r < 0.5, else.
MIXED = Mixture((0.3, 0.2, 0.5), (Empty(), Spans(0.85, Geometric(50)), Spans(0.5, Geometric(50))))


# Separates these random numbers from other uses of the same seed and index.
_PURPOSE = int.from_bytes(b"contexts")
_WORDS = 2**64


def sequence_rng(seed: int, index: int) -> np.random.Generator:
    """Return the random generator of one sequence of a stream.

    It is Philox keyed by (seed, index) directly, which is cheaper than hashing them by
    SeedSequence.
    """
    for what, value in (("seed", seed), ("index", index)):
        if not 0 <= value < _WORDS:
            raise ValueError(f"{what} is {value!r}; it must lie in 0..2^64-1")
    key = np.array((seed, index), np.uint64)
    counter = np.array((0, 0, 0, _PURPOSE), np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_contexts(
    strategy: Strategy,
    lengths: Sequence[int] | NDArray[np.integer],
    seed: int,
    indices: Sequence[int] | NDArray[np.integer],
    width: int | None = None,
) -> Context:
    """Draw the contexts of a batch, (B, T) bool, True where given.

    Padding counts as given. For new contexts in each epoch, continue counting indices instead of
    starting again from 0.

    Args:
        strategy: Law of the contexts.
        lengths: True length of each sequence.
        seed: Seed of the stream.
        indices: Number of each sequence in the stream.
        width: T; None: the longest length.
    """
    lengths, indices = [int(n) for n in lengths], [int(i) for i in indices]
    if not lengths or len(lengths) != len(indices):
        raise ValueError(
            f"there are {len(lengths)} lengths and {len(indices)} indices; give one of each for "
            "every sequence, and at least one sequence"
        )
    longest = max(lengths)
    width = longest if width is None else width
    if width < longest:
        raise ValueError(f"width is {width}, less than the longest sequence of {longest} tokens")
    contexts = np.ones((len(lengths), width), np.bool_)
    for row, length, index in zip(contexts, lengths, indices, strict=True):
        row[:length] = strategy.draw(length, sequence_rng(seed, index))
    return contexts


_PLAIN = {"empty": Empty(), "middle": Middle(), "mixed": MIXED, "uniform": UniformRatio()}
_ONE_NUMBER: dict[str, Callable[[float], Strategy]] = {"prefix": Prefix, "random": RandomRatio}
LAWS = ("geometric", "dlogistic")
SPAN_KEYS = ("p", "mean", "sd", "law")


def parse(text: str) -> Strategy:
    """Return the strategy that a string names.

    Raises:
        ValueError: The string is not a strategy; the message quotes it and says what is allowed.

    Example:
    >>> parse("prefix:0.5")
    Prefix(fraction=0.5)
    >>> parse("span: mean=50, p=0.50").name
    'span:p=0.5,mean=50'
    """
    if not isinstance(text, str):
        raise ValueError(
            f"a context is {text!r}, not a string; write one such as 'span:p=0.5,mean=50' or, in "
            "quotes, '[0.25,0.75]'"
        )
    try:
        return _parse_mixture(text) if "*" in text or "+" in text else _parse_one(text)
    except ValueError as error:
        raise ValueError(f"context {text!r}: {error}") from None


def _parse_mixture(text: str) -> Mixture:
    weights: list[float] = []
    parts: list[Strategy] = []
    for piece in text.split("+"):
        weight, star, part = piece.partition("*")
        if not star:
            raise ValueError(
                f"{piece.strip()!r} has no weight; a mixture is written like 0.5*empty+0.5*uniform"
            )
        weights.append(_number("a weight", weight))
        parts.append(_parse_one(part))
    return Mixture(tuple(weights), tuple(parts))


def _parse_one(text: str) -> Strategy:
    if text.strip().startswith("["):
        return _parse_ranges(text)
    name, colon, values = (part.strip() for part in text.partition(":"))
    if colon and not values:
        raise ValueError(f"nothing follows the colon of {text.strip()!r}")
    if name in _PLAIN:
        if values:
            raise ValueError(f"{name!r} takes no values, but {values!r} follows it")
        return _PLAIN[name]
    if name in _ONE_NUMBER:
        if not values:
            raise ValueError(f"{name!r} needs a number, such as {name}:0.5")
        return _ONE_NUMBER[name](_number(name, values))
    if name == "span":
        return _parse_span(values)
    if name == "tokens":
        return _parse_tokens(values)
    known = (*_PLAIN, *_ONE_NUMBER, "span", "tokens", "[a,b]&[c,d]")
    raise ValueError(f"unknown strategy {name!r}{did_you_mean(name, known)}")


def _parse_span(values: str) -> Strategy:
    fields: dict[str, str] = {}
    for item in values.split(",") if values else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(
                f"{item.strip()!r} is not of the form key=value; a span is written like "
                "span:p=0.5,mean=50"
            )
        if key not in SPAN_KEYS:
            raise ValueError(f"a span has no {key!r}{did_you_mean(key, SPAN_KEYS)}")
        if key in fields:
            raise ValueError(f"{key!r} is given twice")
        fields[key] = value
    for key in ("p", "mean"):
        if key not in fields:
            raise ValueError(f"{key!r} is missing; a span is written like span:p=0.5,mean=50")
    return Spans(_number("p", fields["p"]), _length_law(fields))


def _length_law(fields: dict[str, str]) -> LengthLaw:
    mean, law = _number("mean", fields["mean"]), fields.get("law", "geometric")
    if law not in LAWS:
        raise ValueError(f"law is {law!r}{did_you_mean(law, LAWS)}")
    if law == "dlogistic":
        if "sd" not in fields:
            raise ValueError(
                "'sd' is missing; law=dlogistic is written like "
                "span:p=0.5,mean=15,sd=3,law=dlogistic"
            )
        return DLogistic(mean, _number("sd", fields["sd"]))
    if "sd" in fields:
        raise ValueError(
            f"sd is {fields['sd']!r}, but geometric lengths have only a mean; leave it out or add "
            "law=dlogistic"
        )
    return Geometric(mean)


def _parse_ranges(text: str) -> Ranges:
    ranges: list[tuple[float, float]] = []
    for piece in text.split("&"):
        match = re.fullmatch(r"\s*\[([^\[\],]*),([^\[\],]*)\]\s*", piece)
        if match is None:
            raise ValueError(
                f"{piece.strip()!r} is not a range [a,b]; ranges are written like "
                "[0.1,0.4]&[0.6,0.9]"
            )
        ranges.append((_number("a bound", match[1]), _number("a bound", match[2])))
    return Ranges(tuple(ranges))


def _parse_tokens(values: str) -> Strategy:
    if not values.isdecimal():
        raise ValueError(f"tokens is {values!r}; it must be a positive integer, as in tokens:1")
    return RandomTokens(int(values))


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{what} is {text.strip()!r}; it must be a number") from None
