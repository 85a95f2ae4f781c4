"""Tables of results as HTML, CSV and LaTeX, and on the terminal.

A table of figures: models down, settings across, in blocks by the kind of answer; as HTML, CSV
and LaTeX.

The best cell of a column is marked within its block alone: an exact probability, a marginal and a
bound are different quantities.

Results as plain tables: a row for each setting, a column for each model, what kind of number it is
in the column's head.
"""

import csv
import html
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.report.compare import comparable, differences

LOWER, HIGHER, NEITHER = "lower", "higher", ""

KINDS = {
    "exact": "exact joint probability",
    "marginal": "marginals: each target alone, given the context",
    "bound": "bound: the likelihood is at least this good",
    "sample": "drawn text",
    "": "",
}


@dataclass(frozen=True)
class Cell:
    value: float
    # 95% interval: over sequences, and of several seeds over these too (see `seeds`)
    low: float | None = None
    high: float | None = None
    spread: float | None = None  # standard deviation over training seeds
    seeds: int = 1
    paper: float | None = None  # the paper's figure for the same question
    place: str = ""  # where the paper prints it
    note: str = ""


@dataclass(frozen=True)
class Line:
    """One model's figures, a cell or a gap for each column."""

    label: str
    kind: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    name: str  # of its files
    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    better: str = LOWER
    caption: str = ""

    def blocks(self) -> Iterator[tuple[str, list[Line]]]:
        """The lines by kind, kinds in the order of `KINDS`."""
        for kind in KINDS:
            lines = [line for line in self.lines if line.kind == kind]
            if lines:
                yield kind, lines

    def has_paper(self, column: int) -> bool:
        return any(
            cell is not None and cell.paper is not None
            for cell in (line.cells[column] for line in self.lines)
        )

    def to_html(self) -> str:
        paper = [self.has_paper(column) for column in range(len(self.columns))]
        tall = " rowspan='2'" if any(paper) else ""
        heads, second = [f"<th scope='col'{tall}>model</th>"], []
        for name, beside in zip(self.columns, paper, strict=True):
            width = " colspan='2'" if beside else tall
            heads.append(f"<th scope='col'{width}>{html.escape(name)}</th>")
            second += ["<th scope='col'>ours</th><th scope='col'>paper</th>"] if beside else []
        body = []
        cells_wide = 1 + len(self.columns) + sum(paper)
        for kind, lines in self.blocks():
            if KINDS[kind]:
                body.append(
                    f"<tr class='kind'><th colspan='{cells_wide}' "
                    f"scope='rowgroup'>{html.escape(KINDS[kind])}</th></tr>"
                )
            best = best_of(lines, self.better)
            for line in lines:
                cells = [f"<th scope='row'>{html.escape(line.label)}</th>"]
                for cell, top, beside in zip(line.cells, best, paper, strict=True):
                    cells.append(_html_cell(cell, top))
                    cells += [_html_paper(cell)] if beside else []
                body.append(f"<tr>{''.join(cells)}</tr>")
        caption = (
            f"<caption>{html.escape(self.title)}"
            + (f" <span>{html.escape(self.caption)}</span>" if self.caption else "")
            + "</caption>"
        )
        under = f"<tr>{''.join(second)}</tr>" if second else ""
        head = f"<thead><tr>{''.join(heads)}</tr>{under}</thead>"
        return (
            "<div class='scroll' "
            f"tabindex='0'><table>{caption}{head}<tbody>{''.join(body)}</tbody></table></div>"
        )

    def to_csv(self) -> str:
        """One line a figure, so that nothing is lost and anything can read it."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(
            [
                "title",
                "model",
                "kind",
                "setting",
                "value",
                "low",
                "high",
                "spread",
                "seeds",
                "paper",
                "place",
                "note",
            ]
        )
        for _, lines in self.blocks():
            for line in lines:
                for column, cell in zip(self.columns, line.cells, strict=True):
                    if cell is not None:
                        numbers = [
                            _exact(n) for n in (cell.value, cell.low, cell.high, cell.spread)
                        ]
                        rest = [cell.seeds, _exact(cell.paper), cell.place, cell.note]
                        writer.writerow(
                            [self.title, line.label, line.kind, column, *numbers, *rest]
                        )
        return out.getvalue()

    def to_markdown(self) -> str:
        """Ours alone; behind a figure, small, its interval, and how many seeds it is
        the mean of.
        """
        blocks = list(self.blocks())
        rows = [["", *self.columns], ["---", *["---:"] * len(self.columns)]]
        for kind, lines in blocks:
            best = best_of(lines, self.better)
            for line in lines:
                name = f"{line.label} ({kind})" if len(blocks) > 1 else line.label
                rows.append(
                    [
                        name,
                        *(
                            _markdown_cell(cell, top)
                            for cell, top in zip(line.cells, best, strict=True)
                        ),
                    ]
                )
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def to_latex(self) -> str:
        paper = [self.has_paper(column) for column in range(len(self.columns))]
        heads = [
            name
            for column, beside in zip(self.columns, paper, strict=True)
            for name in ([column, "(paper)"] if beside else [column])
        ]
        lines = [
            f"% {self.title}: needs \\usepackage{{booktabs}}",
            f"\\begin{{tabular}}{{l{'r' * len(heads)}}}",
            "\\toprule",
            " & ".join(map(_latex, ["model", *heads])) + r" \\",
        ]
        for kind, rows in self.blocks():
            lines.append("\\midrule")
            if KINDS[kind]:
                lines.append(
                    f"\\multicolumn{{{len(heads) + 1}}}{{l}}{{\\emph{{{_latex(KINDS[kind])}}}}} "
                    "\\\\"
                )
            best = best_of(rows, self.better)
            for row in rows:
                cells = [_latex(row.label)]
                for cell, top, beside in zip(row.cells, best, paper, strict=True):
                    cells.append(_latex_cell(cell, top))
                    cells += (
                        [
                            _latex(number(cell.paper))
                            if cell is not None and cell.paper is not None
                            else "--"
                        ]
                        if beside
                        else []
                    )
                lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def best_of(lines: Sequence[Line], better: str) -> list[float | None]:
    """The best value of each column, where there is something to compare it with."""
    best: list[float | None] = []
    for column in zip(*(line.cells for line in lines), strict=True):
        values = [cell.value for cell in column if cell is not None and not math.isnan(cell.value)]
        compare = {LOWER: min, HIGHER: max}.get(better)
        best.append(compare(values) if compare is not None and len(values) > 1 else None)
    return best


def number(value: float) -> str:
    """Four figures, without an exponent where that can be helped.

    >>> [number(v) for v in (29.3812, 0.46412, 1234567.0, 0.000012, 257.0, float("inf"), 0.0)]
    ['29.38', '0.4641', '1,234,567', '1.2e-05', '257', '∞', '0']
    """
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000 or (size >= 10 and value == round(value)):
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.{max(0, min(4, 3 - math.floor(math.log10(size))))}f}"


def _small(cell: Cell, between: str) -> str:
    """Its interval, and of how many seeds it is."""
    interval = (
        ""
        if cell.low is None or cell.high is None
        else between.format(number(cell.low), number(cell.high))
    )
    return ", ".join(filter(None, (interval, f"{cell.seeds} seeds" if cell.seeds > 1 else "")))


def _markdown_cell(cell: Cell | None, best: float | None) -> str:
    if cell is None:
        return "-"
    shown = (
        f"**{number(cell.value)}**"
        if best is not None and cell.value == best
        else number(cell.value)
    )
    small = _small(cell, "{}..{}")
    return f"{shown} <sub>{small}</sub>" if small else shown


def _latex_cell(cell: Cell | None, best: float | None) -> str:
    if cell is None:
        return "--"
    shown = _latex(number(cell.value))
    shown = f"\\textbf{{{shown}}}" if best is not None and cell.value == best else shown
    small = _latex(_small(cell, "[{}, {}]"))
    return f"{shown} {{\\scriptsize {small}}}" if small else shown


def _html_cell(cell: Cell | None, best: float | None) -> str:
    if cell is None:
        return "<td class='gap'>-</td>"
    top = best is not None and cell.value == best
    shown = f"<strong>{number(cell.value)}</strong>" if top else number(cell.value)
    under = []
    if cell.low is not None and cell.high is not None:
        under.append(f"{number(cell.low)} to {number(cell.high)}")
    if cell.seeds > 1:
        under.append(
            f"{cell.seeds} seeds"
            + ("" if cell.spread is None else f", standard deviation {number(cell.spread)}")
        )
    small = f"<small>{'; '.join(under)}</small>" if under else ""
    note = f" title='{html.escape(cell.note, quote=True)}'" if cell.note else ""
    return f"<td{' class=' + repr('best') if top else ''}{note}>{shown}{small}</td>"


def _html_paper(cell: Cell | None) -> str:
    if cell is None or cell.paper is None:
        return "<td class='paper gap'>-</td>"
    return f"<td class='paper'>{number(cell.paper)}<small>{html.escape(cell.place)}</small></td>"


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)


def _latex(text: str) -> str:
    special = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"}
    special |= {
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "∞": r"$\infty$",
        "±": r"$\pm$",
    }
    return "".join(special.get(character, character) for character in text)


# of another column; and only needed where tokenisers differ
LOGARITHM, PER_BYTE = "nll", "bits_per_byte"


def tables(results: Sequence[Result], per_byte: bool = False) -> str:
    """One table for each task and metric, and the differences from the first model where models
    were asked the same.

    per_byte: bits per byte are shown, and differences taken in them, even where the tokenisers
    agree.
    """
    parts = []
    for group in _by_question(results):
        alike = len({result.manifest.get("hashes", {}).get("tokenizer") for result in group}) == 1
        unshown = (LOGARITHM, PER_BYTE) if alike and not per_byte else (LOGARITHM,)
        metrics = dict.fromkeys(
            row.metric for result in group for row in result.rows if row.metric not in unshown
        )
        parts += [_metric_table(group, metric) for metric in metrics]
        parts += _difference_tables(group, per_byte)
    return "\n\n".join(parts)


def _by_question(results: Sequence[Result]) -> Iterable[list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.question(), []).append(result)
    return groups.values()


def _metric_table(asked: Sequence[Result], metric: str) -> str:
    """Models that have no such figure, as a bound has no KL, have no column."""
    group = [result for result in asked if any(row.metric == metric for row in result.rows)]
    chosen = [[row for row in result.rows if row.metric == metric] for result in group]
    kinds = [{row.kind for row in rows} for rows in chosen]
    heads = [
        f"{result.model} {result.mode}" + (f" ({_only(kind)})" if _only(kind) else "")
        for result, kind in zip(group, kinds, strict=True)
    ]
    columns = [
        {label(row): cell(row, kind=len(kind) > 1) for row in rows}
        for rows, kind in zip(chosen, kinds, strict=True)
    ]
    notes = dict.fromkeys(
        f"{head}: {row.note}"
        for head, rows in zip(heads, chosen, strict=True)
        for row in rows
        if row.note
    )
    return "\n".join(
        [_title(group[0], metric), _grid(heads, columns), *(f"  {note}" for note in notes)]
    )


def _difference_tables(group: Sequence[Result], per_byte: bool) -> list[str]:
    first = group[0]
    others = [
        result
        for result in group[1:]
        if comparable(first, result) and _has_sums(first) and _has_sums(result)
    ]
    if not others:
        return []
    found = [differences(first, other, per_byte) for other in others]
    columns = [{label(row): cell(row, sign="+") for row in rows} for rows in found]
    title = f"less {first.model} {first.mode}, paired by sequence"
    unit = ", ".join(
        dict.fromkeys(row.metric.removesuffix("_difference") for rows in found for row in rows)
    )
    notes = dict.fromkeys(
        f"  {other.model}: {row.note}"
        for other, rows in zip(others, found, strict=True)
        for row in rows
        if row.note
    )
    return [
        "\n".join(
            [
                f"{unit} {title}",
                _grid([f"{other.model} {other.mode}" for other in others], columns),
                *notes,
            ]
        )
    ]


def label(row: ResultRow) -> str:
    """A setting in words; the contexts' name only where nothing else tells rows apart."""
    told = set(row.setting) - {"contexts", "over"}
    shown = {key: value for key, value in row.setting.items() if key != "contexts" or not told}
    return "  ".join(f"{key} {value}" for key, value in shown.items()) or "all"


