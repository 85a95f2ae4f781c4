"""The task `exact`: how far a model is from known conditionals, for a fixed list of contexts.

    kl(t) = sum over v of p(x_t = v | known) log (p(x_t = v | known) / q(x_t = v | known))

p is the conditional of the source that the mode claims to answer: p(x_t | x_C, x_<t) in mode `car`,
p(x_t | x_C) in mode `ac`, p(x_t | x_<t) in mode `ar`. Whole distributions are compared at each
target, so the figure is zero for the truth, with little sampling noise. A bound has no distribution
at a target: its figure is the excess of its nats over those of log p(x_R | x_C).

Here are the context patterns (`PATTERNS`), two models whose scores are known (`TruthModel`,
`UniformModel`), the comparison of a model with the truth (`compare`), and the task (`Exact`). The
sources are in `exact_sources.py`.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tracformer.contexts import Context, parse, sequence_rng
from tracformer.evaluation.bootstrap import ratio, ratio_interval
from tracformer.evaluation.exact_sources import (
    SMALLEST,
    VERSION,
    ExactSource,
    Floats,
    Known,
    Symbols,
    describe_source,
    draw_sequences,
    find_source,
    log_joint,
    picked,
)
from tracformer.evaluation.questions import SHARED_NOISE, by_sequence, noise_groups, standard_error
from tracformer.evaluation.result_files import Result, ResultRow, array_hash
from tracformer.evaluation.task import Progress, Subject, Task
from tracformer.model.base import BOUND, EXACT, MARGINAL, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.config import MODES, ModelConfig
from tracformer.options import did_you_mean, option
from tracformer.rng import derived_seed

# (length, rng) -> (length,) bool, True where given
Pattern = Callable[[int, np.random.Generator], Context]


def comb(step: int) -> Pattern:
    """Return a pattern in which every `step`-th token is given."""
    return lambda length, rng: np.arange(length) % step == step - 1


def one_missing(length: int, rng: np.random.Generator) -> Context:
    """Return a context with one target."""
    return np.arange(length) != rng.integers(length)


def one_given(length: int, rng: np.random.Generator) -> Context:
    """Return a context with one given token."""
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
    """Return the named patterns, in the order of PATTERNS; all of them if none is named."""
    for name in names:
        if name not in PATTERNS:
            raise ValueError(f"unknown pattern {name!r}{did_you_mean(name, PATTERNS)}")
    return {name: pattern for name, pattern in PATTERNS.items() if not names or name in names}


def draw_pattern(pattern: Pattern, length: int, seed: int, numbers: range) -> Context:
    """Return contexts (len(numbers), length); that of sequence i depends on (seed, i) alone."""
    return np.stack([pattern(length, sequence_rng(seed, number)) for number in numbers])


@dataclass(frozen=True)
class KnownConfig(ModelConfig):
    """Configuration of a model whose score is known."""

    model_type = "known"
    possible_modes = MODES
    presets = {}  # noqa: RUF012

    source: str = ""
    says: str = ""


class KnownModel(ConditionalModel):
    """A model that answers with given log-probabilities.

    They are its hidden states, in float64, and its head is the identity.
    """

    config: KnownConfig
    config_class = KnownConfig
    says: ClassVar[str]
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012

    def __init__(self, source: ExactSource) -> None:
        super().__init__()
        self.source = source
        self.config = KnownConfig(
            vocab_size=source.symbols, max_length=source.length, source=source.name, says=self.says
        )
        self.register_buffer(
            "identity", torch.eye(source.symbols, dtype=torch.float64), persistent=False
        )

    @abstractmethod
    def log_probs(self, tokens: Symbols, context: Known, mode: str) -> Floats:
        """Return the log-probabilities at every position, (B, T, V)."""

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities at the wanted positions, and the positions."""
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
        """The identity."""
        return self.get_buffer("identity")

    def blocks(self) -> list[nn.Module]:
        """Return no blocks."""
        return []

    def embedding_tables(self) -> list[Tensor]:
        """Return no tables."""
        return []


class TruthModel(KnownModel):
    """A model that answers with the source's own conditionals; its KL is zero."""

    says = "truth"

    def log_probs(self, tokens: Symbols, context: Known, mode: str) -> Floats:
        """Return the source's conditionals, (B, T, V)."""
        return truth_of(self.source, tokens, context, mode)


class UniformModel(KnownModel):
    """A model that finds all symbols equally likely; its KL is log V - entropy of the truth."""

    says = "uniform"

    def log_probs(self, tokens: Symbols, context: Known, mode: str) -> Floats:
        """Return -log V everywhere, (B, T, V)."""
        return np.full((*tokens.shape, self.source.symbols), -np.log(self.source.symbols))


