"""BLEU, BERTScore and MAUVE of filled texts.

Holes filled by a model, several times each, and the texts that come out.

Sample s of sequence i has a seed of its own, so that neither the batch nor the number of processes
changes a fill. Sequences go in blocks: blocks are shared among ranks, and a finished one is kept in
the subject's scratch folder, to resume from.

BLEU-4 (Papineni et al. 2002) by sacrebleu, from 0 to 1: over a corpus, and by sentence.

With m_n the n-grams of the hypothesis that the reference has too (each counted at most as often as
it stands there), t_n all n-grams of the hypothesis, h and r the two lengths, all summed over the
corpus:

    BLEU-4 = min(1, exp(1 - r/h)) * (prod_{n=1..4} m_n / t_n)^(1/4)

Words are cut by sacrebleu's default tokenizer, `13a` (that of the reference script mteval-v13a,
which sets punctuation apart): figures of other work are quoted under it. Smoothing is sacrebleu's
default too, `exp`, which matters where an order has no match. The paper writes "BLEU-4" and figures
between 0 and 1, and names neither a package nor a level. Corpus BLEU is the definition, so `bleu4`
is that here.

BERTScore (Zhang et al. 2020): each token of one text is matched with the most similar token of the
other.

With unit embeddings x_i of the reference and y_j of the hypothesis, and weights w that sum to one
over a text,

    recall = sum_i w_i max_j x_i.y_j    precision = sum_j w_j max_i x_i.y_j    F1 = 2 P R / (P + R)

Weights are equal (or inverse document frequencies over the references), and zero for the tokens
that only open and close a text: those can be matched, but do not count. A text without any token of
its own scores 0.

Without rescaling the scores of a given encoder crowd together near the top. A `Baseline`, the mean
score of unrelated sentences, spreads
them: (score - b) / (1 - b). The paper names no encoder and no rescaling; its figures, down to 0.041
where 30% of the text is given, are what rescaled scores of roberta-large look like, and far below
unscaled ones.

MAUVE (Pillutla et al. 2021): how close two sets of texts are, from 0 to 1, given one feature vector
a text.

1. The features of both sets together are scaled to unit length, reduced by PCA to 90% of their
   variance, and put into k clusters by k-means of scikit-learn, k a tenth of the smaller set. The
   share of each set in each cluster gives two histograms, p and q.
2. Mixtures r = w p + (1 - w) q trace the divergence curve
       x(w) = exp(-c KL(q | r)),   y(w) = exp(-c KL(p | r)),   c = 5,
   from (1, 0) to (0, 1). MAUVE is the area under it: 1 when p = q, towards 0 as they part.

The score depends on the clustering and so on its seed, and on the number of texts: compare figures
of equal numbers alone.

How close filled texts are to the originals: BLEU-4, BERTScore and MAUVE, over the whole text and
over the holes alone.

`whole` takes given and filled text together, as the paper's figures suggest. `filled` takes what
stands in the holes: for BLEU n-grams inside one hole, for the other two the holes of a sequence
joined by spaces.
"""

import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tracformer.data.tokenizer import Tokenizer
from tracformer.distributed import Ranks
from tracformer.evaluation import bootstrap
from tracformer.evaluation.encoders import (
    PAPER_BERTSCORE,
    PAPER_MAUVE,
    Embedded,
    Encoder,
    FoundEncoder,
)
from tracformer.evaluation.result_files import SAMPLE, ResultRow, plain
from tracformer.evaluation.task import Subject
from tracformer.evaluation.windows import Flags, Integers, Sequences
from tracformer.files import optional_package, write_atomically
from tracformer.generation.decode import fill
from tracformer.generation.orders import Order
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.model.batch import Batch
from tracformer.rng import derived_seed

BLOCK = 32  # sequences

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fills:
    tokens: Integers  # (sequences, samples, T)
    log_probs: Floats  # (sequences, samples): the model's own, of what it filled in


@dataclass(frozen=True)
class Ask:
    """How a model is to fill."""

    samples: int = 5
    seed: int = 0
    sampler: Sampler = PLAIN
    order: Order | None = None

    def seed_of(self, sequence: int, sample: int) -> int:
        return derived_seed(derived_seed(self.seed, sequence + 1), sample + 1)


def blocks(count: int, ranks: Ranks) -> list[slice]:
    """This rank's blocks of the sequences 0..count-1: the same cuts for any number of ranks."""
    return [
        slice(start, min(start + BLOCK, count))
        for start in range(0, count, BLOCK)[ranks.rank :: ranks.world]
    ]


