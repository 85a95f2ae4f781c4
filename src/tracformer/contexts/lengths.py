"""How long a span is: the two laws of Algorithm 1.

A law is its log cdf, log F(n) = log P(length <= n) for n = 1, 2, ...: in logs a hole far shorter than the usual span
keeps its true, tiny chance of being filled.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

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
    """A logistic variable of mean m and standard deviation sigma, rounded to the nearest integer, or to 1 if that is less than 1.

    P(n) = G(n + 1/2) - G(n - 1/2) for n > 1 and P(1) = G(3/2), where G(x) = 1 / (1 + exp(-(x - m) / s)) and s = sigma sqrt(3) / pi.
    The mean and the deviation are those before rounding.
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
    """log F(1), log F(2), ...: `length` entries or more. No entry depends on how many there are, so nearby lengths share a table."""
    return _log_cdf_table(law, 1 << (length - 1).bit_length())


@lru_cache(maxsize=128)
def _log_cdf_table(law: LengthLaw, size: int) -> NDArray[np.float64]:
    table = law.log_cdf(np.arange(1.0, size + 1))
    table.setflags(write=False)
    return table


def _check_mean(mean: float) -> None:
    if not 1 <= mean <= LONGEST:
        raise ValueError(f"mean is {mean!r}; a mean span length must lie in [1, {LONGEST:g}]")
