"""Intervals by resampling sequences, the unit that is drawn independently: tokens of one sequence
go together.

A figure is a ratio of sums, sum of nll over sum of targets. One resample draws N of the N sequences
with replacement; what it needs is only how often each was drawn, so that all resamples are one
matrix product. Resamples of few sequences lie too close together, as a variance does that is
divided by N and read off a normal law: their distance to the figure is stretched by t sqrt(N / (N -
1)) / z.
"""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES, LEVEL, SEED = 2000, 0.95, 20250
ROWS_AT_ONCE = 2**22  # counts held at a time
LARGEST_EXPONENT = 700.0  # exp of more is no float64

Floats = NDArray[np.float64]
Interval = tuple[float, float]

# Student's t at 0.975, for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def ratio(above: ArrayLike, below: ArrayLike) -> float:
    """sum(above) / sum(below); nan where nothing is below."""
    top, bottom = (float(np.asarray(x, np.float64).sum()) for x in (above, below))
    return top / bottom if bottom else float("nan")


def ratio_interval(above: ArrayLike, below: ArrayLike, seed: int = SEED) -> Interval | None:
    """95% interval of sum(above) / sum(below) over sequences; None for fewer than two.

    Of what is never below zero no end is.
    """
    ratios = resampled(above, below, seed)
    if ratios is None:
        return None
    low, high = stretched(quantiles(ratios), ratio(above, below), len(np.asarray(above)))
    return (low if np.asarray(above).min() < 0 else max(low, 0.0)), high


def share_interval(part: ArrayLike, whole: ArrayLike) -> Interval | None:
    """`ratio_interval` of a part that is at most the whole, as right guesses among
    targets: within [0, 1].
    """
    interval = ratio_interval(part, whole)
    return None if interval is None else (interval[0], min(interval[1], 1.0))


def difference_interval(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    seed: int = SEED,
    *,
    exponent: bool = False,
) -> Interval | None:
    """95% interval of ratio(a) - ratio(b), or of exp of each, both from the same resamples: what
    sequences have in common cancels.
    """
    if len(np.asarray(a[0])) != len(np.asarray(b[0])):
        raise ValueError(
            f"{len(np.asarray(a[0]))} and {len(np.asarray(b[0]))} sequences cannot be paired; they "
            "must be the same ones"
        )
    # (RESAMPLES, 4)
    sums = resampled_sums(np.stack([np.asarray(x, np.float64) for x in (*a, *b)], axis=1), seed)
    if sums is None:
        return None
    kept = sums[(sums[:, 1] != 0) & (sums[:, 3] != 0)]
    first, second = kept[:, 0] / kept[:, 1], kept[:, 2] / kept[:, 3]
    if exponent:
        first, second = (np.exp(np.minimum(each, LARGEST_EXPONENT)) for each in (first, second))
    means = [ratio(*a), ratio(*b)]
    value = perplexity_of(means[0]) - perplexity_of(means[1]) if exponent else means[0] - means[1]
    return stretched(quantiles(first - second), value, len(np.asarray(a[0])))


def perplexity_of(nll: float) -> float:
    """exp, or the largest that is a number."""
    return math.exp(min(nll, LARGEST_EXPONENT))


def mean_interval(values: ArrayLike, seed: int = SEED) -> Interval | None:
    """95% interval of the mean of one number a sequence."""
    return ratio_interval(values, np.ones(len(np.asarray(values))), seed)


def resampled(above: ArrayLike, below: ArrayLike, seed: int = SEED) -> Floats | None:
    """(RESAMPLES,) the ratio in each resample; None for fewer than two sequences.

    A resample in which nothing is below is left out.
    """
    sums = resampled_sums(
        np.stack([np.asarray(above, np.float64), np.asarray(below, np.float64)], axis=1), seed
    )
    if sums is None:
        return None
    kept = sums[sums[:, 1] != 0]
    return kept[:, 0] / kept[:, 1] if len(kept) else None


def resampled_sums(values: ArrayLike, seed: int = SEED) -> Floats | None:
    """(RESAMPLES, k) the sums over sequences of k numbers each, (N, k), in each resample; None for
    fewer than two sequences.
    """
    rows = np.asarray(values, np.float64)
    if len(rows) < 2:
        return None
    return np.concatenate([counts @ rows for counts in _counts(len(rows), seed)])


@lru_cache(maxsize=1)
def _counts(n: int, seed: int) -> list[NDArray[np.uint16]]:
    """(RESAMPLES, n) in a few parts: how often each sequence was drawn."""
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, n], np.uint64)))
    at_once = max(1, ROWS_AT_ONCE // n)
    parts = []
    for start in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - start)
        drawn = rng.integers(n, size=(rows, n)) + np.arange(rows)[:, None] * n
        parts.append(
            np.bincount(drawn.ravel(), minlength=rows * n).astype(np.uint16).reshape(rows, n)
        )
    return parts


def quantiles(values: Floats) -> Interval:
    """The 95% interval of what resamples gave."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def stretched(interval: Interval, value: float, n: int) -> Interval:
    """Away from the value, by what n units make resamples too narrow: 2% at 100 of them, 20% at 10,
    ninefold at 2.
    """
    by = t_quantile(n - 1) / NormalDist().inv_cdf(0.975) * math.sqrt(n / (n - 1))
    return value - by * (value - interval[0]), value + by * (interval[1] - value)


def t_quantile(freedom: int) -> float:
    """
    >>> [round(t_quantile(n), 3) for n in (1, 2, 20, 30)]
    [12.706, 4.303, 2.086, 2.042]
    """
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
