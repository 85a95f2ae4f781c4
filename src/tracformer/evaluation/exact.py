"""The task `exact`: KL from the known conditionals, pattern by pattern.

The benchmark's hole patterns, a fixed list: from one missing token to one given, in runs, combs
and halves.

Two models whose score is known before it is measured: the truth, and the one that knows nothing.

One batch of a model's answers beside the truth.

    kl(t) = sum over v of p(x_t = v | known) log (p(x_t = v | known) / q(x_t = v | known))

p is the source's own conditional of the kind that the mode claims: p(x_t | x_C, x_<t) under `car`,
p(x_t | x_C) under `ac`, p(x_t | x_<t) under `ar`. The whole distribution is compared at each
target, so that the figure is zero for the truth and little is left to chance. A bound has no
distribution at a target: there the figure is the excess of its nats over those of log p(x_R | x_C).

A source as training data: sequences as documents of letters, one letter a symbol, in a prepared
folder like any other.

    tracformer prepare exact:hmm-16 --out data/hmm-16
    tracformer prepare exact:hmm-16,sequences=50000,seed=1 --out data/hmm-16

A document and its end of text fill length + 1 tokens, so `length=49` in training makes each packed
row one sequence of hmm-16. The benchmark puts the same end of text behind each sequence, as given.

The benchmark with exact answers: how far a model is from the truth, for each of a fixed list of
hole patterns, and where it is worst.

Sources whose every conditional is known, and the benchmark that holds models against them.
"""

import string
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tracformer.contexts import Context, parse, sequence_rng
from tracformer.data import DataSource, TextSource, Tokenizer, char_tokenizer
from tracformer.evaluation.bootstrap import ratio, ratio_interval
from tracformer.evaluation.exact_sources import (
    SMALLEST,
    VERSION,
    Floats,
    Known,
    Source,
    Tokens,
    describe_source,
    draw_sequences,
    find_source,
    log_joint,
    picked,
    source_names,
)
from tracformer.evaluation.provenance import array_hash
from tracformer.evaluation.questions import SHARED_NOISE, by_sequence, noise_groups, standard_error
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.evaluation.task import Progress, Subject, Task
from tracformer.model.base import BOUND, EXACT, MARGINAL, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.config import MODES, ModelConfig
from tracformer.rng import derived_seed

Pattern = Callable[[int, np.random.Generator], Context]
"""(length, rng) -> (length,) bool, True where given."""


def comb(step: int) -> Pattern:
    """Every `step`-th token is given, the others are targets."""
    return lambda length, rng: np.arange(length) % step == step - 1


def one_missing(length: int, rng: np.random.Generator) -> Context:
    return np.arange(length) != rng.integers(length)


def one_given(length: int, rng: np.random.Generator) -> Context:
    return np.arange(length) == rng.integers(length)


PATTERNS: dict[str, Pattern] = {
    "one": one_missing,
    "spans-20%-short": parse("span:p=0.2,mean=2").draw,
    "spans-20%-long": parse("span:p=0.2,mean=8").draw,
    "spans-50%-short": parse("span:p=0.5,mean=2").draw,
    "spans-50%-long": parse("span:p=0.5,mean=8").draw,
    "spans-80%-short": parse("span:p=0.8,mean=2").draw,
    "spans-80%-long": parse("span:p=0.8,mean=8").draw,
    "scattered-50%": parse("random:0.5").draw,
    "alternating": comb(2),
    "three-of-four": comb(4),
    "first-half": parse("[0.0,0.5]").draw,
    "last-half": parse("prefix:0.5").draw,
    "middle-half": parse("[0.25,0.75]").draw,
    "outer-half": parse("[0.0,0.25]&[0.75,1.0]").draw,
    "two-far": parse("[0.0,0.1]&[0.9,1.0]").draw,
    "all-but-one": one_given,
    "all": parse("empty").draw,
}


def find_patterns(names: Sequence[str]) -> dict[str, Pattern]:
    """Those of the list that are named, in the list's order; all of them if none is."""
    for name in names:
        if name not in PATTERNS:
            close = get_close_matches(name, PATTERNS, n=1)
            guess = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(
                f"there is no hole pattern {name!r}{guess}; available: {', '.join(PATTERNS)}"
            )
    return {name: pattern for name, pattern in PATTERNS.items() if not names or name in names}


def draw_pattern(pattern: Pattern, length: int, seed: int, numbers: range) -> Context:
    """(len(numbers), length): sequence i has the context that belongs to (seed, i),
    whoever draws it.
    """
    return np.stack([pattern(length, sequence_rng(seed, number)) for number in numbers])


@dataclass(frozen=True)
class KnownConfig(ModelConfig):
    model_type = "known"
    possible_modes = MODES
    presets = {}  # noqa: RUF012

    source: str = ""
    says: str = ""


