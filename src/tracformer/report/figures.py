"""Curves, histograms and heat maps of results.

Pictures for the report, by matplotlib: SVG inside the page, which follows its light or dark
colours, and a PNG beside it.

Colours are Okabe and Ito's, told apart by everyone; each line has its own marker too, and its name
stands at its end.

What each task's section shows beside its tables: curves, histograms, reliability plots, heat maps.
"""

import dataclasses
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tracformer.evaluation.result_files import ResultRow
from tracformer.files import optional_package
from tracformer.report.collect import Entry, Section, metric_name, over_seeds
from tracformer.report.tables import number

INK = "#1a1c1f"  # in the page's SVG it becomes the text's own colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = {"exact": "-", "marginal": "--", "bound": ":", "": "-", "sample": "-"}
SIZE = (5.4, 3.5)  # inches
WIDE_RANGE = 8.0  # from lowest to highest: beyond it a logarithmic axis


@dataclass(frozen=True)
class Curve:
    label: str
    kind: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int = 1

    @property
    def name(self) -> str:
        """As it stands in the picture."""
        return f"{self.label}, {self.seeds} seeds" if self.seeds > 1 else self.label


@dataclass(frozen=True)
class Picture:
    name: str  # of its files
    title: str  # also read aloud where the picture cannot be seen
    draw: Callable[[Any], None]  # onto a matplotlib figure
    size: tuple[float, float] = SIZE
    caption: str = ""

    def save(self, folder: Path) -> str:
        """Write the PNG, and return the SVG for the page."""
        pyplot = pyplot_of()
        with pyplot.rc_context(style_of(self.name)):
            figure = pyplot.figure(figsize=self.size, layout="constrained")
            try:
                self.draw(figure)
                drawn = io.StringIO()
                figure.savefig(
                    drawn,
                    format="svg",
                    transparent=True,
                    metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
                )
                figure.suptitle(self.title, fontsize=8, wrap=True)  # the page has it as a caption
                figure.savefig(
                    folder / f"{self.name}.png",
                    dpi=160,
                    facecolor="white",
                    metadata={"Software": None},
                )
            finally:
                pyplot.close(figure)
        return page_svg(drawn.getvalue(), self.name, self.title)


def curves(
    lines: Sequence[Curve], x_name: str, y_name: str, colours: dict[str, int]
) -> Callable[[Any], None]:
    """Lines with bands, named at their right end; `colours` gives a label the same
    colour in every picture.
    """

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for line in lines:
            index = colours[line.label]
            colour = COLOURS[index % len(COLOURS)]
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
            style = {
                "color": colour,
                "marker": MARKERS[index % len(MARKERS)],
                "linestyle": STYLES.get(line.kind, "-"),
            }
            axes.plot(line.x, line.y, linewidth=1.6, markersize=5, **style)
        values = [
            value
            for line in lines
            for value in (*line.low, *line.high)
            if value > 0 and math.isfinite(value)
        ]
        if values and max(values) / min(values) > WIDE_RANGE:
            axes.set_yscale("log")
        axes.set(xlabel=x_name, ylabel=y_name)
        _plain_ticks(axes)
        axes.grid(alpha=0.15)
        _name_ends(axes, lines, colours)

    return draw


def histograms(
    groups: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    x_name: str,
    colours: dict[str, int],
) -> Callable[[Any], None]:
    """A panel for each (label, edges, counts), on one x-axis."""

    def draw(figure: Any) -> None:
        panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (label, edges, counts) in zip(panels, groups, strict=True):
            colour = COLOURS[colours[label] % len(COLOURS)]
            axes.stairs(counts, edges, fill=True, color=colour, alpha=0.8)
            axes.set_title(label, fontsize=9, loc="left", color=INK)
            axes.set_ylabel("sequences")
            axes.grid(alpha=0.15)
        panels[-1].set_xlabel(x_name)

    return draw


