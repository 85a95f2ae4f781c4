"""Pictures for the report, by matplotlib: SVG inside the page, which follows its light or dark colours, and a PNG beside it.

Colours are Okabe and Ito's, told apart by everyone; each line has its own marker too, and its name stands at its end.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracformer.evaluation.report.tables import number
from tracformer.files import optional_package

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
                    drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
                )
                figure.suptitle(self.title, fontsize=8, wrap=True)  # the page has it as a caption
                figure.savefig(folder / f"{self.name}.png", dpi=160, facecolor="white", metadata={"Software": None})
            finally:
                pyplot.close(figure)
        return page_svg(drawn.getvalue(), self.name, self.title)


def curves(lines: Sequence[Curve], x_name: str, y_name: str, colours: dict[str, int]) -> Callable[[Any], None]:
    """Lines with bands, named at their right end; `colours` gives a label the same colour in every picture."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for line in lines:
            index = colours[line.label]
            colour = COLOURS[index % len(COLOURS)]
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
            style = {"color": colour, "marker": MARKERS[index % len(MARKERS)], "linestyle": STYLES.get(line.kind, "-")}
            axes.plot(line.x, line.y, linewidth=1.6, markersize=5, **style)
        values = [value for line in lines for value in (*line.low, *line.high) if value > 0 and math.isfinite(value)]
        if values and max(values) / min(values) > WIDE_RANGE:
            axes.set_yscale("log")
        axes.set(xlabel=x_name, ylabel=y_name)
        _plain_ticks(axes)
        axes.grid(alpha=0.15)
        _name_ends(axes, lines, colours)

    return draw


def histograms(
    groups: Sequence[tuple[str, Sequence[float], Sequence[float]]], x_name: str, colours: dict[str, int]
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
    """How often the guess was right against how sure the model was; on the diagonal the two agree."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle="--")
        for line in lines:
            index = colours[line.label]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(line.x, line.y, color=colour, marker=MARKERS[index % len(MARKERS)], linewidth=1.5, markersize=5)
        axes.set(xlabel="probability given", ylabel="share that came true", xlim=(0, 1), ylim=(0, 1))
        axes.grid(alpha=0.15)
        _name_ends(axes, lines, colours)

    return draw


def heat_map(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], what: str) -> Callable[[Any], None]:
    """Darker is worse; each cell says its number. Colours follow the logarithm, for errors differ by orders of magnitude."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        floor = 1e-6
        logs = [[math.nan if v is None else math.log10(max(v, floor)) for v in row] for row in values]
        image = axes.pcolormesh(logs, cmap="cividis_r")  # drawn as shapes: sharp at every size
        axes.invert_yaxis()
        low, high = image.get_clim()
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if value is not None:
                    dark = high > low and (logs[i][j] - low) / (high - low) > 0.55
                    axes.text(j + 0.5, i + 0.5, number(value), ha="center", va="center", fontsize=7, color="white" if dark else "#000001")
        axes.set_xticks([j + 0.5 for j in range(len(columns))], columns, rotation=35, ha="right", fontsize=8)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], rows, fontsize=8)
        axes.set_title(what, fontsize=9, loc="left", color=INK)

    return draw


def page_svg(text: str, name: str, title: str) -> str:
    """matplotlib's SVG made fit for the inside of a page: no prolog, no addresses, ids of its own, the page's colour for ink."""
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
    ends = [(line, line.x[-1], line.y[-1]) for line in lines if line.x and math.isfinite(line.y[-1])]
    if not ends:
        return
    axes.figure.canvas.draw()  # fixes the axes' limits and scale
    height = axes.get_window_extent().height or 1.0
    gap = 12.0 * axes.figure.dpi / 72.0 / height  # a line of text, as a fraction of the axes
    to_fraction = axes.transAxes.inverted()
    wanted = [(float(to_fraction.transform(axes.transData.transform((x, y)))[1]), line) for line, x, y in ends]
    wanted.sort(key=lambda each: (each[0], each[1].label))
    for height_there, (_, line) in zip(spread_apart([height for height, _ in wanted], gap), wanted, strict=True):
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
    return {**dict.fromkeys(inked, INK), **look, "axes.spines.top": False, "axes.spines.right": False}
