"""Score filled texts against the originals by BLEU, BERTScore, MAUVE and a judge, as result rows.

`BlankedText` is a text with the positions that were filled; `Scorers` are the metrics and encoders;
`score_block` gives the raw scores of some sequences, and `figures` turns those of all sequences
into rows with intervals.

Scores are taken over two parts of the text. `whole` is given and filled text together, as the
paper's figures suggest. `filled` is what stands in the blanks: for BLEU, n-grams inside one blank;
for BERTScore and MAUVE, the blanks of a sequence joined by spaces. A judge reads whole texts only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tracformer.data.tokenizer import Tokenizer
from tracformer.evaluation import bootstrap
from tracformer.evaluation.encoders import PAPER_BERTSCORE, PAPER_MAUVE, Encoder, FoundEncoder
from tracformer.evaluation.metrics import (
    BASELINES,
    COUNTS,
    Baseline,
    Bleu,
    Floats,
    Integers,
    cluster_texts,
    greedy_match,
    jackknife_variance,
    rescale,
)
from tracformer.evaluation.result_files import SAMPLE, ResultRow
from tracformer.evaluation.windows import Flags
from tracformer.generation.language_model import LanguageModel

METRICS = ("bleu4", "bertscore", "mauve")
PARTS = ("whole", "filled")


# ---- Texts


@dataclass(frozen=True)
class BlankedText:
    """A text, and the text of each of its blanks from left to right."""

    whole: str
    blanks: tuple[str, ...]

    @property
    def filled(self) -> str:
        """The text of the blanks, joined by spaces."""
        return " ".join(blank.strip() for blank in self.blanks).strip()

    def part(self, name: str) -> str:
        """Return one of PARTS."""
        return self.whole if name == "whole" else self.filled


def blanked_text(tokenizer: Tokenizer, tokens: Integers, given: Flags) -> BlankedText:
    """Return the text of one sequence (n,) without padding; an end of text reads as a newline."""
    return BlankedText(
        _decode(tokenizer, tokens),
        tuple(_decode(tokenizer, tokens[start:stop]) for start, stop in blanks_of(given)),
    )


def character_spans(tokenizer: Tokenizer, tokens: Integers, given: Flags) -> list[tuple[int, int]]:
    """Return which characters of the whole text the blanks are, as [start, stop)."""
    ends = [
        (len(_decode(tokenizer, tokens[:start])), len(_decode(tokenizer, tokens[:stop])))
        for start, stop in blanks_of(given)
    ]
    return [(start, stop) for start, stop in ends if start < stop]


def blanks_of(given: Flags) -> list[tuple[int, int]]:
    """Return the runs of targets, as positions [start, stop).

    >>> blanks_of(np.array([False, True, False, False]))
    [(0, 1), (2, 4)]
    """
    runs = [(known, len(list(run))) for known, run in groupby(given.tolist())]
    edges = np.cumsum([0, *(length for _, length in runs)]).tolist()
    return [(edges[i], edges[i + 1]) for i, (known, _) in enumerate(runs) if not known]


def _decode(tokenizer: Tokenizer, tokens: Integers) -> str:
    return tokenizer.decode(tokens.tolist()).replace(tokenizer.eot, "\n")


# ---- Raw scores


@dataclass(frozen=True)
class Scorers:
    """The metrics to compute, and the encoders that they need.

    Args:
        bleu: BLEU, or None to leave it out.
        bertscore: BERTScore's encoder, or None to leave it out.
        mauve: MAUVE's encoder, or None to leave it out.
        baseline: Baseline of BERTScore, if it is rescaled.
        clusters: MAUVE's number of clusters; None: a tenth of the sequences.
        clusterings: Clusterings over which MAUVE is averaged.
        judge: Language model that reads the whole texts from left to right, or None.
    """

    bleu: Bleu | None = None
    bertscore: Encoder | None = None
    mauve: Encoder | None = None
    baseline: Baseline | None = None
    clusters: int | None = None
    clusterings: int = 5
    judge: LanguageModel | None = None

    def shapes(self, samples: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `score_block`'s arrays for one sequence with S samples.

        - counts: (S, COUNTS), of BLEU
        - f1: (S,), BERTScore
        - originals: (d,) and fills: (S, d), features for MAUVE
        - judged: (S,), nats by which the judge finds the filled text less likely than the original
        """
        found: dict[str, tuple[int, ...]] = {}
        if self.bleu is not None:
            found["counts"] = (samples, COUNTS)
        if self.bertscore is not None:
            found["f1"] = (samples,)
        if self.mauve is not None:
            found |= {"originals": (self.mauve.width,), "fills": (samples, self.mauve.width)}
        if self.judge is not None:
            found["judged"] = (samples,)
        return found


