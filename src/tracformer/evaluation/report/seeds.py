"""Training seeds of one model as one figure: their mean, and an interval that leaves open what either the windows or the seeds do."""

import math
import statistics
from collections.abc import Sequence
from statistics import NormalDist

from tracformer.evaluation.report.tables import Cell
from tracformer.evaluation.results import Row

# Student's t at 0.975, for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def over_seeds(rows: Sequence[Row]) -> Cell:
    """One row a seed. Of a single seed its own interval; of n seeds

        mean -+ sqrt(w^2 + (t * sd / sqrt(n))^2)

    w: the mean half-width of the seeds' intervals over windows, which they share, so that more seeds do not narrow it; sd: the standard
    deviation of the seeds' values; t: Student's quantile for n - 1 degrees of freedom.
    """
    if len(rows) == 1:
        return Cell(rows[0].value, rows[0].low, rows[0].high)
    values = [row.value for row in rows]
    mean = statistics.fmean(values)
    if not all(map(math.isfinite, values)):
        return Cell(mean, seeds=len(rows))
    spread = statistics.stdev(values)
    between = t_quantile(len(rows) - 1) * spread / math.sqrt(len(rows))
    below = [row.value - row.low for row in rows if row.low is not None]
    above = [row.high - row.value for row in rows if row.high is not None]
    low = mean - math.hypot(statistics.fmean(below), between) if below else mean - between
    high = mean + math.hypot(statistics.fmean(above), between) if above else mean + between
    never_negative = all(min(row.value, row.value if row.low is None else row.low) >= 0 for row in rows)
    return Cell(mean, max(low, 0.0) if never_negative else low, high, spread, len(rows))


def t_quantile(freedom: int) -> float:
    """
    >>> [round(t_quantile(n), 3) for n in (1, 2, 20, 30)]
    [12.706, 4.303, 2.086, 2.042]
    """
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
