"""Group results into sections; seeds and paired differences.

From result files to sections: results of one task with the same options side by side, training
seeds of one model as one line.

A model trained several times is named `NAME #SEED`; its runs share a line, whose cells hold the
mean over seeds and its interval.

Training seeds of one model as one figure: their mean, and an interval that leaves open what either
the windows or the seeds do.

How far models of one section are apart, paired by sequence: what makes a sequence hard for both
cancels.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracformer.baselines import find_family
from tracformer.evaluation.bootstrap import t_quantile
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.model.base import BOUND
from tracformer.report.compare import SAME, comparable, differences, same_tokens
from tracformer.report.paper_figures import (
    FULL_ENCODER,
    PAPER_TOKENS,
    PaperFigure,
    find_paper_figure,
)
from tracformer.report.tables import HIGHER, LOWER, NEITHER, Cell, Line, Table

SEED = re.compile(r" #\d+$")
HIGHER_IS_BETTER = (
    "mauve",
    "bertscore",
    "bleu4",
    "bleu4_sentence",
    "accuracy",
    "tokens_per_second",
    "sequences_per_second",
)
NO_CONTEST = ("pilots",)  # tasks in which each model competes with itself alone
NO_WINNER = (
    "targets",
    "sequences",
    "parameters",
    "parameters_without_embeddings",
    "trained_tokens",
    "flops_per_token",
    "log_prob",
)
NAMES = {
    "perplexity": "perplexity",
    "nll": "nats per target",
    "bits_per_byte": "bits per byte",
    "kl": "KL from the truth, nats per target",
    "mauve": "MAUVE",
    "bertscore": "BERTScore",
    "bleu4": "BLEU-4",
    "bleu4_sentence": "BLEU-4, mean over sentences",
    "excess": "the bound's excess over the true nll, nats per target",
    "missed": "share missed of what the context tells",
    "kl_full": "KL from the truth that sees what follows, nats per target",
    "ece": "expected calibration error",
    "spread": "highest less lowest log-likelihood over all orders, nats",
    "tokens_per_second": "tokens a second",
    "parameters": "parameters",
    "parameters_without_embeddings": "parameters without embeddings",
    "trained_tokens": "trained tokens",
    "flops_per_token": "operations per trained token",
}
TITLES = {
    "ratios": "Perplexity against the share of targets",
    "contexts": "Perplexity under several contexts",
    "ranges": "Perplexity over fixed ranges",
    "prefixes": "Perplexity given a prefix",
    "unconditional": "Unconditional perplexity",
    "infilling": "Infilling quality",
    "orders": "Order consistency",
    "calibration": "Calibration",
    "exact": "The exact benchmark",
    "speed": "Generation speed and memory",
    "domains": "Hidden stretches of protein domains",
    "sizes": "Sizes",
    "training": "Held-out perplexity while training",
    "pilots": "Learning rates tried",
}
ACROSS_DATA = ("unconditional",)  # tasks with one figure a data set, which stand side by side
PER_TOKEN = ("perplexity", "nll")  # metrics that do not compare where tokens differ
ANY_INPUT = ("speed",)  # tasks whose answer does not depend on which tokens are read
Setting = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Entry:
    """One model in one mode: a result for each training seed."""

    label: str
    results: tuple[Result, ...]

    @property
    def first(self) -> Result:
        return self.results[0]


@dataclass(frozen=True)
class Section:
    """One question put to several models."""

    task: str
    options: Mapping[str, Any]
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        length = [f"T = {self.options['length']}"] if self.options.get("length") else []
        parts = [*self._data(), *length, *self._spans()]
        return TITLES.get(self.task, self.task) + (f": {', '.join(parts)}" if parts else "")

    @property
    def file_stem(self) -> str:
        """Of its files' names: the question in short, so that a figure keeps its name as others
        join the report.
        """
        length = [str(self.options["length"])] if self.options.get("length") else []
        return "-".join(
            file_words(part) for part in (self.task, *self._data(), *length, *self._spans())
        )

    def _data(self) -> list[str]:
        return [str(self.options[key]) for key in ("data", "source") if self.options.get(key)]

    def _spans(self) -> list[str]:
        """How targets are laid out, where all rows have it in common."""
        spans = {
            str(row.setting["spans"])
            for entry in self.entries
            for row in entry.first.rows
            if "spans" in row.setting
        }
        return [spans.pop()] if len(spans) == 1 else []

    def metrics(self) -> list[str]:
        return list(dict.fromkeys(row.metric for entry in self.entries for row in entry.first.rows))


def sections(results: Iterable[Result]) -> list[Section]:
    """In the order of their first result; so are the models inside.

    The same question about another text, or other holes, is another.
    """
    asked: dict[str, list[Result]] = {}
    for result in _joined(results):
        key = result.question() if result.task in ACROSS_DATA else _asked(result)
        asked.setdefault(f"{key} {result.schemas['task']}", []).append(result)
    return [
        Section(group[0].task, group[0].options, tuple(_entries(group))) for group in asked.values()
    ]


def chapter_titles(found: Sequence[Section]) -> list[str]:
    """Their titles; where two are equal, with the beginnings of the hashes that tell them apart."""
    titles = [section.title for section in found]
    inputs = ["/".join(_told_apart(section.entries[0].first)) for section in found]
    return [
        f"{t} (inputs {told})" if told and titles.count(t) > 1 else t
        for t, told in zip(titles, inputs, strict=True)
    ]


def by_file_stem(found: Sequence[Section]) -> dict[str, Section]:
    """Sections by the stem of their files' names; a number tells apart those whose
    stems are equal.
    """
    named: dict[str, Section] = {}
    for section in found:
        same = sum(other.file_stem == section.file_stem for other in named.values())
        named[f"{section.file_stem}-{same + 1}" if same else section.file_stem] = section
    return named


def one_each(results: Iterable[Result]) -> list[Result]:
    """Of several results of one model and question, as evaluations with changed code or weights
    leave them, one: of the weights asked last the one with the most draws of noise, and of these
    the last one made.
    """
    asked: dict[str, list[Result]] = {}
    for result in results:
        asked.setdefault(f"{result.model} {result.mode} {_asked(result)}", []).append(result)
    return [_best(group) for group in asked.values()]


def _best(group: Sequence[Result]) -> Result:
    """The one of the highest schemas; the later one, where nothing tells them apart."""
    newest = max(sum(result.schemas.values()) for result in group)
    group = [result for result in group if sum(result.schemas.values()) == newest]
    weights = _hash(max(reversed(group), key=_time), "weights")
    return max(
        reversed([result for result in group if _hash(result, "weights") == weights]),
        key=lambda each: (_draws(each), _time(each)),
    )


def _draws(result: Result) -> int:
    """Of noise; None among the options is the model's own number. 0: the answer is no estimate."""
    if "draws" not in result.options or not any(row.kind == BOUND for row in result.rows):
        return 0
    asked = result.options["draws"]
    return int(
        find_family(result.family).model_class.default_draws or 0 if asked is None else asked
    )


