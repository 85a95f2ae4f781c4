"""The strategies: each draws which tokens of a sequence are given, and has a name that `parse` reads back.

A context is (T,) bool, True where the token is given; the others are the targets, of which there is always at least one.
Numbers are read as the decimals they print as, so that 0.29 of 100 tokens is 29, not floor(28.999...).
"""

import math
import numbers
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tracformer.contexts.lengths import Geometric, LengthLaw
from tracformer.contexts.spans import draw_spans, target_count

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
        return start if isinstance(self.law, Geometric) else f"{start},sd={_decimal(self.law.sd)},law=dlogistic"

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
    """Exactly `count` targets (all tokens of a shorter sequence), every such set equally probable."""

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
    """The masking of diffusion: k targets, k uniform on 1..T, every set of k being as probable as any other.

    Masking each token with chance u, u ~ U(0, 1), has this law, given that at least one token is masked.
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
            raise ValueError(f"the prefix is {self.fraction!r} of the sequence; it must lie in [0, 1), so that a target is left")

    @property
    def name(self) -> str:
        return f"prefix:{_decimal(self.fraction)}"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        return np.arange(length) < _floor(self.fraction, length)


@dataclass(frozen=True)
class Ranges(Strategy):
    """Fixed targets: floor(aT) <= t < floor(bT), zero-based, for each range (a, b). Kept in ascending order.

    A range so narrow that it holds no position of a short sequence takes the one in which its middle lies.
    """

    ranges: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("no range is given; write at least one, such as [0.25,0.75]")
        for a, b in self.ranges:
            if not 0 <= a < b <= 1:
                raise ValueError(f"the range {_range_name(a, b)} is out of order; a range [a,b] of targets needs 0 <= a < b <= 1")
        ordered = tuple(sorted((a, b) for a, b in self.ranges))
        for before, after in pairwise(ordered):
            if after[0] < before[1]:
                raise ValueError(f"the ranges {_range_name(*before)} and {_range_name(*after)} overlap; they may touch at most")
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
    """One run of targets between two distinct cuts, each pair of cuts being as probable as any other."""

    @property
    def name(self) -> str:
        return "middle"

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        first, last = sorted(rng.choice(length + 1, 2, replace=False, shuffle=False).tolist())
        position = np.arange(length)
        return (position < first) | (position >= last)


@dataclass(frozen=True)
class Mixture(Strategy):
    """Each sequence draws one of the parts by weight, then its context from that part. A mixture among the parts is spread out."""

    weights: tuple[float, ...]
    parts: tuple[Strategy, ...]

    def __post_init__(self) -> None:
        if not self.parts or len(self.weights) != len(self.parts):
            raise ValueError(
                f"a mixture has {len(self.weights)} weights and {len(self.parts)} parts; it needs at least one part, each with a weight"
            )
        flat: list[tuple[float, Strategy]] = []
        for weight, part in zip(self.weights, self.parts, strict=True):
            if isinstance(part, Mixture):
                flat += ((weight * inner, leaf) for inner, leaf in zip(part.weights, part.parts, strict=True))
            else:
                flat.append((weight, part))
        object.__setattr__(self, "weights", tuple(weight for weight, _ in flat))
        object.__setattr__(self, "parts", tuple(part for _, part in flat))
        for weight in self.weights:
            if not 0 < weight <= 1:
                raise ValueError(f"a weight is {weight!r}; the weights of a mixture must lie in (0, 1]")
        total = math.fsum(self.weights)
        if abs(total - 1) > 1e-9:
            raise ValueError(f"the weights {', '.join(map(_decimal, self.weights))} sum to {total:.10g}; they must sum to 1")

    @property
    def name(self) -> str:
        if self == MIXED:
            return "mixed"
        return "+".join(f"{_decimal(weight)}*{part.name}" for weight, part in zip(self.weights, self.parts, strict=True))

    def _draw(self, length: int, rng: np.random.Generator) -> Context:
        part = bisect_right(list(accumulate(self.weights)), rng.random())
        return self.parts[min(part, len(self.parts) - 1)].draw(length, rng)  # rounded weights may end just below 1


def _random_subset(length: int, targets: int, rng: np.random.Generator) -> Context:
    given = np.ones(length, np.bool_)
    given[rng.choice(length, targets, replace=False, shuffle=False)] = False
    return given


@lru_cache(maxsize=4096)
def _floor(fraction: float, length: int) -> int:
    """floor(fraction * length) without rounding, the fraction being the decimal that it prints as."""
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
