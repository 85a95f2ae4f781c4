import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import literal
from tracformer.spans import (
    DLogistic,
    Geometric,
    LengthLaw,
    draw_spans,
    free_starts,
    log_cdf_table,
    propose,
    target_count,
)

means = st.floats(1, 1e9) | st.floats(1, 60)
laws = st.builds(Geometric, means) | st.builds(
    DLogistic, means, st.floats(1e-3, 1e9) | st.floats(0.1, 10)
)
LAWS: list[LengthLaw] = [
    Geometric(1),
    Geometric(2.5),
    Geometric(50),
    DLogistic(3, 1),
    DLogistic(15, 3),
    DLogistic(1, 4),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_length_laws(law: LengthLaw) -> None:
    """F(n) - F(n-1) is the law's definition, and the definition has the mean that it names."""
    cdf = np.exp(log_cdf_table(law, 4000))
    written_out = [literal.probability(law, n) for n in range(1, len(cdf) + 1)]
    np.testing.assert_allclose(np.diff(cdf, prepend=0.0), written_out, rtol=0, atol=1e-12)
    n = np.arange(1, len(cdf) + 1)
    if isinstance(law, Geometric):
        assert n @ written_out == pytest.approx(law.mean, rel=1e-9)


def test_moments_of_the_logistic_law() -> None:
    """Far from 1, where nothing is cut off, rounding keeps the mean and adds the variance 1/12 of a
    rounding error.
    """
    n = np.arange(1, 513)
    probabilities = np.diff(np.exp(log_cdf_table(DLogistic(100, 6), 512)), prepend=0.0)
    mean = float(n @ probabilities)
    assert mean == pytest.approx(100, abs=1e-9)
    assert float((n - mean) ** 2 @ probabilities) == pytest.approx(36 + 1 / 12, abs=1e-6)


STATES: list[frozenset[literal.Span]] = [
    frozenset(),
    frozenset({(3, 5)}),
    frozenset({(0, 1), (4, 6), (11, 12)}),
    frozenset({(2, 3), (3, 7), (8, 12)}),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("spans", STATES, ids=str)
def test_proposals_have_the_law_of_accepted_ones(
    law: LengthLaw, spans: frozenset[literal.Span]
) -> None:
    masked = np.zeros(12, np.bool_)
    for start, end in spans:
        masked[start:end] = True
    log_cdf = log_cdf_table(law, 12)
    accepted = literal.accepted_law(12, spans, law)

    free, log_fits = free_starts(masked, log_cdf)
    weights = np.exp(log_fits)
    by_start = [
        sum(chance for (start, _), chance in accepted.items() if start == position)
        for position in free
    ]
    np.testing.assert_allclose(weights / weights.sum(), by_start, rtol=0, atol=1e-12)

    literal.check_frequencies(
        Counter(propose(masked, log_cdf, 100_000, np.random.default_rng(0))), accepted
    )


def test_holes_too_short_for_float64_keep_their_law() -> None:
    """F(3) is about exp(-1800) here. So far below the mean F(r) is proportional to exp(r / s)."""
    law = DLogistic(1000, 1)
    masked = np.array([False, False, False, True, False, False, True])
    # F(0), F(1), F(2), F(3), but for a factor
    up_to = [0.0, *np.exp(np.arange(1, 4) * math.pi / math.sqrt(3))]
    total = 2 * up_to[1] + 2 * up_to[2] + up_to[3]
    chances = {
        (start, start + n): (up_to[n] - up_to[n - 1]) / total
        for low, high in ((0, 3), (4, 6))
        for start in range(low, high)
        for n in range(1, high - start + 1)
    }
    literal.check_frequencies(
        Counter(propose(masked, log_cdf_table(law, 7), 100_000, np.random.default_rng(0))), chances
    )


@pytest.mark.parametrize("block", [1, 2, None])
@pytest.mark.parametrize(
    ("length", "p", "law"),
    [
        (6, 0.5, Geometric(2)),
        (5, 1.0, Geometric(3)),
        (7, 0.7, DLogistic(3, 1)),
        (6, 0.9, Geometric(50)),
    ],
    ids=str,
)
def test_results_have_the_exact_law_of_algorithm_1(
    length: int, p: float, law: LengthLaw, block: int | None
) -> None:
    """However many proposals are made at once."""
    rng = np.random.default_rng(1)
    drawn = Counter(
        frozenset(draw_spans(length, target_count(length, p), law, rng, block)[0])
        for _ in range(10_000)
    )
    literal.check_frequencies(drawn, literal.spans_law(length, p, law))


@pytest.mark.parametrize(
    ("p", "law"), [(0.5, Geometric(10)), (0.85, Geometric(4)), (0.7, DLogistic(6, 2))], ids=str
)
def test_spans_have_the_law_of_algorithm_1(p: float, law: LengthLaw) -> None:
    """Starts, lengths and number of spans, against the paper's own rejection; and the same for the
    last span, which is trimmed.
    """
    length, rounds = 48, 2500
    rng = np.random.default_rng(2)
    theirs = [literal.sample_spans(length, p, law, rng) for _ in range(rounds)]
    ours = [draw_spans(length, target_count(length, p), law, rng)[0] for _ in range(rounds)]
    literal.check_same_law(
        Counter(len(spans) for spans in ours), Counter(len(spans) for spans in theirs)
    )
    for which in (0, 1, -1):
        mine, paper = (
            [spans[which % len(spans)] for spans in ours],
            [spans[which % len(spans)] for spans in theirs],
        )
        literal.check_same_law(
            Counter(start for start, _ in mine), Counter(start for start, _ in paper)
        )
        literal.check_same_law(
            Counter(end - start for start, end in mine),
            Counter(end - start for start, end in paper),
        )


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0, 1, exclude_min=True), laws, st.integers(0, 2**32))
def test_exact_count_and_no_overlap(length: int, p: float, law: LengthLaw, seed: int) -> None:
    count = max(1, round(p * length))
    assert target_count(length, p) == count
    spans, masked = draw_spans(length, count, law, np.random.default_rng(seed))
    assert masked.shape == (length,)
    assert masked.sum() == count
    assert all(0 <= start < end <= length for start, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))
    assert (
        sorted(t for start, end in spans for t in range(start, end))
        == np.flatnonzero(masked).tolist()
    )