def _time(result: Result) -> str:
    return str(result.manifest.get("time", ""))


def _asked(result: Result) -> str:
    """The question and what it was put about."""
    inputs = [] if result.task in ANY_INPUT else [_hash(result, key) for key in SAME]
    return " ".join([result.question(), *inputs])


def _told_apart(result: Result) -> list[str]:
    """Return the beginnings of the hashes of what was asked about, and a schema above 1."""
    schema = result.schemas["task"]
    later = [f"schema {schema}"] if schema > 1 else []
    return [*filter(None, (_hash(result, key)[:6] for key in SAME)), *later]


def _hash(result: Result, key: str) -> str:
    return str(result.manifest.get("hashes", {}).get(key, ""))


def in_order(results: Iterable[Result]) -> list[Result]:
    """Results of whole folders, whose files' names tell no order: by task, then by what is asked,
    then by model.
    """
    tasks = list(TITLES)

    def key(result: Result) -> tuple[Any, ...]:
        place = tasks.index(result.task) if result.task in tasks else len(tasks)
        options = result.options
        return (
            place,
            str(options.get("data", "")),
            str(options.get("source", "")),
            result.question(),
            result.model,
        )

    return sorted(results, key=key)


def tables(section: Section, name: str) -> list[Table]:
    """A table for each metric of a section; columns are what varies inside it."""
    made = []
    for metric in section.metrics():
        settings = list(
            dict.fromkeys(
                _setting(row)
                for entry in section.entries
                for r in entry.results
                for row in r.rows
                if row.metric == metric
            )
        )
        labels, common = column_labels(settings)
        common = ", ".join(filter(None, (common, _counted(section, metric))))
        lines = []
        for entry in section.entries:
            rows = [
                {_setting(row): row for row in result.rows if row.metric == metric}
                for result in entry.results
            ]
            for kind in dict.fromkeys(row.kind for found in rows for row in found.values()):
                cells = [
                    _cell(entry, [found.get(setting) for found in rows], kind)
                    for setting in settings
                ]
                lines.append(Line(entry.label, kind, tuple(cells)))
        base = metric.partition("[")[0]  # bertscore[NAME]: by a scorer of that name
        compete = base not in NO_WINNER and section.task not in NO_CONTEST
        compete &= (
            base not in PER_TOKEN
            or len({_hash(entry.first, "tokenizer") for entry in section.entries}) == 1
        )
        better = NEITHER if not compete else HIGHER if base in HIGHER_IS_BETTER else LOWER
        made.append(
            Table(
                f"{name}-{file_words(metric)}",
                metric_name(metric),
                tuple(labels),
                tuple(lines),
                better,
                common,
            )
        )
    return made