def kept_fills(
    subject: Subject, read: Sequences, given: Flags, block: slice, ask: Ask, name: str
) -> Fills:
    """A block's fills: read from the scratch folder, or drawn and put there.

    `name` tells one set of contexts from another.
    """
    path = None if subject.scratch is None else subject.scratch / f"{name}-{block.start:08d}.json"
    if path is not None and path.is_file():
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Fills(
            np.array(document["tokens"], np.int64), np.array(document["log_probs"], np.float64)
        )
    fills = draw_fills(subject, read, given, block, ask)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path, json.dumps(plain({"tokens": fills.tokens, "log_probs": fills.log_probs}))
        )
    return fills


def draw_fills(subject: Subject, read: Sequences, given: Flags, block: slice, ask: Ask) -> Fills:
    """Every sequence of the block, `ask.samples` times; `given` is (N, T)."""
    pairs = [(i, s) for i in range(block.start, block.stop) for s in range(ask.samples)]
    tokens = np.empty((len(pairs), read.tokens.shape[1]), np.int64)
    log_probs = np.empty(len(pairs))
    for start in range(0, len(pairs), subject.batch):
        some = pairs[start : start + subject.batch]
        numbers = [i for i, _ in some]
        filled = fill(
            subject.model,
            Batch(
                torch.from_numpy(read.tokens[numbers]).to(subject.device),
                torch.from_numpy(given[numbers]).to(subject.device),
                torch.from_numpy(read.lengths[numbers]).to(subject.device),
            ),
            subject.mode,
            sampler=ask.sampler,
            seed=[ask.seed_of(i, s) for i, s in some],
            order=ask.order,
        )
        tokens[start : start + len(some)] = filled.tokens.cpu().numpy()
        log_probs[start : start + len(some)] = filled.log_prob.cpu().numpy()
    shape = block.stop - block.start, ask.samples
    return Fills(tokens.reshape(*shape, -1), log_probs.reshape(shape))


def gathered(values: NDArray[Any], ranks: Ranks) -> NDArray[Any]:
    """An array of which each rank has filled its own blocks, the rest being zero:
    whole, on all of them.
    """
    if ranks.world == 1:
        return values
    tensor = torch.from_numpy(values).to(ranks.device)
    dist.all_reduce(tensor)
    return tensor.cpu().numpy()


@dataclass(frozen=True)
class Reading:
    """A sequence as text, with its holes."""

    whole: str
    holes: tuple[str, ...]  # each hole's own text, from left to right

    @property
    def filled(self) -> str:
        """The holes alone, as one text."""
        return " ".join(hole.strip() for hole in self.holes).strip()


def reading(tokenizer: Tokenizer, tokens: Integers, given: Flags) -> Reading:
    """Of one sequence (n,), without padding. An end of text reads as a new line."""
    return Reading(
        as_text(tokenizer, tokens),
        tuple(as_text(tokenizer, tokens[start:stop]) for start, stop in holes_of(given)),
    )


def shown_spans(tokenizer: Tokenizer, tokens: Integers, given: Flags) -> list[tuple[int, int]]:
    """Which characters of the whole text the holes are."""
    ends = [
        (len(as_text(tokenizer, tokens[:start])), len(as_text(tokenizer, tokens[:stop])))
        for start, stop in holes_of(given)
    ]
    return [(start, stop) for start, stop in ends if start < stop]


def holes_of(given: Flags) -> list[tuple[int, int]]:
    """The runs of targets, as positions [start, stop).

    >>> holes_of(np.array([False, True, False, False]))
    [(0, 1), (2, 4)]
    """
    runs = [(known, len(list(run))) for known, run in groupby(given.tolist())]
    edges = np.cumsum([0, *(length for _, length in runs)]).tolist()
    return [(edges[i], edges[i + 1]) for i, (known, _) in enumerate(runs) if not known]


def as_text(tokenizer: Tokenizer, tokens: Integers) -> str:
    return tokenizer.decode(tokens.tolist()).replace(tokenizer.eot, "\n")


TOKENIZERS = {"13a": "13a", "space": "none"}  # the option `words` -> sacrebleu's name
COUNTS = 10  # m_1..m_4, t_1..t_4, h, r


