"""What each task's section shows beside its tables: curves, histograms, reliability plots, heat maps."""

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from tracformer.evaluation.report import plots
from tracformer.evaluation.report.collect import Entry, Section, metric_name
from tracformer.evaluation.report.plots import Curve, Picture
from tracformer.evaluation.report.seeds import over_seeds
from tracformer.evaluation.report.tables import number
from tracformer.evaluation.results import Row

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
    """A curve for each kind of answer; its band is the figures' interval."""
    made = []
    wanted = [[row for row in result.rows if row.metric == metric and axis in row.setting] for result in entry.results]
    for kind in dict.fromkeys(row.kind for rows in wanted for row in rows):
        points: dict[float, list[Row]] = {}  # a row for each seed
        for rows in wanted:
            own: dict[float, list[Row]] = {}
            for row in rows:
                if row.kind == kind:
                    own.setdefault(float(row.setting[axis]), []).append(row)
            for x, found in own.items():
                points.setdefault(x, []).append(_mean_row(found))
        xs = sorted(points)
        cells = [over_seeds(points[x]) for x in xs]
        low, high = tuple(_or(cell.low, cell.value) for cell in cells), tuple(_or(cell.high, cell.value) for cell in cells)
        seeds = max(cell.seeds for cell in cells)
        made.append(Curve(entry.label, kind, tuple(xs), tuple(cell.value for cell in cells), low, high, seeds))
    return made


def _mean_row(rows: Sequence[Row]) -> Row:
    """Of one seed's rows at one place, as several contexts leave them."""
    return rows[0] if len(rows) == 1 else dataclasses.replace(rows[0], value=fmean(row.value for row in rows), low=None, high=None)


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
            bands = "bands: 95% intervals over sequences, and over training seeds where a line stands for several"
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
            f"{name}-spread",
            f"{section.title}: {what}",
            draw,
            size,
            f"{section.title}; zero is a model that has one joint distribution{_first_seeds(section)}",
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
                caption=f"{title}; on the dashed line a model is as often right as it says{_first_seeds(section)}",
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
        labels = [f"{entry.label} ({entry.first.rows[0].kind}{_seeds(entry)})" for entry in entries]
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


def _first_seeds(section: Section) -> str:
    return "; of several training seeds the first is shown" if any(len(entry.results) > 1 for entry in section.entries) else ""


def _seeds(entry: Entry) -> str:
    return f", mean of {len(entry.results)} seeds" if len(entry.results) > 1 else ""


def _marked(curve: Curve) -> Curve:
    return dataclasses.replace(curve, label=f"{curve.label} ({curve.kind})") if curve.kind else curve


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