def score_block(
    scorers: Scorers,
    part: str,
    originals: Sequence[BlankedText],
    fills: Sequence[Sequence[BlankedText]],
) -> dict[str, Floats]:
    """Return the scores of N originals against their S fills each, over one part of the text.

    The arrays are (N, *shape), see `Scorers.shapes`.
    """
    shapes = scorers.shapes(len(fills[0]))
    scores = {name: np.zeros((len(originals), *shape)) for name, shape in shapes.items()}
    pairs = [
        (i, s, fill, original)
        for i, (original, samples) in enumerate(zip(originals, fills, strict=True))
        for s, fill in enumerate(samples)
    ]
    if scorers.bleu is not None:
        for i, s, fill, original in pairs:
            scores["counts"][i, s] = (
                scorers.bleu.count([fill.whole], [original.whole])
                if part == "whole"
                else scorers.bleu.count(fill.blanks, original.blanks)
            )
    texts = list(dict.fromkeys(each.part(part) for _, _, *two in pairs for each in two))
    place = {text: number for number, text in enumerate(texts)}
    embedded = None if scorers.bertscore is None else scorers.bertscore.embed(texts)
    if embedded is not None:
        for i, s, fill, original in pairs:
            two = (embedded[place[each.part(part)]] for each in (fill, original))
            scores["f1"][i, s] = rescale(np.array(greedy_match(*two)), scorers.baseline)[2]
    if scorers.mauve is not None:
        # one pass of the encoder serves both metrics, if both use its last layer
        shared = scorers.mauve is scorers.bertscore and scorers.mauve.embeds_features
        features = (
            scorers.mauve.pooled(embedded)
            if shared and embedded is not None
            else scorers.mauve.features(texts)
        )
        for i, s, fill, original in pairs:
            scores["originals"][i] = features[place[original.part(part)]]
            scores["fills"][i, s] = features[place[fill.part(part)]]
    if scorers.judge is not None:
        read = {text: log_prob(scorers.judge, text) for text in texts}
        for i, s, fill, original in pairs:
            scores["judged"][i, s] = read[original.part(part)] - read[fill.part(part)]
    return scores


def log_prob(judge: LanguageModel, text: str) -> float:
    """Return the log-probability of a whole text, read from left to right."""
    tokens = judge.tokenizer.encode(text)
    return sum(judge.score_tokens(tokens, [False] * len(tokens), "ar"))


# ---- Rows


def bertscore_name(found: FoundEncoder, rescaled: bool) -> str:
    """Return the metric's name, which names the encoder unless it is taken for the paper's.

    >>> from pathlib import Path
    >>> bertscore_name(FoundEncoder("minilm-l6", Path(), None, "mean"), False)
    'bertscore[minilm-l6]'
    """
    if found.name == PAPER_BERTSCORE and rescaled:
        return "bertscore"
    return f"bertscore[{found.name}{',rescaled' if rescaled else ''}]"


def mauve_name(found: FoundEncoder) -> str:
    """Return the metric's name, which names the encoder unless it is taken for the paper's."""
    return "mauve" if found.name == PAPER_MAUVE else f"mauve[{found.name}]"


def judge_name(judge: LanguageModel) -> str:
    """Return the metric's name, which names the judge."""
    return f"gap[{Path(judge.name).name}]"


def baseline_of(found: FoundEncoder) -> Baseline:
    """Return BERTScore's baseline for an encoder; ValueError if there is none."""
    baseline = BASELINES.get((found.name, found.layer or 0))
    if baseline is None:
        known = ", ".join(f"{name} at layer {layer}" for name, layer in BASELINES)
        raise ValueError(
            f"rescale is true, but BERTScore has no baseline for the encoder {found.name!r}; there "
            f"is one for {known}"
        )
    return baseline