def metric_name(metric: str) -> str:
    """
    >>> metric_name("bertscore[minilm-l6]"), metric_name("ece")
    ('BERTScore by minilm-l6', 'expected calibration error')
    """
    base, bracket, scorer = metric.partition("[")
    return NAMES.get(base, base.replace("_", " ")) + (
        f" by {scorer.rstrip(']')}" if bracket else ""
    )


def file_words(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip("_")


def column_labels(settings: Sequence[Setting]) -> tuple[list[str], str]:
    """What tells the columns apart, and what is common to all of them.

    `contexts` is left out where `ratio` or `given` says the same.
    """
    dicts = [dict(setting) for setting in settings]
    keys = list(dict.fromkeys(key for each in dicts for key in each))
    varying = [key for key in keys if len({repr(each.get(key)) for each in dicts}) > 1]
    for key in varying:
        rest = [other for other in varying if other != key]
        told = len({tuple(repr(each.get(other)) for other in rest) for each in dicts}) == len(dicts)
        if key == "contexts" and rest and told:
            varying = rest
            break
    common = ", ".join(
        f"{key} {_short(dicts[0][key])}"
        for key in keys
        if key not in varying and key in dicts[0] and key != "contexts"
    )
    if len(dicts) == 1 and not varying:
        return [common or "all"], ""
    return [
        ", ".join(_short(each[key]) for key in varying if key in each) or "all" for each in dicts
    ], common


def paper_figure(result: Result, row: ResultRow) -> PaperFigure | None:
    """The paper's answer to the very question that this row answers: same data, length, contexts,
    tokeniser and way of counting.
    """
    model = result.manifest.get("model", {})
    config = model.get("config", {}) if isinstance(model, Mapping) else {}
    if config.get("vocab_size") != PAPER_TOKENS or config.get("decoder", "strided") != "strided":
        return None
    name = (
        FULL_ENCODER
        if result.family == "tracformer" and config.get("encoder") == "full"
        else result.family
    )
    return find_paper_figure(
        name, row.metric, {**result.options, **row.setting, "mode": result.mode}
    )


def _joined(results: Iterable[Result]) -> list[Result]:
    """For the tasks of `ACROSS_DATA` one result instead of several that differ in their data alone;
    the rows' settings tell the data.
    """
    kept: dict[str, list[Result]] = {}
    inputs: dict[str, list[str]] = {}  # of each data set's name, in the order of their first result
    for number, result in enumerate(results):
        name = f"{SEED.sub('', result.model)} {_hash(result, 'weights') or result.model}"
        same = f"{name} {result.mode} {result.question(without=('data',))} {result.schemas['task']}"
        kept.setdefault(same if result.task in ACROSS_DATA else str(number), []).append(result)
        if result.task in ACROSS_DATA and _asked(result) not in (
            known := inputs.setdefault(result.question(), [])
        ):
            known.append(_asked(result))
    return [
        _join(group, inputs) if group[0].task in ACROSS_DATA else group[0]
        for group in kept.values()
    ]


def _join(group: Sequence[Result], inputs: Mapping[str, Sequence[str]]) -> Result:
    """A number tells apart texts of one name."""
    parts: dict[str, list[Result]] = {}
    for result in group:
        parts.setdefault(_asked(result), []).append(result)
    group = [_best(same) for same in parts.values()]
    first = group[0]
    rows = []
    for result in group:
        place = inputs[result.question()].index(_asked(result))
        data = f"{result.options['data']} ({place + 1})" if place else result.options["data"]
        rows += [
            dataclasses.replace(row, setting={**row.setting, "data": data}) for row in result.rows
        ]
    options = {key: value for key, value in first.options.items() if key != "data"}
    if len(group) == 1:
        return dataclasses.replace(first, rows=tuple(rows), options=options)
    hashes = [result.manifest.get("hashes", {}) for result in group]
    common = {
        key: value
        for key, value in hashes[0].items()
        if all(each.get(key) == value for each in hashes)
    }
    manifest = {
        "hashes": common,
        "schemas": first.schemas,
        "model": first.manifest.get("model"),
        "parts": [result.manifest for result in group],
    }
    return dataclasses.replace(
        first, rows=tuple(rows), options=options, manifest=manifest, details={}
    )


def _entries(results: Sequence[Result]) -> list[Entry]:
    runs: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        runs.setdefault(
            (SEED.sub("", result.model), result.mode, _hash(result, "tokenizer")), []
        ).append(result)
    return [Entry(_label(key, list(runs)), tuple(_once(found))) for key, found in runs.items()]


def _label(key: tuple[str, str, str], keys: Sequence[tuple[str, str, str]]) -> str:
    """The model's name, with its mode and its tokeniser where it stands there in several."""
    model, mode, tokenizer = key
    modes, tokenizers = ({each[part] for each in keys if each[0] == model} for part in (1, 2))
    told = [
        *([mode] if len(modes) > 1 else []),
        *([f"tokeniser {tokenizer[:6] or '-'}"] if len(tokenizers) > 1 else []),
    ]
    return f"{model} ({', '.join(told)})" if told else model


def _once(results: Sequence[Result]) -> list[Result]:
    """Each model's weights once, under whatever names they were asked."""
    kept: dict[str, list[Result]] = {}
    for number, result in enumerate(results):
        kept.setdefault(_hash(result, "weights") or str(number), []).append(result)
    return [_best(group) for group in kept.values()]


def _counted(section: Section, metric: str) -> str:
    """How many sequences each figure rests on, where that is one number."""
    counts = {
        row.sequences
        for entry in section.entries
        for result in entry.results
        for row in result.rows
        if row.metric == metric
    }
    return f"{counts.pop():,} sequences" if len(counts) == 1 and counts != {0} else ""


def _setting(row: ResultRow) -> Setting:
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in row.setting.items()
    )


