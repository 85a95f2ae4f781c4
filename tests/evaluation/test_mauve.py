"""MAUVE against the authors' package: exactly on the same histograms, within the spread over seeds
from features on.
"""

import sys
import warnings
from typing import Any

import numpy as np
import pytest

from tracformer.evaluation.metrics import (
    Quantised,
    cluster,
    jackknife_variance,
    mauve,
    mauve_of_counts,
    quantise,
    reduce,
)

pytest.importorskip("sklearn")

HISTOGRAMS = [
    ([3, 0, 5, 2], [3, 0, 5, 2]),
    ([10, 20, 30, 40], [40, 30, 20, 10]),
    ([5, 0, 0, 1, 7], [0, 4, 2, 3, 0]),
    ([1, 0], [0, 1]),
    ([100, 1], [1, 1]),
]


def clouds(
    n: int, m: int, shift: float, seed: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two sets of points around the same eight centres, the second moved by `shift`."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.normal(size=(8, 12))
    p, q = (centres[rng.integers(8, size=count)] + rng.normal(size=(count, 12)) for count in (n, m))
    q[:, 0] += shift
    return p, q


@pytest.mark.parametrize(("p", "q"), HISTOGRAMS)
def test_the_area_agrees_with_the_package_on_the_same_histograms(
    p: list[int], q: list[int]
) -> None:
    package = pytest.importorskip("mauve.compute_mauve")
    first, second = np.array(p) / sum(p), np.array(q) / sum(q)
    x, y = package.get_divergence_curve_for_multinomials(
        first, second, np.linspace(1e-6, 1 - 1e-6, 25), 5
    ).T
    by_x, by_y = np.argsort(x), np.argsort(y)
    area = package.compute_area_under_curve
    expected = (area(x[by_x], y[by_x]) + area(y[by_y], x[by_y])) / 2
    assert mauve_of_counts(np.array(p, float), np.array(q, float)) == pytest.approx(
        expected, abs=1e-9
    )


def test_the_score_agrees_with_the_package_on_the_packages_own_clusters() -> None:
    package = pytest.importorskip("mauve.compute_mauve")
    out = package.compute_mauve(*clouds(120, 150, 1.0), num_buckets=12)
    assert mauve_of_counts(out.p_hist, out.q_hist) == pytest.approx(out.mauve, abs=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1.5, 4.0])
def test_from_features_on_it_lies_within_the_packages_spread_over_seeds(shift: float) -> None:
    package = pytest.importorskip("mauve.compute_mauve")
    p, q = clouds(300, 400, shift)
    theirs = [package.compute_mauve(p, q, seed=seed).mauve for seed in range(12)]
    ours = [mauve(p, q, seed=seed) for seed in range(12)]
    spread = np.std(theirs)
    assert min(theirs) - spread < np.mean(ours) < max(theirs) + spread
    assert abs(np.mean(ours) - np.mean(theirs)) < 2 * spread + 1e-3


def test_the_directions_are_those_of_scikit_learn() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    features = np.random.default_rng(0).normal(size=(40, 6)) * np.array([5, 3, 2, 1, 0.5, 0.1]) + 1
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    pca = decomposition.PCA().fit(unit)
    kept = int(np.argmax(np.cumsum(pca.explained_variance_ratio_) >= 0.9)) + 1
    ours = reduce(features)
    assert ours.shape == (40, kept)
    # a direction's sign is free
    assert np.abs(np.abs(ours) - np.abs(pca.transform(unit)[:, :kept])).max() < 1e-10


def test_equal_sets_score_one_and_disjoint_sets_almost_nothing() -> None:
    p, _ = clouds(100, 100, 0)
    assert mauve(p, p) == pytest.approx(1)
    far = (
        np.concatenate([np.ones((50, 1)), np.zeros((50, 1))], 1),
        np.concatenate([np.zeros((50, 1)), np.ones((50, 1))], 1),
    )
    assert mauve(*far) == pytest.approx(mauve_of_counts(np.array([1.0, 0]), np.array([0, 1.0])))
    assert mauve(*far) < 0.01


def test_the_same_seed_gives_the_same_score() -> None:
    p, q = clouds(80, 90, 1.0)
    assert mauve(p, q, seed=3) == mauve(p, q, seed=3)


def test_threads_do_not_change_a_cluster() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    points, _ = clouds(300, 1, 0)
    with threadpoolctl.threadpool_limits(2):
        two = cluster(points, 20, seed=1)
    with threadpoolctl.threadpool_limits(1):
        one = cluster(points, 20, seed=1)
    assert (one == two).all()


def test_as_many_clusters_as_points_and_points_that_coincide() -> None:
    points = np.array([[0.0], [1.0], [2.0]])
    assert sorted(cluster(points, 3).tolist()) == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(cluster(np.zeros((4, 2)), 3)) == 4


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(
        ImportError, match=r"needs the package 'sklearn.*pip install 'tracformer\[eval\]'"
    ):
        mauve(*clouds(20, 20, 0))


def test_the_jackknife_tells_the_spread_of_the_score_over_draws() -> None:
    """Sequences drawn again and again from known cluster probabilities: the score's variance is
    what one draw says about it.
    """
    rng = np.random.default_rng(0)
    n, samples = 300, 3
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.3, 0.3, 0.2, 0.2])
    owner = np.repeat(np.arange(n), samples)
    draws = [
        Quantised(rng.choice(4, n, p=p), rng.choice(4, n * samples, p=q), 4) for _ in range(400)
    ]
    seen = np.var([each.score for each in draws])
    told = np.mean([jackknife_variance(each, owner) for each in draws[:10]])
    assert 0.75 < told / seen < 1.35


def test_bad_features_are_named() -> None:
    with pytest.raises(ValueError, match=r"shapes \(3, 2\) and \(3, 4\)"):
        mauve(np.zeros((3, 2)), np.zeros((3, 4)))
    with pytest.raises(ValueError, match="9 clusters are asked for; there must be between 1 and 6"):
        quantise(np.zeros((3, 2)), np.zeros((3, 2)), clusters=9)