class Bleu:
    """BLEU from counts that add up, over spans to a text's and over texts to a corpus's.

    Args:
        words: How words are cut: "13a", or "space" as the text is spaced.

    Raises:
        ImportError: if sacrebleu is not installed.

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
        # force: do not warn about text that looks tokenized
        self._tokenizer = TOKENIZERS[words]
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
        """Return the sentence BLEU of one text's counts; orders that it lacks are left out."""
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


PAIRS = 64  # scored at once: their embeddings are all that is held


class Scores(NamedTuple):
    """(N,) float64 each."""

    precision: NDArray[np.float64]
    recall: NDArray[np.float64]
    f1: NDArray[np.float64]


class Baseline(NamedTuple):
    precision: float
    recall: float
    f1: float


# By encoder and layer: the figures that the authors' package `bert-score` rescales English with.
BASELINES = {("roberta-large", 17): Baseline(0.83150584, 0.8314941, 0.83122575)}


def bertscore(
    encoder: Encoder,
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    idf: bool = False,
    baseline: Baseline | None = None,
) -> Scores:
    """One score for each pair of texts."""
    if len(hypotheses) != len(references):
        raise ValueError(
            f"there are {len(hypotheses)} hypotheses and {len(references)} references; they are "
            "compared one by one"
        )
    rarity = inverse_frequencies([encoder.ids(text) for text in references]) if idf else None
    values = np.zeros((len(hypotheses), 3))
    for start in range(0, len(hypotheses), PAIRS):
        pairs = list(
            zip(hypotheses[start : start + PAIRS], references[start : start + PAIRS], strict=True)
        )
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        embedded = dict(zip(texts, encoder.embed(texts), strict=True))
        for row, (hypothesis, reference) in enumerate(pairs, start):
            values[row] = greedy_match(embedded[hypothesis], embedded[reference], rarity)
    return Scores(*rescale(values, baseline).T)


def rescale(values: NDArray[np.float64], baseline: Baseline | None) -> NDArray[np.float64]:
    """(..., 3) precision, recall and F1, each against its own baseline, if there is one."""
    if baseline is None:
        return values
    floor = np.array(baseline)
    return (values - floor) / (1 - floor)


def greedy_match(
    hypothesis: Embedded, reference: Embedded, rarity: "Rarity | None" = None
) -> tuple[float, float, float]:
    """Precision, recall and F1 of one pair."""
    to_reference, to_hypothesis = weights(hypothesis, rarity), weights(reference, rarity)
    if to_reference is None or to_hypothesis is None:
        return 0.0, 0.0, 0.0
    # (tokens of the hypothesis, tokens of the reference)
    similar = unit(hypothesis.vectors) @ unit(reference.vectors).T
    precision = float(to_reference @ similar.amax(1))
    recall = float(to_hypothesis @ similar.amax(0))
    total = precision + recall
    return precision, recall, 2 * precision * recall / total if total else 0.0


class Rarity(NamedTuple):
    """log((N + 1) / (df + 1)) over N references, of which df hold the token;
    `unseen` where none does.
    """

    known: dict[int, float]
    unseen: float


def inverse_frequencies(references: Sequence[Sequence[int]]) -> Rarity:
    documents = len(references)
    frequency = Counter(token for reference in references for token in set(reference))
    return Rarity(
        {token: math.log((documents + 1) / (df + 1)) for token, df in frequency.items()},
        math.log(documents + 1),
    )


def weights(text: Embedded, rarity: Rarity | None) -> Tensor | None:
    """(tokens,) float64, summing to one; None where no token counts."""
    counted = torch.tensor(text.own, dtype=torch.float64)
    if rarity is not None:
        counted *= torch.tensor(
            [rarity.known.get(token, rarity.unseen) for token in text.ids], dtype=torch.float64
        )
    total = counted.sum()
    return counted / total if total > 0 else None


def unit(vectors: Tensor) -> Tensor:
    vectors = vectors.double()
    return vectors / vectors.norm(dim=1, keepdim=True)


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
        p, q = (
            np.bincount(labels, minlength=self.clusters).astype(np.float64)
            for labels in (self.p, self.q)
        )
        return p, q

    @property
    def score(self) -> float:
        return mauve_of_counts(*self.counts)


def mauve(p: Floats, q: Floats, *, clusters: int | None = None, seed: int = 0) -> float:
    """From features (n, d) and (m, d).

    `clusters`: by default a tenth of the smaller set, at least 2.
    """
    return quantise(p, q, clusters=clusters, seed=seed).score