def reliability(lines: Sequence[Curve], colours: dict[str, int]) -> Callable[[Any], None]:
    """How often the guess was right against how sure the model was; on the diagonal
    the two agree.
    """

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle="--")
        for line in lines:
            index = colours[line.label]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(
                line.x,
                line.y,
                color=colour,
                marker=MARKERS[index % len(MARKERS)],
                linewidth=1.5,
                markersize=5,
            )
        axes.set(
            xlabel="probability given", ylabel="share that came true", xlim=(0, 1), ylim=(0, 1)
        )
        axes.grid(alpha=0.15)
        _name_ends(axes, lines, colours)

    return draw


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], what: str
) -> Callable[[Any], None]:
    """Darker is worse; each cell says its number.

    Colours follow the logarithm, for errors differ by orders of magnitude.
    """

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        floor = 1e-6
        logs = [
            [math.nan if v is None else math.log10(max(v, floor)) for v in row] for row in values
        ]
        image = axes.pcolormesh(logs, cmap="cividis_r")  # drawn as shapes: sharp at every size
        axes.invert_yaxis()
        low, high = image.get_clim()
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if value is not None:
                    dark = high > low and (logs[i][j] - low) / (high - low) > 0.55
                    axes.text(
                        j + 0.5,
                        i + 0.5,
                        number(value),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if dark else "#000001",
                    )
        axes.set_xticks(
            [j + 0.5 for j in range(len(columns))], columns, rotation=35, ha="right", fontsize=8
        )
        axes.set_yticks([i + 0.5 for i in range(len(rows))], rows, fontsize=8)
        axes.set_title(what, fontsize=9, loc="left", color=INK)

    return draw


def page_svg(text: str, name: str, title: str) -> str:
    """matplotlib's SVG made fit for the inside of a page: no prolog, no addresses, ids of its own,
    the page's colour for ink.
    """
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.S)
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href", "href")
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = body.replace(INK, "currentColor")
    body = re.sub(r'(<svg[^>]*?) width="[^"]*pt"', r"\1", body, count=1)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", body, count=1)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return body.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def _name_ends(axes: Any, lines: Sequence[Curve], colours: dict[str, int]) -> None:
    """Each line's name right of its last point, pushed apart where they would overlap."""
    ends = [
        (line, line.x[-1], line.y[-1]) for line in lines if line.x and math.isfinite(line.y[-1])
    ]
    if not ends:
        return
    axes.figure.canvas.draw()  # fixes the axes' limits and scale
    height = axes.get_window_extent().height or 1.0
    gap = 12.0 * axes.figure.dpi / 72.0 / height  # a line of text, as a fraction of the axes
    to_fraction = axes.transAxes.inverted()
    wanted = [
        (float(to_fraction.transform(axes.transData.transform((x, y)))[1]), line)
        for line, x, y in ends
    ]
    wanted.sort(key=lambda each: (each[0], each[1].label))
    for height_there, (_, line) in zip(
        spread_apart([height for height, _ in wanted], gap), wanted, strict=True
    ):
        colour = COLOURS[colours[line.label] % len(COLOURS)]
        axes.annotate(
            line.name,
            (1.0, height_there),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=9,
        )


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as a single sweep can so that neighbours are `gap` apart.

    >>> spread_apart([0.1, 0.1, 0.9], 0.2)
    [0.0, 0.2, 0.9]
    """
    groups: list[list[float]] = []  # each: the heights that stand as one stack
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], gap) < _top(groups[-2], gap) + gap:
            last = groups.pop()
            groups[-1] += last
    return [round(_bottom(group, gap) + gap * i, 6) for group in groups for i in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + gap * (len(group) - 1)


def _plain_ticks(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())


def pyplot_of() -> Any:
    optional_package("matplotlib", "a report", "plot").use("Agg")
    from matplotlib import pyplot

    return pyplot


def style_of(name: str) -> dict[str, Any]:
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    look = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "grid.color": INK}
    return {
        **dict.fromkeys(inked, INK),
        **look,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }


X_AXES = {
    "ratio": "share of targets",
    "prefix": "share given, as a prefix",
    "step": "training steps",
}
BINS = 40
# both speak of the joint probability, and may share axes with the bound marked; a marginal may not
JOINT = ("exact", "bound")


def colours_of(sections: Iterable[Section]) -> dict[str, int]:
    """A number for each model, the same in every picture."""
    labels = dict.fromkeys(entry.label for section in sections for entry in section.entries)
    return {label: number for number, label in enumerate(sorted(labels))}


def pictures(section: Section, name: str, colours: Mapping[str, int]) -> list[Picture]:
    made = [*_curve_pictures(section, name, colours)]
    drawers = {
        "orders": _order_pictures,
        "calibration": _calibration_pictures,
        "exact": _exact_pictures,
    }
    if section.task in drawers:
        made += drawers[section.task](section, name, colours)
    return made


def curves_of(entry: Entry, metric: str, axis: str) -> list[Curve]:
    """A curve for each kind of answer; its band is the figures' interval."""
    made = []
    wanted = [
        [row for row in result.rows if row.metric == metric and axis in row.setting]
        for result in entry.results
    ]
    for kind in dict.fromkeys(row.kind for rows in wanted for row in rows):
        points: dict[float, list[ResultRow]] = {}  # a row for each seed
        for rows in wanted:
            own: dict[float, list[ResultRow]] = {}
            for row in rows:
                if row.kind == kind:
                    own.setdefault(float(row.setting[axis]), []).append(row)
            for x, found in own.items():
                points.setdefault(x, []).append(_mean_row(found))
        xs = sorted(points)
        cells = [over_seeds(points[x]) for x in xs]
        low, high = (
            tuple(_or(cell.low, cell.value) for cell in cells),
            tuple(_or(cell.high, cell.value) for cell in cells),
        )
        seeds = max(cell.seeds for cell in cells)
        made.append(
            Curve(
                entry.label, kind, tuple(xs), tuple(cell.value for cell in cells), low, high, seeds
            )
        )
    return made


