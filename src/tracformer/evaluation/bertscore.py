"""BERTScore (Zhang et al. 2020): each token of one text is matched with the most similar token of the other.

With unit embeddings x_i of the reference and y_j of the hypothesis, and weights w that sum to one over a text,

    recall = sum_i w_i max_j x_i.y_j      precision = sum_j w_j max_i x_i.y_j      F1 = 2 P R / (P + R)

Weights are equal (or inverse document frequencies over the references), and zero for the tokens that only open and close a text: those
can be matched, but do not count. A text without any token of its own scores 0.

Without rescaling the scores of a given encoder crowd together near the top. A `Baseline`, the mean score of unrelated sentences, spreads
them: (score - b) / (1 - b). The paper names no encoder and no rescaling; its figures, down to 0.041 where 30% of the text is given, are
what rescaled scores of roberta-large look like, and far below unscaled ones.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.evaluation.features import Embedded, Encoder

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
    encoder: Encoder, hypotheses: Sequence[str], references: Sequence[str], *, idf: bool = False, baseline: Baseline | None = None
) -> Scores:
    """One score for each pair of texts."""
    if len(hypotheses) != len(references):
        raise ValueError(f"there are {len(hypotheses)} hypotheses and {len(references)} references; they are compared one by one")
    rarity = inverse_frequencies([encoder.ids(text) for text in references]) if idf else None
    values = np.zeros((len(hypotheses), 3))
    for start in range(0, len(hypotheses), PAIRS):
        pairs = list(zip(hypotheses[start : start + PAIRS], references[start : start + PAIRS], strict=True))
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


def greedy_match(hypothesis: Embedded, reference: Embedded, rarity: "Rarity | None" = None) -> tuple[float, float, float]:
    """Precision, recall and F1 of one pair."""
    to_reference, to_hypothesis = weights(hypothesis, rarity), weights(reference, rarity)
    if to_reference is None or to_hypothesis is None:
        return 0.0, 0.0, 0.0
    similar = unit(hypothesis.vectors) @ unit(reference.vectors).T  # (tokens of the hypothesis, tokens of the reference)
    precision = float(to_reference @ similar.amax(1))
    recall = float(to_hypothesis @ similar.amax(0))
    total = precision + recall
    return precision, recall, 2 * precision * recall / total if total else 0.0


class Rarity(NamedTuple):
    """log((N + 1) / (df + 1)) over N references, of which df hold the token; `unseen` where none does."""

    known: dict[int, float]
    unseen: float


def inverse_frequencies(references: Sequence[Sequence[int]]) -> Rarity:
    documents = len(references)
    frequency = Counter(token for reference in references for token in set(reference))
    return Rarity({token: math.log((documents + 1) / (df + 1)) for token, df in frequency.items()}, math.log(documents + 1))


def weights(text: Embedded, rarity: Rarity | None) -> Tensor | None:
    """(tokens,) float64, summing to one; None where no token counts."""
    counted = torch.tensor(text.own, dtype=torch.float64)
    if rarity is not None:
        counted *= torch.tensor([rarity.known.get(token, rarity.unseen) for token in text.ids], dtype=torch.float64)
    total = counted.sum()
    return counted / total if total > 0 else None


def unit(vectors: Tensor) -> Tensor:
    vectors = vectors.double()
    return vectors / vectors.norm(dim=1, keepdim=True)
