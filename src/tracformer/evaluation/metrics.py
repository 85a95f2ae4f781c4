"""Metrics of generated text: BLEU, BERTScore and MAUVE.

**BLEU-4** (Papineni et al. 2002), `Bleu`, by sacrebleu, from 0 to 1. With m_n the n-grams of the
hypothesis that the reference has too (each counted at most as often as there), t_n all n-grams of
the hypothesis, h and r the lengths, all summed over the corpus:

    BLEU-4 = min(1, exp(1 - r/h)) * (prod_{n=1..4} m_n / t_n)^(1/4)

Words are cut by sacrebleu's default tokenizer `13a`, and its default smoothing `exp` applies where
an order has no match. The paper writes "BLEU-4" and names neither a package nor a level; corpus
BLEU is the definition, so `bleu4` is that here.

**BERTScore** (Zhang et al. 2020), `greedy_match`. With unit embeddings x_i of the m tokens of the
reference and y_j of the n tokens of the hypothesis:

    recall = 1/m sum_i max_j x_i.y_j    precision = 1/n sum_j max_i x_i.y_j    F1 = 2 P R / (P + R)

Tokens that only open and close a text can be matched but do not count. A text without other tokens
scores 0. Scores of one encoder lie close together near the top; a `Baseline` b, the mean score of
unrelated sentences, spreads them: (score - b) / (1 - b). The paper names no encoder and no
rescaling. Its figures, down to 0.041 where 30% of the text is given, look like rescaled scores of
roberta-large and are far below unscaled ones.

**MAUVE** (Pillutla et al. 2021), `cluster_texts(...).score`: how close two sets of texts are, from
0 to 1, given one feature vector for each text.

1. The features of both sets are scaled to unit length, reduced by PCA to 90% of their variance, and
   clustered by k-means, k being a tenth of the smaller set. The shares of each set in the clusters
   are two histograms p and q.
2. Mixtures r = w p + (1 - w) q trace the divergence curve
       x(w) = exp(-c KL(q | r)),   y(w) = exp(-c KL(p | r)),   c = 5,
   from (1, 0) to (0, 1). MAUVE is the area under it: 1 if p = q, near 0 if they are disjoint.

MAUVE depends on the clustering and so on its seed, and on the number of texts: figures are
comparable for equal numbers only.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.evaluation.encoders import Embedded
from tracformer.files import optional_package

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# ---- BLEU

TOKENIZERS = {"13a": "13a", "space": "none"}  # the option `words` -> sacrebleu's name
COUNTS = 10  # m_1..m_4, t_1..t_4, h, r


class Bleu:
    """BLEU from counts that add up, over the blanks of a text and over the texts of a corpus.

    Args:
        words: How words are cut: "13a", or "space" for text that is tokenized already.

    Raises:
        ImportError: sacrebleu is not installed.

    Example:
        >>> bleu = Bleu()
        >>> counts = bleu.count(["the cat sat on it ."], ["the cat sat on a mat ."])
        >>> counts.tolist()
        [5.0, 3.0, 2.0, 1.0, 6.0, 5.0, 4.0, 3.0, 6.0, 7.0]
        >>> round(bleu.corpus(counts), 4)
        0.4548
    """

    def __init__(self, words: str = "13a") -> None:
        metrics = optional_package("sacrebleu.metrics", "BLEU", "eval")
        self._tokenizer = TOKENIZERS[words]
        # force: do not warn about text that looks tokenized
        self._metric: Any = metrics.BLEU(tokenize=self._tokenizer, force=True)

    def count(self, hypotheses: Sequence[str], references: Sequence[str]) -> Floats:
        """Return counts (COUNTS,) of texts against references; no n-gram crosses two texts."""
        if not hypotheses:
            return np.zeros(COUNTS)
        score = self._metric.corpus_score(hypotheses, [references])
        return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.float64)

    def corpus(self, counts: Floats) -> float:
        """Return the corpus BLEU of summed counts (COUNTS,)."""
        return self._score(counts, effective_order=False)

    def sentence(self, counts: Floats) -> float:
        """Return the sentence BLEU of one text's counts, without the orders that it lacks."""
        return self._score(counts, effective_order=True)

    @property
    def signature(self) -> str:
        """The settings in sacrebleu's notation, and its version."""
        version = optional_package("sacrebleu", "BLEU", "eval").__version__
        return f"sacrebleu {version}, tok:{self._tokenizer}, smooth:{self._metric.smooth_method}"

    def _score(self, counts: Floats, effective_order: bool) -> float:
        whole = [round(each) for each in counts.tolist()]
        score = self._metric.compute_bleu(
            whole[:4],
            whole[4:8],
            *whole[8:],
            smooth_method=self._metric.smooth_method,
            smooth_value=self._metric.smooth_value,
            effective_order=effective_order,
        )
        return float(score.score) / 100