def _mean_row(rows: Sequence[ResultRow]) -> ResultRow:
    """Of one seed's rows at one place, as several contexts leave them."""
    return (
        rows[0]
        if len(rows) == 1
        else dataclasses.replace(
            rows[0], value=fmean(row.value for row in rows), low=None, high=None
        )
    )


def _curve_pictures(section: Section, name: str, colours: Mapping[str, int]) -> Iterable[Picture]:
    metric = "perplexity" if "perplexity" in section.metrics() else "bits_per_byte"
    for axis, axis_name in X_AXES.items():
        found = [curve for entry in section.entries for curve in curves_of(entry, metric, axis)]
        for group, kinds in (("joint", (*JOINT, "")), ("marginal", ("marginal",))):
            chosen = [curve for curve in found if curve.kind in kinds and len(curve.x) > 1]
            if not chosen:
                continue
            mixed = len({curve.kind for curve in chosen}) > 1
            named = [_marked(curve) if mixed else curve for curve in chosen]
            wanted = {
                curve.label: colours[plain.label]
                for curve, plain in zip(named, chosen, strict=True)
            }
            bands = (
                "bands: 95% intervals over sequences, and over training seeds where a line stands "
                "for several"
            )
            draw = curves(
                named,
                axis_name,
                f"{metric_name(metric)}{' (marginal)' if group == 'marginal' else ''}",
                wanted,
            )
            yield Picture(
                f"{name}-{axis}-{group}",
                section.title,
                draw,
                caption=f"{section.title}; {bands}",
            )