class KnownModel(ConditionalModel):
    """Says what it is told to: its hidden states are log-probabilities in float64, and its head is
    the identity.
    """

    config: KnownConfig
    config_class = KnownConfig
    says: ClassVar[str]
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.config = KnownConfig(
            vocab_size=source.symbols, max_length=source.length, source=source.name, says=self.says
        )
        self.register_buffer(
            "identity", torch.eye(source.symbols, dtype=torch.float64), persistent=False
        )

    @abstractmethod
    def log_probs(self, tokens: Tokens, context: Known, mode: str) -> Floats:
        """(B, T, V)"""

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        shortest = int(batch.lengths.min())
        if shortest < self.source.length or batch.width != self.source.length:
            raise ValueError(
                f"sequences are {shortest} tokens long; source {self.source.name!r} makes "
                f"{self.source.length}"
            )
        tokens, context = batch.tokens.cpu().numpy().astype(np.int64), batch.context.cpu().numpy()
        logs = torch.from_numpy(self.log_probs(tokens, context, mode)).to(batch.device)
        return logs[wanted], wanted.flatten().nonzero()[:, 0]

    @property
    def head(self) -> Tensor:
        return self.get_buffer("identity")

    def blocks(self) -> list[nn.Module]:
        return []

    def embedding_tables(self) -> list[Tensor]:
        return []


class TruthModel(KnownModel):
    """The source's own conditionals: no model can do better."""

    says = "truth"

    def log_probs(self, tokens: Tokens, context: Known, mode: str) -> Floats:
        if mode == "car":
            return self.source.log_next(tokens, context)
        return (
            self.source.log_marginal(tokens, context)
            if mode == "ac"
            else self.source.log_left(tokens)
        )


class UniformModel(KnownModel):
    """Every symbol alike: its KL at a target is log V less the entropy of the truth there."""

    says = "uniform"

    def log_probs(self, tokens: Tokens, context: Known, mode: str) -> Floats:
        return np.full((*tokens.shape, self.source.symbols), -np.log(self.source.symbols))


FIGURES = ("kl", "prior", "nll", "truth", "targets")
BOUND_FIGURES = ("excess", "nll", "truth", "targets", "error")


def figures_of(subject: Subject) -> tuple[str, ...]:
    """What `compare` finds out.

    kl: from the truth. prior: KL from the truth to what is known of the position without any
    context. nll, truth: of the tokens that stand there, in the model's answer and in the truth's.
    excess: their difference. error: the standard error of nll, where it is an estimate.
    kl_full: from the truth that sees what follows, where the model does not.
    """
    if subject.kind == BOUND:
        return BOUND_FIGURES
    return (*FIGURES, "kl_full") if subject.mode == "ar" else FIGURES


def compare(
    subject: Subject,
    source: Source,
    tokens: Tokens,
    context: Known,
    numbers: range,
    draws: int,
    seed: int,
) -> dict[str, Floats]:
    """(B,) each: sums over the targets of each sequence, by figure.

    `numbers` are the sequences', for the noise of a bound.
    """
    targets = ~context
    counts = targets.sum(1).astype(np.float64)
    if subject.kind == BOUND:
        nll, error = bound(subject, source, tokens, context, numbers, draws, seed)
        truth = -log_joint(source, tokens, context)
        return {
            "excess": nll - truth,
            "nll": nll,
            "truth": truth,
            "targets": counts,
            "error": error,
        }
    row, position = targets.nonzero()  # (N,) each

    def summed(values: Floats) -> Floats:
        return np.asarray(np.bincount(row, values, minlength=len(tokens)), np.float64)

    asked = answers(subject, source, tokens, context)  # (N, V) or (N, V + 1)
    true = truth_of(source, tokens, context, subject.mode)  # (B, T, V)
    # (T, V), whatever the tokens are
    prior = source.log_marginal(tokens[:1], np.zeros_like(context[:1]))[0]
    figures = {
        "kl": summed(kl(true[targets], asked)),
        "prior": summed(kl(true[targets], prior[position])),
        "nll": -summed(np.take_along_axis(asked, tokens[targets][:, None], axis=1)[:, 0]),
        "truth": -summed(picked(true, tokens)[targets]),
        "targets": counts,
    }
    if subject.mode == "ar":
        figures["kl_full"] = summed(kl(source.log_next(tokens, context)[targets], asked))
    return figures


def kl(true: Floats, asked: Floats) -> Floats:
    """(N,) from log-probabilities (N, V); what `asked` gives to an end of text behind the symbols
    is lost to it.
    """
    p, q = np.exp(true), asked[:, : true.shape[1]]
    possible = p > 10 * SMALLEST
    return np.where(possible, p * (true - np.where(possible, q, 0.0)), 0.0).sum(1)


