"""Confidence intervals by resampling sequences.

Sequences are the unit that is drawn independently; the tokens of one stay together. A figure is a
ratio of sums over sequences, such as sum of nll / sum of targets. A resample draws N of the N
sequences with replacement; only how often each was drawn matters, so all resamples are one matrix
product.

Resamples of few sequences lie too close together, like a variance that is divided by N and read off
a normal distribution. `stretched` corrects for both: distances from the figure are multiplied by
t sqrt(N / (N - 1)) / z.
"""

import math
from functools import cache, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES, LEVEL, SEED = 2000, 0.95, 20250
COUNTS_AT_ONCE = 2**22
LARGEST_EXPONENT = 700.0  # exp of more overflows float64
NORMAL = 1.959963984540054  # standard errors on either side of a 95% interval

Floats = NDArray[np.float64]
Interval = tuple[float, float]


def ratio(above: ArrayLike, below: ArrayLike) -> float:
    """Return sum(above) / sum(below); NaN if the latter is 0."""
    top, bottom = (float(np.asarray(x, np.float64).sum()) for x in (above, below))
    return top / bottom if bottom else float("nan")


def ratio_interval(above: ArrayLike, below: ArrayLike, seed: int = SEED) -> Interval | None:
    """Return the 95% interval of sum(above) / sum(below) over sequences; None for fewer than two.

    If all of `above` is non-negative, so are the ends.
    """
    ratios = resampled(above, below, seed)
    if ratios is None:
        return None
    low, high = stretched(quantiles(ratios), ratio(above, below), len(np.asarray(above)))
    return (low if np.asarray(above).min() < 0 else max(low, 0.0)), high


def share_interval(part: ArrayLike, whole: ArrayLike) -> Interval | None:
    """Return `ratio_interval` within [0, 1], for parts that are at most the whole."""
    interval = ratio_interval(part, whole)
    return None if interval is None else (interval[0], min(interval[1], 1.0))


def difference_interval(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    seed: int = SEED,
    *,
    exponent: bool = False,
) -> Interval | None:
    """Return the 95% interval of ratio(*a) - ratio(*b), paired by sequence.

    Both ratios come from the same resamples, so that what the sequences have in common cancels.

    Args:
        a: Numerators and denominators of the first ratio, one of each for each sequence.
        b: The same for the second ratio.
        seed: Seed of the resamples.
        exponent: Compare exp of the ratios instead, as for perplexities.

    Raises:
        ValueError: The numbers of sequences differ.
    """
    n, other = len(np.asarray(a[0])), len(np.asarray(b[0]))
    if n != other:
        raise ValueError(f"{n} and {other} sequences cannot be paired; they must be the same ones")
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
    return stretched(quantiles(first - second), value, n)


def perplexity_of(nll: float) -> float:
    """Return exp(nll), at most the largest that float64 holds."""
    return math.exp(min(nll, LARGEST_EXPONENT))


def mean_interval(values: ArrayLike, seed: int = SEED) -> Interval | None:
    """Return the 95% interval of the mean of one number for each sequence."""
    return ratio_interval(values, np.ones(len(np.asarray(values))), seed)


def resampled(above: ArrayLike, below: ArrayLike, seed: int = SEED) -> Floats | None:
    """Return the ratio in each resample, (RESAMPLES,); None for fewer than two sequences.

    Resamples whose denominator is 0 are left out.
    """
    sums = resampled_sums(
        np.stack([np.asarray(above, np.float64), np.asarray(below, np.float64)], axis=1), seed
    )
    if sums is None:
        return None
    kept = sums[sums[:, 1] != 0]
    return kept[:, 0] / kept[:, 1] if len(kept) else None


def resampled_sums(values: ArrayLike, seed: int = SEED) -> Floats | None:
    """Return sums over sequences of values (N, k) in each resample, (RESAMPLES, k).

    None for fewer than two sequences.
    """
    rows = np.asarray(values, np.float64)
    if len(rows) < 2:
        return None
    return np.concatenate([counts @ rows for counts in _counts(len(rows), seed)])


@lru_cache(maxsize=1)
def _counts(n: int, seed: int) -> list[NDArray[np.uint16]]:
    """Return how often each sequence was drawn, (RESAMPLES, n) in a few parts."""
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, n], np.uint64)))
    at_once = max(1, COUNTS_AT_ONCE // n)
    parts = []
    for start in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - start)
        drawn = rng.integers(n, size=(rows, n)) + np.arange(rows)[:, None] * n
        counts = np.bincount(drawn.ravel(), minlength=rows * n)
        parts.append(counts.astype(np.uint16).reshape(rows, n))
    return parts


def quantiles(values: Floats) -> Interval:
    """Return the ends between which 95% of the values lie."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def stretched(interval: Interval, value: float, n: int) -> Interval:
    """Return an interval stretched about the value, as resamples of n sequences need.

    The factor is 1.02 for 100 sequences, 1.2 for 10, and 9 for 2.
    """
    by = t_quantile(n - 1) / NORMAL * math.sqrt(n / (n - 1))
    return value - by * (value - interval[0]), value + by * (interval[1] - value)


@cache
def t_quantile(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t distribution.

    >>> [round(t_quantile(n), 3) for n in (1, 2, 20, 30)]
    [12.706, 4.303, 2.086, 2.042]
    """
    from scipy.special import stdtrit  # slow to import, and not needed by `tracformer --help`

    quantile = float(stdtrit(freedom, (1 + LEVEL) / 2))
    # Results so far were made with a printed table up to here; their intervals stay the same.
    return round(quantile, 3) if freedom <= 10 else quantile
