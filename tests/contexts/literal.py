"""Algorithm 1 as the paper prints it, twice: drawn with rejection, and enumerated
exactly for short sequences.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from functools import cache
from typing import TypeVar

import numpy as np

from tracformer.spans import DLogistic, Geometric, LengthLaw

Span = tuple[int, int]
K = TypeVar("K", bound=Hashable)


def probability(law: LengthLaw, n: int) -> float:
    """P(n), from the definitions."""
    if isinstance(law, Geometric):
        return (1 / law.mean) * (1 - 1 / law.mean) ** (n - 1)

    def below(x: float) -> float:
        scale = law.sd * math.sqrt(3) / math.pi
        return 0.5 * (1 + math.tanh((x - law.mean) / (2 * scale)))

    return below(1.5) if n == 1 else below(n + 0.5) - below(n - 0.5)


def sample_length(law: LengthLaw, rng: np.random.Generator) -> int:
    if isinstance(law, Geometric):
        return int(rng.geometric(1 / law.mean))
    assert isinstance(law, DLogistic)
    return max(1, round(rng.logistic(law.mean, law.sd * math.sqrt(3) / math.pi)))


def sample_spans(length: int, p: float, law: LengthLaw, rng: np.random.Generator) -> list[Span]:
    """Spans in the order accepted, with rejection."""
    to_mask = max(1, round(p * length))
    masked = 0
    spans: list[Span] = []
    while masked < to_mask:
        start = int(rng.integers(length))
        if any(a <= start < b for a, b in spans):
            continue
        end = min(start + sample_length(law, rng), length)
        if any(a < end and start < b for a, b in spans):
            continue
        spans.append((start, end))
        masked += end - start
    if masked > to_mask:
        start, end = spans[-1]
        spans[-1] = (start, end - (masked - to_mask))
    return spans


def accepted_law(length: int, spans: frozenset[Span], law: LengthLaw) -> dict[Span, float]:
    """The exact law of the next accepted (start, end), before any trimming: every proposal, less
    the rejected ones.
    """
    lengths = {n: probability(law, n) for n in range(1, length)}
    lengths[length] = 1 - math.fsum(lengths.values())  # whatever is longer ends at T all the same
    taken = {t for a, b in spans for t in range(a, b)}
    chances: dict[Span, float] = defaultdict(float)
    for start in range(length):
        for n, chance in lengths.items():
            end = min(start + n, length)
            if not taken & set(range(start, end)):
                chances[start, end] += chance / length
    accepted = math.fsum(chances.values())
    return {span: chance / accepted for span, chance in chances.items()}


def spans_law(length: int, p: float, law: LengthLaw) -> dict[frozenset[Span], float]:
    """The exact law of the result, as a set of spans."""

    @cache
    def finish(spans: frozenset[Span], missing: int) -> dict[frozenset[Span], float]:
        if missing == 0:
            return {spans: 1.0}
        total: dict[frozenset[Span], float] = defaultdict(float)
        for (start, end), chance in accepted_law(length, spans, law).items():
            end = min(end, start + missing)
            for result, rest in finish(spans | {(start, end)}, missing - (end - start)).items():
                total[result] += chance * rest
        return total

    return finish(frozenset(), max(1, round(p * length)))


def check_frequencies(observed: Mapping[K, int], law: Mapping[K, float]) -> None:
    """Chi-square against a known law; anything impossible is a failure."""
    assert set(observed) <= set(law)
    assert math.isclose(math.fsum(law.values()), 1.0, abs_tol=1e-12)
    draws = sum(observed.values())
    pairs = [(observed.get(key, 0), draws * chance) for key, chance in law.items()]
    _check_chi_square([(n, expected, expected) for n, expected in pairs])


def check_same_law(first: Counter[K], second: Counter[K]) -> None:
    """Chi-square of two samples of one size."""
    assert first.total() == second.total()
    _check_chi_square(
        [(first[key], second[key], first[key] + second[key]) for key in first | second]
    )


def _check_chi_square(cells: list[tuple[float, float, float]]) -> None:
    """Cells are (observed, expected, variance); rare ones are pooled.

    The threshold is passed by chance less than once in 10^4.
    """
    common = [cell for cell in cells if cell[2] >= 10]
    rare = [cell for cell in cells if cell[2] < 10]
    if rare:
        common.append(
            (sum(c[0] for c in rare), sum(c[1] for c in rare), max(1.0, sum(c[2] for c in rare)))
        )
    statistic = sum(
        (observed - expected) ** 2 / variance for observed, expected, variance in common
    )
    freedom = max(1, len(common) - 1)
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 10, (statistic, freedom)
