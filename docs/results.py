"""The figures of docs/results.md and of the README, from results of `tracformer reproduce`.

    python docs/results.py runs/reproduce/mini/results     take results over into results/mini, one of each question; then as below
    python docs/results.py                                 write the tables and pictures anew from results/mini

docs/results.md and the README say which table goes where:

    <!-- table ratios-wikitext-256-Geometric_12-perplexity.csv: tracformer-car, bart -->
    ...
    <!-- end -->

and which figures of its sentences come from such tables, the direction of a comparison being
checked with them:

    by <!-- share ratios-wikitext-256-Geometric_12: tracformer-car below bart at 0.1..0.5 -->36 to 39%<!-- end -->
    between <!-- range ratios-wikitext-256-Geometric_12, ratios-wikitext-256-Geometric_3: bart -->95 and 98<!-- end -->
    at <!-- times prefixes-wikitext-128: sedd, mdlm over tracformer-web -->2.1 to 2.8<!-- end --> times
    within <!-- within prefixes-wikitext-128: sedd of mdlm -->7%<!-- end -->

Files are those of results/mini/report; without a colon all models stand in the table; without `at`
all columns count. What is taken over has no per-sequence figures and no texts: the rows, and where
each of them came from. Of the report's files those are kept that docs/results.md names, and the
page.
"""

import argparse
import dataclasses
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tracformer.evaluation.result_files import Result, read_results
from tracformer.files import write_atomically
from tracformer.model.base import BOUND
from tracformer.report import figures as plots
from tracformer.report import write_report
from tracformer.report.collect import Section, choose, in_order, sections, tables
from tracformer.report.figures import curves_of
from tracformer.report.tables import Cell, Table

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "results.md"
DOCUMENTS = (DOCUMENT, ROOT / "README.md")
RESULTS = ROOT / "results" / "mini"
PICTURES = ROOT / "docs" / "pictures"
BLOCK = re.compile(
    r"(?P<head><!-- table (?P<file>[^:\s]+)(?:: (?P<models>[^>]+?))? -->\n).*?(?P<tail><!-- end -->)",
    re.S,
)
MARK = re.compile(
    r"(?P<head><!-- (?P<what>share|range|times|within) (?P<claim>[^>]*) -->).*?(?P<tail><!-- end -->)"
)
CLAIMS = {
    what: re.compile(rf"(?P<files>[^:]+): {models}(?: at (?P<columns>\S+))?")
    for what, models in {
        "share": r"(?P<one>\S+) (?P<way>below|above) (?P<other>\S+)",
        "range": r"(?P<one>\S+)",
        "times": r"(?P<one>\S+(?:, \S+)*) over (?P<other>\S+)",
        "within": r"(?P<one>\S+) of (?P<other>\S+)",
    }.items()
}
ABOUT = (
    "Made by `tracformer reproduce ... scale=mini`; docs/results.md says what these figures show, "
    "what not, and how to make them again.",
)


@dataclass(frozen=True)
class Panel:
    """Curves of some models, over one question."""

    title: str
    models: tuple[str, ...]
    asked: dict[str, object]  # options that tell the question from others of the task
    task: str = "ratios"
    axis: str = "ratio"
    axis_name: str = "share of tokens to fill (trained at 0.5)"


CAR, AC = (
    ("tracformer-car", "bart"),
    ("tracformer-ac", "dit-ac", "mdlm", "bert", "bert-bidir", "frequencies"),
)
WEB = ("tracformer-web", "gpt2", "sedd", "mdlm")
LONG, SHORT = {"data": "wikitext", "length": 256}, {"length": 128}
GIVEN = {"task": "prefixes", "axis": "prefix", "axis_name": "share given, as a prefix"}
PANELS = {
    "ratios.png": [
        Panel("given the rest and all before it (CAR)", CAR, {**LONG, "mean": 12}),
        Panel("given the rest alone (AC)", AC, {**LONG, "mean": 12}),
    ],
    "spans.png": [
        Panel("CAR, spans of mean 3", CAR, {**LONG, "mean": 3}),
        Panel("CAR, single tokens", CAR, {**LONG, "mean": 1}),
        Panel("AC, spans of mean 3", AC, {**LONG, "mean": 3}),
        Panel("AC, single tokens", AC, {**LONG, "mean": 1}),
    ],
    "prefixes.png": [
        Panel(name, WEB, {**SHORT, "data": data}, **GIVEN)
        for data, name in (("wikitext", "WikiText"), ("1bw", "1BW"))
    ],
}
ACROSS = 2  # panels in a row


