"""Spans of targets: the laws of span lengths, and Algorithm 1 of the paper.

A length law is given by its log cdf, log F(n) = log P(length <= n) for n = 1, 2, ...: in logs, a
gap much shorter than the usual span keeps its true, tiny probability of being filled.

The paper proposes a start and a length and rejects spans that overlap others, which almost never
ends once every gap is shorter than the usual span. Here proposals are drawn in blocks, conditioned
on fitting between the spans that existed when the block began. Whatever fits now also fitted then,
so the accepted proposals follow the paper's law, and the first proposal of each block is always
accepted: the time is bounded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LONGEST = 1e9  # largest mean and sd: longer than any sequence, and far from float64 limits
NARROWEST = 1e-3  # smallest sd: lengths that never vary could not fill every gap


@dataclass(frozen=True)
class Geometric:
    """Geometric lengths of mean m: P(n) = (1/m) (1 - 1/m)^(n-1) for n = 1, 2, ..."""

    mean: float

    def __post_init__(self) -> None:
        _check_mean(self.mean)

    def log_cdf(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return log F(n) for F(n) = 1 - (1 - 1/m)^n."""
        if self.mean == 1:
            return np.zeros_like(n)
        return np.log(-np.expm1(n * math.log1p(-1 / self.mean)))


@dataclass(frozen=True)
class DLogistic:
    """Discretised logistic lengths: a logistic variable rounded to the nearest integer, at least 1.

    P(n) = G(n + 1/2) - G(n - 1/2) for n > 1 and P(1) = G(3/2), where G(x) = 1 / (1 + exp(-(x - m) /
    s)) and s = sigma sqrt(3) / pi. `mean` (m) and `sd` (sigma) are those before rounding.
    """

    mean: float
    sd: float

    def __post_init__(self) -> None:
        _check_mean(self.mean)
        if not NARROWEST <= self.sd <= LONGEST:
            raise ValueError(f"sd is {self.sd!r}; it must lie in [{NARROWEST:g}, {LONGEST:g}]")

    def log_cdf(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return log F(n) for F(n) = G(n + 1/2)."""
        scale = self.sd * math.sqrt(3) / math.pi
        return -np.logaddexp(0.0, -(n + 0.5 - self.mean) / scale)


LengthLaw = Geometric | DLogistic


def log_cdf_table(law: LengthLaw, length: int) -> NDArray[np.float64]:
    """Return log F(1), log F(2), ..., at least `length` entries.

    Entries do not depend on the size of the table, so nearby lengths share one.
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
    """Return max(1, round(p T)); Python's `round` rounds halves to even."""
    return max(1, round(p * length))


def draw_spans(
    length: int, count: int, law: LengthLaw, rng: np.random.Generator, block: int | None = None
) -> tuple[list[Span], NDArray[np.bool_]]:
    """Draw spans that do not overlap and cover exactly `count` positions (Algorithm 1).

    Args:
        length: Tokens of the sequence, T.
        count: Number of positions to cover.
        law: Law of span lengths.
        rng: Generator to draw from.
        block: Proposals drawn at once. It changes the speed, not the law.

    Returns:
        The spans in the order drawn, and (T,) bool, True inside a span.
    """
    log_cdf = log_cdf_table(law, length)
    masked = bytearray(length)  # bytearray.find tests a whole span at once
    as_array = np.frombuffer(masked, np.bool_)  # (T,), shares the memory
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
    """Draw `count` independent spans: uniform start and length by the law, given that they fit.

    A span fits if it contains no masked position.
    """
    free, log_fits = free_starts(masked, log_cdf)
    cumulative = np.cumsum(np.exp(log_fits - log_fits.max()))
    chosen = cumulative.searchsorted(rng.random(count) * cumulative[-1], side="right")
    chosen = np.minimum(chosen, len(free) - 1)  # the product may be rounded up to the sum
    starts = free[chosen]
    # P(n) / F(r) for n <= r, by the inverse cdf with log u = -Exponential.
    lengths = 1 + log_cdf.searchsorted(log_fits[chosen] - rng.standard_exponential(count))
    ends = np.minimum(starts + lengths, len(masked))
    return zip(starts.tolist(), ends.tolist(), strict=True)


def free_starts(
    masked: NDArray[np.bool_], log_cdf: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the free positions, and the log-probability that a span starting at each one fits.

    With r free positions before the next span it is log F(r). After the last span every length
    fits, because spans are cut off at the end of the sequence.
    """
    length = len(masked)
    nowhere = 2 * length
    next_masked = np.minimum.accumulate(np.where(masked, np.arange(length), nowhere)[::-1])[::-1]
    free = np.flatnonzero(~masked)
    room = next_masked[free] - free
    return free, np.where(room <= length, log_cdf[np.minimum(room, length) - 1], 0.0)
