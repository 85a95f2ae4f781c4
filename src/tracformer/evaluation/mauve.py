"""MAUVE (Pillutla et al. 2021): how close two sets of texts are, from 0 to 1, given one feature vector a text.

1. The features of both sets together are scaled to unit length, reduced by PCA to 90% of their
   variance, and put into k clusters by k-means of scikit-learn, k a tenth of the smaller set. The
   share of each set in each cluster gives two histograms, p and q.
2. Mixtures r = w p + (1 - w) q trace the divergence curve
       x(w) = exp(-c KL(q | r)),   y(w) = exp(-c KL(p | r)),   c = 5,
   from (1, 0) to (0, 1). MAUVE is the area under it: 1 when p = q, towards 0 as they part.

The score depends on the clustering and so on its seed, and on the number of texts: compare figures of equal numbers alone.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracformer.files import optional_package

Floats = NDArray[np.float64]

SCALING = 5.0
POINTS = 25
EDGE = 1e-6  # mixture weights run from here to 1 - here, where every divergence is finite
VARIANCE = 0.9
STARTS = 5  # of k-means; the best is kept
STEPS = 500  # of k-means, at most


@dataclass(frozen=True)
class Quantised:
    """Each text's cluster, for the two sets."""

    p: NDArray[np.int64]
    q: NDArray[np.int64]
    clusters: int

    @property
    def counts(self) -> tuple[Floats, Floats]:
        p, q = (np.bincount(labels, minlength=self.clusters).astype(np.float64) for labels in (self.p, self.q))
        return p, q

    @property
    def score(self) -> float:
        return mauve_of_counts(*self.counts)


def mauve(p: Floats, q: Floats, *, clusters: int | None = None, seed: int = 0) -> float:
    """From features (n, d) and (m, d). `clusters`: by default a tenth of the smaller set, at least 2."""
    return quantise(p, q, clusters=clusters, seed=seed).score


def quantise(p: Floats, q: Floats, *, clusters: int | None = None, seed: int = 0) -> Quantised:
    if p.ndim != 2 or q.ndim != 2 or p.shape[1] != q.shape[1] or not len(p) or not len(q):
        raise ValueError(
            f"features have the shapes {p.shape} and {q.shape}; they must be (texts, d) for the same d, at least one text each"
        )
    k = max(2, round(min(len(p), len(q)) / 10)) if clusters is None else clusters
    if not 1 <= k <= len(p) + len(q):
        raise ValueError(f"{k} clusters are asked for; there must be between 1 and {len(p) + len(q)}, the number of texts")
    labels = cluster(reduce(np.concatenate([p, q])), k, seed)
    return Quantised(labels[: len(p)], labels[len(p) :], k)


def cluster(points: Floats, clusters: int, seed: int = 0) -> NDArray[np.int64]:
    """Return the cluster (N,) of each point (N, d), by k-means of scikit-learn.

    It runs on one thread: the order of its sums depends on the number of threads.
    """
    sklearn, threads = clustering_package()
    kmeans = sklearn.KMeans(clusters, n_init=STARTS, max_iter=STEPS, random_state=seed)
    with threads.threadpool_limits(1), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Number of distinct clusters")  # equal texts
        labels: NDArray[np.int64] = kmeans.fit(points).labels_.astype(np.int64)
    return labels


def clustering_package() -> tuple[Any, Any]:
    """Return `sklearn.cluster` and `threadpoolctl`; an ImportError says what to install."""
    cluster = optional_package("sklearn.cluster", "MAUVE", "eval")
    return cluster, optional_package("threadpoolctl", "MAUVE", "eval")


def reduce(features: Floats, variance: float = VARIANCE) -> Floats:
    """Rows of unit length in the fewest principal directions that hold `variance` of the whole."""
    features = features.astype(np.float64)
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    features = features / np.where(norms > 0, norms, 1)
    centred = features - features.mean(0)
    scales, directions = np.linalg.eigh(centred.T @ centred)  # ascending
    share = np.cumsum(scales[::-1]) / max(scales.sum(), np.finfo(np.float64).tiny)
    kept = min(int(np.searchsorted(share, variance)) + 1, len(scales))
    return centred @ directions[:, ::-1][:, :kept]


def mauve_of_counts(p: Floats, q: Floats, scaling: float = SCALING) -> float:
    """The area under the divergence curve of two histograms."""
    x, y = divergence_curve(p, q, scaling)
    # Along the curve x falls from 1 to 0. The area above the other axis is the same: the curve ends on both.
    return float(np.sum((x[:-1] - x[1:]) * (y[:-1] + y[1:])) / 2)


def divergence_curve(p: Floats, q: Floats, scaling: float = SCALING) -> tuple[Floats, Floats]:
    """x and y of its points, the two ends included."""
    p, q = p / p.sum(), q / q.sum()
    w = np.linspace(EDGE, 1 - EDGE, POINTS)[:, None]
    r = w * p + (1 - w) * q  # (points, clusters)
    x, y = (np.exp(-scaling * _divergence(of, r)) for of in (q, p))
    return np.concatenate([[1.0], x, [0.0]]), np.concatenate([[0.0], y, [1.0]])


def _divergence(p: Floats, r: Floats) -> Floats:
    """KL(p | r) for each row of r, which is positive wherever p is."""
    inside = p > 0
    divergence: Floats = (p[inside] * np.log(p[inside] / r[:, inside])).sum(1)
    return divergence


def jackknife_variance(quantised: Quantised, owner_of_q: NDArray[np.int64]) -> float:
    """The variance of the score over the draw of sequences, the clusters held fixed.

    Text i of p is sequence i; text j of q belongs to sequence `owner_of_q[j]`. Each sequence is left out in turn, with all that belongs to
    it: (n-1)/n sum_i (s_i - mean s)^2. A bootstrap would not do: texts drawn twice make the two sets look further apart.
    """
    n = len(quantised.p)
    p, q = quantised.counts
    scores = np.empty(n)
    by_owner = np.argsort(owner_of_q, kind="stable")
    cuts = np.searchsorted(owner_of_q[by_owner], np.arange(n + 1))
    for i in range(n):
        without_p, without_q = p.copy(), q.copy()
        without_p[quantised.p[i]] -= 1
        np.subtract.at(without_q, quantised.q[by_owner[cuts[i] : cuts[i + 1]]], 1)
        scores[i] = mauve_of_counts(without_p, without_q)
    return float((n - 1) / n * np.sum((scores - scores.mean()) ** 2))
