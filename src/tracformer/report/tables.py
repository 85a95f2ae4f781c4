"""Tables as HTML, CSV, LaTeX, Markdown or on the terminal, and the paper's figures beside ours.

A `Table` says what stands where; each format is one method. Rows are `Line`s: a label and a cell
for each column. A cell is a `Cell` (a figure with its interval), a string, or None for a gap.

Lines are grouped by `kind`. Exact probabilities, marginals and bounds are different quantities, so
the best figure of a column is marked within its kind only.

`paper_figures.yaml` holds what the paper's tables print; nothing was read off a plot.
"""

import csv
import html
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tracformer.contexts import parse

LOWER, HIGHER, NEITHER = "lower", "higher", ""

KINDS = {
    "exact": "exact joint probability",
    "marginal": "marginals: each target alone, given the context",
    "bound": "bound: the likelihood is at least this good",
    "sample": "drawn text",
    "": "",
}
CSV_COLUMNS = (
    *("title", "model", "kind", "setting", "value", "low", "high"),
    *("spread", "seeds", "paper", "place", "note"),
)
WIDE = 10_000  # columns of an output that is not a terminal: nothing is wrapped


@dataclass(frozen=True)
class Cell:
    """A figure with what is known about its precision.

    Args:
        value: The figure.
        low: Lower end of the 95% interval over sequences, and over training seeds if several.
        high: Upper end of that interval.
        spread: Standard deviation over training seeds.
        seeds: Number of training seeds that `value` is the mean of.
        paper: The paper's figure for the same question.
        place: Where the paper prints it, such as "Table 2".
        note: A remark about this figure.
    """

    value: float
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    seeds: int = 1
    paper: float | None = None
    place: str = ""
    note: str = ""

    def small_print(self, interval: str) -> str:
        """Return the interval, formatted by e.g. "[{}, {}]", and the number of seeds if not 1."""
        parts = []
        if self.low is not None and self.high is not None:
            parts.append(interval.format(number(self.low), number(self.high)))
        if self.seeds > 1:
            parts.append(f"{self.seeds} seeds")
        return ", ".join(parts)


