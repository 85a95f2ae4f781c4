"""Training seeds of one model as one figure: their mean, and an interval that leaves open what either the windows or the seeds do."""

import math
import statistics
from collections.abc import Sequence

from tracformer.evaluation.bootstrap import t_quantile
from tracformer.evaluation.report.tables import Cell
from tracformer.evaluation.results import Row


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