def quantise(p: Floats, q: Floats, *, clusters: int | None = None, seed: int = 0) -> Quantised:
    if p.ndim != 2 or q.ndim != 2 or p.shape[1] != q.shape[1] or not len(p) or not len(q):
        raise ValueError(
            f"features have the shapes {p.shape} and {q.shape}; they must be (texts, d) for the "
            "same d, at least one text each"
        )
    k = max(2, round(min(len(p), len(q)) / 10)) if clusters is None else clusters
    if not 1 <= k <= len(p) + len(q):
        raise ValueError(
            f"{k} clusters are asked for; there must be between 1 and {len(p) + len(q)}, the "
            "number of texts"
        )
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
    # Along the curve x falls from 1 to 0. The area above the other axis is the same: the curve ends
    # on both.
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

    Text i of p is sequence i; text j of q belongs to sequence `owner_of_q[j]`. Each sequence is
    left out in turn, with all that belongs to
    it: (n-1)/n sum_i (s_i - mean s)^2. A bootstrap would not do: texts drawn twice make the two
    sets look further apart.
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


METRICS = ("bleu4", "bertscore", "mauve")
OVERS = ("whole", "filled")
NORMAL = 1.959963984540054  # standard errors on either side of a 95% interval


@dataclass(frozen=True)
class Scoring:
    """What is scored, and by what."""

    bleu: Bleu | None = None
    scorer: Encoder | None = None  # BERTScore's
    features: Encoder | None = None  # MAUVE's
    baseline: Baseline | None = None
    clusters: int | None = None
    seeds: int = 5  # of MAUVE's clusters


@dataclass(frozen=True)
class ScoredFills:
    """The figures of N sequences with S samples each, over one part of the text.

    Empty (N, S, 0) where the metric was not asked for.
    """

    counts: Floats  # (N, S, COUNTS)
    f1: Floats  # (N, S, 0 or 1)
    originals: Floats  # (N, d) features
    fills: Floats  # (N, S, d)

    @classmethod
    def empty(cls, scoring: Scoring, sequences: int, samples: int) -> "ScoredFills":
        d = 0 if scoring.features is None else scoring.features.width
        return cls(
            np.zeros((sequences, samples, 0 if scoring.bleu is None else COUNTS)),
            np.zeros((sequences, samples, 0 if scoring.scorer is None else 1)),
            np.zeros((sequences, d)),
            np.zeros((sequences, samples, d)),
        )

    def parts(self) -> list[Floats]:
        return [self.counts, self.f1, self.originals, self.fills]


def score(
    scoring: Scoring, over: str, originals: Sequence[Reading], fills: Sequence[Sequence[Reading]]
) -> ScoredFills:
    """Each original (N) against its fills (N, S)."""
    scored = ScoredFills.empty(scoring, len(originals), len(fills[0]))
    pairs = [
        (i, s, fill, original)
        for i, (original, of) in enumerate(zip(originals, fills, strict=True))
        for s, fill in enumerate(of)
    ]
    if scoring.bleu is not None:
        for i, s, fill, original in pairs:
            scored.counts[i, s] = _counted(scoring.bleu, over, fill, original)
    texts = list(dict.fromkeys(_text(over, each) for _, _, *two in pairs for each in two))
    place = {text: number for number, text in enumerate(texts)}
    embedded = None if scoring.scorer is None else scoring.scorer.embed(texts)
    if embedded is not None:
        for i, s, fill, original in pairs:
            values = greedy_match(
                embedded[place[_text(over, fill)]], embedded[place[_text(over, original)]]
            )
            scored.f1[i, s] = rescale(np.array(values), scoring.baseline)[2]
    if scoring.features is not None:
        shared = (
            embedded is not None
            and scoring.features is scoring.scorer
            and scoring.features.embeds_features
        )
        features = (
            scoring.features.pooled(embedded)
            if shared and embedded is not None
            else scoring.features.features(texts)
        )
        for i, s, fill, original in pairs:
            scored.originals[i] = features[place[_text(over, original)]]
            scored.fills[i, s] = features[place[_text(over, fill)]]
    return scored


def bertscore_name(found: FoundEncoder, rescaled: bool) -> str:
    """Plain only for what the paper's figures are taken to be: any other figure bears its encoder's
    name.

    >>> from pathlib import Path
    >>> bertscore_name(FoundEncoder("minilm-l6", Path(), None, "mean"), False)
    'bertscore[minilm-l6]'
    """
    if found.name == PAPER_BERTSCORE and rescaled:
        return "bertscore"
    return f"bertscore[{found.name}{',rescaled' if rescaled else ''}]"


