"""Which tokens are given: laws of span lengths, context strategies, and the strings that name them.

How long a span is: the two laws of Algorithm 1.

A law is its log cdf, log F(n) = log P(length <= n) for n = 1, 2, ...: in logs a hole far shorter
than the usual span keeps its true, tiny chance of being filled.

Algorithm 1 of the paper: targets in spans that do not overlap, in bounded time.

The paper proposes a start and a length and rejects what overlaps, which hardly ever ends once every
hole is shorter than the usual span. Here proposals come in blocks, and a block proposes only what
fits between the spans that stood when it began. What fits now also fitted then, so the accepted
proposals follow the paper's law; and the first proposal of each block is always accepted.

The strategies: each draws which tokens of a sequence are given, and has a name that `parse` reads
back.

A context is (T,) bool, True where the token is given; the others are the targets, of which there is
always at least one. Numbers are read as the decimals they print as, so that 0.29 of 100 tokens is
29, not floor(28.999...).

One seed, one stream of contexts: sequence i of the stream has its own randomness, whoever draws it
and beside whichever others.

Strings that name a strategy, in configurations and on the command line.

empty                                        nothing is given
span:p=0.5,mean=50                           Algorithm 1, geometric lengths
span:p=0.5,mean=15,sd=3,law=dlogistic        Algorithm 1, discretised logistic lengths
mixed                                        Algorithm 2
[0.1,0.4]&[0.6,0.9]                          these fractions of the sequence are targets
prefix:0.5                                   the first half is given
middle                                       the targets are one run between two uniform cuts
random:0.3                                   30% of the tokens are targets, anywhere
tokens:1                                     one target, anywhere; all other tokens are given
uniform                                      any number of targets, anywhere
0.7*span:p=0.5,mean=50+0.3*uniform           a mixture; the weights sum to 1

How the given set C is drawn, and the strings that name a way to draw it.
"""

import math
import numbers
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

LONGEST = 1e9  # of mean and sd: beyond any sequence, and far from the limits of float64
NARROWEST = 1e-3  # of sd: a length that never varied could not fill every hole