# ---- BERTScore


class Baseline(NamedTuple):
    """Mean scores of unrelated sentences."""

    precision: float
    recall: float
    f1: float


# By encoder and layer: the values with which the authors' package `bert-score` rescales English.
BASELINES = {("roberta-large", 17): Baseline(0.83150584, 0.8314941, 0.83122575)}


def rescale(values: Floats, baseline: Baseline | None) -> Floats:
    """Return precision, recall and F1 (..., 3), rescaled if there is a baseline."""
    if baseline is None:
        return values
    floor = np.array(baseline)
    return (values - floor) / (1 - floor)


def greedy_match(hypothesis: Embedded, reference: Embedded) -> tuple[float, float, float]:
    """Return precision, recall and F1 of one pair of texts."""
    weights = [_token_weights(text) for text in (hypothesis, reference)]
    if weights[0] is None or weights[1] is None:
        return 0.0, 0.0, 0.0
    # (tokens of the hypothesis, tokens of the reference)
    similar = _unit(hypothesis.vectors) @ _unit(reference.vectors).T
    precision = float(weights[0] @ similar.amax(1))
    recall = float(weights[1] @ similar.amax(0))
    total = precision + recall
    return precision, recall, 2 * precision * recall / total if total else 0.0


def _token_weights(text: Embedded) -> Tensor | None:
    """Return weights (tokens,) that sum to 1; None if no token counts."""
    counted = torch.tensor(text.own, dtype=torch.float64)
    total = counted.sum()
    return counted / total if total > 0 else None


def _unit(vectors: Tensor) -> Tensor:
    vectors = vectors.double()
    return vectors / vectors.norm(dim=1, keepdim=True)


# ---- MAUVE

SCALING = 5.0  # c
POINTS = 25  # of the divergence curve
EDGE = 1e-6  # mixture weights run from here to 1 - here, where every divergence is finite
VARIANCE = 0.9
STARTS = 5  # of k-means; the best is kept
STEPS = 500  # of k-means, at most


@dataclass(frozen=True)
class TextClusters:
    """The cluster of each text of two sets."""

    p: Integers
    q: Integers
    clusters: int

    @property
    def counts(self) -> tuple[Floats, Floats]:
        """The number of texts of each set in each cluster, (clusters,) each."""
        p, q = (
            np.bincount(labels, minlength=self.clusters).astype(np.float64)
            for labels in (self.p, self.q)
        )
        return p, q

    @property
    def score(self) -> float:
        """MAUVE of the two sets."""
        return mauve_of_counts(*self.counts)


def cluster_texts(
    p: Floats, q: Floats, *, clusters: int | None = None, seed: int = 0
) -> TextClusters:
    """Return the clusters of two sets of texts with features (n, d) and (m, d).

    Args:
        p: Features of the first set.
        q: Features of the second set.
        clusters: Number of clusters; None: a tenth of the smaller set, at least 2.
        seed: Seed of k-means.

    Raises:
        ValueError: The features have wrong shapes, or there are more clusters than texts.
        ImportError: scikit-learn is not installed.
    """
    if p.ndim != 2 or q.ndim != 2 or p.shape[1] != q.shape[1] or not len(p) or not len(q):
        raise ValueError(
            f"features have shapes {p.shape} and {q.shape}; they must be (texts, d) with the same "
            "d and at least one text each"
        )
    k = max(2, round(min(len(p), len(q)) / 10)) if clusters is None else clusters
    if not 1 <= k <= len(p) + len(q):
        raise ValueError(
            f"clusters is {k}; it must be between 1 and the number of texts, {len(p) + len(q)}"
        )
    labels = k_means(reduce_features(np.concatenate([p, q])), k, seed)
    return TextClusters(labels[: len(p)], labels[len(p) :], k)


