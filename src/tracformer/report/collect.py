"""From results to sections: one question, the models that answered it, and their tables.

- `choose` is the one place that decides which of several results is shown.
- `sections` groups results by question; training seeds of one model (`NAME #SEED`) share an entry.
- `tables` makes a table for each metric of a section. `budget_of` says what a model was trained
  with; the best figures are marked only where all models had the same.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracformer.baselines import find_family
from tracformer.evaluation.bootstrap import t_quantile
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.model.base import BOUND
from tracformer.report.tables import (
    FULL_ENCODER,
    HIGHER,
    LOWER,
    NEITHER,
    PAPER_TOKENS,
    Cell,
    Line,
    PaperFigure,
    Table,
    find_paper_figure,
)

SEED = re.compile(r" #\d+$")
HIGHER_IS_BETTER = (
    *("mauve", "bertscore", "bleu4", "bleu4_sentence", "accuracy"),
    *("tokens_per_second", "sequences_per_second"),
)
NO_WINNER = (
    *("targets", "sequences", "parameters", "parameters_without_embeddings", "trained_tokens"),
    *("flops_per_token", "log_prob"),
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
    "missed": "share of the context's information that is missed",
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
EQUAL = 1.05  # ratio up to which two budgets are equal
INPUTS = ("data", "contexts")  # hashes that must agree before two results are compared
ACROSS_DATA = ("unconditional",)  # tasks with one figure per data set: data sets are columns
ANY_INPUT = ("speed",)  # tasks whose answer does not depend on which tokens are read
NO_CONTEST = ("pilots",)  # tasks in which each model competes only with itself
PER_TOKEN = ("perplexity", "nll")  # metrics that do not compare across tokenizers
Setting = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class ReportEntry:
    """One model in one mode, with a result for each training seed (and data set, if several)."""

    label: str
    results: tuple[Result, ...]

    @property
    def first(self) -> Result:
        """The result of the first seed."""
        return self.results[0]


@dataclass(frozen=True)
class Section:
    """One question and the models that answered it."""

    task: str
    options: Mapping[str, Any]
    entries: tuple[ReportEntry, ...]
    number: int = 1  # tells apart sections whose words are the same

    @property
    def title(self) -> str:
        """The question as a heading."""
        title = TITLES.get(self.task, self.task)
        words = [*self.subject(), *self._spans()]
        title += f": {', '.join(words)}" if words else ""
        return f"{title} ({self.number})" if self.number > 1 else title

    @property
    def file_stem(self) -> str:
        """The question as the beginning of file names, the same whatever else is reported."""
        length = str(self.options.get("length") or "")
        words = [self.task, *self._data(), length, *self._spans()]
        stem = "-".join(file_words(word) for word in words if word)
        return f"{stem}-{self.number}" if self.number > 1 else stem

    def subject(self) -> list[str]:
        """Return what the figures are about: data and length."""
        length = [f"T = {self.options['length']}"] if self.options.get("length") else []
        return [*self._data(), *length]

    def results(self) -> list[Result]:
        """Return the results of all entries."""
        return [result for entry in self.entries for result in entry.results]

    def metrics(self) -> list[str]:
        """Return the names of all metrics, in order of first appearance."""
        return list(dict.fromkeys(row.metric for result in self.results() for row in result.rows))

    def _data(self) -> list[str]:
        return [str(self.options[key]) for key in ("data", "source") if self.options.get(key)]

    def _spans(self) -> list[str]:
        """Return how targets are laid out, if all rows agree on it."""
        rows = [row for entry in self.entries for row in entry.first.rows]
        spans = {str(row.setting["spans"]) for row in rows if "spans" in row.setting}
        return [spans.pop()] if len(spans) == 1 else []


def choose(results: Iterable[Result]) -> list[Result]:
    """Return one result for each model and question.

    A folder holds several when code, weights or the number of draws of noise have changed between
    evaluations. Of these the first that applies decides: the highest schema, the weights that were
    evaluated last, the most draws, the latest time. Weights that were evaluated under two names of
    one model (`NAME` and `NAME #0`) count once.
    """
    chosen = list(results)
    identities: tuple[Callable[[Result], str], ...] = (
        lambda result: result.model,
        lambda result: f"{SEED.sub('', result.model)} {_hash(result, 'weights') or result.model}",
    )
    for identity in identities:
        groups: dict[str, list[Result]] = {}
        for result in chosen:
            key = f"{identity(result)} {result.mode} {question_of(result)}"
            groups.setdefault(key, []).append(result)
        chosen = [_preferred(group) for group in groups.values()]
    return chosen


def _preferred(group: Sequence[Result]) -> Result:
    newest = max(sum(result.schemas.values()) for result in group)
    group = [result for result in group if sum(result.schemas.values()) == newest]
    weights = _hash(max(reversed(group), key=_time), "weights")
    group = [result for result in group if _hash(result, "weights") == weights]
    return max(reversed(group), key=lambda result: (_draws(result), _time(result)))


def _draws(result: Result) -> int:
    """Return the draws of noise that an estimate rests on; 0 if the answer is no estimate."""
    if "draws" not in result.options or not any(row.kind == BOUND for row in result.rows):
        return 0
    draws = result.options["draws"]
    if draws is None:
        draws = find_family(result.family).model_class.default_draws or 0
    return int(draws)


def _time(result: Result) -> str:
    return str(result.manifest.get("time", ""))


def _hash(result: Result, key: str) -> str:
    return str(result.manifest.get("hashes", {}).get(key, ""))


def question_of(result: Result) -> str:
    """Return the question with the hashes of its data and contexts, as a key."""
    inputs = [] if result.task in ANY_INPUT else [_hash(result, key) for key in INPUTS]
    return " ".join([result.question(), *inputs])


def in_order(results: Iterable[Result]) -> list[Result]:
    """Return results sorted by task, question and model, for folders, which have no order."""
    tasks = list(TITLES)

    def key(result: Result) -> tuple[Any, ...]:
        place = tasks.index(result.task) if result.task in tasks else len(tasks)
        data, source = (str(result.options.get(name, "")) for name in ("data", "source"))
        return place, data, source, result.question(), result.model

    return sorted(results, key=key)


def sections(results: Iterable[Result], show_modes: bool = False) -> list[Section]:
    """Return the sections in the order of their first result; so are the models of each.

    The same question about other data, other contexts or under another schema is another section.

    Args:
        results: Results in any number; `choose` picks one for each model and question.
        show_modes: Put the mode into every label, not only where a model stands in several.
    """
    groups: dict[str, list[Result]] = {}
    for result in _data_as_columns(choose(results)):
        key = result.question() if result.task in ACROSS_DATA else question_of(result)
        groups.setdefault(f"{key} {result.schemas['task']}", []).append(result)
    found: list[Section] = []
    for group in groups.values():
        section = Section(group[0].task, group[0].options, _entries(group, show_modes))
        number = 1 + sum(
            dataclasses.replace(other, number=1).file_stem == section.file_stem for other in found
        )
        found.append(dataclasses.replace(section, number=number))
    return found


def _data_as_columns(results: Sequence[Result]) -> list[Result]:
    """Move the data from the options to the rows' settings, for the tasks of `ACROSS_DATA`.

    A number tells apart texts of the same name.
    """
    texts: dict[str, list[str]] = {}  # questions with hashes, by questions without
    changed = []
    for result in results:
        if result.task not in ACROSS_DATA:
            changed.append(result)
            continue
        known = texts.setdefault(result.question(), [])
        if question_of(result) not in known:
            known.append(question_of(result))
        number = 1 + known.index(question_of(result))
        data = f"{result.options['data']} ({number})" if number > 1 else result.options["data"]
        rows = [
            dataclasses.replace(row, setting={**row.setting, "data": data}) for row in result.rows
        ]
        options = {key: value for key, value in result.options.items() if key != "data"}
        changed.append(dataclasses.replace(result, rows=tuple(rows), options=options))
    return changed


def _entries(results: Sequence[Result], show_modes: bool) -> tuple[ReportEntry, ...]:
    runs: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        key = SEED.sub("", result.model), result.mode, _hash(result, "tokenizer")
        runs.setdefault(key, []).append(result)
    entries = []
    for (model, mode, tokenizer), group in runs.items():
        same_model = [key for key in runs if key[0] == model]
        parts = []
        if show_modes or len({key[1] for key in same_model}) > 1:
            parts.append(mode)
        if len({key[2] for key in same_model}) > 1:
            parts.append(f"tokenizer {tokenizer[:6] or '-'}")
        label = f"{model} ({', '.join(parts)})" if parts else model
        entries.append(ReportEntry(label, tuple(group)))
    return tuple(entries)


def tables(section: Section) -> list[Table]:
    """Return a table for each metric; its columns are the settings that vary in the section."""
    return [_metric_table(section, metric) for metric in section.metrics()]


def _metric_table(section: Section, metric: str) -> Table:
    found = {
        entry.label: [
            {setting_of(row): row for row in result.rows if row.metric == metric}
            for result in entry.results
        ]
        for entry in section.entries
    }
    rows = [row for seeds in found.values() for seed in seeds for row in seed.values()]
    settings = list(dict.fromkeys(map(setting_of, rows)))
    lines = []
    for entry in section.entries:
        seeds = found[entry.label]
        for kind in dict.fromkeys(row.kind for seed in seeds for row in seed.values()):
            cells = [_cell(entry, [seed.get(each) for seed in seeds], kind) for each in settings]
            lines.append(Line(entry.label, kind, tuple(cells)))
    columns, common = column_labels(settings)
    counts = {row.sequences for row in rows}
    counted = f"{counts.pop():,} sequences" if len(counts) == 1 and counts != {0} else ""
    better, unequal = _better(section, metric), ""
    if better != NEITHER and not same_budget(section.entries):
        better, unequal = NEITHER, "the models were trained with unequal budgets: no best is marked"
    if any(map(budget_of, section.entries)):
        budgets = {entry.label: budget_cells(entry) for entry in section.entries}
        columns = [*BUDGET, *columns]
        lines = [
            dataclasses.replace(line, cells=(*budgets[line.label], *line.cells)) for line in lines
        ]
    return Table(
        f"{section.file_stem}-{file_words(metric)}",
        metric_name(metric),
        tuple(columns),
        tuple(lines),
        better,
        ", ".join(filter(None, (common, counted, unequal))),
    )


BUDGET = ("parameters", "tokens seen", "training FLOPs")


@dataclass(frozen=True)
class TrainingBudget:
    """What a model was trained with."""

    tokens: float
    flops: float | None


def budget_of(entry: ReportEntry) -> TrainingBudget | None:
    """Return what a model was trained with; None if its folder did not say."""
    known = entry.first.manifest.get("training")
    if not isinstance(known, Mapping) or not known.get("tokens"):
        return None
    return TrainingBudget(known["tokens"], known.get("flops"))


def budget_cells(entry: ReportEntry) -> tuple[str, ...]:
    """Return parameters, tokens seen and training FLOPs of a model, as words."""
    model, budget = entry.first.manifest.get("model", {}), budget_of(entry)
    parameters = model.get("parameters") if isinstance(model, Mapping) else None
    numbers = (parameters, budget and budget.tokens, budget and budget.flops)
    return tuple("-" if not each else rounded(each) for each in numbers)


def same_budget(entries: Sequence[ReportEntry]) -> bool:
    """Return whether models may compete: trained on equally many tokens or FLOPs within 5%.

    Models may also compete if nothing is known about any of them.
    """
    budgets = [budget_of(entry) for entry in entries]
    known = [budget for budget in budgets if budget is not None]
    if len(known) < len(budgets) or not known:
        return not known
    tokens, flops = [each.tokens for each in known], [each.flops for each in known]
    spent = [each for each in flops if each]
    same_flops = len(spent) == len(flops) and max(spent) <= EQUAL * min(spent)
    return max(tokens) <= EQUAL * min(tokens) or same_flops


def rounded(number: float) -> str:
    """Return a large number in three digits with a letter for its size.

    >>> rounded(1_234_567), rounded(999), rounded(6.1e13)
    ('1.23M', '999', '61T')
    """
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _better(section: Section, metric: str) -> str:
    base = metric.partition("[")[0]  # bertscore[NAME]: by a scorer of that name
    tokenizers = {_hash(entry.first, "tokenizer") for entry in section.entries}
    if (
        base in NO_WINNER
        or section.task in NO_CONTEST
        or (base in PER_TOKEN and len(tokenizers) > 1)
    ):
        return NEITHER
    return HIGHER if base in HIGHER_IS_BETTER else LOWER


def _cell(entry: ReportEntry, rows: Sequence[ResultRow | None], kind: str) -> Cell | None:
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


def over_seeds(rows: Sequence[ResultRow]) -> Cell:
    """Return the mean of one figure over training seeds, with its interval.

    A single seed keeps its own interval. For n seeds it is

        mean -+ sqrt(w^2 + (t * sd / sqrt(n))^2)

    where w is the mean half-width of the seeds' intervals over sequences, which they share, so that
    more seeds do not narrow it; sd is the standard deviation of the seeds' values, and t is
    Student's quantile for n - 1 degrees of freedom.

    Args:
        rows: One row for each seed.
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
    lows = [row.value if row.low is None else row.low for row in rows]
    if min(*values, *lows) >= 0:  # a perplexity, for instance, is never negative
        low = max(low, 0.0)
    return Cell(mean, low, high, spread, len(rows))