def test_half_a_target_goes_to_the_even_count() -> None:
    assert [target_count(T, 0.5) for T in (1, 3, 5, 7)] == [1, 2, 2, 4]


@settings(deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=80).filter(lambda masked: not all(masked)),
    laws,
    st.integers(0, 2**32),
)
def test_every_proposal_fits(masked: list[bool], law: LengthLaw, seed: int) -> None:
    """So each block accepts its first proposal, and there are no more blocks than
    targets: bounded time.
    """
    array = np.array(masked)
    for start, end in propose(
        array, log_cdf_table(law, len(masked)), 20, np.random.default_rng(seed)
    ):
        assert 0 <= start < end <= len(masked)
        assert not array[start:end].any()


@pytest.mark.parametrize(
    "law",
    [Geometric(1e9), DLogistic(500, 1e-3), DLogistic(1e9, 1e-3), DLogistic(15, 3), Geometric(3)],
    ids=str,
)
def test_everything_masked_ends(law: LengthLaw) -> None:
    """Rejection would wait for lengths of probability exp(-10^12)."""
    _, masked = draw_spans(1024, 1024, law, np.random.default_rng(0))
    assert masked.all()


@pytest.mark.parametrize("mean", [0.5, 0, -3, float("nan"), float("inf")])
def test_bad_mean(mean: float) -> None:
    for build in (Geometric, lambda mean: DLogistic(mean, 3)):
        with pytest.raises(ValueError, match=rf"mean is {mean!r}; .*must lie in \[1, 1e\+09\]"):
            build(mean)


@pytest.mark.parametrize("sd", [0, -1, 1e-4, float("nan"), float("inf")])
def test_bad_deviation(sd: float) -> None:
    with pytest.raises(ValueError, match=rf"sd is {sd!r}; .*must lie in \[0.001, 1e\+09\]"):
        DLogistic(15, sd)
