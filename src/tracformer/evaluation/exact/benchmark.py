"""The benchmark with exact answers: how far a model is from the truth, for each of a fixed list of hole patterns, and where it is worst."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tracformer.evaluation.answers import noise_groups, standard_error
from tracformer.evaluation.bootstrap import ratio, ratio_interval
from tracformer.evaluation.exact.catalogue import VERSION, describe_source, draw_sequences, find_source
from tracformer.evaluation.exact.compare import compare, figures_of
from tracformer.evaluation.exact.patterns import Pattern, draw_pattern, find_patterns
from tracformer.evaluation.exact.sources import Floats, Source, Tokens
from tracformer.evaluation.gathering import by_sequence
from tracformer.evaluation.manifest import array_hash
from tracformer.evaluation.results import Result, Row
from tracformer.evaluation.tasks import Progress, Subject, Task
from tracformer.model.base import BOUND

WRONG = 1.5  # a pattern is called wrong if even its interval's lower end is so many times the mean pattern
NOTHING = 1e-6  # nats a target: below it a difference from the truth is rounding


@dataclass(frozen=True)
class Exact(Task):
    """Rows: `kl` (of a bound, `excess`) in nats per target; and `missed`, the share that it is of KL(truth || prior), where the prior is
    what is known of a position without any context: 0 is the truth, 1 is no better than reading nothing. Under `ar` also `kl_full`,
    from the truth that sees what follows.
    """

    name = "exact"

    source: str = "hmm-16"
    patterns: tuple[str, ...] = ()  # some of the list; none named: all
    sequences: int = 500
    seed: int = 0
    draws: int = 64  # of noise for each sequence, where the model answers with a bound
    version: int = VERSION  # of the sources: figures of another version don't compare

    def __post_init__(self) -> None:
        find_source(self.source)
        object.__setattr__(self, "patterns", tuple(find_patterns(self.patterns)))
        if self.sequences < 1 or self.draws < 1:
            raise ValueError(f"sequences is {self.sequences} and draws {self.draws}; each must be at least 1")
        if self.version != VERSION:
            raise ValueError(f"version is {self.version}; this program draws from the sources of version {VERSION}")

    def asked_of(self, subject: Subject) -> "Exact":
        return self if subject.kind == BOUND else replace(self, draws=Exact.draws)

    def check(self, subject: Subject) -> None:
        super().check(subject)
        source, config = find_source(self.source), subject.model.config
        extra = config.vocab_size - source.symbols
        if extra not in (0, 1):
            raise ValueError(
                f"{subject.name} has {config.vocab_size} tokens; source {source.name!r} has {source.symbols} symbols, and an end of text "
                f"behind them: train on what `tracformer prepare exact:{source.name} --out FOLDER` writes"
            )
        if config.max_length < source.length + extra:
            raise ValueError(
                f"{subject.name} takes at most {config.max_length} tokens; a sequence of source {source.name!r} has "
                f"{source.length + extra}{', end of text included' if extra else ''}"
            )

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        source = find_source(self.source)
        contexts = [draw_pattern(each, source.length, self.seed, range(self.sequences)) for each in find_patterns(self.patterns).values()]
        return {"data": array_hash([self._tokens(source)]), "contexts": array_hash(contexts)}

    def run(self, subject: Subject, progress: Progress) -> Result:
        self.check(subject)
        source, patterns = find_source(self.source), find_patterns(self.patterns)
        tokens = self._tokens(source)
        progress.start(f"{subject.name} {subject.mode}: {self.name} {source.name}", len(patterns) * self.sequences)
        rows: list[Row] = []
        details: dict[str, Any] = {}
        for name, pattern in patterns.items():

            def ask(numbers: range, pattern: Pattern = pattern) -> dict[str, Floats]:
                context = draw_pattern(pattern, source.length, self.seed, numbers)
                return compare(subject, source, tokens[numbers.start : numbers.stop], context, numbers, self.draws, self.seed)

            details[name] = by_sequence(subject, ask, figures_of(subject), self.sequences, progress, name)
            rows += _rows(subject, source.name, name, details[name], self.draws)
        rows, ranking = rank(rows)
        about = {"name": source.name, "about": describe_source(source.name), "symbols": source.symbols, "length": source.length}
        return self.result(subject, rows, {**details, "ranking": ranking, "source": about})

    def _tokens(self, source: Source) -> Tokens:
        return draw_sequences(source, "test", self.sequences, self.seed)


def _rows(subject: Subject, source: str, pattern: str, figures: Mapping[str, Floats], draws: int) -> list[Row]:
    """A pattern's figures, each a ratio of sums over sequences."""
    counts = figures["targets"]
    error = standard_error(figures["excess"], figures["error"], counts) if subject.kind == BOUND else 0.0
    told = f"{draws} draws, standard error of excess {error:.2g}" if subject.kind == BOUND else ""
    note = "; ".join(filter(None, (subject.note, told)))
    drawn = noise_groups if subject.kind == BOUND else np.asarray

    def row(metric: str, above: Floats, below: Floats) -> Row:
        low, high = ratio_interval(drawn(above), drawn(below)) or (None, None)
        setting = {"source": source, "pattern": pattern}
        return Row(metric, setting, ratio(above, below), low, high, subject.kind, len(counts), int(counts.sum()), note)

    if subject.kind == BOUND:
        return [row("excess", figures["excess"], counts)]
    rows = [row("kl", figures["kl"], counts)]
    if figures["prior"].sum() > NOTHING * counts.sum():  # else there is nothing to miss
        rows.append(row("missed", figures["kl"], figures["prior"]))
    if "kl_full" in figures:
        rows.append(row("kl_full", figures["kl_full"], counts))
    return rows


def rank(rows: list[Row]) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows with a word on those patterns that the model gets wrong, and all patterns from the worst to the best.

    Wrong: further from the truth than the mean pattern, by so much that chance does not explain it.
    """
    judged = sorted((row for row in rows if row.metric in ("kl", "excess")), key=lambda row: -row.value)
    mean = float(np.mean([row.value for row in judged]))
    missed = {row.setting["pattern"]: row.value for row in rows if row.metric == "missed"}
    wrong = [row for row in judged if row.low is not None and row.low > max(WRONG * mean, NOTHING)]
    ranking = [
        {
            "pattern": row.setting["pattern"],
            row.metric: row.value,
            "missed": missed.get(row.setting["pattern"]),
            "times_mean": row.value / mean if mean > NOTHING else None,
            "wrong": row in wrong,
        }
        for row in judged
    ]
    return [_marked(row, mean) if row in wrong else row for row in rows], ranking


def _marked(row: Row, mean: float) -> Row:
    words = f"wrong on {row.setting['pattern']}: {row.value / mean:.1f} times the mean pattern"
    return replace(row, note="; ".join(filter(None, (words, row.note))))