def _cell(entry: Entry, rows: Sequence[ResultRow | None], kind: str) -> Cell | None:
    found = [
        (result, row)
        for result, row in zip(entry.results, rows, strict=True)
        if row is not None and row.kind == kind
    ]
    if not found:
        return None
    paper = paper_figure(*found[0])
    return dataclasses.replace(
        over_seeds([row for _, row in found]),
        paper=paper.value if paper else None,
        place=paper.place if paper else "",
        note=found[0][1].note,
    )


def _short(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "/".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def over_seeds(rows: Sequence[ResultRow]) -> Cell:
    """One row a seed. Of a single seed its own interval; of n seeds

        mean -+ sqrt(w^2 + (t * sd / sqrt(n))^2)

    w: the mean half-width of the seeds' intervals over windows, which they share, so that more
    seeds do not narrow it; sd: the standard deviation of the seeds' values; t: Student's quantile
    for n - 1 degrees of freedom.
    """
    if len(rows) == 1:
        return Cell(rows[0].value, rows[0].low, rows[0].high)
    values = [row.value for row in rows]
    mean = statistics.fmean(values)
    if not all(map(math.isfinite, values)):
        return Cell(mean, seeds=len(rows))
    spread = statistics.stdev(values)
    between = t_quantile(len(rows) - 1) * spread / math.sqrt(len(rows))
    below = [row.value - row.low for row in rows if row.low is not None]
    above = [row.high - row.value for row in rows if row.high is not None]
    low = mean - math.hypot(statistics.fmean(below), between) if below else mean - between
    high = mean + math.hypot(statistics.fmean(above), between) if above else mean + between
    never_negative = all(
        min(row.value, row.value if row.low is None else row.low) >= 0 for row in rows
    )
    return Cell(mean, max(low, 0.0) if never_negative else low, high, spread, len(rows))


def paired_table(section: Section, name: str) -> Table | None:
    """Each model less the first of its kind.

    Of several seeds each sequence's mean is paired; the caption names the seeds.
    """
    pairs: list[tuple[str, Entry, Entry]] = []  # kind, leader, other
    leaders: dict[str, Entry] = {}
    means = {
        entry.label: mean for entry in section.entries if (mean := mean_of_seeds(entry)) is not None
    }
    for entry in section.entries:
        if entry.label not in means:
            continue
        kind = next(row.kind for row in means[entry.label].rows if row.metric == "perplexity")
        leader = leaders.setdefault(kind, entry)
        if leader is not entry and comparable(means[leader.label], means[entry.label]):
            pairs.append((kind, leader, entry))
    # one unit for the whole table
    per_byte = not all(
        same_tokens(means[leader.label], means[other.label]) for _, leader, other in pairs
    )
    found = [
        (kind, leader, other, differences(means[leader.label], means[other.label], per_byte))
        for kind, leader, other in pairs
    ]
    rows = [row for *_, each in found for row in each]
    if not rows:
        return None
    settings = list(dict.fromkeys(tuple(row.setting.items()) for row in rows))
    labels, common = column_labels(settings)
    lines = []
    for kind, leader, other, each in found:
        by_setting = {tuple(row.setting.items()): row for row in each}
        cells = tuple(_difference_cell(by_setting.get(setting)) for setting in settings)
        lines.append(Line(f"{other.label} less {leader.label}", kind, cells))
    unit = metric_name(rows[0].metric.removesuffix("_difference"))
    shown = [entry for entry in section.entries if any(entry in pair for pair in pairs)]
    caption = ", ".join(filter(None, (common, _named_seeds(shown))))
    return Table(
        f"{name}-differences",
        f"differences in {unit}, paired by sequence",
        tuple(labels),
        tuple(lines),
        "",
        caption,
    )


def mean_of_seeds(entry: Entry) -> Result | None:
    """A result in which each sequence's nll is its mean over those seeds that kept
    it; None where none did.
    """
    kept = _kept(entry)
    if not kept:
        return None
    details = {}
    for contexts in _contexts(kept[0]):
        sums = [result.details[contexts] for result in kept]
        details[contexts] = {
            **sums[0],
            "nll": np.mean([np.array(each["nll"], np.float64) for each in sums], axis=0),
        }
    return dataclasses.replace(kept[0], details=details)


def _kept(entry: Entry) -> list[Result]:
    """The seeds with per-sequence sums, asked the same as the first of them."""
    kept = [result for result in entry.results if _has_sums(result)]
    return [
        result for number, result in enumerate(kept) if number == 0 or comparable(kept[0], result)
    ]


def _named_seeds(entries: list[Entry]) -> str:
    """Which seeds are compared, where a model has several."""
    if all(len(entry.results) == 1 for entry in entries):
        return ""
    named = [
        f"{entry.label} {'/'.join(_seed(result) for result in _kept(entry))}" for entry in entries
    ]
    return (
        f"seeds: {', '.join(named)}; nll is the mean over seeds, and intervals are over sequences "
        "alone"
    )


def _seed(result: Result) -> str:
    found = SEED.search(result.model)
    return found[0].removeprefix(" #") if found else "-"


def _has_sums(result: Result) -> bool:
    contexts = _contexts(result)
    details: Mapping[str, Any] = result.details
    return bool(contexts) and all(
        isinstance(details.get(c), Mapping) and "nll" in details[c] for c in contexts
    )


def _contexts(result: Result) -> list[str]:
    return [str(row.setting.get("contexts")) for row in result.rows if row.metric == "perplexity"]


def _difference_cell(row: ResultRow | None) -> Cell | None:
    return None if row is None else Cell(row.value, row.low, row.high, note=row.note)