def k_means(points: Floats, clusters: int, seed: int = 0) -> Integers:
    """Return the cluster (N,) of each point (N, d), by scikit-learn.

    It runs on one thread: the order of its sums depends on the number of threads.
    """
    sklearn, threads = clustering_packages()
    kmeans = sklearn.KMeans(clusters, n_init=STARTS, max_iter=STEPS, random_state=seed)
    with threads.threadpool_limits(1), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Number of distinct clusters")  # equal texts
        labels: Integers = kmeans.fit(points).labels_.astype(np.int64)
    return labels


def clustering_packages() -> tuple[Any, Any]:
    """Return `sklearn.cluster` and `threadpoolctl`, or raise an ImportError that helps."""
    cluster = optional_package("sklearn.cluster", "MAUVE", "eval")
    return cluster, optional_package("threadpoolctl", "MAUVE", "eval")


def reduce_features(features: Floats) -> Floats:
    """Return features of unit length, in the fewest directions that hold VARIANCE of them."""
    features = features.astype(np.float64)
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    features = features / np.where(norms > 0, norms, 1)
    centred = features - features.mean(0)
    scales, directions = np.linalg.eigh(centred.T @ centred)  # ascending
    share = np.cumsum(scales[::-1]) / max(scales.sum(), np.finfo(np.float64).tiny)
    kept = min(int(np.searchsorted(share, VARIANCE)) + 1, len(scales))
    return centred @ directions[:, ::-1][:, :kept]


def mauve_of_counts(p: Floats, q: Floats) -> float:
    """Return the area under the divergence curve of two histograms."""
    x, y = divergence_curve(p, q)
    # x falls from 1 to 0 along the curve
    return float(np.sum((x[:-1] - x[1:]) * (y[:-1] + y[1:])) / 2)


def divergence_curve(p: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Return x and y of the points of the divergence curve, ends included."""
    p, q = p / p.sum(), q / q.sum()
    w = np.linspace(EDGE, 1 - EDGE, POINTS)[:, None]
    r = w * p + (1 - w) * q  # (points, clusters)
    x, y = (np.exp(-SCALING * _divergence(each, r)) for each in (q, p))
    return np.concatenate([[1.0], x, [0.0]]), np.concatenate([[0.0], y, [1.0]])


def _divergence(p: Floats, r: Floats) -> Floats:
    """Return KL(p | r) for each row of r, which is positive wherever p is."""
    inside = p > 0
    divergence: Floats = (p[inside] * np.log(p[inside] / r[:, inside])).sum(1)
    return divergence


def jackknife_variance(clustered: TextClusters, owner_of_q: Integers) -> float:
    """Return the variance of MAUVE over the choice of sequences, with fixed clusters.

    Text i of p is sequence i; text j of q belongs to sequence `owner_of_q[j]`. Each sequence is
    left out in turn, with all its texts: (n-1)/n sum_i (s_i - mean s)^2. A bootstrap would not do,
    because texts that are drawn twice move the two sets apart.
    """
    n = len(clustered.p)
    p, q = clustered.counts
    scores = np.empty(n)
    by_owner = np.argsort(owner_of_q, kind="stable")
    cuts = np.searchsorted(owner_of_q[by_owner], np.arange(n + 1))
    for i in range(n):
        without_p, without_q = p.copy(), q.copy()
        without_p[clustered.p[i]] -= 1
        np.subtract.at(without_q, clustered.q[by_owner[cuts[i] : cuts[i + 1]]], 1)
        scores[i] = mauve_of_counts(without_p, without_q)
    return float((n - 1) / n * np.sum((scores - scores.mean()) ** 2))
