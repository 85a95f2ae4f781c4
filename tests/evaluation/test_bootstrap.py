"""Confidence intervals on cases whose answer is known."""

import numpy as np
import pytest

from tracformer.evaluation import bootstrap


def test_a_resample_is_a_draw_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of draws: each resample draws N sequences; in parts as in one piece."""
    [whole] = bootstrap._counts(7, 5)
    assert whole.shape == (bootstrap.RESAMPLES, 7)
    assert (whole.sum(1) == 7).all()
    bootstrap._counts.cache_clear()
    monkeypatch.setattr(bootstrap, "COUNTS_AT_ONCE", 700)
    parts = bootstrap._counts(7, 5)
    assert len(parts) == 20
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    bootstrap._counts.cache_clear()


@pytest.mark.parametrize("count", [3, 8, 80])
def test_intervals_cover_the_truth_about_95_percent_of_the_time(count: int) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        targets = rng.integers(5, 15, size=count)
        low, high = bootstrap.ratio_interval(
            targets * 2.0 + rng.normal(size=count) * 5, targets, seed=seed
        ) or (0.0, 0.0)
        hits += low < 2.0 < high
    assert 0.88 < hits / 200 < 0.99


def test_intervals_of_few_sequences_are_stretched_away_from_the_figure() -> None:
    assert bootstrap.stretched((1.0, 4.0), 2.0, 10**6) == pytest.approx((1.0, 4.0), abs=1e-4)
    low, high = bootstrap.stretched((1.0, 4.0), 2.0, 2)
    assert (2.0 - low, high - 2.0) == pytest.approx((9.168, 2 * 9.168), rel=1e-3)


def test_stretched_intervals_of_shares_stay_shares() -> None:
    part, whole = np.array([10, 9, 10]), np.full(3, 10)
    low, high = bootstrap.ratio_interval(part, whole) or (0.0, 0.0)
    assert high > 1.0
    assert bootstrap.share_interval(part, whole) == (low, 1.0)
    assert (bootstrap.share_interval(whole - part, whole) or (1.0, 1.0))[0] == 0.0
    assert (bootstrap.ratio_interval(np.array([-1, 0, 1]), whole) or (0.0, 0.0))[0] < 0.0


def test_paired_differences_cancel_what_is_common() -> None:
    rng = np.random.default_rng(1)
    targets = np.full(100, 10)
    hard = rng.normal(30, 10, size=100)
    a, b = hard + 1 + rng.normal(size=100) * 0.1, hard
    low, high = bootstrap.difference_interval((a, targets), (b, targets)) or (0.0, 0.0)
    assert 0.09 < low < 0.1 < high < 0.11
    wide = bootstrap.ratio_interval(a, targets) or (0.0, 0.0)
    assert wide[1] - wide[0] > 20 * (high - low)
    with pytest.raises(ValueError, match="100 and 99 sequences cannot be paired"):
        bootstrap.difference_interval((a, targets), (b[1:], targets[1:]))


def test_the_same_seed_gives_the_same_interval_and_one_sequence_none() -> None:
    values = np.arange(10.0)
    assert bootstrap.mean_interval(values) == bootstrap.mean_interval(values)
    assert bootstrap.mean_interval(values, seed=1) != bootstrap.mean_interval(values)
    assert bootstrap.mean_interval([1.0]) is None
    assert np.isnan(bootstrap.ratio([1.0], [0.0]))