def cell(row: ResultRow, sign: str = "", kind: bool = False) -> str:
    text = _number(row.value, sign)
    if row.low is not None and row.high is not None:
        text += f" [{_number(row.low, sign)}, {_number(row.high, sign)}]"
    return f"{text} {row.kind}" if kind and row.kind else text


def _number(value: float, sign: str = "") -> str:
    return format(value, f"{sign}.4g" if abs(value) < 1000 else f"{sign},.0f")


def _title(result: Result, metric: str) -> str:
    options = result.options
    words = [f"{result.task}: {metric}"]
    if options.get("data"):
        rows = max((row.sequences for row in result.rows), default=0)
        words.append(
            f"{options['data']}, {rows} sequences"
            + (f" of {options['length']} tokens" if "length" in options else "")
        )
    if any(row.low is not None for row in result.rows if row.metric == metric):
        words.append("95% intervals over sequences")
    return "; ".join(words)


def _grid(heads: Sequence[str], columns: Sequence[dict[str, str]]) -> str:
    labels = list(dict.fromkeys(name for column in columns for name in column))
    lines = [
        ["", *heads],
        *([name, *(column.get(name, "") for column in columns)] for name in labels),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _only(kinds: set[str]) -> str:
    return next(iter(kinds)) if len(kinds) == 1 else ""


def _has_sums(result: Result) -> bool:
    contexts = [
        row.setting.get("contexts", "") for row in result.rows if row.metric == "perplexity"
    ]
    return bool(contexts) and all("nll" in result.details.get(name, {}) for name in contexts)
