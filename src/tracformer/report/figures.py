"""Pictures of a report, drawn by matplotlib.

- `pictures` decides what a section shows beside its tables: curves, histograms, reliability plots,
  heat maps.
- `curves`, `histograms`, `reliability` and `heat_map` return functions that draw on a matplotlib
  figure; `Picture.save` writes the PNG and returns SVG for the page, which follows its light or
  dark colours.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; each line has a
marker of its own, too.
"""

import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tracformer.evaluation.result_files import ResultRow
from tracformer.files import optional_package
from tracformer.report.collect import ReportEntry, Section, metric_name, over_seeds
from tracformer.report.tables import Cell, Line, Table, number

INK = "#1a1c1f"  # replaced in the page's SVG by the text colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = {"exact": "-", "marginal": "--", "bound": ":", "": "-", "sample": "-"}
SIZE = (5.4, 3.5)  # inches
WIDE_RANGE = 8.0  # largest over smallest value from which the axis is logarithmic
FLOOR = 1e-6  # of a heat map's logarithmic colours
BINS = 40
X_AXES = {
    "ratio": "share of targets",
    "prefix": "share given, as a prefix",
    "step": "training steps",
}
# Joint probabilities and bounds on them share axes, with the bound marked; marginals do not.
AXES_OF_KINDS = {"joint": ("exact", "bound", ""), "marginal": ("marginal",)}

Draw = Callable[[Any], None]  # onto a matplotlib figure


@dataclass(frozen=True)
class Curve:
    """A line with its band: one model, one kind of answer."""

    label: str
    kind: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int = 1

    @property
    def name(self) -> str:
        """The label as the legend has it."""
        return f"{self.label}, {self.seeds} seeds" if self.seeds > 1 else self.label


@dataclass(frozen=True)
class Picture:
    """A picture of the report.

    Args:
        name: Stem of its file names.
        title: Also the text for those who cannot see the picture.
        draw: Function that draws it.
        size: Width and height in inches.
        caption: Stands under the picture.
    """

    name: str
    title: str
    draw: Draw
    size: tuple[float, float] = SIZE
    caption: str = ""

    def save(self, folder: Path) -> str:
        """Write the PNG into the folder and return SVG for the page."""
        pyplot = pyplot_of()
        with pyplot.rc_context(style_of(self.name)):
            figure = pyplot.figure(figsize=self.size, layout="constrained")
            try:
                self.draw(figure)
                drawn = io.StringIO()
                no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
                figure.savefig(drawn, format="svg", transparent=True, metadata=no_metadata)
                figure.suptitle(self.title, fontsize=8, wrap=True)  # the page has it as a caption
                path = folder / f"{self.name}.png"
                figure.savefig(path, dpi=160, facecolor="white", metadata={"Software": None})
            finally:
                pyplot.close(figure)
        return page_svg(drawn.getvalue(), self.name, self.title)


def curves(lines: Sequence[Curve], x_name: str, y_name: str, colours: Mapping[str, int]) -> Draw:
    """Return a function that draws lines with bands.

    Args:
        lines: The curves.
        x_name: Name of the horizontal axis.
        y_name: Name of the vertical axis.
        colours: Number of the colour of each label, the same in every picture.
    """

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for line in lines:
            style = _style(colours[line.label])
            band = {"color": style["color"], "alpha": 0.18, "linewidth": 0}
            axes.fill_between(line.x, line.low, line.high, **band)
            style["linestyle"] = STYLES.get(line.kind, "-")
            axes.plot(line.x, line.y, linewidth=1.6, label=line.name, **style)
        values = [v for line in lines for v in (*line.low, *line.high) if 0 < v < math.inf]
        if values and max(values) / min(values) > WIDE_RANGE:
            axes.set_yscale("log")
        axes.set(xlabel=x_name, ylabel=y_name)
        _plain_ticks(axes)
        _finish(axes)

    return draw


def histograms(
    groups: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    x_name: str,
    colours: Mapping[str, int],
) -> Draw:
    """Return a function that draws a panel for each (label, edges, counts), on one x-axis."""

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


def reliability(lines: Sequence[Curve], colours: Mapping[str, int]) -> Draw:
    """Return a function that draws how often the guess was right against the model's confidence.

    On the diagonal the two agree.
    """

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle="--")
        for line in lines:
            style = _style(colours[line.label])
            axes.plot(line.x, line.y, linewidth=1.5, label=line.name, **style)
        axes.set(xlabel="confidence", ylabel="share that was right", xlim=(0, 1), ylim=(0, 1))
        _finish(axes)

    return draw


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], what: str
) -> Draw:
    """Return a function that draws a table of errors as colours; darker is worse.

    Colours follow the logarithm, since errors differ by orders of magnitude; each cell also shows
    its number.
    """

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        logs = [
            [math.nan if v is None else math.log10(max(v, FLOOR)) for v in row] for row in values
        ]
        image = axes.pcolormesh(logs, cmap="cividis_r")  # drawn as shapes: sharp at every size
        axes.invert_yaxis()
        low, high = image.get_clim()
        centred = {"ha": "center", "va": "center", "fontsize": 7}
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if value is not None:
                    dark = high > low and (logs[i][j] - low) / (high - low) > 0.55
                    colour = "white" if dark else "#000001"
                    axes.text(j + 0.5, i + 0.5, number(value), color=colour, **centred)
        middles = [j + 0.5 for j in range(len(columns))]
        axes.set_xticks(middles, columns, rotation=35, ha="right", fontsize=8)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], rows, fontsize=8)
        axes.set_title(what, fontsize=9, loc="left", color=INK)

    return draw


