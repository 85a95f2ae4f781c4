"""k-means: Lloyd's steps from seeds spread by k-means++, the best of several starts. The same numbers for the same seed, no dependency."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

STARTS = 5
STEPS = 500


def kmeans(points: Floats, clusters: int, seed: int = 0, *, starts: int = STARTS, steps: int = STEPS) -> Labels:
    """(N,) the cluster of each point of (N, d)."""
    rng = np.random.default_rng(seed)
    squares = (points**2).sum(1)
    found: list[tuple[float, Labels]] = []
    for _ in range(starts):
        found.append(_lloyd(points, squares, spread(points, squares, clusters, rng), steps))
    return min(found, key=lambda each: each[0])[1]


def spread(points: Floats, squares: Floats, clusters: int, rng: np.random.Generator) -> Floats:
    """k-means++: each next centre is a point, drawn with a chance in proportion to its squared distance from the nearest centre so far."""
    chosen = [int(rng.integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    for _ in range(clusters - 1):
        nearest = np.minimum(nearest, _distances(points, squares, points[chosen[-1:]])[:, 0])
        total = nearest.sum()
        chosen.append(int(rng.choice(len(points), p=nearest / total)) if total > 0 else int(rng.integers(len(points))))
    return points[chosen].copy()


def _lloyd(points: Floats, squares: Floats, centres: Floats, steps: int) -> tuple[float, Labels]:
    """The sum of squared distances reached, and the labels."""
    labels = np.full(len(points), -1)
    for _ in range(steps):
        distances = _distances(points, squares, centres)
        before, labels = labels, distances.argmin(1)
        if (labels == before).all():
            break
        sizes = np.bincount(labels, minlength=len(centres))
        sums = np.zeros_like(centres)
        np.add.at(sums, labels, points)
        centres = sums / np.maximum(sizes, 1)[:, None]
        empty = np.flatnonzero(sizes == 0)
        farthest = np.argsort(distances[np.arange(len(points)), labels])[::-1]
        centres[empty] = points[farthest[: len(empty)]]  # an empty cluster moves to a point that is served worst
    distances = _distances(points, squares, centres)
    return float(distances.min(1).sum()), distances.argmin(1)


def _distances(points: Floats, squares: Floats, centres: Floats) -> Floats:
    """(N, k) squared."""
    distances: Floats = np.maximum(squares[:, None] - 2 * points @ centres.T + (centres**2).sum(1), 0)
    return distances