@dataclass(frozen=True)
class Line:
    """A row of a table: one model, one kind of answer."""

    label: str
    kind: str
    cells: tuple[Cell | str | None, ...]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of figures or words.

    Args:
        name: Stem of its file names.
        title: What the figures are.
        columns: Heads of the columns after the first.
        lines: The rows.
        better: LOWER or HIGHER to mark the best figure of each column, NEITHER for no marks.
        caption: What all figures have in common.
        head: Head of the first column.
        align: "l" or "r" for each column; numbers stand on the right, which is the default.

    Example:
        >>> line = Line("ours", "", (Cell(29.376, low=28.0, high=31.0), "-"))
        >>> print(Table("t", "perplexity", ("wikitext", "ptb"), (line,)).to_text())
        perplexity
                    wikitext  ptb
        ours  29.38 [28, 31]    -
    """

    name: str
    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    better: str = LOWER
    caption: str = ""
    head: str = ""
    align: str = ""

    def blocks(self) -> Iterator[tuple[str, list[Line]]]:
        """Yield each kind with its lines; kinds stand in the order of `KINDS`."""
        for kind in dict.fromkeys([*KINDS, *(line.kind for line in self.lines)]):
            lines = [line for line in self.lines if line.kind == kind]
            if lines:
                yield kind, lines

    def notes(self) -> list[str]:
        """Return the remarks about lines and cells, each once, with the line's label."""
        found = [
            f"{line.label}: {note}"
            for line in self.lines
            for note in (line.note, *(c.note for c in line.cells if isinstance(c, Cell)))
            if note
        ]
        return list(dict.fromkeys(found))

    def to_html(self) -> str:
        """Return an HTML table; the paper's figures stand in columns of their own."""
        paper = self._paper_columns()
        tall = " rowspan='2'" if any(paper) else ""
        heads = [f"<th scope='col'{tall}>{html.escape(self.head or 'model')}</th>"]
        second = []
        for name, has_paper in zip(self.columns, paper, strict=True):
            width = " colspan='2'" if has_paper else tall
            heads.append(f"<th scope='col'{width}>{html.escape(name)}</th>")
            second += ["<th scope='col'>ours</th><th scope='col'>paper</th>"] if has_paper else []
        body = []
        width_of_all = 1 + len(self.columns) + sum(paper)
        for kind, rows in self._ranked_blocks():
            if title := KINDS.get(kind, kind):
                heading = f"<th colspan='{width_of_all}' scope='rowgroup'>{html.escape(title)}</th>"
                body.append(f"<tr class='kind'>{heading}</tr>")
            for line, best in rows:
                cells = [f"<th scope='row'>{html.escape(line.label)}</th>"]
                for cell, is_best, has_paper in zip(line.cells, best, paper, strict=True):
                    cells.append(_html_cell(cell, is_best))
                    cells += [_html_paper_cell(cell)] if has_paper else []
                body.append(f"<tr>{''.join(cells)}</tr>")
        caption = html.escape(self.title)
        caption += f" <span>{html.escape(self.caption)}</span>" if self.caption else ""
        under = f"<tr>{''.join(second)}</tr>" if second else ""
        return (
            f"<div class='scroll' tabindex='0'><table><caption>{caption}</caption>"
            f"<thead><tr>{''.join(heads)}</tr>{under}</thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )

    def to_csv(self) -> str:
        """Return one line per figure, unrounded, with everything that is known about it."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for _, lines in self.blocks():
            for line in lines:
                for column, cell in zip(self.columns, line.cells, strict=True):
                    start = [self.title, line.label, line.kind, column]
                    if isinstance(cell, Cell):
                        numbers = (cell.value, cell.low, cell.high, cell.spread)
                        end = [cell.seeds, _exact(cell.paper), cell.place, cell.note]
                        writer.writerow([*start, *map(_exact, numbers), *end])
                    elif cell is not None:
                        writer.writerow([*start, cell, *[""] * 6, line.note])
        return out.getvalue()

    def to_markdown(self) -> str:
        """Return a Markdown table; intervals and numbers of seeds are in small print."""
        several = len(list(self.blocks())) > 1
        notes = any(line.note for line in self.lines)
        heads = [self.head, *self.columns, *(["note"] if notes else [])]
        rules = ["---", *({"l": "---", "r": "---:"}[a] for a in self._alignment())]
        rows = [heads, [*rules, *(["---"] if notes else [])]]
        for kind, ranked in self._ranked_blocks():
            for line, best in ranked:
                label = f"{line.label} ({kind})" if several else line.label
                cells = [_markdown_cell(c, b) for c, b in zip(line.cells, best, strict=True)]
                rows.append([label, *cells, *([line.note] if notes else [])])
        escaped = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
        return "".join(f"| {' | '.join(row)} |\n" for row in escaped)

    def to_latex(self) -> str:
        """Return a LaTeX `tabular`, which needs the package booktabs."""
        paper = self._paper_columns()
        heads = [self.head or "model"]
        for column, has_paper in zip(self.columns, paper, strict=True):
            heads += [column, "(paper)"] if has_paper else [column]
        lines = [
            f"% {self.title}: needs \\usepackage{{booktabs}}",
            f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            "\\toprule",
            " & ".join(map(_latex, heads)) + r" \\",
        ]
        for kind, rows in self._ranked_blocks():
            lines.append("\\midrule")
            if title := KINDS.get(kind, kind):
                heading = f"\\emph{{{_latex(title)}}}"
                lines.append(f"\\multicolumn{{{len(heads)}}}{{l}}{{{heading}}} \\\\")
            for line, best in rows:
                cells = [_latex(line.label)]
                for cell, is_best, has_paper in zip(line.cells, best, paper, strict=True):
                    cells.append(_latex_cell(cell, is_best))
                    cells += [_latex_paper_cell(cell)] if has_paper else []
                lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])

    def to_text(self, *, turned: bool = False, terminal: bool = False) -> str:
        """Return the table as plain text, laid out by `rich`.

        Args:
            turned: Let the lines be columns, for few models under many settings.
            terminal: Fit the width of the terminal and mark the best figures in bold.
        """
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        grid = RichTable(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
        heads, body = self._turned_grid() if turned else self._grid()
        for head, side in zip(heads, ("l" + self._alignment(len(heads) - 1)), strict=True):
            grid.add_column(Text(head), justify="right" if side == "r" else "left")
        for row in body:
            grid.add_row(*(Text(cell, "bold" if best else "") for cell, best in row))
        console = Console(width=None if terminal else WIDE, force_terminal=terminal)
        with console.capture() as captured:
            console.print(grid)
        lines = [self.title + (f"; {self.caption}" if self.caption else "")]
        lines += [line.rstrip() for line in captured.get().rstrip("\n").split("\n")]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes())])

    def _grid(self) -> tuple[list[str], list[list[tuple[str, bool]]]]:
        """Return the heads, and (text, whether it is the best) of each cell by row."""
        body: list[list[tuple[str, bool]]] = []
        for kind, rows in self._ranked_blocks():
            if title := KINDS.get(kind, kind):
                body.append([(title, False), *[("", False)] * len(self.columns)])
            for line, best in rows:
                body.append(
                    [(line.label, False), *zip(map(_text_cell, line.cells), best, strict=True)]
                )
        return [self.head, *self.columns], body

    def _turned_grid(self) -> tuple[list[str], list[list[tuple[str, bool]]]]:
        lines = [(line, best) for _, rows in self._ranked_blocks() for line, best in rows]
        heads = [f"{line.label}, {line.kind}" if line.kind else line.label for line, _ in lines]
        body = [
            [(column, False), *((_text_cell(line.cells[i]), best[i]) for line, best in lines)]
            for i, column in enumerate(self.columns)
        ]
        return ["", *heads], body

    def _alignment(self, columns: int | None = None) -> str:
        return self.align or "r" * (len(self.columns) if columns is None else columns)

    def _paper_columns(self) -> list[bool]:
        """Return for each column whether any of its cells has a figure of the paper."""
        return [
            any(isinstance(cell, Cell) and cell.paper is not None for cell in cells)
            for cells in zip(*(line.cells for line in self.lines), strict=True)
        ] or [False] * len(self.columns)

    def _ranked_blocks(self) -> Iterator[tuple[str, list[tuple[Line, list[bool]]]]]:
        """Yield each kind with its lines, and for each cell whether it is the best."""
        for kind, lines in self.blocks():
            columns = zip(*(line.cells for line in lines), strict=True)
            best = [self._best(cells) for cells in columns]
            yield kind, [(line, _at(line.cells, best)) for line in lines]

    def _best(self, cells: Iterable[Cell | str | None]) -> float | None:
        """Return the best value of one column and kind; None if there is no competition."""
        values = [c.value for c in cells if isinstance(c, Cell) and not math.isnan(c.value)]
        if self.better == NEITHER or len(values) < 2:
            return None
        return min(values) if self.better == LOWER else max(values)


def print_tables(tables: Sequence[Table], *, turned: bool = False) -> None:
    """Print tables to standard output, with bold figures on a terminal."""
    from rich.console import Console

    terminal = Console().is_terminal
    shown = "\n\n".join(table.to_text(turned=turned, terminal=terminal) for table in tables)
    print(shown, flush=True)


def number(value: float) -> str:
    """Return a number with four significant digits, without an exponent where possible.

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


def _at(cells: Sequence[Cell | str | None], values: Sequence[float | None]) -> list[bool]:
    """Return whether each cell has the value of its column."""
    pairs = zip(cells, values, strict=True)
    return [isinstance(cell, Cell) and cell.value == value for cell, value in pairs]


def _text_cell(cell: Cell | str | None) -> str:
    if not isinstance(cell, Cell):
        return "-" if cell is None else cell
    return f"{number(cell.value)} {cell.small_print('[{}, {}]')}".rstrip()


def _markdown_cell(cell: Cell | str | None, best: bool) -> str:
    if not isinstance(cell, Cell):
        return "-" if cell is None else cell
    shown = f"**{number(cell.value)}**" if best else number(cell.value)
    small = cell.small_print("{}..{}")
    return f"{shown} <sub>{small}</sub>" if small else shown


def _latex_cell(cell: Cell | str | None, best: bool) -> str:
    if not isinstance(cell, Cell):
        return "--" if cell is None else _latex(cell)
    shown = _latex(number(cell.value))
    shown = f"\\textbf{{{shown}}}" if best else shown
    small = _latex(cell.small_print("[{}, {}]"))
    return f"{shown} {{\\scriptsize {small}}}" if small else shown


def _latex_paper_cell(cell: Cell | str | None) -> str:
    if not isinstance(cell, Cell) or cell.paper is None:
        return "--"
    return _latex(number(cell.paper))


def _html_cell(cell: Cell | str | None, best: bool) -> str:
    if not isinstance(cell, Cell):
        return "<td class='gap'>-</td>" if cell is None else f"<td>{html.escape(cell)}</td>"
    shown = f"<strong>{number(cell.value)}</strong>" if best else number(cell.value)
    under = []
    if cell.low is not None and cell.high is not None:
        under.append(f"{number(cell.low)} to {number(cell.high)}")
    if cell.seeds > 1:
        spread = "" if cell.spread is None else f", standard deviation {number(cell.spread)}"
        under.append(f"{cell.seeds} seeds{spread}")
    small = f"<small>{'; '.join(under)}</small>" if under else ""
    note = f" title='{html.escape(cell.note, quote=True)}'" if cell.note else ""
    return f"<td{' class=' + repr('best') if best else ''}{note}>{shown}{small}</td>"


def _html_paper_cell(cell: Cell | str | None) -> str:
    if not isinstance(cell, Cell) or cell.paper is None:
        return "<td class='paper gap'>-</td>"
    return f"<td class='paper'>{number(cell.paper)}<small>{html.escape(cell.place)}</small></td>"


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)