FIGURES = ("kl", "prior", "nll", "truth", "targets")
BOUND_FIGURES = ("excess", "nll", "truth", "targets", "error")


def figures_of(subject: Subject) -> tuple[str, ...]:
    """Return the names of the figures that `compare` computes.

    - kl: KL from the truth to the model.
    - prior: KL from the truth to the distribution of the position without any context.
    - nll, truth: negative log-likelihood of the targets under the model and under the truth.
    - excess: nll - truth; error: standard error of nll, if it is an estimate.
    - kl_full: in mode `ar`, KL from the truth that also sees the given tokens after the target.
    """
    if subject.kind == BOUND:
        return BOUND_FIGURES
    return (*FIGURES, "kl_full") if subject.mode == "ar" else FIGURES


def compare(
    subject: Subject,
    source: ExactSource,
    tokens: Symbols,
    context: Known,
    numbers: range,
    draws: int,
    seed: int,
) -> dict[str, Floats]:
    """Return sums over the targets of each sequence, (B,) by figure; see `figures_of`.

    `numbers` are the numbers of the sequences, on which the noise of a bound depends.
    """
    targets = ~context
    counts = targets.sum(1).astype(np.float64)
    if subject.kind == BOUND:
        nll, error = bound(subject, source, tokens, context, numbers, draws, seed)
        truth = -log_joint(source, tokens, context)
        return dict(zip(BOUND_FIGURES, (nll - truth, nll, truth, counts, error), strict=True))
    row, position = targets.nonzero()  # (N,) each

    def summed(values: Floats) -> Floats:
        return np.asarray(np.bincount(row, values, minlength=len(tokens)), np.float64)

    answered = answers(subject, source, tokens, context)  # (N, V) or (N, V + 1)
    true = truth_of(source, tokens, context, subject.mode)  # (B, T, V)
    # (T, V); it does not depend on the tokens
    prior = source.log_marginal(tokens[:1], np.zeros_like(context[:1]))[0]
    figures = {
        "kl": summed(kl(true[targets], answered)),
        "prior": summed(kl(true[targets], prior[position])),
        "nll": -summed(np.take_along_axis(answered, tokens[targets][:, None], axis=1)[:, 0]),
        "truth": -summed(picked(true, tokens)[targets]),
        "targets": counts,
    }
    if subject.mode == "ar":
        figures["kl_full"] = summed(kl(source.log_next(tokens, context)[targets], answered))
    return figures


def kl(true: Floats, answered: Floats) -> Floats:
    """Return KL (N,) from log-probabilities (N, V).

    Probability that `answered` gives to an end of text, after the V symbols, is lost to it.
    """
    p, log_q = np.exp(true), answered[:, : true.shape[1]]
    possible = p > 10 * SMALLEST
    return np.where(possible, p * (true - np.where(possible, log_q, 0.0)), 0.0).sum(1)


def truth_of(source: ExactSource, tokens: Symbols, context: Known, mode: str) -> Floats:
    """Return the right answer in a mode, (B, T, V)."""
    if mode == "ac":
        return source.log_marginal(tokens, context)
    return source.log_left(tokens) if mode == "ar" else source.log_next(tokens, context)


@torch.no_grad()
def answers(subject: Subject, source: ExactSource, tokens: Symbols, context: Known) -> Floats:
    """Return the model's log-probabilities at the targets, (N, vocab_size)."""
    batch = _batch(subject, source, tokens, context)
    logits = subject.model.logits_at(batch, subject.mode, batch.targets())
    found: Floats = logits.double().log_softmax(1).cpu().numpy()
    return found


@torch.no_grad()
def bound(
    subject: Subject,
    source: ExactSource,
    tokens: Symbols,
    context: Known,
    numbers: range,
    draws: int,
    seed: int,
) -> tuple[Floats, Floats]:
    """Return an upper bound on -log p(x_R | x_C) and its standard error, (B,) each.

    Each SHARED_NOISE neighbouring sequences share noise, whatever the batch.
    """
    groups = np.array(numbers) // SHARED_NOISE
    parts, errors = [], []
    for group in np.unique(groups).tolist():
        batch = _batch(subject, source, tokens[groups == group], context[groups == group])
        found = subject.model.estimate(
            batch, subject.mode, draws=draws, seed=derived_seed(seed, group + 1)
        )
        parts.append(-found.values.double().sum(1).cpu().numpy())
        errors.append(
            np.zeros(len(parts[-1]))
            if found.standard_error is None
            else found.standard_error.double().cpu().numpy()
        )
    return np.concatenate(parts), np.concatenate(errors)