def paper_figure(result: Result, row: ResultRow) -> PaperFigure | None:
    """Return the paper's figure for the question of this row, if it prints one.

    The data, length, contexts, tokenizer and way of counting must be the same.
    """
    model = result.manifest.get("model", {})
    config = model.get("config", {}) if isinstance(model, Mapping) else {}
    if config.get("vocab_size") != PAPER_TOKENS or config.get("decoder", "strided") != "strided":
        return None
    full = result.family == "tracformer" and config.get("encoder") == "full"
    question = {**result.options, **row.setting, "mode": result.mode}
    return find_paper_figure(FULL_ENCODER if full else result.family, row.metric, question)


def metric_name(metric: str) -> str:
    """Return a metric's name in words.

    >>> metric_name("bertscore[minilm-l6]"), metric_name("ece")
    ('BERTScore by minilm-l6', 'expected calibration error')
    """
    base, bracket, scorer = metric.partition("[")
    name = NAMES.get(base, base.replace("_", " "))
    return f"{name} by {scorer.rstrip(']')}" if bracket else name


def file_words(text: str) -> str:
    """Return text with everything but letters, digits, dots and dashes as underscores."""
    return re.sub(r"[^\w.-]+", "_", text).strip("_")


def column_labels(settings: Sequence[Setting]) -> tuple[list[str], str]:
    """Return what tells the settings apart, for each, and what they have in common.

    `contexts` is left out where `ratio` or `given` says the same.
    """
    dicts = [dict(setting) for setting in settings]
    keys = list(dict.fromkeys(key for each in dicts for key in each))
    varying = [key for key in keys if len({repr(each.get(key)) for each in dicts}) > 1]
    rest = [key for key in varying if key != "contexts"]
    if rest and len({tuple(repr(each.get(key)) for key in rest) for each in dicts}) == len(dicts):
        varying = rest
    common = ", ".join(
        f"{key} {_short(dicts[0][key])}"
        for key in keys
        if key not in varying and key in dicts[0] and key != "contexts"
    )
    if len(dicts) == 1 and not varying:
        return [common or "all"], ""
    labels = [", ".join(_short(each[key]) for key in varying if key in each) for each in dicts]
    return [label or "all" for label in labels], common


def setting_of(row: ResultRow) -> Setting:
    """Return a row's setting as a key."""
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in row.setting.items()
    )


def _short(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "/".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