def _latex(text: str) -> str:
    special = {character: f"\\{character}" for character in "&%$#_{}"} | {
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "∞": r"$\infty$",
        "±": r"$\pm$",
    }
    return "".join(special.get(character, character) for character in text)


# ---- the numbers that the paper prints

# GPT-2's vocabulary: a perplexity per token of another tokenizer is another quantity
PAPER_TOKENS = 50257
FULL_ENCODER = "tracformer-full"  # Table 11's second model
# Modes of Tables 2 and 4: CAR for Tracformer (with an empty context in Table 4), a bound for
# diffusion models.
PAPER_MODES = {
    "tracformer": "car",
    "gpt2": "ar",
    "sedd": "diffusion",
    "mdlm": "diffusion",
    "d3pm": "diffusion",
    "plaid": "diffusion",
}

# What all of the paper's questions have in common: packed text, and plain sampling.
ALWAYS = {"rows": "packed", "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class PaperFigure:
    """A number that the paper prints.

    Args:
        table: Name of its table, such as "table2".
        model: Name of the system, or `FULL_ENCODER`.
        metric: What it measures.
        setting: What the paper fixes: data, length, mode, contexts, spans, ratio.
        value: The number.
    """

    table: str
    model: str
    metric: str
    setting: Mapping[str, Any]
    value: float

    @property
    def place(self) -> str:
        """Where the paper prints it, such as "Table 2"."""
        return place_name(self.table)


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    name: str
    caption: str
    figures: tuple[PaperFigure, ...]


def place_name(name: str) -> str:
    """Return the name of a table or figure in words.

    >>> place_name("table11"), place_name("fig5"), place_name("claims")
    ('Table 11', 'Figure 5', 'claims')
    """
    for prefix, word in (("table", "Table"), ("fig", "Figure")):
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit():
            return f"{word} {name.removeprefix(prefix)}"
    return name


@cache
def paper_tables() -> Mapping[str, PaperTable]:
    """Return every table by name."""
    text = (resources.files("tracformer.report") / "paper_figures.yaml").read_text(encoding="utf-8")
    document: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return {
        name: PaperTable(
            name,
            table["caption"],
            tuple(figure for block in table["blocks"] for figure in _read_block(name, block)),
        )
        for name, table in document.items()
    }


def find_paper_figure(model: str, metric: str, question: Mapping[str, Any]) -> PaperFigure | None:
    """Return the paper's figure for a question, or None if it prints none.

    Args:
        model: Name of the system, or `FULL_ENCODER`.
        metric: What is measured.
        question: Options of the question. What the paper fixes must be the same here.

    >>> question = {"data": "1bw", "length": 128, "contexts": "[0.10,0.9]", "count_eos": False}
    >>> question["mode"] = "diffusion"
    >>> find_paper_figure("mdlm", "perplexity", question).value
    59.14
    >>> find_paper_figure("mdlm", "perplexity", {**question, "length": 256})
    """
    canonical = _canonical(question)
    if any(canonical.get(key, value) != value for key, value in ALWAYS.items()):
        return None
    for table in paper_tables().values():
        for figure in table.figures:
            same = figure.model == model and figure.metric == metric
            if same and all(canonical.get(key) == value for key, value in figure.setting.items()):
                return figure
    return None


def _read_block(table: str, block: Mapping[str, Any]) -> list[PaperFigure]:
    figures = []
    for row, values in block["cells"].items():
        for head, value in zip(block["head"], values, strict=True):
            if value is None:
                continue
            setting = {
                **block["setting"],
                block["rows"]: row,
                **dict(zip(block["columns"], head, strict=True)),
            }
            model, metric = setting.pop("model"), setting.pop("metric")
            if metric == "perplexity" and "mode" not in setting:
                setting["mode"] = PAPER_MODES[model]
            figures.append(PaperFigure(table, model, metric, _canonical(setting), float(value)))
    return figures


def _canonical(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting with canonical names of contexts: [0,0.5] and [0.0,0.50] are the same."""
    return {
        key: parse(value).name if key == "contexts" and isinstance(value, str) else value
        for key, value in setting.items()
    }
