"""A table of figures: models down, settings across, in blocks by the kind of answer; as HTML, CSV and LaTeX.

The best cell of a column is marked within its block alone: an exact probability, a marginal and a bound are different quantities.
"""

import csv
import html
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    low: float | None = None  # 95% interval: over sequences, and of several seeds over these too (see `seeds`)
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
        return any(cell is not None and cell.paper is not None for cell in (line.cells[column] for line in self.lines))

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
                body.append(f"<tr class='kind'><th colspan='{cells_wide}' scope='rowgroup'>{html.escape(KINDS[kind])}</th></tr>")
            best = best_of(lines, self.better)
            for line in lines:
                cells = [f"<th scope='row'>{html.escape(line.label)}</th>"]
                for cell, top, beside in zip(line.cells, best, paper, strict=True):
                    cells.append(_html_cell(cell, top))
                    cells += [_html_paper(cell)] if beside else []
                body.append(f"<tr>{''.join(cells)}</tr>")
        caption = (
            f"<caption>{html.escape(self.title)}" + (f" <span>{html.escape(self.caption)}</span>" if self.caption else "") + "</caption>"
        )
        under = f"<tr>{''.join(second)}</tr>" if second else ""
        head = f"<thead><tr>{''.join(heads)}</tr>{under}</thead>"
        return f"<div class='scroll' tabindex='0'><table>{caption}{head}<tbody>{''.join(body)}</tbody></table></div>"

    def to_csv(self) -> str:
        """One line a figure, so that nothing is lost and anything can read it."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["title", "model", "kind", "setting", "value", "low", "high", "spread", "seeds", "paper", "place", "note"])
        for _, lines in self.blocks():
            for line in lines:
                for column, cell in zip(self.columns, line.cells, strict=True):
                    if cell is not None:
                        numbers = [_exact(n) for n in (cell.value, cell.low, cell.high, cell.spread)]
                        rest = [cell.seeds, _exact(cell.paper), cell.place, cell.note]
                        writer.writerow([self.title, line.label, line.kind, column, *numbers, *rest])
        return out.getvalue()

    def to_markdown(self) -> str:
        """Ours alone; behind a figure, small, its interval, and how many seeds it is the mean of."""
        blocks = list(self.blocks())
        rows = [["", *self.columns], ["---", *["---:"] * len(self.columns)]]
        for kind, lines in blocks:
            best = best_of(lines, self.better)
            for line in lines:
                name = f"{line.label} ({kind})" if len(blocks) > 1 else line.label
                rows.append([name, *(_markdown_cell(cell, top) for cell, top in zip(line.cells, best, strict=True))])
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def to_latex(self) -> str:
        paper = [self.has_paper(column) for column in range(len(self.columns))]
        heads = [name for column, beside in zip(self.columns, paper, strict=True) for name in ([column, "(paper)"] if beside else [column])]
        lines = [
            f"% {self.title}: needs \\usepackage{{booktabs}}",
            f"\\begin{{tabular}}{{l{'r' * len(heads)}}}",
            "\\toprule",
            " & ".join(map(_latex, ["model", *heads])) + r" \\",
        ]
        for kind, rows in self.blocks():
            lines.append("\\midrule")
            if KINDS[kind]:
                lines.append(f"\\multicolumn{{{len(heads) + 1}}}{{l}}{{\\emph{{{_latex(KINDS[kind])}}}}} \\\\")
            best = best_of(rows, self.better)
            for row in rows:
                cells = [_latex(row.label)]
                for cell, top, beside in zip(row.cells, best, paper, strict=True):
                    cells.append(_latex_cell(cell, top))
                    cells += [_latex(number(cell.paper)) if cell is not None and cell.paper is not None else "--"] if beside else []
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
    interval = "" if cell.low is None or cell.high is None else between.format(number(cell.low), number(cell.high))
    return ", ".join(filter(None, (interval, f"{cell.seeds} seeds" if cell.seeds > 1 else "")))


def _markdown_cell(cell: Cell | None, best: float | None) -> str:
    if cell is None:
        return "-"
    shown = f"**{number(cell.value)}**" if best is not None and cell.value == best else number(cell.value)
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
        under.append(f"{cell.seeds} seeds" + ("" if cell.spread is None else f", standard deviation {number(cell.spread)}"))
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
