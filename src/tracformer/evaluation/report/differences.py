"""How far models of one section are apart, paired by sequence: what makes a sequence hard for both cancels."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracformer.evaluation.compare import comparable, differences, same_tokens
from tracformer.evaluation.report.collect import SEED, Entry, Section, column_labels, metric_name
from tracformer.evaluation.report.tables import Cell, Line, Table
from tracformer.evaluation.results import Result, Row


def paired_table(section: Section, name: str) -> Table | None:
    """Each model less the first of its kind. Of several seeds each sequence's mean is paired; the caption names the seeds."""
    pairs: list[tuple[str, Entry, Entry]] = []  # kind, leader, other
    leaders: dict[str, Entry] = {}
    means = {entry.label: mean for entry in section.entries if (mean := mean_of_seeds(entry)) is not None}
    for entry in section.entries:
        if entry.label not in means:
            continue
        kind = next(row.kind for row in means[entry.label].rows if row.metric == "perplexity")
        leader = leaders.setdefault(kind, entry)
        if leader is not entry and comparable(means[leader.label], means[entry.label]):
            pairs.append((kind, leader, entry))
    per_byte = not all(same_tokens(means[leader.label], means[other.label]) for _, leader, other in pairs)  # one unit for the whole table
    found = [(kind, leader, other, differences(means[leader.label], means[other.label], per_byte)) for kind, leader, other in pairs]
    rows = [row for *_, each in found for row in each]
    if not rows:
        return None
    settings = list(dict.fromkeys(tuple(row.setting.items()) for row in rows))
    labels, common = column_labels(settings)
    lines = []
    for kind, leader, other, each in found:
        by_setting = {tuple(row.setting.items()): row for row in each}
        cells = tuple(_difference_cell(by_setting.get(setting)) for setting in settings)
        lines.append(Line(f"{other.label} less {leader.label}", kind, cells))
    unit = metric_name(rows[0].metric.removesuffix("_difference"))
    shown = [entry for entry in section.entries if any(entry in pair for pair in pairs)]
    caption = ", ".join(filter(None, (common, _named_seeds(shown))))
    return Table(f"{name}-differences", f"differences in {unit}, paired by sequence", tuple(labels), tuple(lines), "", caption)


def mean_of_seeds(entry: Entry) -> Result | None:
    """A result in which each sequence's nll is its mean over those seeds that kept it; None where none did."""
    kept = _kept(entry)
    if not kept:
        return None
    details = {}
    for contexts in _contexts(kept[0]):
        sums = [result.details[contexts] for result in kept]
        details[contexts] = {**sums[0], "nll": np.mean([np.array(each["nll"], np.float64) for each in sums], axis=0)}
    return dataclasses.replace(kept[0], details=details)


def _kept(entry: Entry) -> list[Result]:
    """The seeds with per-sequence sums, asked the same as the first of them."""
    kept = [result for result in entry.results if _has_sums(result)]
    return [result for number, result in enumerate(kept) if number == 0 or comparable(kept[0], result)]


def _named_seeds(entries: list[Entry]) -> str:
    """Which seeds are compared, where a model has several."""
    if all(len(entry.results) == 1 for entry in entries):
        return ""
    named = [f"{entry.label} {'/'.join(_seed(result) for result in _kept(entry))}" for entry in entries]
    return f"seeds: {', '.join(named)}; nll is the mean over seeds, and intervals are over sequences alone"


def _seed(result: Result) -> str:
    found = SEED.search(result.model)
    return found[0].removeprefix(" #") if found else "-"


def _has_sums(result: Result) -> bool:
    contexts = _contexts(result)
    details: Mapping[str, Any] = result.details
    return bool(contexts) and all(isinstance(details.get(c), Mapping) and "nll" in details[c] for c in contexts)


def _contexts(result: Result) -> list[str]:
    return [str(row.setting.get("contexts")) for row in result.rows if row.metric == "perplexity"]


def _difference_cell(row: Row | None) -> Cell | None:
    return None if row is None else Cell(row.value, row.low, row.high, note=row.note)