def take_over(source: Path, target: Path = RESULTS) -> None:
    """Results without their per-sequence figures beside those that are there, and the report of
    all. Of several answers to one question that with the most draws of noise stays, then the
    latest. What is there is replaced once everything is written.
    """
    results = choose([*(read_results(target) if target.exists() else ()), *read_results(source)])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        whole, new, old = (Path(scratch) / name for name in ("whole", "new", "old"))
        for result in results:
            result.save(whole)
            dataclasses.replace(result, details={}).save(new)
        write_report(
            [whole], new / "report", title="The paper's experiments at scale mini", about=ABOUT
        )
        named = DOCUMENT.read_text()
        for path in (new / "report").iterdir():
            if path.name != "index.html" and path.name not in named:
                path.unlink()
        if target.exists():
            target.rename(old)
        new.rename(target)


def tables_of(results: list[Result]) -> dict[str, Table]:
    """By the names of their files in the report."""
    return {
        f"{table.name}.csv": table
        for section in sections(in_order(results))
        for table in tables(section)
    }


def render(document: str, made: dict[str, Table]) -> str:
    """The document with each of its tables as the results have it."""

    def block(found: re.Match[str]) -> str:
        if found["file"] not in made:
            raise ValueError(f"there is no table {found['file']!r}; there are {', '.join(made)}")
        wanted = [name.strip() for name in found["models"].split(",")] if found["models"] else None
        return found["head"] + only(made[found["file"]], wanted).to_markdown() + found["tail"]

    return MARK.sub(
        lambda found: found["head"] + figure(found["what"], found["claim"], made) + found["tail"],
        BLOCK.sub(block, document),
    )


def figure(what: str, claim: str, made: dict[str, Table]) -> str:
    """Of all tables and columns that a claim names; or a ValueError, where they do not say so."""
    found = CLAIMS[what].fullmatch(claim)
    if found is None:
        raise ValueError(f"{what} {claim!r} cannot be read; write it as the top of this file does")
    said = found.groupdict()
    rows: dict[str, list[float]] = {}  # by where they stand
    for one in said["one"].split(", "):
        rows |= values_of(
            [one, *([said["other"]] if "other" in said else [])],
            said["files"].split(", "),
            said["columns"],
            made,
        )
    if what == "range":
        return " and ".join(
            dict.fromkeys(f"{value:.0f}" for (value,) in (min(rows.values()), max(rows.values())))
        )
    ratios = {where: one / other for where, (one, other) in rows.items()}
    if what == "times":
        return " to ".join(
            dict.fromkeys(f"{ratio:.1f}" for ratio in (min(ratios.values()), max(ratios.values())))
        )
    for where, ratio in ratios.items():
        if what == "share" and (ratio >= 1 if said["way"] == "below" else ratio <= 1):
            raise ValueError(f"{where} is not {said['way']} {said['other']}")
    shares = [100 * abs(ratio - 1) for ratio in ratios.values()]
    if what == "within":
        return f"{math.ceil(max(shares))}%"
    digits = 1 if max(shares) < 3 else 0
    return (
        " to ".join(dict.fromkeys(f"{share:.{digits}f}" for share in (min(shares), max(shares))))
        + "%"
    )