def figures(
    scorers: Scorers,
    scores: Mapping[str, Floats],
    setting: Mapping[str, Any],
    targets: int,
    note: str,
) -> tuple[list[ResultRow], dict[str, list[float]]]:
    """Return rows with intervals, and the mean of each sequence over its samples, by metric.

    Args:
        scorers: The metrics.
        scores: Arrays of all N sequences, as `score_block` makes them.
        setting: Setting of the rows.
        targets: Number of targets, for the rows.
        note: Note of the rows.
    """
    rows: list[ResultRow] = []
    means: dict[str, list[float]] = {}
    sequences = len(next(iter(scores.values())))
    about: dict[str, Any] = {"kind": SAMPLE, "sequences": sequences, "targets": targets}

    def add_mean(metric: str, values: Floats, remark: str) -> None:
        means[metric] = values.tolist()
        low, high = bootstrap.mean_interval(values) or (None, None)
        about["note"] = _joined(note, remark)
        rows.append(ResultRow(metric, setting, float(values.mean()), low, high, **about))

    if scorers.bleu is not None:
        bleu, by = scorers.bleu, scorers.bleu.signature
        by_sequence = scores["counts"].sum(1)
        sums = bootstrap.resampled_sums(by_sequence)
        low, high = (
            (None, None)
            if sums is None
            else bootstrap.quantiles(np.array([bleu.corpus(each) for each in sums]))
        )
        about["note"] = _joined(note, f"over the corpus, {by}")
        rows.append(
            ResultRow("bleu4", setting, bleu.corpus(by_sequence.sum(0)), low, high, **about)
        )
        sentences = np.array(
            [[bleu.sentence(each) for each in samples] for samples in scores["counts"]]
        )
        add_mean("bleu4_sentence", sentences.mean(1), f"mean over sentences, {by}")
    if scorers.bertscore is not None:
        name = bertscore_name(scorers.bertscore.found, scorers.baseline is not None)
        add_mean(name, scores["f1"].mean(1), "F1")
    if scorers.mauve is not None:
        rows.append(_mauve_row(scorers, scorers.mauve.found, scores, setting, note, about))
    if scorers.judge is not None:
        remark = "nats by which the judge finds the filled text less likely than the original"
        add_mean(judge_name(scorers.judge), scores["judged"].mean(1), remark)
    return rows, means


def _mauve_row(
    scorers: Scorers,
    found: FoundEncoder,
    scores: Mapping[str, Floats],
    setting: Mapping[str, Any],
    note: str,
    about: Mapping[str, Any],
) -> ResultRow:
    """Return the mean over clusterings.

    Its variance is that over sequences, plus that of the mean over clusterings.
    """
    sequences, samples, d = scores["fills"].shape
    owner = np.repeat(np.arange(sequences), samples)
    fills = scores["fills"].reshape(-1, d)
    clustered = [
        cluster_texts(scores["originals"], fills, clusters=scorers.clusters, seed=seed)
        for seed in range(scorers.clusterings)
    ]
    each_score = np.array([each.score for each in clustered])
    value, low, high = float(each_score.mean()), None, None
    if sequences > 1 and scorers.clusterings > 1:
        over_sequences = np.mean([jackknife_variance(each, owner) for each in clustered])
        over_clusterings = each_score.var(ddof=1) / scorers.clusterings
        error = bootstrap.NORMAL * float(np.sqrt(over_sequences + over_clusterings))
        low, high = max(0.0, value - error), min(1.0, value + error)
    remark = (
        f"{sequences} originals and {sequences * samples} fills in {clustered[0].clusters} "
        f"clusters, mean of {scorers.clusterings} clusterings "
        f"({each_score.min():.3f} to {each_score.max():.3f}); interval by jackknife over "
        "sequences; comparable for equal numbers only"
    )
    about = {**about, "note": _joined(note, remark)}
    return ResultRow(mauve_name(found), setting, value, low, high, **about)


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