def _order_pictures(section: Section, name: str, colours: Mapping[str, int]) -> list[Picture]:
    """Fig.

    2(b): how far the likeliest order of a sequence is from the least likely; the same bins for all
    models.
    """
    spreads = {
        entry.label: [float(v) for v in entry.first.details.get("sequences", {}).get("spread", ())]
        for entry in section.entries
    }
    spreads = {label: values for label, values in spreads.items() if values}
    if not spreads:
        return []
    top = max(max(values) for values in spreads.values()) or 1.0
    edges = [top * i / BINS for i in range(BINS + 1)]
    groups = [(label, edges, counted(values, top)) for label, values in spreads.items()]
    what = "highest less lowest log-likelihood over all orders, nats"
    draw = histograms(groups, what, dict(colours))
    size = (SIZE[0], 0.9 + 1.3 * len(groups))
    return [
        Picture(
            f"{name}-spread",
            f"{section.title}: {what}",
            draw,
            size,
            f"{section.title}; zero is a model that has one joint "
            f"distribution{_first_seeds(section)}",
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
    contexts = dict.fromkeys(
        row.setting["contexts"]
        for entry in section.entries
        for row in entry.first.rows
        if row.metric == "ece"
    )
    kinds = {row.kind for entry in section.entries for row in entry.first.rows}
    for place, each in enumerate(contexts):
        lines, wanted = [], {}
        for entry in section.entries:
            bins = entry.first.details.get(each, {}).get("bins", ())
            kind = next(row.kind for row in entry.first.rows)
            label = f"{entry.label} ({kind})" if len(kinds) > 1 else entry.label
            x, y = (
                tuple(float(b["confidence"]) for b in bins),
                tuple(float(b["accuracy"]) for b in bins),
            )
            lines.append(Curve(label, kind, x, y, y, y))
            wanted[label] = colours[entry.label]
        title = f"{section.title}, {each}"
        made.append(
            Picture(
                f"{name}-reliability-{place}",
                title,
                reliability(lines, wanted),
                caption=(
                    f"{title}; on the dashed line a model is as often right as it "
                    f"says{_first_seeds(section)}"
                ),
            )
        )
    return made


def _exact_pictures(section: Section, name: str, colours: Mapping[str, int]) -> list[Picture]:
    """Patterns across, models down; bounds (their excess) apart from distances."""
    made = []
    for metric, what in (
        ("kl", "KL from the truth, nats per target"),
        ("excess", "bound's excess over the true nll, nats per target"),
    ):
        entries = [
            entry
            for entry in section.entries
            if any(row.metric == metric for row in entry.first.rows)
        ]
        patterns = list(
            dict.fromkeys(
                row.setting["pattern"]
                for entry in entries
                for row in entry.first.rows
                if row.metric == metric
            )
        )
        if not entries:
            continue
        entries.sort(key=lambda entry: entry.first.rows[0].kind)
        labels = [f"{entry.label} ({entry.first.rows[0].kind}{_seeds(entry)})" for entry in entries]
        values = [[_mean(entry, metric, pattern) for pattern in patterns] for entry in entries]
        size = (1.6 + 0.62 * len(patterns), 1.4 + 0.42 * len(entries))
        draw = heat_map(labels, patterns, values, what)
        made.append(
            Picture(
                f"{name}-{metric}",
                f"{section.title}: {what}",
                draw,
                size,
                f"{section.title}; darker is further from the truth",
            )
        )
    return made


def _mean(entry: Entry, metric: str, pattern: str) -> float | None:
    values = [
        row.value
        for r in entry.results
        for row in r.rows
        if row.metric == metric and row.setting.get("pattern") == pattern
    ]
    return sum(values) / len(values) if values else None


def _first_seeds(section: Section) -> str:
    return (
        "; of several training seeds the first is shown"
        if any(len(entry.results) > 1 for entry in section.entries)
        else ""
    )


def _seeds(entry: Entry) -> str:
    return f", mean of {len(entry.results)} seeds" if len(entry.results) > 1 else ""


def _marked(curve: Curve) -> Curve:
    return (
        dataclasses.replace(curve, label=f"{curve.label} ({curve.kind})") if curve.kind else curve
    )


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def order_steps(section: Section) -> str:
    """Fig.

    2(a): one text asked forward and in reverse, each token's log-probability under it, and their
    sum; HTML.
    """
    lines = []
    for entry in section.entries:
        text = entry.first.details.get("text")
        if not isinstance(text, Mapping) or "tokens" not in text:
            continue
        for direction in ("forward", "reverse"):
            # in reading order, whichever way they were asked
            values = [float(value) for value in text[direction]]
            pairs = zip(text["tokens"], values, strict=True)
            cells = "".join(
                f"<td>{html.escape(str(token))}<small>{number(value)}</small></td>"
                for token, value in pairs
            )
            head = f"<th scope='row'>{html.escape(entry.label)}, {direction}</th>"
            lines.append(f"<tr>{head}<td><strong>{number(sum(values))}</strong></td>{cells}</tr>")
    caption = (
        "<caption>One text in two orders <span>log-probability of the whole, then of each "
        "token</span></caption>"
    )
    return (
        "<div class='scroll' "
        f"tabindex='0'><table>{caption}<tbody>{''.join(lines)}</tbody></table></div>"
        if lines
        else ""
    )
