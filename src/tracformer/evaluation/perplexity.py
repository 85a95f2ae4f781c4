"""Conditional perplexity on fixed sequences and contexts: `ratios`, `ranges`, `contexts`, ...

    perplexity = exp(sum over sequences of nll / sum over sequences of targets)
    bits per byte = sum over sequences of nll / log 2 / bytes of the targets

Every sequence is read under every context of the task. The tasks differ in their contexts: `Ratios`
(spans that cover a share of the text), `FixedRanges` (the paper's tables), `NamedContexts`,
`Prefixes` and `Unconditional`. Neither the batch nor the number of processes changes a figure.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tracformer.contexts import (
    Empty,
    Prefix,
    Spans,
    Strategy,
    parse,
)
from tracformer.evaluation import NoiseOptions, bootstrap
from tracformer.evaluation.questions import Answers, Floats, answer_contexts, noise_groups
from tracformer.evaluation.result_files import Result, ResultRow, array_hash
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Sequences, TextTask, Windows
from tracformer.model.base import BOUND
from tracformer.options import option
from tracformer.rng import derived_seed
from tracformer.spans import DLogistic, Geometric, LengthLaw

TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PAPER_RANGES = {  # targets, in the order of the paper's rows
    "table1": (
        "[0.25,0.75]",
        "[0.5,1]",
        "[0.1,0.4]&[0.6,0.9]",
        "[0,0.4]&[0.5,0.8]",
        "[0,0.25]&[0.75,1]",
        "[0,0.1]&[0.2,0.5]&[0.7,1]",
    ),
    "table2": (
        "[0.25,0.75]",
        "[0.1,0.4]&[0.6,0.9]",
        "[0,0.4]&[0.5,0.8]",
        "[0,0.25]&[0.75,1]",
        "[0.2,0.3]&[0.4,0.6]",
        "[0.1,0.9]",
    ),
}


@dataclass(frozen=True)
class Perplexity(TextTask, NoiseOptions):
    """Base class of the perplexity tasks; they differ in their contexts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategies()  # raises for contexts that are not allowed

    @property
    def times(self) -> int:
        """How often each context is drawn for each sequence."""
        return 1

    @abstractmethod
    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        """Return each context strategy, and the setting of its rows."""

    def canonical(self, subject: Subject) -> "Perplexity":
        """Return the task without `draws`, unless the model answers with a bound."""
        return self if subject.kind == BOUND else dataclasses.replace(self, draws=None)

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Return hashes of the windows and contexts, the same for all compared models."""
        windows = self.read(subject).windows
        return {"data": windows.hash, "contexts": _contexts_hash(self, windows)}

    def run(self, subject: Subject, progress: Progress) -> Result:
        """Return perplexity, nll and bits per byte under each context."""
        self.check(subject)
        read = self.read(subject)
        answers = answer_contexts(
            subject,
            read,
            _contexts(self, read),
            draws=self.draws,
            seed=self.seed,
            progress=progress,
            what=self.name,
        )
        answers = answers.summed(self.times)
        rows: list[ResultRow] = []
        details: dict[str, Any] = {}
        for number, (strategy, setting) in enumerate(self.strategies()):
            sums = answers.sums(number)
            details[strategy.name] = sums
            rows += figures(
                {"contexts": strategy.name, **setting},
                sums,
                subject,
                self._note(subject, answers, number),
            )
        return self.result(subject, rows, details)

    def _note(self, subject: Subject, answers: Answers, number: int) -> str:
        notes = [subject.note]
        if subject.kind == BOUND:
            drawn = self.draws or subject.model.default_draws or "the model's own number of"
            notes.append(
                f"{drawn} draws, standard error of nll {answers.standard_error(number):.2g}"
            )
        return "; ".join(filter(None, notes))


@lru_cache(maxsize=2)
def _contexts(task: Perplexity, read: Sequences) -> list[Flags]:
    """Return contexts (N, T) for each strategy and repeat; repeats of a strategy are adjacent."""
    return list(_drawn(task, read))


@lru_cache(maxsize=8)
def _contexts_hash(task: Perplexity, windows: Windows) -> str:
    return array_hash(np.packbits(context) for context in _drawn(task, windows))


def _drawn(task: Perplexity, read: Sequences | Windows) -> Iterator[Flags]:
    seeds = [task.seed, *(derived_seed(task.seed, number) for number in range(1, task.times))]
    for strategy, _ in task.strategies():
        yield from (read.contexts(strategy, seed, task.count_eos) for seed in seeds)


def figures(
    setting: Mapping[str, Any], sums: Mapping[str, Any], subject: Subject, note: str
) -> list[ResultRow]:
    """Return rows of perplexity, nll and, if bytes are known, bits per byte, with intervals.

    Intervals are over sequences, or for a bound over groups of sequences that share noise.
    """
    nll, targets = np.array(sums["nll"]), np.array(sums["targets"])
    counts: dict[str, Any] = {
        "kind": subject.kind,
        "sequences": len(nll),
        "targets": int(targets.sum()),
        "note": note,
    }
    if not targets.any():
        raise ValueError(
            f"no sequence has a target under contexts {setting['contexts']!r}; use longer windows, "
            "or count_eos=true"
        )
    drawn = noise_groups if subject.kind == BOUND else np.asarray

    def interval(above: Floats, below: Floats) -> tuple[float | None, float | None]:
        return bootstrap.ratio_interval(drawn(above), drawn(below)) or (None, None)

    value, (low, high) = bootstrap.ratio(nll, targets), interval(nll, targets)
    perplexity = bootstrap.perplexity_of(value)
    least, most = (None if end is None else bootstrap.perplexity_of(end) for end in (low, high))
    rows = [
        ResultRow("perplexity", setting, perplexity, least, most, **counts),
        ResultRow("nll", setting, value, low, high, **counts),
    ]
    if sums.get("bytes") is not None and sum(sums["bytes"]) > 0:
        bits, size = nll / math.log(2), np.array(sums["bytes"])
        value, (low, high) = bootstrap.ratio(bits, size), interval(bits, size)
        rows.append(ResultRow("bits_per_byte", setting, value, low, high, **counts))
    return rows


@dataclass(frozen=True)
class Ratios(Perplexity):
    """Perplexity against the share of targets, in random spans (Figs. 5, 6, 7; Table 11)."""

    name = "ratios"

    mean: float = option(50.0, "mean length of a span, in tokens")
    sd: float | None = option(
        None, "standard deviation for discretized logistic lengths; none: geometric lengths"
    )
    ratios: tuple[float, ...] = option(TENTHS, "shares of targets")

    @property
    def law(self) -> LengthLaw:
        """Distribution of span lengths."""
        return Geometric(self.mean) if self.sd is None else DLogistic(self.mean, self.sd)

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        """Return spans for each share of targets."""
        spans = (
            f"Geometric({self.mean:g})"
            if self.sd is None
            else f"DLogistic({self.mean:g},{self.sd:g})"
        )
        return [(Spans(p, self.law), {"ratio": p, "spans": spans}) for p in self.ratios]


@dataclass(frozen=True)
class NamedContexts(Perplexity):
    """Perplexity under contexts by name: `tokens:1`, `span:p=0.3,mean=3`, `prefix:0.5`."""

    name = "contexts"

    contexts: tuple[str, ...] = option(("span:p=0.5,mean=50",), "context strategies by name")
    repeats: int = option(
        1, "draws of each context for each sequence; their targets are counted together", low=1
    )

    @property
    def times(self) -> int:
        """How often each context is drawn for each sequence."""
        return self.repeats

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        """Return the named strategies, each once."""
        return [(parse(text), {}) for text in dict.fromkeys(self.contexts)]


@dataclass(frozen=True)
class FixedRanges(Perplexity):
    """Perplexity on fixed ranges of targets (Tables 1 and 2)."""

    name = "ranges"

    ranges: tuple[str, ...] = option(
        ("table2",), "table1, table2, or ranges of targets such as [0.1,0.4]&[0.6,0.9]"
    )

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        """Return the ranges, each once."""
        return [(strategy, {"ranges": strategy.name}) for strategy in range_strategies(self.ranges)]


@dataclass(frozen=True)
class Prefixes(Perplexity):
    """Perplexity of the rest of a sequence given its beginning (Fig. 1)."""

    name = "prefixes"

    fractions: tuple[float, ...] = option(TENTHS, "shares of the sequence that are given")

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        """Return a prefix for each share."""
        return [(Prefix(fraction), {"prefix": fraction}) for fraction in self.fractions]


@dataclass(frozen=True)
class Unconditional(Perplexity):
    """Perplexity of whole sequences (Table 4).

    Mode `car` knows the length of the sequence, mode `ar` does not.
    """

    name = "unconditional"

    count_eos: bool = option(True, "count end-of-text tokens as targets")

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        """Return the empty context."""
        return [(Empty(), {})]


def range_strategies(names: tuple[str, ...]) -> list[Strategy]:
    """Return ranges, and the ranges of tables by name, each once."""
    texts = [text for name in names for text in PAPER_RANGES.get(name, (name,))]
    for text in texts:
        if not text.startswith("["):
            raise ValueError(
                f"ranges is {text!r}; it must be {' or '.join(PAPER_RANGES)}, or a range such as "
                "[0.1,0.4]&[0.6,0.9]"
            )
    return [parse(text) for text in dict.fromkeys(texts)]
