"""Paired differences between models: of two results, and of all models of a section.

A difference between two models on the same sequences and contexts is known far better than either
figure: what makes a sequence hard for both cancels.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracformer.evaluation import bootstrap
from tracformer.evaluation.questions import noise_groups
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.model.base import BOUND
from tracformer.report.collect import (
    ACROSS_DATA,
    INPUTS,
    SEED,
    ReportEntry,
    Section,
    column_labels,
    metric_name,
    question_of,
    setting_of,
)
from tracformer.report.tables import NEITHER, Cell, Line, Table


def comparable(first: Result, other: Result) -> bool:
    """Return whether two results answer the same question about the same data and contexts."""
    hashes, others = first.manifest.get("hashes", {}), other.manifest.get("hashes", {})
    same = all(key in hashes and hashes[key] == others.get(key) for key in INPUTS)
    same &= first.schemas["task"] == other.schemas["task"]
    return same and first.question() == other.question()


def same_tokens(first: Result, other: Result) -> bool:
    """Return whether both models have the same tokenizer, so that figures per token compare."""
    return bool(
        first.manifest["hashes"].get("tokenizer") == other.manifest["hashes"].get("tokenizer")
    )


def differences(first: Result, other: Result, per_byte: bool = False) -> list[ResultRow]:
    """Return `other` less `first` for each setting, with paired intervals.

    Args:
        first: Result to subtract.
        other: Result of another model on the same task, data and contexts.
        per_byte: Compare bits per byte rather than perplexity. Models with different tokenizers
            are always compared in bits per byte.

    Raises:
        ValueError: The results answer different questions, or hold no sums per sequence.
    """
    if not comparable(first, other):
        raise ValueError(
            f"{first.model} and {other.model} were not evaluated on the same data and contexts of "
            f"task {first.task!r}; evaluate both in one command"
        )
    per_byte |= not same_tokens(first, other)
    metric = "bits_per_byte" if per_byte else "perplexity"
    rows = {str(row.setting.get("contexts", "")): row for row in first.rows if row.metric == metric}
    if "" in rows:
        raise ValueError(
            f"results of task {first.task!r} hold no sums per sequence and contexts, which "
            "differences are computed from"
        )
    kinds = {row.setting["contexts"]: row.kind for row in other.rows if row.metric == metric}
    found = []
    for contexts, row in rows.items():
        if contexts not in kinds:
            continue
        a, b = (_sums(result.details[contexts], per_byte) for result in (other, first))
        ratios = bootstrap.ratio(*a), bootstrap.ratio(*b)
        if not per_byte:
            ratios = bootstrap.perplexity_of(ratios[0]), bootstrap.perplexity_of(ratios[1])
        count = len(a[0])
        if BOUND in (row.kind, kinds[contexts]):
            a, b = ((noise_groups(above), noise_groups(below)) for above, below in (a, b))
        low, high = bootstrap.difference_interval(a, b, exponent=not per_byte) or (None, None)
        note = ""
        if kinds[contexts] != row.kind:
            note = f"{kinds[contexts]} less {row.kind}: not the same kind of number"
        value = ratios[0] - ratios[1]
        name = f"{metric}_difference"
        found.append(ResultRow(name, row.setting, value, low, high, sequences=count, note=note))
    return found


def _sums(
    sums: Mapping[str, Any], per_byte: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return numerator and denominator of each sequence: nats by targets, or bits by bytes."""
    nll = np.array(sums["nll"], np.float64)
    if per_byte:
        return nll / math.log(2), np.array(sums["bytes"], np.float64)
    return nll, np.array(sums["targets"], np.float64)


def paired_table(
    section: Section, per_byte: bool = False, across_kinds: bool = False
) -> Table | None:
    """Return the differences of each model from the first of its kind, paired by sequence.

    Of several seeds the mean of each sequence is paired; the caption names the seeds.

    Args:
        section: The section.
        per_byte: Take differences in bits per byte even if the tokenizers agree.
        across_kinds: Take all differences from the first model, whatever its kind of answer.
    """
    if section.task in ACROSS_DATA and len(set(map(question_of, section.results()))) > 1:
        return None  # no sequences in common
    pairs: list[tuple[str, ReportEntry, ReportEntry]] = []  # kind, leader, other
    leaders: dict[str, ReportEntry] = {}
    means = {entry.label: mean_of_seeds(entry) for entry in section.entries}
    known = {label: mean for label, mean in means.items() if mean is not None}
    for entry in section.entries:
        if entry.label not in known:
            continue
        kind = next(row.kind for row in known[entry.label].rows if row.metric == "perplexity")
        leader = leaders.setdefault("" if across_kinds else kind, entry)
        if leader is not entry and comparable(known[leader.label], known[entry.label]):
            pairs.append((kind, leader, entry))
    # one unit for the whole table
    per_byte |= not all(same_tokens(known[a.label], known[b.label]) for _, a, b in pairs)
    found = [
        (kind, leader, other, differences(known[leader.label], known[other.label], per_byte))
        for kind, leader, other in pairs
    ]
    rows = [row for *_, each in found for row in each]
    if not rows:
        return None
    settings = list(dict.fromkeys(map(setting_of, rows)))
    columns, common = column_labels(settings)
    lines = []
    for kind, leader, other, each in found:
        cells = {setting_of(row): Cell(row.value, row.low, row.high, note=row.note) for row in each}
        label = f"{other.label} less {leader.label}"
        lines.append(Line(label, kind, tuple(cells.get(setting) for setting in settings)))
    unit = metric_name(rows[0].metric.removesuffix("_difference"))
    shown = [entry for entry in section.entries if any(entry in pair for pair in pairs)]
    return Table(
        f"{section.file_stem}-differences",
        f"differences in {unit}, paired by sequence",
        tuple(columns),
        tuple(lines),
        NEITHER,
        ", ".join(filter(None, (common, _named_seeds(shown)))),
    )


def mean_of_seeds(entry: ReportEntry) -> Result | None:
    """Return a result in which each sequence's nll is its mean over seeds.

    Seeds whose results hold no sums per sequence are left out; None if none does.
    """
    kept = _with_sums(entry)
    if not kept:
        return None
    details = {}
    for contexts in _contexts(kept[0]):
        sums = [result.details[contexts] for result in kept]
        nll = np.mean([np.array(each["nll"], np.float64) for each in sums], axis=0)
        details[contexts] = {**sums[0], "nll": nll}
    return dataclasses.replace(kept[0], details=details)


def _with_sums(entry: ReportEntry) -> list[Result]:
    """Return the seeds with sums per sequence that answer the same question as the first."""
    kept = [result for result in entry.results if _has_sums(result)]
    return kept[:1] + [result for result in kept[1:] if comparable(kept[0], result)]


def _has_sums(result: Result) -> bool:
    contexts = _contexts(result)
    sums = [result.details.get(name) for name in contexts]
    return bool(sums) and all(isinstance(each, Mapping) and "nll" in each for each in sums)


def _contexts(result: Result) -> list[str]:
    return [str(row.setting.get("contexts")) for row in result.rows if row.metric == "perplexity"]


def _named_seeds(entries: Sequence[ReportEntry]) -> str:
    """Return which seeds are compared, if any model has several."""
    if all(len(entry.results) == 1 for entry in entries):
        return ""

    def seed(result: Result) -> str:
        found = SEED.search(result.model)
        return found[0].removeprefix(" #") if found else "-"

    named = [f"{entry.label} {'/'.join(map(seed, _with_sums(entry)))}" for entry in entries]
    return (
        f"seeds: {', '.join(named)}; nll is the mean over seeds, and intervals are over sequences "
        "alone"
    )