def truth_of(source: Source, tokens: Tokens, context: Known, mode: str) -> Floats:
    """(B, T, V): what the mode should say."""
    if mode == "ac":
        return source.log_marginal(tokens, context)
    return source.log_left(tokens) if mode == "ar" else source.log_next(tokens, context)


@torch.no_grad()
def answers(subject: Subject, source: Source, tokens: Tokens, context: Known) -> Floats:
    """(N, vocab_size): the model's log-probabilities at the targets, sequence by sequence."""
    batch = _batch(subject, source, tokens, context)
    logits = subject.model.logits_at(batch, subject.mode, batch.targets())
    found: Floats = logits.double().log_softmax(1).cpu().numpy()
    return found


@torch.no_grad()
def bound(
    subject: Subject,
    source: Source,
    tokens: Tokens,
    context: Known,
    numbers: range,
    draws: int,
    seed: int,
) -> tuple[Floats, Floats]:
    """(B,) each: a bound on -log p(x_R | x_C), from above, and its standard error. Every
    SHARED_NOISE sequences have noise of their own, in whichever batch they come.
    """
    groups = np.array(numbers) // SHARED_NOISE
    parts, errors = [], []
    for group in np.unique(groups).tolist():
        asked = _batch(subject, source, tokens[groups == group], context[groups == group])
        found = subject.model.estimate(
            asked, subject.mode, draws=draws, seed=derived_seed(seed, group + 1)
        )
        parts.append(-found.values.double().sum(1).cpu().numpy())
        errors.append(
            np.zeros(len(parts[-1]))
            if found.standard_error is None
            else found.standard_error.double().cpu().numpy()
        )
    return np.concatenate(parts), np.concatenate(errors)


def _batch(subject: Subject, source: Source, tokens: Tokens, context: Known) -> Batch:
    """A model with one token more than there are symbols has seen an end of text behind each
    sequence: it stands there, given.
    """
    if subject.model.config.vocab_size > source.symbols:
        tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=source.symbols)
        context = np.pad(context, ((0, 0), (0, 1)), constant_values=True)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(context)).to(subject.device)


PREFIX = "exact:"
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
SEQUENCES, SHARE_HELD = 20_000, 20  # a twentieth as many again for validation