def _batch(subject: Subject, source: ExactSource, tokens: Symbols, context: Known) -> Batch:
    """Return sequences as the model reads them.

    A model with one token more than the source has symbols was trained with an end of text after
    each sequence; it is appended, as given.
    """
    if subject.model.config.vocab_size > source.symbols:
        tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=source.symbols)
        context = np.pad(context, ((0, 0), (0, 1)), constant_values=True)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(context)).to(subject.device)


WRONG = 1.5  # a pattern is marked if the lower end of its interval is this many times the mean
NOTHING = 1e-6  # nats per target; smaller differences from the truth are rounding


@dataclass(frozen=True)
class Exact(Task):
    """KL to the truth on sequences of an exact source, for each pattern of given tokens.

    Rows, in nats per target: `kl`, or `excess` of a bound. `missed` is kl as a share of
    KL(truth || prior), where the prior knows the position but no token: 0 is the truth, 1 is no
    better than reading nothing. In mode `ar` also `kl_full`, from the truth that sees what follows.
    """

    name = "exact"

    source: str = option("hmm-16", "name of the source")
    patterns: tuple[str, ...] = option((), "patterns of given tokens; none named: all")
    sequences: int = option(500, "number of sequences", low=1)
    seed: int = option(0, "random seed of sequences, contexts and noise")
    draws: int = option(
        64, "draws of noise for each sequence, if the model's answer is a bound", low=1
    )
    version: int = option(VERSION, "version of the sources; figures of others are not comparable")

    def __post_init__(self) -> None:
        super().__post_init__()
        find_source(self.source)
        object.__setattr__(self, "patterns", tuple(find_patterns(self.patterns)))
        if self.version != VERSION:
            raise ValueError(
                f"version is {self.version}; this program has version {VERSION} of the sources"
            )

    def canonical(self, subject: Subject) -> "Exact":
        """Return the task with `draws` at its default, unless the model answers with a bound."""
        return self if subject.kind == BOUND else replace(self, draws=Exact.draws)

    def check(self, subject: Subject) -> None:
        """Raise ValueError if the model's vocabulary or length does not fit the source."""
        super().check(subject)
        source, config = find_source(self.source), subject.model.config
        extra = config.vocab_size - source.symbols
        if extra not in (0, 1):
            raise ValueError(
                f"{subject.name} has {config.vocab_size} tokens; source {source.name!r} has "
                f"{source.symbols} symbols and an end of text; train on what "
                f"`tracformer prepare exact:{source.name} --out FOLDER` writes"
            )
        if config.max_length < source.length + extra:
            raise ValueError(
                f"{subject.name} takes at most {config.max_length} tokens; a sequence of source "
                f"{source.name!r} has {source.length + extra}"
                f"{', end of text included' if extra else ''}"
            )

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Return hashes of the sequences and contexts."""
        source = find_source(self.source)
        contexts = [
            draw_pattern(each, source.length, self.seed, range(self.sequences))
            for each in find_patterns(self.patterns).values()
        ]
        return {"data": array_hash([self._tokens(source)]), "contexts": array_hash(contexts)}

    def run(self, subject: Subject, progress: Progress) -> Result:
        """Return figures for each pattern, and the patterns from the worst to the best."""
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

            def compute(numbers: range, pattern: Pattern = pattern) -> dict[str, Floats]:
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
                subject, compute, figures_of(subject), self.sequences, progress, name
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

    def _tokens(self, source: ExactSource) -> Symbols:
        return draw_sequences(source, "test", self.sequences, self.seed)


def _rows(
    subject: Subject, source: str, pattern: str, figures: Mapping[str, Floats], draws: int
) -> list[ResultRow]:
    """Return the rows of a pattern; each figure is a ratio of sums over sequences."""
    counts = figures["targets"]
    error = (
        standard_error(figures["excess"], figures["error"], counts)
        if subject.kind == BOUND
        else 0.0
    )
    noise = f"{draws} draws, standard error of excess {error:.2g}" if subject.kind == BOUND else ""
    note = "; ".join(filter(None, (subject.note, noise)))
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
    if figures["prior"].sum() > NOTHING * counts.sum():  # else context does not matter
        rows.append(row("missed", figures["kl"], figures["prior"]))
    if "kl_full" in figures:
        rows.append(row("kl_full", figures["kl_full"], counts))
    return rows


def rank(rows: list[ResultRow]) -> tuple[list[ResultRow], list[dict[str, Any]]]:
    """Return the rows with notes on patterns that the model gets wrong, and a ranking of patterns.

    A pattern is wrong if its whole interval is above WRONG times the mean over patterns. The
    ranking is from the worst pattern to the best.
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