@dataclass(frozen=True)
class Geometric:
    """P(n) = (1/m) (1 - 1/m)^(n-1) from n = 1, whose mean is m."""

    mean: float

    def __post_init__(self) -> None:
        _check_mean(self.mean)

    def log_cdf(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """F(n) = 1 - (1 - 1/m)^n."""
        if self.mean == 1:
            return np.zeros_like(n)
        return np.log(-np.expm1(n * math.log1p(-1 / self.mean)))


@dataclass(frozen=True)
class DLogistic:
    """A logistic variable of mean m and standard deviation sigma, rounded to the nearest integer,
    or to 1 if that is less than 1.

    P(n) = G(n + 1/2) - G(n - 1/2) for n > 1 and P(1) = G(3/2), where G(x) = 1 / (1 + exp(-(x - m) /
    s)) and s = sigma sqrt(3) / pi. The mean and the deviation are those before rounding.
    """

    mean: float
    sd: float

    def __post_init__(self) -> None:
        _check_mean(self.mean)
        if not NARROWEST <= self.sd <= LONGEST:
            raise ValueError(f"sd is {self.sd!r}; it must lie in [{NARROWEST:g}, {LONGEST:g}]")

    def log_cdf(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """F(n) = G(n + 1/2)."""
        scale = self.sd * math.sqrt(3) / math.pi
        return -np.logaddexp(0.0, -(n + 0.5 - self.mean) / scale)


LengthLaw = Geometric | DLogistic


def log_cdf_table(law: LengthLaw, length: int) -> NDArray[np.float64]:
    """log F(1), log F(2), ...: `length` entries or more.

    No entry depends on how many there are, so nearby lengths share a table.
    """
    return _log_cdf_table(law, 1 << (length - 1).bit_length())


@lru_cache(maxsize=128)
def _log_cdf_table(law: LengthLaw, size: int) -> NDArray[np.float64]:
    table = law.log_cdf(np.arange(1.0, size + 1))
    table.setflags(write=False)
    return table


def _check_mean(mean: float) -> None:
    if not 1 <= mean <= LONGEST:
        raise ValueError(f"mean is {mean!r}; a mean span length must lie in [1, {LONGEST:g}]")


Span = tuple[int, int]  # start and end, zero-based, end excluded


def target_count(length: int, p: float) -> int:
    """max(1, round(p T)), by Python's `round`: a half goes to the even neighbour."""
    return max(1, round(p * length))


def draw_spans(
    length: int, count: int, law: LengthLaw, rng: np.random.Generator, block: int | None = None
) -> tuple[list[Span], NDArray[np.bool_]]:
    """Algorithm 1: the spans in the order drawn, and (T,) bool, True in a span: exactly `count`
    times.

    `block` is how many proposals are made at once: a matter of speed, not of law.
    """
    log_cdf = log_cdf_table(law, length)
    masked = bytearray(length)  # whose find() tests a whole span at once
    as_array = np.frombuffer(masked, np.bool_)  # (T,), the same memory
    ones = b"\1" * length
    if block is None:
        block = max(64, length // 32, round(count / law.mean))
    spans: list[Span] = []
    missing = count
    while missing > 0:
        for start, end in propose(as_array, log_cdf, block, rng):
            if masked.find(1, start, end) >= 0:  # it overlaps a span of this block
                continue
            masked[start:end] = ones[start:end]
            spans.append((start, end))
            missing -= end - start
            if missing <= 0:
                break
    if missing < 0:  # trim the last span to the exact count
        start, end = spans[-1]
        spans[-1] = (start, end + missing)
        as_array[end + missing : end] = False
    return spans, as_array


def propose(
    masked: NDArray[np.bool_], log_cdf: NDArray[np.float64], count: int, rng: np.random.Generator
) -> Iterator[Span]:
    """`count` independent (start, end): a uniform start and a length by the law, given that they
    meet no masked position.
    """
    free, log_fits = free_starts(masked, log_cdf)
    cumulative = np.cumsum(np.exp(log_fits - log_fits.max()))
    chosen = cumulative.searchsorted(rng.random(count) * cumulative[-1], side="right")
    chosen = np.minimum(chosen, len(free) - 1)  # a product may round up to the sum
    starts = free[chosen]
    # P(n) / F(r) for n <= r, by the inverse cdf with log u = -Exponential.
    lengths = 1 + log_cdf.searchsorted(log_fits[chosen] - rng.standard_exponential(count))
    ends = np.minimum(starts + lengths, len(masked))
    return zip(starts.tolist(), ends.tolist(), strict=True)


def free_starts(
    masked: NDArray[np.bool_], log_cdf: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The free positions, and for each the log of the chance that a span starting there fits.

    With r free cells up to the next span that is log F(r). After the last span end = min(start + n,
    T) lets every length fit.
    """
    length = len(masked)
    nowhere = 2 * length
    next_masked = np.minimum.accumulate(np.where(masked, np.arange(length), nowhere)[::-1])[::-1]
    free = np.flatnonzero(~masked)
    room = next_masked[free] - free
    return free, np.where(room <= length, log_cdf[np.minimum(room, length) - 1], 0.0)


Context = NDArray[np.bool_]


class Strategy(ABC):
    """A law of contexts: immutable, comparable, and named by a string."""

    def draw(self, length: int, rng: np.random.Generator) -> Context:
        """(length,) bool, True where given."""
        if not isinstance(length, numbers.Integral) or length < 1:
            raise ValueError(f"length is {length!r}; a context needs at least one token")
        return self._draw(int(length), rng)

    @property
    @abstractmethod
    def name(self) -> str:
        """The canonical string: `parse(strategy.name) == strategy`."""

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
    """Algorithm 1: exactly max(1, round(pT)) targets, in spans whose lengths follow a law."""

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
    """Exactly max(1, round(pT)) targets, every such set being as probable as any other."""

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
    """Exactly `count` targets (all tokens of a shorter sequence), every such set
    equally probable.
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
    """The masking of diffusion: k targets, k uniform on 1..T, every set of k being as probable as
    any other.

    Masking each token with chance u, u ~ U(0, 1), has this law, given that at least one token is
    masked.
    """

    @property
    def name(self) -> str:
        return "uniform"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        return _random_subset(length, int(rng.integers(1, length + 1)), rng)


@dataclass(frozen=True)
class Prefix(Strategy):
    """The first floor(fT) tokens are given, the rest are targets."""

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
    """Fixed targets: floor(aT) <= t < floor(bT), zero-based, for each range (a, b). Kept in
    ascending order.

    A range so narrow that it holds no position of a short sequence takes the one in which its
    middle lies.
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
    """One run of targets between two distinct cuts, each pair of cuts being as
    probable as any other.
    """

    @property
    def name(self) -> str:
        return "middle"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        first, last = sorted(rng.choice(length + 1, 2, replace=False, shuffle=False).tolist())
        position = np.arange(length)
        return (position < first) | (position >= last)


@dataclass(frozen=True)
class Mixture(Strategy):
    """Each sequence draws one of the parts by weight, then its context from that part.

    A mixture among the parts is spread out.
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
    """floor(fraction * length) without rounding, the fraction being the decimal that
    it prints as.
    """
    return math.floor(Fraction(_decimal(fraction)) * length)


def _decimal(value: float) -> str:
    """The shortest decimal that reads back as this number."""
    return repr(float(value)).removesuffix(".0")


def _range_name(a: float, b: float) -> str:
    return f"[{_decimal(a)},{_decimal(b)}]"


def _check_ratio(p: float) -> None:
    if not 0 < p <= 1:
        raise ValueError(f"p is {p!r}; the share of targets must lie in (0, 1]")


# Algorithm 2: r < 0.3, r < 0.5, else.
MIXED = Mixture((0.3, 0.2, 0.5), (Empty(), Spans(0.85, Geometric(50)), Spans(0.5, Geometric(50))))


# Other uses of the same seed and index, elsewhere, must not see the same numbers.
_PURPOSE = int.from_bytes(b"contexts")
_WORDS = 2**64


def sequence_rng(seed: int, index: int) -> np.random.Generator:
    """The generator of sequence `index`: Philox keyed by (seed, index) itself, which is cheaper
    than hashing the two by SeedSequence.
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
    """(B, T) bool, True where given: row b is for sequence `indices[b]` of the stream, of
    `lengths[b]` tokens.

    T is the longest length, or `width`. Padding counts as given: it is never a target. To see a
    sequence under a new context each epoch, count the index on instead of starting again from 0.
    """
    lengths, indices = [int(n) for n in lengths], [int(i) for i in indices]
    if not lengths or len(lengths) != len(indices):
        raise ValueError(
            f"there are {len(lengths)} lengths and {len(indices)} indices; give one of each to a "
            "sequence, at least one sequence"
        )
    longest = max(lengths)
    width = longest if width is None else width
    if width < longest:
        raise ValueError(f"width is {width}, less than the longest sequence of {longest} tokens")
    contexts = np.ones((len(lengths), width), np.bool_)
    for row, length, index in zip(contexts, lengths, indices, strict=True):
        row[:length] = strategy.draw(length, sequence_rng(seed, index))
    return contexts


LAWS = ("geometric", "dlogistic")
SPAN_KEYS = ("p", "mean", "sd", "law")


def parse(text: str) -> Strategy:
    """The strategy that `text` names; a ValueError quotes the text and says what is allowed.

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
    if name not in _PARSERS:
        raise ValueError(
            f"no strategy is called {name!r}{_nearest(name, _PARSERS)}; known: "
            f"{', '.join(_PARSERS)}, [a,b]&[c,d]"
        )
    if colon and not values:
        raise ValueError(f"nothing follows the colon of {text.strip()!r}")
    return _PARSERS[name](values)


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
            raise ValueError(
                f"a span has no {key!r}{_nearest(key, SPAN_KEYS)}; allowed: {', '.join(SPAN_KEYS)}"
            )
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
        raise ValueError(f"law is {law!r}{_nearest(law, LAWS)}; allowed: {', '.join(LAWS)}")
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


def _plain(name: str, strategy: Strategy) -> Callable[[str], Strategy]:
    """A strategy without numbers."""

    def build(values: str) -> Strategy:
        if values:
            raise ValueError(f"{name!r} takes no values, but {values!r} follows it")
        return strategy

    return build


def _one_number(name: str, build: Callable[[float], Strategy]) -> Callable[[str], Strategy]:
    def read(values: str) -> Strategy:
        if not values:
            raise ValueError(f"{name!r} needs a number, such as {name}:0.5")
        return build(_number(name, values))

    return read


def _parse_tokens(values: str) -> Strategy:
    if not values.isdecimal():
        raise ValueError(f"tokens is {values!r}; it must be a positive integer, as in tokens:1")
    return RandomTokens(int(values))


_PARSERS: dict[str, Callable[[str], Strategy]] = {
    "empty": _plain("empty", Empty()),
    "middle": _plain("middle", Middle()),
    "mixed": _plain("mixed", MIXED),
    "prefix": _one_number("prefix", Prefix),
    "random": _one_number("random", RandomRatio),
    "span": _parse_span,
    "tokens": _parse_tokens,
    "uniform": _plain("uniform", UniformRatio()),
}


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{what} is {text.strip()!r}; it must be a number") from None


def _nearest(word: str, known: tuple[str, ...] | dict[str, Callable[[str], Strategy]]) -> str:
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


__all__ = [
    "MIXED",
    "Context",
    "DLogistic",
    "Empty",
    "Geometric",
    "LengthLaw",
    "Middle",
    "Mixture",
    "Prefix",
    "RandomRatio",
    "RandomTokens",
    "Ranges",
    "Spans",
    "Strategy",
    "UniformRatio",
    "draw_contexts",
    "parse",
    "sequence_rng",
]