@dataclass(frozen=True)
class Drawn:
    """What `exact:NAME,sequences=N,seed=S` asks for."""

    source: Source
    sequences: int = SEQUENCES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences is {self.sequences}; at least one must be drawn")

    @property
    def tokenizer(self) -> Tokenizer:
        return char_tokenizer(LETTERS[: self.source.symbols])

    @property
    def sizes(self) -> dict[str, int]:
        """Sequences of each split."""
        return {"train": self.sequences, "validation": max(1, self.sequences // SHARE_HELD)}

    def splits(self) -> dict[str, DataSource]:
        """Training and validation sequences, apart from each other and from those of
        the benchmark.
        """
        return {purpose: self._texts(purpose, count) for purpose, count in self.sizes.items()}

    def _texts(self, purpose: str, count: int) -> TextSource:
        tokens = draw_sequences(self.source, purpose, count, self.seed)
        texts = ["".join(LETTERS[symbol] for symbol in row) for row in tokens.tolist()]
        return TextSource(
            texts, f"{PREFIX}{self.source.name}, version {VERSION}, {purpose}, seed {self.seed}"
        )


def parse_exact(text: str) -> Drawn:
    name, *words = (part.strip() for part in text.removeprefix(PREFIX).split(","))
    options: dict[str, int] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in ("sequences", "seed") or not equals or not value.isdecimal():
            raise ValueError(f"{text!r}: {word!r} is not sequences=NUMBER or seed=NUMBER")
        options[key] = int(value)
    return Drawn(find_source(name), **options)


# a pattern is called wrong if even its interval's lower end is so many times the mean pattern
WRONG = 1.5
NOTHING = 1e-6  # nats a target: below it a difference from the truth is rounding


@dataclass(frozen=True)
class Exact(Task):
    """Rows: `kl` (of a bound, `excess`) in nats per target; and `missed`, the share that it is of
    KL(truth || prior), where the prior is what is known of a position without any context: 0 is the
    truth, 1 is no better than reading nothing. Under `ar` also `kl_full`, from the truth that sees
    what follows.
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
            raise ValueError(
                f"sequences is {self.sequences} and draws {self.draws}; each must be at least 1"
            )
        if self.version != VERSION:
            raise ValueError(
                f"version is {self.version}; this program draws from the sources of version "
                f"{VERSION}"
            )

    def asked_of(self, subject: Subject) -> "Exact":
        return self if subject.kind == BOUND else replace(self, draws=Exact.draws)

    def check(self, subject: Subject) -> None:
        super().check(subject)
        source, config = find_source(self.source), subject.model.config
        extra = config.vocab_size - source.symbols
        if extra not in (0, 1):
            raise ValueError(
                f"{subject.name} has {config.vocab_size} tokens; source {source.name!r} has "
                f"{source.symbols} symbols, and an end of text "
                f"behind them: train on what `tracformer prepare exact:{source.name} --out FOLDER` "
                "writes"
            )
        if config.max_length < source.length + extra:
            raise ValueError(
                f"{subject.name} takes at most {config.max_length} tokens; a sequence of source "
                f"{source.name!r} has "
                f"{source.length + extra}{', end of text included' if extra else ''}"
            )

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        source = find_source(self.source)
        contexts = [
            draw_pattern(each, source.length, self.seed, range(self.sequences))
            for each in find_patterns(self.patterns).values()
        ]
        return {"data": array_hash([self._tokens(source)]), "contexts": array_hash(contexts)}

    def run(self, subject: Subject, progress: Progress) -> Result:
        self.check(subject)
        source, patterns = find_source(self.source), find_patterns(self.patterns)
        tokens = self._tokens(source)
        progress.start(
            f"{subject.name} {subject.mode}: {self.name} {source.name}",
            len(patterns) * self.sequences,
        )
        rows: list[ResultRow] = []
        details: dict[str, Any] = {}
        for name, pattern in patterns.items():

            def ask(numbers: range, pattern: Pattern = pattern) -> dict[str, Floats]:
                context = draw_pattern(pattern, source.length, self.seed, numbers)
                return compare(
                    subject,
                    source,
                    tokens[numbers.start : numbers.stop],
                    context,
                    numbers,
                    self.draws,
                    self.seed,
                )

            details[name] = by_sequence(
                subject, ask, figures_of(subject), self.sequences, progress, name
            )
            rows += _rows(subject, source.name, name, details[name], self.draws)
        rows, ranking = rank(rows)
        about = {
            "name": source.name,
            "about": describe_source(source.name),
            "symbols": source.symbols,
            "length": source.length,
        }
        return self.result(subject, rows, {**details, "ranking": ranking, "source": about})

    def _tokens(self, source: Source) -> Tokens:
        return draw_sequences(source, "test", self.sequences, self.seed)


def _rows(
    subject: Subject, source: str, pattern: str, figures: Mapping[str, Floats], draws: int
) -> list[ResultRow]:
    """A pattern's figures, each a ratio of sums over sequences."""
    counts = figures["targets"]
    error = (
        standard_error(figures["excess"], figures["error"], counts)
        if subject.kind == BOUND
        else 0.0
    )
    told = f"{draws} draws, standard error of excess {error:.2g}" if subject.kind == BOUND else ""
    note = "; ".join(filter(None, (subject.note, told)))
    drawn = noise_groups if subject.kind == BOUND else np.asarray

    def row(metric: str, above: Floats, below: Floats) -> ResultRow:
        low, high = ratio_interval(drawn(above), drawn(below)) or (None, None)
        setting = {"source": source, "pattern": pattern}
        return ResultRow(
            metric,
            setting,
            ratio(above, below),
            low,
            high,
            subject.kind,
            len(counts),
            int(counts.sum()),
            note,
        )

    if subject.kind == BOUND:
        return [row("excess", figures["excess"], counts)]
    rows = [row("kl", figures["kl"], counts)]
    if figures["prior"].sum() > NOTHING * counts.sum():  # else there is nothing to miss
        rows.append(row("missed", figures["kl"], figures["prior"]))
    if "kl_full" in figures:
        rows.append(row("kl_full", figures["kl_full"], counts))
    return rows


def rank(rows: list[ResultRow]) -> tuple[list[ResultRow], list[dict[str, Any]]]:
    """The rows with a word on those patterns that the model gets wrong, and all patterns from the
    worst to the best.

    Wrong: further from the truth than the mean pattern, by so much that chance does not explain it.
    """
    judged = sorted(
        (row for row in rows if row.metric in ("kl", "excess")), key=lambda row: -row.value
    )
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


def _marked(row: ResultRow, mean: float) -> ResultRow:
    words = f"wrong on {row.setting['pattern']}: {row.value / mean:.1f} times the mean pattern"
    return replace(row, note="; ".join(filter(None, (words, row.note))))


__all__ = [
    "PATTERNS",
    "VERSION",
    "Exact",
    "Source",
    "TruthModel",
    "UniformModel",
    "describe_source",
    "draw_sequences",
    "find_source",
    "log_joint",
    "source_names",
]
