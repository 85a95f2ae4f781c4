"""How close filled texts are to the originals: BLEU-4, BERTScore and MAUVE, over the whole text and over the holes alone.

`whole` takes given and filled text together, as the paper's figures suggest. `filled` takes what stands in the holes: for BLEU n-grams
inside one hole, for the other two the holes of a sequence joined by spaces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracformer.evaluation import bootstrap
from tracformer.evaluation.bertscore import BASELINES, Baseline, greedy_match, rescale
from tracformer.evaluation.bleu import COUNTS, Bleu
from tracformer.evaluation.features import PAPER_BERTSCORE, PAPER_MAUVE, Encoder, Found
from tracformer.evaluation.fills import Floats, Reading
from tracformer.evaluation.mauve import jackknife_variance, quantise
from tracformer.evaluation.results import SAMPLE, Row

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
class Scored:
    """The figures of N sequences with S samples each, over one part of the text. Empty (N, S, 0) where the metric was not asked for."""

    counts: Floats  # (N, S, COUNTS)
    f1: Floats  # (N, S, 0 or 1)
    originals: Floats  # (N, d) features
    fills: Floats  # (N, S, d)

    @classmethod
    def empty(cls, scoring: Scoring, sequences: int, samples: int) -> "Scored":
        d = 0 if scoring.features is None else scoring.features.width
        return cls(
            np.zeros((sequences, samples, 0 if scoring.bleu is None else COUNTS)),
            np.zeros((sequences, samples, 0 if scoring.scorer is None else 1)),
            np.zeros((sequences, d)),
            np.zeros((sequences, samples, d)),
        )

    def parts(self) -> list[Floats]:
        return [self.counts, self.f1, self.originals, self.fills]


def score(scoring: Scoring, over: str, originals: Sequence[Reading], fills: Sequence[Sequence[Reading]]) -> Scored:
    """Each original (N) against its fills (N, S)."""
    scored = Scored.empty(scoring, len(originals), len(fills[0]))
    pairs = [(i, s, fill, original) for i, (original, of) in enumerate(zip(originals, fills, strict=True)) for s, fill in enumerate(of)]
    if scoring.bleu is not None:
        for i, s, fill, original in pairs:
            scored.counts[i, s] = _counted(scoring.bleu, over, fill, original)
    texts = list(dict.fromkeys(_text(over, each) for _, _, *two in pairs for each in two))
    place = {text: number for number, text in enumerate(texts)}
    embedded = None if scoring.scorer is None else scoring.scorer.embed(texts)
    if embedded is not None:
        for i, s, fill, original in pairs:
            values = greedy_match(embedded[place[_text(over, fill)]], embedded[place[_text(over, original)]])
            scored.f1[i, s] = rescale(np.array(values), scoring.baseline)[2]
    if scoring.features is not None:
        shared = embedded is not None and scoring.features is scoring.scorer and scoring.features.embeds_features
        features = scoring.features.pooled(embedded) if shared and embedded is not None else scoring.features.features(texts)
        for i, s, fill, original in pairs:
            scored.originals[i] = features[place[_text(over, original)]]
            scored.fills[i, s] = features[place[_text(over, fill)]]
    return scored


def bertscore_name(found: Found, rescaled: bool) -> str:
    """Plain only for what the paper's figures are taken to be: any other figure bears its encoder's name.

    >>> from pathlib import Path
    >>> bertscore_name(Found("minilm-l6", Path(), None, "mean"), False)
    'bertscore[minilm-l6]'
    """
    if found.name == PAPER_BERTSCORE and rescaled:
        return "bertscore"
    return f"bertscore[{found.name}{',rescaled' if rescaled else ''}]"


def mauve_name(found: Found) -> str:
    return "mauve" if found.name == PAPER_MAUVE else f"mauve[{found.name}]"


def baseline_of(found: Found) -> Baseline:
    baseline = BASELINES.get((found.name, found.layer or 0))
    if baseline is None:
        known = ", ".join(f"{name} at layer {layer}" for name, layer in BASELINES)
        raise ValueError(f"rescale is true, but BERTScore has no baseline for the encoder {found.name!r}; there is one for {known}")
    return baseline


def figures(
    scoring: Scoring, scored: Scored, setting: Mapping[str, Any], targets: int, note: str
) -> tuple[list[Row], dict[str, list[float]]]:
    """Rows with intervals, and each sequence's own mean over its samples where the metric has one."""
    rows: list[Row] = []
    means: dict[str, list[float]] = {}
    about: dict[str, Any] = {"kind": SAMPLE, "sequences": len(scored.counts), "targets": targets}

    def add_mean(metric: str, values: Floats, remark: str) -> None:
        means[metric] = values.tolist()
        rows.append(
            Row(metric, setting, float(values.mean()), *_bounds(bootstrap.mean_interval(values)), note=_joined(note, remark), **about)
        )

    if scoring.bleu is not None:
        bleu, by = scoring.bleu, scoring.bleu.signature
        by_sequence = scored.counts.sum(1)
        sums = bootstrap.resampled_sums(by_sequence)
        interval = None
        if sums is not None:
            interval = bootstrap.quantiles(np.array([bleu.corpus(each) for each in sums]))
        value, remark = bleu.corpus(by_sequence.sum(0)), _joined(note, f"over the corpus, {by}")
        rows.append(Row("bleu4", setting, value, *_bounds(interval), note=remark, **about))
        sentences = np.array([[bleu.sentence(each) for each in of] for of in scored.counts])
        add_mean("bleu4_sentence", sentences.mean(1), f"mean over sentences, {by}")
    if scoring.scorer is not None:
        add_mean(bertscore_name(scoring.scorer.found, scoring.baseline is not None), scored.f1[..., 0].mean(1), "F1")
    if scoring.features is not None:
        rows.append(_mauve_row(scoring, scoring.features.found, scored, setting, note, about))
    return rows, means


def _mauve_row(scoring: Scoring, found: Found, scored: Scored, setting: Mapping[str, Any], note: str, about: Mapping[str, Any]) -> Row:
    """The mean over clusterings; its variance is that over sequences, plus that of a mean over clusterings."""
    sequences, samples, d = scored.fills.shape
    owner = np.repeat(np.arange(sequences), samples)
    quantised = [
        quantise(scored.originals, scored.fills.reshape(-1, d), clusters=scoring.clusters, seed=seed) for seed in range(scoring.seeds)
    ]
    scores = np.array([each.score for each in quantised])
    value, low, high = float(scores.mean()), None, None
    if sequences > 1 and scoring.seeds > 1:
        over_sequences = np.mean([jackknife_variance(each, owner) for each in quantised])
        error = NORMAL * float(np.sqrt(over_sequences + scores.var(ddof=1) / scoring.seeds))
        low, high = max(0.0, value - error), min(1.0, value + error)
    remark = (
        f"{sequences} originals and {sequences * samples} fills in {quantised[0].clusters} clusters, mean of {scoring.seeds} clusterings "
        f"({scores.min():.3f} to {scores.max():.3f}); interval by jackknife over sequences; comparable at equal numbers alone"
    )
    return Row(mauve_name(found), setting, value, low, high, note=_joined(note, remark), **about)


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
