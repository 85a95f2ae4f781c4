"""Reports: results as one HTML page, with a PNG, CSV and LaTeX file for each figure and table.

- `write_report` writes the page; `printed_tables` returns what `tracformer eval` prints.
- `differences` and `paired_table` compare models on the same sequences and contexts. Such a
  difference is known far better than either figure: what makes a sequence hard for both cancels.
- `collect.py` groups results into sections.
- `tables.py` writes a table in any format, `figures.py` draws the pictures.

The page needs no network, no script and no other file.
"""

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from tracformer.evaluation import bootstrap
from tracformer.evaluation.questions import noise_groups
from tracformer.evaluation.result_files import Result, ResultRow, read_results
from tracformer.files import write_atomically
from tracformer.model.base import BOUND
from tracformer.report import figures
from tracformer.report.collect import (
    ACROSS_DATA,
    INPUTS,
    SEED,
    ReportEntry,
    Section,
    choose,
    column_labels,
    in_order,
    metric_name,
    question_of,
    rounded,
    sections,
    setting_of,
    tables,
)
from tracformer.report.tables import (
    NEITHER,
    Cell,
    Line,
    PaperTable,
    Table,
    number,
    paper_tables,
    place_name,
)

OPEN_FILLS = 2  # sequences of each context whose fills are shown; the others are folded
MOST_NOTES = 12  # per section: more would bury the tables, and all are in the CSV files
LOGARITHM, PER_BYTE = "nll", "bits_per_byte"  # folded or hidden where perplexity is shown
READING_GUIDE = (
    "Exact, marginal and bound are different quantities and are never compared: the best cell of "
    "a column is marked within each of them, if all models had the same budget of tokens or "
    "operations in training (within 5%), as far as it is known. The small figures under a cell "
    "are its 95% interval over sequences. A line that is the mean of several training seeds says "
    "how many; its interval combines two parts in quadrature: the mean half-width of the seeds' "
    "intervals over sequences, which they share, and Student's t times the standard error of the "
    "seeds' mean. The paper's column stands only where the paper answers the same question: same "
    "data, length, contexts, tokenizer and scoring model."
)


@dataclass(frozen=True)
class Chapter:
    """A part of the page with its link in the table of contents; `body` is HTML."""

    anchor: str
    title: str
    body: str


def write_report(
    places: Iterable[str | PathLike[str]],
    out: str | PathLike[str],
    *,
    title: str = "Evaluation",
    about: Sequence[str] = (),
    paper: Sequence[str] = (),
) -> Path:
    """Write a report of results and return the path of its page.

    Args:
        places: Result files, or folders of them.
        out: Folder of the report; it is made if it does not exist.
        title: Title of the page.
        about: Paragraphs of its introduction.
        paper: Names of tables of the paper to quote in full, such as "table2".

    Raises:
        FileNotFoundError: A place does not exist, or there are no results.
        ValueError: A result file cannot be read.
    """
    places = list(places)
    everything = read_results(*places)
    if not everything:
        looked = ", ".join(map(str, places)) or "no folder"
        raise FileNotFoundError(
            f"no results found in {looked}; `tracformer eval MODEL TASK --out FOLDER` writes some"
        )
    results = choose(everything)
    if any(Path(place).is_dir() for place in places):
        results = in_order(results)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    found = sections(results)
    colours = figures.colours_of(found)
    chapters = [Chapter("models", "Models", _models(results, folder))]
    for section in found:
        body = _section(section, colours, folder)
        chapters.append(Chapter(section.file_stem, section.title, body))
    introduction = [_paragraph(text) for text in about]
    for name in paper:
        if name in paper_tables():
            heading = f"The paper's {place_name(name)}"
            chapters.append(Chapter(f"paper-{name}", heading, _quoted(paper_tables()[name])))
        else:
            text = f"The paper prints no values for {place_name(name)}, so there is none to quote."
            introduction.append(_paragraph(text, faint=True))
    if left_out := len(everything) - len(results):
        text = (
            f"{left_out} {'result is' if left_out == 1 else 'results are'} left out: newer or more "
            "precise results answer the same questions."
        )
        introduction.append(_paragraph(text, faint=True))
    introduction.append(_paragraph(READING_GUIDE, faint=True))
    target = folder / "index.html"
    write_atomically(target, _page(title, "".join(introduction), chapters))
    return target