def page_svg(text: str, name: str, title: str) -> str:
    """Return matplotlib's SVG made fit for the inside of a page.

    It has no prolog and no addresses, its ids begin with `name`, and the page's text colour
    replaces the ink.
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


def _style(index: int) -> dict[str, Any]:
    marker = MARKERS[index % len(MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker, "markersize": 5}


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def _plain_ticks(axes: Any) -> None:
    """Write ticks without exponents, and at 1, 2 and 5 of each decade of a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())


def pyplot_of() -> Any:
    """Return `matplotlib.pyplot`, which draws into files only."""
    optional_package("matplotlib", "a report", "plot").use("Agg")
    from matplotlib import pyplot

    return pyplot


def style_of(name: str) -> dict[str, Any]:
    """Return the matplotlib settings of a picture; the same name gives the same SVG ids."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    frame = {"axes.spines.top": False, "axes.spines.right": False}
    look = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "grid.color": INK}
    return {**dict.fromkeys(inked, INK), **look, **frame}


def colours_of(sections: Iterable[Section]) -> dict[str, int]:
    """Return the number of each model's colour, the same in every picture."""
    labels = {entry.label for section in sections for entry in section.entries}
    return {label: index for index, label in enumerate(sorted(labels))}


def pictures(section: Section, colours: Mapping[str, int]) -> list[Picture]:
    """Return the pictures of a section."""
    found = [*_curve_pictures(section, colours)]
    if section.task == "orders":
        found += _order_pictures(section, colours)
    if section.task == "calibration":
        found += _calibration_pictures(section, colours)
    if section.task == "exact":
        found += _exact_pictures(section)
    return found


def curves_of(entry: ReportEntry, metric: str, axis: str) -> list[Curve]:
    """Return a curve for each kind of answer of a model; the band is the figures' interval.

    Args:
        entry: The model.
        metric: What the curve shows.
        axis: Key of the rows' settings that is on the horizontal axis.
    """
    seeds = [
        [row for row in result.rows if row.metric == metric and axis in row.setting]
        for result in entry.results
    ]
    found = []
    for kind in dict.fromkeys(row.kind for rows in seeds for row in rows):
        points: dict[float, list[ResultRow]] = {}  # a row for each seed
        for rows in seeds:
            of_kind = [row for row in rows if row.kind == kind]
            for x in dict.fromkeys(float(row.setting[axis]) for row in of_kind):
                here = [row for row in of_kind if float(row.setting[axis]) == x]
                points.setdefault(x, []).append(_mean_row(here))
        xs = sorted(points)
        cells = [over_seeds(points[x]) for x in xs]
        y = tuple(cell.value for cell in cells)
        low = tuple(cell.value if cell.low is None else cell.low for cell in cells)
        high = tuple(cell.value if cell.high is None else cell.high for cell in cells)
        count = max(cell.seeds for cell in cells)
        found.append(Curve(entry.label, kind, tuple(xs), y, low, high, count))
    return found


def _mean_row(rows: Sequence[ResultRow]) -> ResultRow:
    """Return the mean of one seed's rows at one place, which several contexts may share."""
    if len(rows) == 1:
        return rows[0]
    mean = fmean(row.value for row in rows)
    return dataclasses.replace(rows[0], value=mean, low=None, high=None)


def _curve_pictures(section: Section, colours: Mapping[str, int]) -> Iterator[Picture]:
    metric = "perplexity" if "perplexity" in section.metrics() else "bits_per_byte"
    caption = (
        f"{section.title}; bands: 95% intervals over sequences, and over training seeds where a "
        "line is the mean of several"
    )
    for axis, axis_name in X_AXES.items():
        found = [curve for entry in section.entries for curve in curves_of(entry, metric, axis)]
        for group, kinds in AXES_OF_KINDS.items():
            chosen = [curve for curve in found if curve.kind in kinds and len(curve.x) > 1]
            if not chosen:
                continue
            marked = len({curve.kind for curve in chosen}) > 1
            lines, numbers = [], {}
            for curve in chosen:
                label = f"{curve.label} ({curve.kind})" if marked and curve.kind else curve.label
                numbers[label] = colours[curve.label]
                lines.append(dataclasses.replace(curve, label=label))
            y_name = metric_name(metric) + (" (marginal)" if group == "marginal" else "")
            draw = curves(lines, axis_name, y_name, numbers)
            name = f"{section.file_stem}-{axis}-{group}"
            yield Picture(name, section.title, draw, caption=caption)


