"""What each task's section shows beside its tables: curves, histograms, reliability plots, heat maps."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tracformer.evaluation.compare import comparable, differences, same_tokens
from tracformer.evaluation.report import plots
from tracformer.evaluation.report.collect import Entry, Section, column_labels, metric_name
from tracformer.evaluation.report.plots import Curve, Picture
from tracformer.evaluation.report.tables import Cell, Line, Table, number
from tracformer.evaluation.results import Result, Row

X_AXES = {"ratio": "share of targets", "prefix": "share given, as a prefix", "step": "training steps"}
BINS = 40
JOINT = ("exact", "bound")  # both speak of the joint probability, and may share axes with the bound marked; a marginal may not


def colours_of(sections: Iterable[Section]) -> dict[str, int]:
    """A number for each model, the same in every picture."""
    labels = dict.fromkeys(entry.label for section in sections for entry in section.entries)
    return {label: number for number, label in enumerate(sorted(labels))}


def pictures(section: Section, name: str, colours: Mapping[str, int]) -> list[Picture]:
    made = [*_curve_pictures(section, name, colours)]
    drawers = {"orders": _order_pictures, "calibration": _calibration_pictures, "exact": _exact_pictures}
    if section.task in drawers:
        made += drawers[section.task](section, name, colours)
    return made


def curves_of(entry: Entry, metric: str, axis: str) -> list[Curve]:
    """A curve for each kind of answer. The band goes from the lowest training seed to the highest; of a single seed it is the interval."""
    made = []
    rows = [row for result in entry.results for row in result.rows if row.metric == metric and axis in row.setting]
    for kind in dict.fromkeys(row.kind for row in rows):
        points: dict[float, list[Row]] = {}
        for row in rows:
            if row.kind == kind:
                points.setdefault(float(row.setting[axis]), []).append(row)
        xs = sorted(points)
        values = [[row.value for row in points[x]] for x in xs]
        several = len(entry.results) > 1
        low = [min(v) if several else _or(points[x][0].low, v[0]) for x, v in zip(xs, values, strict=True)]
        high = [max(v) if several else _or(points[x][0].high, v[0]) for x, v in zip(xs, values, strict=True)]
        made.append(Curve(entry.label, kind, tuple(xs), tuple(sum(v) / len(v) for v in values), tuple(low), tuple(high)))
    return made


def paired_table(section: Section, name: str) -> Table | None:
    """Each model less the first of its kind, paired by sequence. With several seeds the first seeds are compared."""
    pairs: list[tuple[str, Entry, Entry]] = []  # kind, leader, other
    leaders: dict[str, Entry] = {}
    for entry in section.entries:
        kind = next((row.kind for row in entry.first.rows if row.metric == "perplexity"), None)
        if kind is None or not _has_sums(entry.first):
            continue
        leader = leaders.setdefault(kind, entry)
        if leader is not entry and comparable(leader.first, entry.first):
            pairs.append((kind, leader, entry))
    per_byte = not all(same_tokens(leader.first, other.first) for _, leader, other in pairs)  # one unit for the whole table
    found = [(kind, leader, other, differences(leader.first, other.first, per_byte)) for kind, leader, other in pairs]
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
    return Table(f"{name}-differences", f"differences in {unit}, paired by sequence", tuple(labels), tuple(lines), "", common)


def _curve_pictures(section: Section, name: str, colours: Mapping[str, int]) -> Iterable[Picture]:
    metric = "perplexity" if "perplexity" in section.metrics() else "bits_per_byte"
    for axis, axis_name in X_AXES.items():
        curves = [curve for entry in section.entries for curve in curves_of(entry, metric, axis)]
        for group, kinds in (("joint", (*JOINT, "")), ("marginal", ("marginal",))):
            chosen = [curve for curve in curves if curve.kind in kinds and len(curve.x) > 1]
            if not chosen:
                continue
            mixed = len({curve.kind for curve in chosen}) > 1
            named = [_marked(curve) if mixed else curve for curve in chosen]
            wanted = {curve.label: colours[plain.label] for curve, plain in zip(named, chosen, strict=True)}
            bands = "bands: lowest to highest training seed, where there are several, else 95% intervals over sequences"
            draw = plots.curves(named, axis_name, f"{metric_name(metric)}{' (marginal)' if group == 'marginal' else ''}", wanted)
            yield Picture(
                f"{name}-{axis}-{group}",
                section.title,
                draw,
                caption=f"{section.title}; {bands}",
            )


def _order_pictures(section: Section, name: str, colours: Mapping[str, int]) -> list[Picture]:
    """Fig. 2(b): how far the likeliest order of a sequence is from the least likely; the same bins for all models."""
    spreads = {entry.label: [float(v) for v in entry.first.details.get("sequences", {}).get("spread", ())] for entry in section.entries}
    spreads = {label: values for label, values in spreads.items() if values}
    if not spreads:
        return []
    top = max(max(values) for values in spreads.values()) or 1.0
    edges = [top * i / BINS for i in range(BINS + 1)]
    groups = [(label, edges, counted(values, top)) for label, values in spreads.items()]
    what = "highest less lowest log-likelihood over all orders, nats"
    draw = plots.histograms(groups, what, dict(colours))
    size = (plots.SIZE[0], 0.9 + 1.3 * len(groups))
    return [
        Picture(
            f"{name}-spread", f"{section.title}: {what}", draw, size, f"{section.title}; zero is a model that has one joint distribution"
        )
    ]


def counted(values: Sequence[float], top: float) -> list[int]:
    """How many values fall in each of `BINS` equal bins of [0, top].

    >>> sum(counted([0.0, 1.0, 2.0], 2.0)), counted([2.0], 2.0)[-1]
    (3, 1)
    """
    counts = [0] * BINS
    for value in values:
        counts[min(int(value / top * BINS), BINS - 1)] += 1
    return counts


def _calibration_pictures(section: Section, name: str, colours: Mapping[str, int]) -> list[Picture]:
    made = []
    contexts = dict.fromkeys(row.setting["contexts"] for entry in section.entries for row in entry.first.rows if row.metric == "ece")
    kinds = {row.kind for entry in section.entries for row in entry.first.rows}
    for place, each in enumerate(contexts):
        lines, wanted = [], {}
        for entry in section.entries:
            bins = entry.first.details.get(each, {}).get("bins", ())
            kind = next(row.kind for row in entry.first.rows)
            label = f"{entry.label} ({kind})" if len(kinds) > 1 else entry.label
            x, y = tuple(float(b["confidence"]) for b in bins), tuple(float(b["accuracy"]) for b in bins)
            lines.append(Curve(label, kind, x, y, y, y))
            wanted[label] = colours[entry.label]
        title = f"{section.title}, {each}"
        made.append(
            Picture(
                f"{name}-reliability-{place}",
                title,
                plots.reliability(lines, wanted),
                caption=f"{title}; on the dashed line a model is as often right as it says",
            )
        )
    return made


def _exact_pictures(section: Section, name: str, colours: Mapping[str, int]) -> list[Picture]:
    """Patterns across, models down; bounds (their excess) apart from distances."""
    made = []
    for metric, what in (("kl", "KL from the truth, nats per target"), ("excess", "bound's excess over the true nll, nats per target")):
        entries = [entry for entry in section.entries if any(row.metric == metric for row in entry.first.rows)]
        patterns = list(dict.fromkeys(row.setting["pattern"] for entry in entries for row in entry.first.rows if row.metric == metric))
        if not entries:
            continue
        entries.sort(key=lambda entry: entry.first.rows[0].kind)
        labels = [f"{entry.label} ({entry.first.rows[0].kind})" for entry in entries]
        values = [[_mean(entry, metric, pattern) for pattern in patterns] for entry in entries]
        size = (1.6 + 0.62 * len(patterns), 1.4 + 0.42 * len(entries))
        draw = plots.heat_map(labels, patterns, values, what)
        made.append(
            Picture(f"{name}-{metric}", f"{section.title}: {what}", draw, size, f"{section.title}; darker is further from the truth")
        )
    return made


def _mean(entry: Entry, metric: str, pattern: str) -> float | None:
    values = [row.value for r in entry.results for row in r.rows if row.metric == metric and row.setting.get("pattern") == pattern]
    return sum(values) / len(values) if values else None


def _marked(curve: Curve) -> Curve:
    return Curve(f"{curve.label} ({curve.kind})" if curve.kind else curve.label, curve.kind, curve.x, curve.y, curve.low, curve.high)


def _difference_cell(row: Row | None) -> Cell | None:
    return None if row is None else Cell(row.value, row.low, row.high, note=row.note)


def _has_sums(result: Result) -> bool:
    contexts = [str(row.setting.get("contexts")) for row in result.rows if row.metric == "perplexity"]
    details: Mapping[str, Any] = result.details
    return bool(contexts) and all(isinstance(details.get(c), Mapping) and "nll" in details[c] for c in contexts)


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def order_steps(section: Section) -> str:
    """Fig. 2(a): one text asked forward and in reverse, each token's log-probability under it, and their sum; HTML."""
    lines = []
    for entry in section.entries:
        text = entry.first.details.get("text")
        if not isinstance(text, Mapping) or "tokens" not in text:
            continue
        for direction in ("forward", "reverse"):
            values = [float(value) for value in text[direction]]  # in reading order, whichever way they were asked
            pairs = zip(text["tokens"], values, strict=True)
            cells = "".join(f"<td>{html.escape(str(token))}<small>{number(value)}</small></td>" for token, value in pairs)
            head = f"<th scope='row'>{html.escape(entry.label)}, {direction}</th>"
            lines.append(f"<tr>{head}<td><strong>{number(sum(values))}</strong></td>{cells}</tr>")
    caption = "<caption>One text in two orders <span>log-probability of the whole, then of each token</span></caption>"
    return f"<div class='scroll' tabindex='0'><table>{caption}<tbody>{''.join(lines)}</tbody></table></div>" if lines else ""
