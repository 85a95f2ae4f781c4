"""Conditional perplexity: exp of the negative log-likelihood per target, on fixed sequences and
contexts.

    perplexity = exp(sum over sequences of nll / sum over sequences of targets)
    bits per byte = sum over sequences of nll / log 2 / bytes of the targets

Every sequence meets every context of the task. Questions go to the model in blocks of sequences,
all contexts of a sequence side by side; a block's answers depend on nothing but the block, so that
neither the batch nor the number of processes changes a figure.
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
    DLogistic,
    Empty,
    Geometric,
    LengthLaw,
    Prefix,
    Spans,
    Strategy,
    parse,
)
from tracformer.evaluation import bootstrap
from tracformer.evaluation.provenance import array_hash
from tracformer.evaluation.questions import Answers, ask, noise_groups
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Sequences, TextTask, Windows
from tracformer.model.base import BOUND
from tracformer.rng import derived_seed

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
class Perplexity(TextTask):
    """What the tasks below have in common; they differ in their contexts."""

    # of noise for each sequence, where the model answers with a bound; None: as many as the model
    # thinks right
    draws: int | None = None

    @property
    def times(self) -> int:
        """Return how often each context is drawn for each sequence."""
        return 1

    @abstractmethod
    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        """Each context's law, and the setting that its rows are shown under."""

    def asked_of(self, subject: Subject) -> "Perplexity":
        return self if subject.kind == BOUND else dataclasses.replace(self, draws=None)

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """The windows and the contexts drawn on them, which are the same for all
        models that are compared.
        """
        windows = self.read(subject).windows
        return {"data": windows.hash, "contexts": _contexts_hash(self, windows)}

    def run(self, subject: Subject, progress: Progress) -> Result:
        self.check(subject)
        read = self.read(subject)
        answers = ask(
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
            sums = answers.of(number)
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
    """(N, T) for each strategy of a task and each repeat of it, repeats of a
    strategy side by side.
    """
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
    """Perplexity, nll and, where bytes are known, bits per byte, each with its interval: over
    sequences, or for a bound over groups of them that share noise.
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
    value, interval = (
        bootstrap.ratio(nll, targets),
        bootstrap.ratio_interval(drawn(nll), drawn(targets)),
    )
    rows = [
        ResultRow(
            "perplexity",
            setting,
            bootstrap.perplexity_of(value),
            *((None, None) if interval is None else map(bootstrap.perplexity_of, interval)),
            **counts,
        ),
        ResultRow("nll", setting, value, *(interval or (None, None)), **counts),
    ]
    if sums.get("bytes") is not None and sum(sums["bytes"]) > 0:
        bits, size = nll / math.log(2), np.array(sums["bytes"])
        interval = bootstrap.ratio_interval(drawn(bits), drawn(size))
        rows.append(
            ResultRow(
                "bits_per_byte",
                setting,
                bootstrap.ratio(bits, size),
                *(interval or (None, None)),
                **counts,
            )
        )
    return rows


@dataclass(frozen=True)
class Ratios(Perplexity):
    """Against the share of targets, in spans of one law of lengths (Figs. 5, 6, 7; Table 11)."""

    name = "ratios"

    mean: float = 50.0  # of a span, in tokens
    sd: float | None = None  # given: discretised logistic lengths; else geometric
    ratios: tuple[float, ...] = TENTHS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategies()

    @property
    def law(self) -> LengthLaw:
        return Geometric(self.mean) if self.sd is None else DLogistic(self.mean, self.sd)

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        spans = (
            f"Geometric({self.mean:g})"
            if self.sd is None
            else f"DLogistic({self.mean:g},{self.sd:g})"
        )
        return [(Spans(p, self.law), {"ratio": p, "spans": spans}) for p in self.ratios]


@dataclass(frozen=True)
class NamedContexts(Perplexity):
    """Under any contexts, each by its name: `tokens:1`, `span:p=0.3,mean=3`, `prefix:0.5`."""

    name = "contexts"

    contexts: tuple[str, ...] = ("span:p=0.5,mean=50",)
    repeats: int = 1  # draws of each context for each sequence; their targets count together

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategies()
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; it must be at least 1")

    @property
    def times(self) -> int:
        return self.repeats

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        return [(parse(text), {}) for text in dict.fromkeys(self.contexts)]


@dataclass(frozen=True)
class FixedRanges(Perplexity):
    """On fixed ranges of targets (Tables 1 and 2)."""

    name = "ranges"

    # a table of the paper, or ranges such as [0.1,0.4]&[0.6,0.9]
    ranges: tuple[str, ...] = ("table2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategies()

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        return [(strategy, {"ranges": strategy.name}) for strategy in range_strategies(self.ranges)]


@dataclass(frozen=True)
class Prefixes(Perplexity):
    """The rest of a sequence given its beginning (Fig. 1)."""

    name = "prefixes"

    fractions: tuple[float, ...] = TENTHS  # given

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategies()

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        return [(Prefix(fraction), {"prefix": fraction}) for fraction in self.fractions]


@dataclass(frozen=True)
class Unconditional(Perplexity):
    """Nothing is given (Table 4): in mode `car` but the length, in mode `ar` not even that."""

    name = "unconditional"

    count_eos: bool = True

    def strategies(self) -> list[tuple[Strategy, dict[str, Any]]]:
        return [(Empty(), {})]


def range_strategies(names: tuple[str, ...]) -> list[Strategy]:
    """Ranges, and whole tables of the paper by name, each range once."""
    texts = [text for name in names for text in PAPER_RANGES.get(name, (name,))]
    for text in texts:
        if not text.startswith("["):
            raise ValueError(
                f"ranges is {text!r}; write {' or '.join(PAPER_RANGES)}, or a range such as "
                "[0.1,0.4]&[0.6,0.9]"
            )
    return [parse(text) for text in dict.fromkeys(texts)]