def values_of(
    names: list[str], files: list[str], columns: str | None, made: dict[str, Table]
) -> dict[str, list[float]]:
    """Of these models, wherever these columns of these tables have them."""
    rows: dict[str, list[float]] = {}
    for file in files:
        if f"{file}-perplexity.csv" not in made:
            raise ValueError(f"there is no table {file!r}; there are {', '.join(made)}")
        table = only(made[f"{file}-perplexity.csv"], names)
        for i in columns_of(table, columns):
            values = [cell.value for line in table.lines if isinstance(cell := line.cells[i], Cell)]
            if len(values) < len(names):
                raise ValueError(
                    f"{file} has not both of {' and '.join(names)} at {table.columns[i]}"
                )
            rows[f"{names[0]} in {file} at {table.columns[i]}"] = values
    return rows


def columns_of(table: Table, wanted: str | None) -> list[int]:
    """`0.1`, or from one to another as in `0.1..0.5`; None: all."""
    ends = (
        (table.columns[0], table.columns[-1])
        if wanted is None
        else (wanted.split("..")[0], wanted.split("..")[-1])
    )
    if unknown := [end for end in ends if end not in table.columns]:
        raise ValueError(
            f"{table.name} has no column {unknown[0]!r}; it has {', '.join(table.columns)}"
        )
    first, last = map(table.columns.index, ends)
    return list(range(first, last + 1))


def only(table: Table, wanted: list[str] | None) -> Table:
    """The models of these names, in this order."""
    if wanted is None:
        return table
    if missing := [name for name in wanted if name not in {line.label for line in table.lines}]:
        raise ValueError(f"{table.name} has no {missing[0]!r}")
    lines = sorted(
        (line for line in table.lines if line.label in wanted),
        key=lambda line: wanted.index(line.label),
    )
    return dataclasses.replace(table, lines=tuple(lines))


def draw(name: str, found: list[Section], folder: Path = PICTURES) -> None:
    # a curve alone compares with nothing
    panels = [(panel, lines) for panel in PANELS[name] if len(lines := curves_in(panel, found)) > 1]
    rows = [panels[start : start + ACROSS] for start in range(0, len(panels), ACROSS)]
    pyplot = plots.pyplot_of()
    with pyplot.rc_context({**plots.style_of(name), "font.size": 10}):
        figure = pyplot.figure(
            figsize=(5.2 * min(ACROSS, len(panels)), 3.6 * len(rows)), layout="constrained"
        )
        parts = figure.subfigures(len(rows), min(ACROSS, len(panels)), squeeze=False)
        for part, (panel, lines) in zip(parts.flat, panels, strict=False):
            colours = {line.label: index for index, line in enumerate(lines)}
            plots.curves(lines, panel.axis_name, "perplexity", colours)(part)
            part.suptitle(panel.title, fontsize=10)
        figure.savefig(folder / name, dpi=150, facecolor="white", metadata={"Software": None})
        pyplot.close(figure)


def curves_in(panel: Panel, found: list[Section]) -> list[plots.Curve]:
    """In the panel's order of models; a bound is marked where exact figures stand beside it."""
    (section,) = [
        s for s in found if s.task == panel.task and {**s.options, **panel.asked} == dict(s.options)
    ]
    entries = sorted(
        (e for e in section.entries if e.label in panel.models),
        key=lambda entry: panel.models.index(entry.label),
    )
    lines = [curve for entry in entries for curve in curves_of(entry, "perplexity", panel.axis)]
    mixed = len({line.kind for line in lines}) > 1
    return [
        dataclasses.replace(line, label=f"{line.label} ({line.kind})")
        if mixed and line.kind == BOUND
        else line
        for line in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, help="a folder of results to take over")
    arguments = parser.parse_args()
    if arguments.results is not None:
        take_over(arguments.results)
    results = read_results(RESULTS)
    made = tables_of(results)
    for document in DOCUMENTS:
        write_atomically(document, render(document.read_text(), made))
    for name in PANELS:
        draw(name, sections(results))


if __name__ == "__main__":
    main()