def mauve_name(found: FoundEncoder) -> str:
    return "mauve" if found.name == PAPER_MAUVE else f"mauve[{found.name}]"


def baseline_of(found: FoundEncoder) -> Baseline:
    baseline = BASELINES.get((found.name, found.layer or 0))
    if baseline is None:
        known = ", ".join(f"{name} at layer {layer}" for name, layer in BASELINES)
        raise ValueError(
            f"rescale is true, but BERTScore has no baseline for the encoder {found.name!r}; there "
            f"is one for {known}"
        )
    return baseline


def figures(
    scoring: Scoring, scored: ScoredFills, setting: Mapping[str, Any], targets: int, note: str
) -> tuple[list[ResultRow], dict[str, list[float]]]:
    """Rows with intervals, and each sequence's own mean over its samples where the
    metric has one.
    """
    rows: list[ResultRow] = []
    means: dict[str, list[float]] = {}
    about: dict[str, Any] = {"kind": SAMPLE, "sequences": len(scored.counts), "targets": targets}

    def add_mean(metric: str, values: Floats, remark: str) -> None:
        means[metric] = values.tolist()
        rows.append(
            ResultRow(
                metric,
                setting,
                float(values.mean()),
                *_bounds(bootstrap.mean_interval(values)),
                note=_joined(note, remark),
                **about,
            )
        )

    if scoring.bleu is not None:
        bleu, by = scoring.bleu, scoring.bleu.signature
        by_sequence = scored.counts.sum(1)
        sums = bootstrap.resampled_sums(by_sequence)
        interval = None
        if sums is not None:
            interval = bootstrap.quantiles(np.array([bleu.corpus(each) for each in sums]))
        value, remark = bleu.corpus(by_sequence.sum(0)), _joined(note, f"over the corpus, {by}")
        rows.append(ResultRow("bleu4", setting, value, *_bounds(interval), note=remark, **about))
        sentences = np.array([[bleu.sentence(each) for each in of] for of in scored.counts])
        add_mean("bleu4_sentence", sentences.mean(1), f"mean over sentences, {by}")
    if scoring.scorer is not None:
        add_mean(
            bertscore_name(scoring.scorer.found, scoring.baseline is not None),
            scored.f1[..., 0].mean(1),
            "F1",
        )
    if scoring.features is not None:
        rows.append(_mauve_row(scoring, scoring.features.found, scored, setting, note, about))
    return rows, means


def _mauve_row(
    scoring: Scoring,
    found: FoundEncoder,
    scored: ScoredFills,
    setting: Mapping[str, Any],
    note: str,
    about: Mapping[str, Any],
) -> ResultRow:
    """The mean over clusterings; its variance is that over sequences, plus that of a
    mean over clusterings.
    """
    sequences, samples, d = scored.fills.shape
    owner = np.repeat(np.arange(sequences), samples)
    quantised = [
        quantise(
            scored.originals, scored.fills.reshape(-1, d), clusters=scoring.clusters, seed=seed
        )
        for seed in range(scoring.seeds)
    ]
    scores = np.array([each.score for each in quantised])
    value, low, high = float(scores.mean()), None, None
    if sequences > 1 and scoring.seeds > 1:
        over_sequences = np.mean([jackknife_variance(each, owner) for each in quantised])
        error = NORMAL * float(np.sqrt(over_sequences + scores.var(ddof=1) / scoring.seeds))
        low, high = max(0.0, value - error), min(1.0, value + error)
    remark = (
        f"{sequences} originals and {sequences * samples} fills in {quantised[0].clusters} "
        f"clusters, mean of {scoring.seeds} clusterings "
        f"({scores.min():.3f} to {scores.max():.3f}); interval by jackknife over sequences; "
        "comparable at equal numbers alone"
    )
    return ResultRow(
        mauve_name(found), setting, value, low, high, note=_joined(note, remark), **about
    )


def _text(over: str, text: Reading) -> str:
    return text.whole if over == "whole" else text.filled


def _counted(bleu: Bleu, over: str, fill: Reading, original: Reading) -> Floats:
    if over == "whole":
        return bleu.count([fill.whole], [original.whole])
    return bleu.count(fill.holes, original.holes)


def _bounds(interval: bootstrap.Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else interval


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
