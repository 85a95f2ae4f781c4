"""Write results as one HTML page.

The page itself: one HTML file that needs nothing else, no network and no script.

Fills side by side with the original text, the same holes for every model.

From folders of results to `index.html`, with a PNG for each picture and a CSV and a LaTeX file for
each table beside it.

Results as one page that needs no network, with pictures, CSV and LaTeX beside it.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from tracformer.evaluation.result_files import Result, read_results
from tracformer.files import write_atomically
from tracformer.report import figures as views
from tracformer.report.collect import (
    SEED,
    Section,
    by_file_stem,
    chapter_titles,
    in_order,
    metric_name,
    one_each,
    paired_table,
    sections,
    tables,
)
from tracformer.report.paper_figures import PaperFigure, PaperTable, paper_tables, place_name
from tracformer.report.tables import Cell, Line, Table, number


@dataclass(frozen=True)
class Chapter:
    anchor: str
    title: str
    body: str  # HTML


def page(title: str, introduction: str, chapters: Sequence[Chapter]) -> str:
    """`introduction` and the chapters' bodies are HTML; titles are text."""
    style = (resources.files("tracformer.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(
        f"<li><a href='#{chapter.anchor}'>{html.escape(chapter.title)}</a></li>"
        for chapter in chapters
    )
    bodies = "".join(
        f"<section id='{c.anchor}'><h2>{html.escape(c.title)}</h2>{c.body}</section>"
        for c in chapters
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{introduction}<nav "
        f"aria-label='contents'><ul>{links}</ul></nav>"
        f"<main>{bodies}</main></body></html>\n"
    )


def picture(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def pictures(figures: Sequence[str]) -> str:
    return f"<div class='pictures'>{''.join(figures)}</div>" if figures else ""


def paragraph(text: str, faint: bool = False) -> str:
    return f"<p{' class=' + repr('faint') if faint else ''}>{html.escape(text)}</p>" if text else ""


def folded(title: str, body: str) -> str:
    """`body` is HTML."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def as_json(value: Any) -> str:
    return (
        f"<pre>{html.escape(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True))}</pre>"
    )


def text_with_fills(title: str, text: str, spans: Sequence[tuple[int, int]]) -> str:
    """A text in a box, the characters of `spans` highlighted."""
    parts, at = [], 0
    for start, stop in sorted(spans):
        parts += [html.escape(text[at:start]), f"<mark>{html.escape(text[start:stop])}</mark>"]
        at = stop
    parts.append(html.escape(text[at:]))
    return f"<div class='text'><b>{html.escape(title)}</b>{''.join(parts)}</div>"


OPEN = 2  # sequences a context that stand open; the others are folded


def fills_of(section: Section) -> str:
    """HTML of all fills that the section's results kept, by context and sequence; of
    several seeds the first.
    """
    kept: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for entry in section.entries:
        for fill in entry.first.details.get("fills", ()):
            kept.setdefault((str(fill["contexts"]), int(fill["sequence"])), {})[entry.label] = fill
    parts = []
    for contexts in dict.fromkeys(name for name, _ in kept):
        shown = [
            _side_by_side(number_of, kept[contexts, number_of])
            for name, number_of in sorted(kept)
            if name == contexts
        ]
        rest = shown[OPEN:]
        parts.append(
            f"<h3>Fills of {html.escape(contexts)}, unselected</h3>{''.join(shown[:OPEN])}"
        )
        parts += [folded(f"{len(rest)} more", "".join(rest))] if rest else []
    return "".join(parts)


def _side_by_side(sequence: int, fills: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(fills.values()))
    boxes = [
        text_with_fills(
            f"sequence {sequence}: the original",
            str(first["original"]),
            _pairs(first["original_spans"]),
        )
    ]
    for label, fill in fills.items():
        likely = (
            f", log-probability {number(float(fill['log_prob']))}"
            if fill.get("log_prob") is not None
            else ""
        )
        boxes.append(text_with_fills(f"{label}{likely}", str(fill["text"]), _pairs(fill["spans"])))
    return f"<div class='texts'>{''.join(boxes)}</div>"


def _pairs(spans: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(int(start), int(stop)) for start, stop in spans]


FOLDED = ("nll", "bits_per_byte")  # metrics that stand folded where perplexity is shown


def write_report(
    places: Iterable[str | PathLike[str]],
    out: str | PathLike[str],
    *,
    title: str = "Evaluation",
    about: Sequence[str] = (),
    paper: Sequence[str] = (),
) -> Path:
    """The page's path.

    `places` are result files, or folders of them; `paper` names tables of the paper to quote in
    full.
    """
    places = list(places)
    results = read_results(*places)
    if not results:
        looked = ", ".join(map(str, places)) or "no folder"
        raise FileNotFoundError(
            f"there are no results in {looked}; `tracformer eval MODEL TASK --out FOLDER` writes "
            "some"
        )
    everything, results = len(results), one_each(results)
    if any(Path(place).is_dir() for place in places):
        results = in_order(results)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    found = sections(results)
    colours = views.colours_of(found)
    chapters = [Chapter("models", "Models", _models(results, folder))]
    for (name, section), heading in zip(
        by_file_stem(found).items(), chapter_titles(found), strict=True
    ):
        chapters.append(Chapter(name, heading, _section(section, name, colours, folder)))
    chapters += [
        Chapter(f"paper-{name}", f"The paper's {place_name(name)}", _quoted(name))
        for name in paper
        if name in paper_tables()
    ]
    silent = [place_name(name) for name in paper if name not in paper_tables()]
    introduction = "".join(paragraph(text) for text in about)
    if silent:
        introduction += paragraph(
            f"The paper prints no values for {', '.join(silent)}: there is no column of its own to "
            "compare with.",
            faint=True,
        )
    if everything > len(results):
        introduction += paragraph(
            f"{everything - len(results)} older or rougher results of the same questions are left "
            "out.",
            faint=True,
        )
    introduction += paragraph(
        "Exact, marginal and bound are different quantities and never compete: the best cell of a "
        "column is marked within each. Small "
        "figures under a cell are its 95% interval over sequences. A line that is the mean of "
        "several training seeds says how many; its "
        "interval has two parts, in quadrature: the seeds' mean half-width over sequences, which "
        "they share, and Student's t times the "
        "standard error of the seeds' mean. The paper's column stands only where the paper answers "
        "the very same question: same data, "
        "length, contexts, tokeniser and scoring model.",
        faint=True,
    )
    target = folder / "index.html"
    write_atomically(target, page(title, introduction, chapters))
    return target


def _section(section: Section, name: str, colours: dict[str, int], folder: Path) -> str:
    parts = [
        pictures(
            [
                picture(each.save(folder), each.caption)
                for each in views.pictures(section, name, colours)
            ]
        )
    ]
    made = tables(section, name)
    differences = paired_table(section, name)
    has_main = any(table.name.endswith("-perplexity") for table in made)
    for table in made:
        _write_table(table, folder)
        aside = has_main and table.name.removeprefix(f"{name}-") in FOLDED
        parts.append(folded(table.title, table.to_html()) if aside else table.to_html())
    if differences is not None:
        _write_table(differences, folder)
        parts.append(differences.to_html())
    parts += [paragraph(note, faint=True) for note in _notes(section)]
    parts += [views.order_steps(section), fills_of(section)]
    manifests = "".join(
        folded(f"{r.model} ({r.mode})", as_json({"options": r.options, "manifest": r.manifest}))
        for r in _all(section)
    )
    parts.append(folded("where these figures come from", manifests))
    return "".join(parts)


def _models(results: Sequence[Result], folder: Path) -> str:
    """Sizes, from the manifests; nothing is marked best."""
    lines, seen = [], set()
    for result in results:
        model = result.manifest.get("model")
        name = SEED.sub("", result.model)
        if model and name not in seen:
            seen.add(name)
            sizes = [float(model["parameters"]), float(model["parameters_without_embeddings"])]
            sizes.append(float(model.get("config", {}).get("vocab_size", 0)))
            lines.append(Line(f"{name} ({result.family})", "", tuple(Cell(size) for size in sizes)))
    if not lines:
        return paragraph("The results' manifests do not describe their models.", faint=True)
    table = Table(
        "models", "sizes", ("parameters", "without embeddings", "vocabulary"), tuple(lines), ""
    )
    _write_table(table, folder)
    return table.to_html()


def _quoted(name: str) -> str:
    """A table of the paper as it stands there, for orientation."""
    table: PaperTable = paper_tables()[name]
    keys = list(dict.fromkeys(key for figure in table.figures for key in figure.setting))
    head = "".join(
        f"<th scope='col'>{html.escape(key)}</th>" for key in ["model", "metric", *keys, "value"]
    )
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _quoted_row(figure, keys))}</tr>"
        for figure in table.figures
    )
    caption = (
        f"<caption>{html.escape(place_name(name))} "
        f"<span>{html.escape(table.caption)}</span></caption>"
    )
    note = paragraph(
        "Figures of other sizes, tokenisers or data do not compare with these number by number; "
        "orders and trends may.",
        faint=True,
    )
    rows = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    whole = f"<div class='scroll' tabindex='0'><table>{caption}{rows}</table></div>"
    return note + folded(f"{len(table.figures)} figures", whole)


def _quoted_row(figure: PaperFigure, keys: Sequence[str]) -> list[str]:
    return [
        figure.model,
        metric_name(figure.metric),
        *(str(figure.setting.get(key, "")) for key in keys),
        number(figure.value),
    ]


def _notes(section: Section) -> list[str]:
    """What holds for all figures of a model, above all what its mode cannot do, in any case; then
    some of the others.
    """
    always, others = dict[str, None](), dict[str, None]()
    for entry in section.entries:
        rows = [row.note.split("; ") for result in entry.results for row in result.rows]
        for part in dict.fromkeys(part for row in rows for part in row if part):
            (always if all(part in row for row in rows) else others)[f"{entry.label}: {part}"] = (
                None
            )
    return [*always, *list(others)[:MOST_NOTES]]


MOST_NOTES = 12  # a note for each of many settings would bury the tables; every note is in the CSV


def _all(section: Section) -> list[Result]:
    return [result for entry in section.entries for result in entry.results]


def _write_table(table: Table, folder: Path) -> None:
    write_atomically(folder / f"{table.name}.csv", table.to_csv())
    write_atomically(folder / f"{table.name}.tex", table.to_latex())


__all__ = ["write_report"]