def printed_tables(results: Iterable[Result], per_byte: bool = False) -> list[Table]:
    """Return the tables that `tracformer eval` prints.

    Args:
        results: Results of one evaluation.
        per_byte: Show bits per byte, and take differences in them, even if the tokenizers agree.
    """
    shown = []
    for section in sections(results, show_modes=True):
        tokenizers = {r.manifest.get("hashes", {}).get("tokenizer") for r in section.results()}
        hidden = {LOGARITHM} if per_byte or len(tokenizers) > 1 else {LOGARITHM, PER_BYTE}
        metrics = zip(section.metrics(), tables(section), strict=True)
        found = [table for metric, table in metrics if metric not in hidden]
        paired = paired_table(section, per_byte, across_kinds=True)
        for table in [*found, *([paired] if paired is not None else [])]:
            caption = ", ".join(filter(None, (*section.subject(), table.caption)))
            title = f"{section.task}: {table.title}"
            shown.append(dataclasses.replace(table, title=title, caption=caption))
    return shown


def _page(title: str, introduction: str, chapters: Sequence[Chapter]) -> str:
    style = (resources.files("tracformer.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(f"<li><a href='#{c.anchor}'>{html.escape(c.title)}</a></li>" for c in chapters)
    bodies = "".join(
        f"<section id='{c.anchor}'><h2>{html.escape(c.title)}</h2>{c.body}</section>"
        for c in chapters
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{introduction}"
        f"<nav aria-label='contents'><ul>{links}</ul></nav>"
        f"<main>{bodies}</main></body></html>\n"
    )


def _section(section: Section, colours: Mapping[str, int], folder: Path) -> str:
    drawn = "".join(
        f"<figure>{picture.save(folder)}<figcaption>{html.escape(picture.caption)}</figcaption>"
        "</figure>"
        for picture in figures.pictures(section, colours)
    )
    parts = [f"<div class='pictures'>{drawn}</div>" if drawn else ""]
    metrics = section.metrics()
    for metric, table in zip(metrics, tables(section), strict=True):
        _write_table(table, folder)
        aside = "perplexity" in metrics and metric in (LOGARITHM, PER_BYTE)
        parts.append(_folded(table.title, table.to_html()) if aside else table.to_html())
    paired = paired_table(section)
    if paired is not None:
        _write_table(paired, folder)
        parts.append(paired.to_html())
    parts += [_paragraph(note, faint=True) for note in _notes(section)]
    parts += [table.to_html() for table in figures.order_tables(section)]
    parts.append(_fills(section))
    origins = []
    for result in section.results():
        origin = {"options": result.options, "manifest": result.manifest}
        text = json.dumps(origin, indent=1, ensure_ascii=False, sort_keys=True)
        pre = f"<pre>{html.escape(text)}</pre>"
        origins.append(_folded(f"{result.model} ({result.mode})", pre))
    parts.append(_folded("where these figures come from", "".join(origins)))
    return "".join(parts)


def _models(results: Sequence[Result], folder: Path) -> str:
    """Return a table of the models' sizes and training, which are in the manifests."""
    lines: dict[str, Line] = {}
    trained = any(result.manifest.get("training") for result in results)
    for result in results:
        name, model = SEED.sub("", result.model), result.manifest.get("model")
        if model and name not in lines:
            sizes = (
                model["parameters"],
                model["parameters_without_embeddings"],
                model.get("config", {}).get("vocab_size", 0),
            )
            cells: tuple[Cell | str, ...] = tuple(Cell(float(size)) for size in sizes)
            cells += _training(result.manifest.get("training")) if trained else ()
            lines[name] = Line(f"{name} ({result.family})", "", cells)
    if not lines:
        return _paragraph("The results' manifests do not describe their models.", faint=True)
    columns: tuple[str, ...] = ("parameters", "without embeddings", "vocabulary")
    columns += ("steps", "tokens seen", "training FLOPs", "minutes", "machine") if trained else ()
    table = Table("models", "sizes", columns, tuple(lines.values()), NEITHER)
    _write_table(table, folder)
    return table.to_html()


def _training(known: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return how a model was trained, as words."""
    if not known:
        return ("-",) * 5
    planned = f" of {known['planned_steps']:,}" if known.get("planned_steps") else ""
    minutes = f"{known['seconds'] / 60:.1f}"
    minutes += f" of {known['planned_minutes']:g}" if known.get("planned_minutes") else ""
    amounts = [rounded(known[key]) if known.get(key) else "-" for key in ("tokens", "flops")]
    return (f"{known['step']:,}{planned}", *amounts, minutes, known["machine"])


def _quoted(quoted: PaperTable) -> str:
    """Return a table of the paper as it stands there, folded."""
    keys = list(dict.fromkeys(key for figure in quoted.figures for key in figure.setting))
    lines = []
    for figure in quoted.figures:
        settings = [str(figure.setting.get(key, "")) for key in keys]
        words = (metric_name(figure.metric), *settings, number(figure.value))
        lines.append(Line(figure.model, "", words))
    columns = ("metric", *keys, "value")
    title = place_name(quoted.name)
    table = Table(quoted.name, title, columns, tuple(lines), NEITHER, quoted.caption)
    note = _paragraph(
        "Figures of other sizes, tokenizers or data cannot be compared with these number by "
        "number; orders and trends may be.",
        faint=True,
    )
    return note + _folded(f"{len(lines)} figures", table.to_html())


def _notes(section: Section) -> list[str]:
    """Return notes that hold for all figures of a model, then some of the others.

    The first kind, above all what a mode cannot do, is never left out.
    """
    always, others = dict[str, None](), dict[str, None]()
    for entry in section.entries:
        rows = [row.note.split("; ") for result in entry.results for row in result.rows]
        for part in dict.fromkeys(part for row in rows for part in row if part):
            group = always if all(part in row for row in rows) else others
            group[f"{entry.label}: {part}"] = None
    return [*always, *list(others)[:MOST_NOTES]]


def _fills(section: Section) -> str:
    """Return the fills of all models beside the original text, by context and sequence.

    Of several seeds the first is shown.
    """
    kept: dict[str, dict[int, dict[str, Mapping[str, Any]]]] = {}
    for entry in section.entries:
        for fill in entry.first.details.get("fills", ()):
            of_contexts = kept.setdefault(str(fill["contexts"]), {})
            of_contexts.setdefault(int(fill["sequence"]), {})[entry.label] = fill
    parts = []
    for contexts, sequences in kept.items():
        shown = [_side_by_side(each, sequences[each]) for each in sorted(sequences)]
        parts.append(f"<h3>Fills of {html.escape(contexts)}, unselected</h3>")
        parts += shown[:OPEN_FILLS]
        if rest := shown[OPEN_FILLS:]:
            parts.append(_folded(f"{len(rest)} more", "".join(rest)))
    return "".join(parts)


def _side_by_side(sequence: int, fills: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(fills.values()))
    title = f"sequence {sequence}: the original"
    boxes = [_box(title, str(first["original"]), first["original_spans"])]
    for label, fill in fills.items():
        log_prob = fill.get("log_prob")
        likely = "" if log_prob is None else f", log-probability {number(float(log_prob))}"
        boxes.append(_box(f"{label}{likely}", str(fill["text"]), fill["spans"]))
    return f"<div class='texts'>{''.join(boxes)}</div>"


def _box(title: str, text: str, spans: Sequence[Sequence[int]]) -> str:
    """Return a text in a box with the characters of `spans` highlighted."""
    parts, at = [], 0
    for start, stop in sorted((int(start), int(stop)) for start, stop in spans):
        parts += [html.escape(text[at:start]), f"<mark>{html.escape(text[start:stop])}</mark>"]
        at = stop
    parts.append(html.escape(text[at:]))
    return f"<div class='text'><b>{html.escape(title)}</b>{''.join(parts)}</div>"


def _paragraph(text: str, faint: bool = False) -> str:
    return f"<p{' class=' + repr('faint') if faint else ''}>{html.escape(text)}</p>" if text else ""


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def _write_table(table: Table, folder: Path) -> None:
    write_atomically(folder / f"{table.name}.csv", table.to_csv())
    write_atomically(folder / f"{table.name}.tex", table.to_latex())


def comparable(first: Result, other: Result) -> bool:
    """Return whether two results answer the same question about the same data and contexts."""
    hashes, others = first.manifest.get("hashes", {}), other.manifest.get("hashes", {})
    same = all(key in hashes and hashes[key] == others.get(key) for key in INPUTS)
    same &= first.schemas["task"] == other.schemas["task"]
    return same and first.question() == other.question()


def same_tokens(first: Result, other: Result) -> bool:
    """Return whether both models have the same tokenizer, so that figures per token compare."""
    return bool(
        first.manifest["hashes"].get("tokenizer") == other.manifest["hashes"].get("tokenizer")
    )


def differences(first: Result, other: Result, per_byte: bool = False) -> list[ResultRow]:
    """Return `other` less `first` for each setting, with paired intervals.

    Args:
        first: Result to subtract.
        other: Result of another model on the same task, data and contexts.
        per_byte: Compare bits per byte rather than perplexity. Models with different tokenizers
            are always compared in bits per byte.

    Raises:
        ValueError: The results answer different questions, or hold no sums per sequence.
    """
    if not comparable(first, other):
        raise ValueError(
            f"{first.model} and {other.model} were not evaluated on the same data and contexts of "
            f"task {first.task!r}; evaluate both in one command"
        )
    per_byte |= not same_tokens(first, other)
    metric = "bits_per_byte" if per_byte else "perplexity"
    rows = {str(row.setting.get("contexts", "")): row for row in first.rows if row.metric == metric}
    if "" in rows:
        raise ValueError(
            f"results of task {first.task!r} hold no sums per sequence and contexts, which "
            "differences are computed from"
        )
    kinds = {row.setting["contexts"]: row.kind for row in other.rows if row.metric == metric}
    found = []
    for contexts, row in rows.items():
        if contexts not in kinds:
            continue
        a, b = (_sums(result.details[contexts], per_byte) for result in (other, first))
        ratios = bootstrap.ratio(*a), bootstrap.ratio(*b)
        if not per_byte:
            ratios = bootstrap.perplexity_of(ratios[0]), bootstrap.perplexity_of(ratios[1])
        count = len(a[0])
        if BOUND in (row.kind, kinds[contexts]):
            a, b = ((noise_groups(above), noise_groups(below)) for above, below in (a, b))
        low, high = bootstrap.difference_interval(a, b, exponent=not per_byte) or (None, None)
        note = ""
        if kinds[contexts] != row.kind:
            note = f"{kinds[contexts]} less {row.kind}: not the same kind of number"
        value = ratios[0] - ratios[1]
        name = f"{metric}_difference"
        found.append(ResultRow(name, row.setting, value, low, high, sequences=count, note=note))
    return found


def _sums(
    sums: Mapping[str, Any], per_byte: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return numerator and denominator of each sequence: nats by targets, or bits by bytes."""
    nll = np.array(sums["nll"], np.float64)
    if per_byte:
        return nll / math.log(2), np.array(sums["bytes"], np.float64)
    return nll, np.array(sums["targets"], np.float64)


def paired_table(
    section: Section, per_byte: bool = False, across_kinds: bool = False
) -> Table | None:
    """Return the differences of each model from the first of its kind, paired by sequence.

    Of several seeds the mean of each sequence is paired; the caption names the seeds.

    Args:
        section: The section.
        per_byte: Take differences in bits per byte even if the tokenizers agree.
        across_kinds: Take all differences from the first model, whatever its kind of answer.
    """
    if section.task in ACROSS_DATA and len(set(map(question_of, section.results()))) > 1:
        return None  # no sequences in common
    pairs: list[tuple[str, ReportEntry, ReportEntry]] = []  # kind, leader, other
    leaders: dict[str, ReportEntry] = {}
    means = {entry.label: mean_of_seeds(entry) for entry in section.entries}
    known = {label: mean for label, mean in means.items() if mean is not None}
    for entry in section.entries:
        if entry.label not in known:
            continue
        kind = next(row.kind for row in known[entry.label].rows if row.metric == "perplexity")
        leader = leaders.setdefault("" if across_kinds else kind, entry)
        if leader is not entry and comparable(known[leader.label], known[entry.label]):
            pairs.append((kind, leader, entry))
    # one unit for the whole table
    per_byte |= not all(same_tokens(known[a.label], known[b.label]) for _, a, b in pairs)
    found = [
        (kind, leader, other, differences(known[leader.label], known[other.label], per_byte))
        for kind, leader, other in pairs
    ]
    rows = [row for *_, each in found for row in each]
    if not rows:
        return None
    settings = list(dict.fromkeys(map(setting_of, rows)))
    columns, common = column_labels(settings)
    lines = []
    for kind, leader, other, each in found:
        cells = {setting_of(row): Cell(row.value, row.low, row.high, note=row.note) for row in each}
        label = f"{other.label} less {leader.label}"
        lines.append(Line(label, kind, tuple(cells.get(setting) for setting in settings)))
    unit = metric_name(rows[0].metric.removesuffix("_difference"))
    shown = [entry for entry in section.entries if any(entry in pair for pair in pairs)]
    return Table(
        f"{section.file_stem}-differences",
        f"differences in {unit}, paired by sequence",
        tuple(columns),
        tuple(lines),
        NEITHER,
        ", ".join(filter(None, (common, _named_seeds(shown)))),
    )


def mean_of_seeds(entry: ReportEntry) -> Result | None:
    """Return a result in which each sequence's nll is its mean over seeds.

    Seeds whose results hold no sums per sequence are left out; None if none does.
    """
    kept = _with_sums(entry)
    if not kept:
        return None
    details = {}
    for contexts in _contexts(kept[0]):
        sums = [result.details[contexts] for result in kept]
        nll = np.mean([np.array(each["nll"], np.float64) for each in sums], axis=0)
        details[contexts] = {**sums[0], "nll": nll}
    return dataclasses.replace(kept[0], details=details)


def _with_sums(entry: ReportEntry) -> list[Result]:
    """Return the seeds with sums per sequence that answer the same question as the first."""
    kept = [result for result in entry.results if _has_sums(result)]
    return kept[:1] + [result for result in kept[1:] if comparable(kept[0], result)]


def _has_sums(result: Result) -> bool:
    contexts = _contexts(result)
    sums = [result.details.get(name) for name in contexts]
    return bool(sums) and all(isinstance(each, Mapping) and "nll" in each for each in sums)


def _contexts(result: Result) -> list[str]:
    return [str(row.setting.get("contexts")) for row in result.rows if row.metric == "perplexity"]


def _named_seeds(entries: Sequence[ReportEntry]) -> str:
    """Return which seeds are compared, if any model has several."""
    if all(len(entry.results) == 1 for entry in entries):
        return ""

    def seed(result: Result) -> str:
        found = SEED.search(result.model)
        return found[0].removeprefix(" #") if found else "-"

    named = [f"{entry.label} {'/'.join(map(seed, _with_sums(entry)))}" for entry in entries]
    return (
        f"seeds: {', '.join(named)}; nll is the mean over seeds, and intervals are over sequences "
        "alone"
    )