def _order_pictures(section: Section, colours: Mapping[str, int]) -> list[Picture]:
    """Return histograms of how far the likeliest order is from the least likely (Figure 2b)."""
    kept = {
        entry.label: [float(v) for v in entry.first.details.get("sequences", {}).get("spread", ())]
        for entry in section.entries
    }
    spreads = {label: values for label, values in kept.items() if values}
    if not spreads:
        return []
    top = max(max(values) for values in spreads.values()) or 1.0
    edges = [top * i / BINS for i in range(BINS + 1)]  # the same for all models
    groups = [(label, edges, counted(values, top)) for label, values in spreads.items()]
    what = "highest less lowest log-likelihood over all orders, nats"
    caption = f"{section.title}; 0: the model has one joint distribution{_first_seeds(section)}"
    size = (SIZE[0], 0.9 + 1.3 * len(groups))
    title = f"{section.title}: {what}"
    draw = histograms(groups, what, colours)
    return [Picture(f"{section.file_stem}-spread", title, draw, size, caption)]


def counted(values: Sequence[float], top: float) -> list[int]:
    """Return how many values fall in each of `BINS` equal bins of [0, top].

    >>> sum(counted([0.0, 1.0, 2.0], 2.0)), counted([2.0], 2.0)[-1]
    (3, 1)
    """
    counts = [0] * BINS
    for value in values:
        counts[min(int(value / top * BINS), BINS - 1)] += 1
    return counts


def _calibration_pictures(section: Section, colours: Mapping[str, int]) -> list[Picture]:
    rows = [row for entry in section.entries for row in entry.first.rows]
    kinds = {row.kind for row in rows}
    found = []
    for place, contexts in enumerate(
        dict.fromkeys(row.setting["contexts"] for row in rows if row.metric == "ece")
    ):
        lines, numbers = [], {}
        for entry in section.entries:
            bins = entry.first.details.get(contexts, {}).get("bins", ())
            kind = entry.first.rows[0].kind
            label = f"{entry.label} ({kind})" if len(kinds) > 1 else entry.label
            x = tuple(float(each["confidence"]) for each in bins)
            y = tuple(float(each["accuracy"]) for each in bins)
            lines.append(Curve(label, kind, x, y, y, y))
            numbers[label] = colours[entry.label]
        title = f"{section.title}, {contexts}"
        caption = (
            f"{title}; on the dashed line a model is right as often as it expects"
            f"{_first_seeds(section)}"
        )
        name = f"{section.file_stem}-reliability-{place}"
        found.append(Picture(name, title, reliability(lines, numbers), caption=caption))
    return found


def _exact_pictures(section: Section) -> list[Picture]:
    """Return heat maps of models by patterns: distances, and the excess of bounds."""
    found = []
    for metric, what in (
        ("kl", "KL from the truth, nats per target"),
        ("excess", "bound's excess over the true nll, nats per target"),
    ):
        # (model, pattern): the figures of all seeds
        values: dict[tuple[str, str], list[float]] = {}
        for entry in sorted(section.entries, key=lambda entry: entry.first.rows[0].kind):
            several = len(entry.results) > 1
            seeds = f", mean of {len(entry.results)} seeds" if several else ""
            label = f"{entry.label} ({entry.first.rows[0].kind}{seeds})"
            for row in (row for result in entry.results for row in result.rows):
                if row.metric == metric:
                    values.setdefault((label, row.setting["pattern"]), []).append(row.value)
        if not values:
            continue
        labels, patterns = (list(dict.fromkeys(key[i] for key in values)) for i in (0, 1))
        grid = [
            [fmean(values[label, p]) if (label, p) in values else None for p in patterns]
            for label in labels
        ]
        size = (1.6 + 0.62 * len(patterns), 1.4 + 0.42 * len(labels))
        title = f"{section.title}: {what}"
        caption = f"{section.title}; darker is further from the truth"
        draw = heat_map(labels, patterns, grid, what)
        found.append(Picture(f"{section.file_stem}-{metric}", title, draw, size, caption))
    return found


def _first_seeds(section: Section) -> str:
    several = any(len(entry.results) > 1 for entry in section.entries)
    return "; of several training seeds the first is shown" if several else ""


def order_tables(section: Section) -> list[Table]:
    """Return for each model the log-probabilities of one text in two orders (Figure 2a).

    Tokens stand in reading order, whichever way they were predicted.
    """
    found = []
    for entry in section.entries:
        text = entry.first.details.get("text")
        if not isinstance(text, Mapping) or "tokens" not in text:
            continue
        lines = []
        for direction in ("forward", "reverse"):
            values = [float(value) for value in text[direction]]
            lines.append(Line(direction, "", tuple(map(Cell, (sum(values), *values)))))
        title = f"One text in two orders, {entry.label}"
        columns = ("whole text", *map(str, text["tokens"]))
        table = Table(
            f"{section.file_stem}-text",
            title,
            columns,
            tuple(lines),
            better="",
            caption="log-probability of the whole, then of each token",
            head="order",
        )
        found.append(table)
    return found
