"""The figures of docs/results.md and of the README, from results of `tracformer reproduce`.

    python docs/results.py runs/reproduce/mini/results     take results over into results/mini, with a report; then as below
    python docs/results.py                                 write the tables and pictures anew from results/mini

docs/results.md says which table goes where:

    <!-- table ratios-wikitext-256-Geometric_12-perplexity.csv: tracformer-car, bart -->
    ...
    <!-- end -->

Files are those of results/mini/report; without a colon all models stand in the table. What is taken over has no per-sequence figures and
no texts: the rows, and where each of them came from. Of the report's files those are kept that docs/results.md names, and the page.
"""

import argparse
import dataclasses
import re
import shutil
from pathlib import Path

from tracformer.evaluation.report import plots, write_report
from tracformer.evaluation.report.collect import by_file_stem, in_order, newest, sections, tables
from tracformer.evaluation.report.tables import Table
from tracformer.evaluation.report.views import curves_of
from tracformer.evaluation.results import Result, read_results

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "results.md"
RESULTS = ROOT / "results" / "mini"
ASKED = {"data": "wikitext", "length": 256, "mean": 12}  # ratio generalisation at scale mini
PICTURE = ROOT / "docs" / "pictures" / "ratios.png"
PANELS = {"exact": "given the rest and all before it (CAR)", "marginal": "given the rest alone (AC)"}
BLOCK = re.compile(r"(?P<head><!-- table (?P<file>[^:\s]+)(?:: (?P<models>[^>]+?))? -->\n).*?(?P<tail><!-- end -->)", re.S)
ABOUT = (
    "Made by `tracformer reproduce ... scale=mini`; docs/results.md says what these figures show, what not, and how to make them again.",
)


def take_over(source: Path, target: Path = RESULTS) -> None:
    """Results without their per-sequence figures, and the report of the whole ones."""
    results = newest(read_results(source))
    shutil.rmtree(target, ignore_errors=True)
    for result in results:
        dataclasses.replace(result, details={}).save(target)
    write_report([source], target / "report", title="The paper's experiments at scale mini", about=ABOUT)
    named = DOCUMENT.read_text()
    for path in (target / "report").iterdir():
        if path.name != "index.html" and path.name not in named:
            path.unlink()


def tables_of(results: list[Result]) -> dict[str, Table]:
    """By the names of their files in the report."""
    named = by_file_stem(sections(in_order(results)))
    return {f"{table.name}.csv": table for stem, section in named.items() for table in tables(section, stem)}


def render(document: str, made: dict[str, Table]) -> str:
    """The document with each of its tables as the results have it."""

    def block(found: re.Match[str]) -> str:
        if found["file"] not in made:
            raise ValueError(f"there is no table {found['file']!r}; there are {', '.join(made)}")
        wanted = [name.strip() for name in found["models"].split(",")] if found["models"] else None
        return found["head"] + only(made[found["file"]], wanted).to_markdown() + found["tail"]

    return BLOCK.sub(block, document)


def only(table: Table, wanted: list[str] | None) -> Table:
    """The models of these names, in this order."""
    if wanted is None:
        return table
    if missing := [name for name in wanted if name not in {line.label for line in table.lines}]:
        raise ValueError(f"{table.name} has no {missing[0]!r}")
    lines = sorted((line for line in table.lines if line.label in wanted), key=lambda line: wanted.index(line.label))
    return dataclasses.replace(table, lines=tuple(lines))


def draw(results: list[Result], path: Path = PICTURE) -> None:
    """The README's picture: ratio generalisation as in Fig. 5, CAR left, AC right."""
    (section,) = [s for s in sections(results) if s.task == "ratios" and {**s.options, **ASKED} == dict(s.options)]
    panels: dict[str, list[plots.Curve]] = {}
    for entry in section.entries:
        for curve in curves_of(entry, "perplexity", "ratio"):
            panels.setdefault(curve.kind, []).append(curve)
    panels = {kind: panels[kind] for kind in PANELS if len(panels.get(kind, ())) > 1}  # a curve alone compares with nothing
    pyplot = plots.pyplot_of()
    with pyplot.rc_context({**plots.style_of("ratios"), "font.size": 10}):
        figure = pyplot.figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
        for part, (kind, lines) in zip(figure.subfigures(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            ours_first = sorted(lines, key=lambda line: not line.label.startswith("tracformer"))
            colours = {line.label: index for index, line in enumerate(ours_first)}
            plots.curves(lines, "share of tokens to fill (trained at 0.5)", "perplexity", colours)(part)
            part.suptitle(PANELS[kind], fontsize=10)
        figure.savefig(path, dpi=150, facecolor="white", metadata={"Software": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="a folder of results to take over")
    arguments = parser.parse_args()
    if arguments.results is not None:
        take_over(arguments.results)
    results = read_results(RESULTS)
    DOCUMENT.write_text(render(DOCUMENT.read_text(), tables_of(results)))
    draw(results)


if __name__ == "__main__":
    main()
