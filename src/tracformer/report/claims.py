"""Verdicts on claims, computed from result files alone.

A claim says that one model's loss is below another's (`better`, `worse`), or that the two are equal
within a margin (`margin`), on some questions. The figure is the mean over the questions and their
settings of

    d = (sum of nll of `worse` - sum of nll of `better`) / number of targets

in nats per target, paired by sequence and by training seed. Its 95% interval combines in quadrature
the interval over sequences, which all seeds share, and Student's t times the standard error of the
seeds' mean. A claim

- holds, if the interval lies above 0 and no single setting's interval lies below it;
- is contradicted, if its interval, or that of a single setting, lies below 0;
- cannot be tested, if the interval contains 0, or if a model did not pass the gate: a model that
  gains too little over token frequencies from the context of one hidden token has not learned, and
  says nothing about its architecture;
- was not run, if a result is missing.

A claim about another figure than loss (`metric`) compares means whose intervals are not paired, or
one model's figure with a bound (`above`). Of several variants of `worse` (as published, with
another recipe) the best one among those that pass the gate is compared.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tracformer.evaluation.bootstrap import quantiles, resampled_sums, stretched, t_quantile
from tracformer.evaluation.questions import noise_groups
from tracformer.evaluation.result_files import Result
from tracformer.model.base import BOUND, MARGINAL
from tracformer.options import did_you_mean
from tracformer.report.collect import SEED, choose, over_seeds
from tracformer.report.tables import Cell

HOLDS, CONTRADICTED = "holds", "contradicted"
NOT_TESTABLE, NOT_RUN = "not testable here", "not run"
WHOLE = "whole"  # scores of fills are taken over the whole text


@dataclass(frozen=True)
class Question:
    """Results of one task that have these options; optionally only some of their contexts."""

    name: str
    task: str
    options: Mapping[str, Any]
    contexts: tuple[str, ...] = ()

    def asks(self, result: Result) -> bool:
        """Return whether a result answers this question."""
        return self.task == result.task and all(
            result.options.get(key) == value for key, value in self.options.items()
        )


@dataclass(frozen=True)
class Claim:
    """A claim and how it is tested; without `better` it is not tested, and `reason` says why.

    Args:
        place: Where it is made, such as "Figure 5 (a)".
        text: What it says.
        better: Model that is claimed to have the lower loss.
        worse: Variants of the model that it is compared with.
        questions: Names of questions.
        margin: If given, the claim is that the models differ by less than this, in nats.
        metric: Compare this figure, higher being better, rather than the loss.
        above: The claim is that the `metric` of `better` exceeds this.
        sizes: Parameters that a model is claimed to have, in millions, by model.
        reason: Why it cannot be tested.
    """

    place: str
    text: str
    better: str = ""
    worse: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    margin: float = 0.0
    metric: str = ""
    above: float | None = None
    sizes: Mapping[str, float] | None = None
    reason: str = ""


@dataclass(frozen=True)
class Difference:
    """A paired difference in nats per target, with its interval and the seeds behind it."""

    value: float
    low: float
    high: float
    seeds: int
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Verdict:
    """What the results say about a claim.

    Args:
        claim: The claim.
        outcome: One of the four outcomes.
        because: Why it is not testable, or what contradicts it.
        difference: The figure, if there is one.
        worse: The variant that was compared.
        results: The results that it rests on.
    """

    claim: Claim
    outcome: str
    because: str = ""
    difference: Difference | None = None
    worse: str = ""
    results: tuple[Result, ...] = ()

    @property
    def text(self) -> str:
        """The verdict in a few words."""
        one = self.difference is not None and self.difference.seeds == 1
        words = f"**{self.outcome}**" + (", one seed" if one and self.outcome in SETTLED else "")
        return f"{words}: {self.because}" if self.because else words


SETTLED = (HOLDS, CONTRADICTED)


@dataclass(frozen=True)
class Claims:
    """The claims of a file, its questions, and the gate that models must pass.

    Args:
        claims: The claims.
        questions: The questions, by name.
        gate: Name of the question with one hidden token.
        baseline: Model of the token frequencies.
        gain: Least gain over the baseline, in nats.
    """

    claims: tuple[Claim, ...]
    questions: Mapping[str, Question]
    gate: str
    baseline: str
    gain: float


def read_claims(path: str | PathLike[str]) -> Claims:
    """Read claims from a YAML file.

    Raises:
        ValueError: A claim has an unknown key or names an unknown question.
    """
    document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    questions = {}
    for name, values in document["questions"].items():
        options = dict(values)
        task, contexts = options.pop("task"), tuple(options.pop("only", ()))
        questions[name] = Question(name, task, options, contexts)
    claims = []
    for values in document["claims"]:
        unknown = [key for key in values if key not in Claim.__dataclass_fields__]
        if unknown:
            raise ValueError(f"{path}: a claim has the unknown key {unknown[0]!r}")
        lists = {key: tuple(values.get(key, ())) for key in ("worse", "questions")}
        claim = Claim(**{**values, **lists})
        for name in claim.questions:
            if name not in questions:
                raise ValueError(
                    f"{path}: {claim.place}: unknown question {name!r}"
                    f"{did_you_mean(name, questions)}"
                )
        claims.append(claim)
    gate = document["gate"]
    return Claims(tuple(claims), questions, gate["question"], gate["baseline"], gate["gain"])


class Judge:
    """Judge claims by results.

    Args:
        claims: The claims.
        results: Results of any number of models; of several for one question the newest counts.
    """

    def __init__(self, claims: Claims, results: Iterable[Result]) -> None:
        self.claims = claims
        self.results = choose(results)

    @cached_property
    def _by_model(self) -> dict[str, list[Result]]:
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(SEED.sub("", result.model), []).append(result)
        return found

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each claim, in order."""
        return [self.verdict(claim) for claim in self.claims.claims]

    def verdict(self, claim: Claim) -> Verdict:
        """Return the verdict on one claim.

        Raises:
            ValueError: Results of one comparison were made with different data, contexts or
                tokenizers.
        """
        if claim.reason:
            return Verdict(claim, NOT_TESTABLE, claim.reason)
        if claim.sizes is not None:
            return self._sizes(claim)
        models = (claim.better, *claim.worse)
        questions = [self.claims.questions[name] for name in claim.questions]
        needed = [(model, question) for model in models for question in questions]
        missing = [model for model, question in needed if not self.answers(model, question)]
        gains = {model: self.gain(model) for model in models}
        missing += [model for model, gain in gains.items() if gain is None]
        if missing:
            return Verdict(claim, NOT_RUN)
        passed = [model for model, gain in gains.items() if gain and gain >= self.claims.gain]
        variants = [model for model in claim.worse if model in passed]
        if claim.above is not None:
            variants = [claim.better]
        if claim.better not in passed or not variants:
            failed = [claim.better] if claim.better not in passed else list(claim.worse)
            gained = ", ".join(f"{model} gains {gains[model]:.2f} nats" for model in failed)
            because = f"{gained} from the context of one hidden token, less than {self.claims.gain}"
            return Verdict(claim, NOT_TESTABLE, because)
        found: dict[str, tuple[Difference, list[Difference]]] = {}
        for model in variants:
            found[model] = (
                (self._metric_difference(claim, model, questions), [])
                if claim.metric
                else self.difference(claim.better, model, questions)
            )
        worse = min(variants, key=lambda model: found[model][0].value)
        whole, settings = found[worse]
        results = tuple(
            result
            for model in dict.fromkeys((claim.better, worse))
            for question in questions
            for result in self.answers(model, question).values()
        )
        outcome, because = _outcome(whole, settings, claim.margin)
        return Verdict(claim, outcome, because, whole, worse, results)

    def gain(self, model: str) -> float | None:
        """Return what a model gains over token frequencies where one token is hidden, in nats.

        None if a result is missing. Of several seeds the smallest gain counts.
        """
        gate = self.claims.questions[self.claims.gate]
        own, base = self.answers(model, gate), self.answers(self.claims.baseline, gate)
        if not own or not base:
            return None
        floor = next(iter(base.values())).find("nll").value
        return min(floor - result.find("nll").value for result in own.values())

    def difference(
        self, better: str, worse: str, questions: Sequence[Question]
    ) -> tuple[Difference, list[Difference]]:
        """Return `worse` less `better` over all settings, and for each setting alone.

        Raises:
            ValueError: The results have no seed in common, or are not comparable.
        """
        nll, targets, names = [], [], []
        for question in questions:
            own, other = self.answers(better, question), self.answers(worse, question)
            seeds = sorted(own.keys() & other.keys())
            if not seeds:
                raise ValueError(f"{better} and {worse} have no training seed in common")
            pairs = [(own[seed], other[seed]) for seed in seeds]
            for first, second in pairs:
                require_comparable(first, second)
            for contexts in question.contexts or _contexts(pairs[0][0]):
                rows = [_sums(a, b, contexts) for a, b in pairs]
                nll.append(np.stack([row[0] for row in rows]))  # (S, N)
                targets.append(rows[0][1])
                names.append(contexts)
        seeds_of_each = min(len(each) for each in nll)
        nll = [each[:seeds_of_each] for each in nll]
        settings = [
            _estimate([a], [b], name) for a, b, name in zip(nll, targets, names, strict=True)
        ]
        return _estimate(nll, targets, ""), settings

    def _metric_difference(
        self, claim: Claim, worse: str, questions: Sequence[Question]
    ) -> Difference:
        """Return `better` less `worse` in the claim's metric, or less `above`; not paired."""

        def mean(model: str) -> Cell:
            rows = [
                row
                for question in questions
                for result in self.answers(model, question).values()
                for row in result.rows
                if row.metric.partition("[")[0] == claim.metric
                and row.setting.get("over", WHOLE) == WHOLE
            ]
            return over_seeds(rows)

        own = mean(claim.better)
        other = Cell(claim.above) if claim.above is not None else mean(worse)
        (down, up), (other_down, other_up) = _half_widths(own), _half_widths(other)
        value = own.value - other.value
        return Difference(
            value,
            value - math.hypot(down, other_up),
            value + math.hypot(up, other_down),
            own.seeds,
        )

    def answers(
        self, model: str, question: Question, kinds: Sequence[str] = ()
    ) -> dict[str, Result]:
        """Return a model's results for a question, by training seed.

        Args:
            model: Name of the model, without seed.
            question: The question.
            kinds: Kinds of figures that count. By default marginals count only where the model did
                not answer with a joint probability or a bound.
        """
        found: dict[str, Result] = {}
        answers = [each for each in self._by_model.get(model, []) if question.asks(each)]
        if kinds:
            answers = [each for each in answers if each.rows[0].kind in kinds]
        # a joint probability comes last, and replaces a marginal
        for result in sorted(answers, key=lambda each: each.rows[0].kind != MARGINAL):
            seed = SEED.search(result.model)
            found[seed[0] if seed else " #0"] = result
        return found

    def _sizes(self, claim: Claim) -> Verdict:
        assert claim.sizes is not None
        wrong, results = [], []
        for model, millions in claim.sizes.items():
            found = [each for each in self._by_model.get(model, []) if each.task == "sizes"]
            if not found:
                return Verdict(claim, NOT_RUN)
            results.append(found[0])
            counted = found[0].find("parameters").value / 1e6
            if abs(counted - millions) >= 1:  # printed as a whole number, rounded or cut
                wrong.append(f"{model} has {counted:.1f}M, not {millions:g}M")
        outcome = CONTRADICTED if wrong else HOLDS
        return Verdict(claim, outcome, ", ".join(wrong), results=tuple(results))


def require_comparable(first: Result, other: Result) -> None:
    """Raise ValueError unless two results have the same data, contexts and tokenizer."""
    hashes, others = first.manifest.get("hashes", {}), other.manifest.get("hashes", {})
    for key in ("data", "contexts", "tokenizer"):
        if hashes.get(key) != others.get(key):
            raise ValueError(
                f"{first.model} and {other.model} (task {first.task}) cannot stand in one table: "
                f"their {key} differ ({str(hashes.get(key))[:12]} and "
                f"{str(others.get(key))[:12]}); evaluate both on the same"
            )
    if first.schemas["task"] != other.schemas["task"]:
        raise ValueError(
            f"{first.model} and {other.model} were evaluated by different versions of task "
            f"{first.task}; evaluate both again"
        )


def _half_widths(cell: Cell) -> tuple[float, float]:
    low = cell.value if cell.low is None else cell.low
    high = cell.value if cell.high is None else cell.high
    return cell.value - low, high - cell.value


def _contexts(result: Result) -> list[str]:
    return [str(row.setting["contexts"]) for row in result.rows if row.metric == "nll"]


def _sums(better: Result, worse: Result, contexts: str) -> tuple[Any, Any]:
    """Return the difference in nll and the number of targets of each sequence, or noise group."""
    own, other = better.details[contexts], worse.details[contexts]
    nll = np.array(other["nll"], np.float64) - np.array(own["nll"], np.float64)
    targets = np.array(own["targets"], np.float64)
    kinds = {result.find("nll", contexts=contexts).kind for result in (better, worse)}
    return (noise_groups(nll), noise_groups(targets)) if BOUND in kinds else (nll, targets)


def _estimate(nll: Sequence[Any], targets: Sequence[Any], setting: str) -> Difference:
    """Return the mean over settings of the difference per target.

    Args:
        nll: For each setting (S, N), the difference of each seed and sequence.
        targets: For each setting (N,).
        setting: Name of the setting.
    """
    by_seed = [
        statistics.fmean(
            float(each[seed].sum() / count.sum()) for each, count in zip(nll, targets, strict=True)
        )
        for seed in range(len(nll[0]))
    ]
    value = statistics.fmean(by_seed)
    columns = [each.mean(0) for each in nll] + list(targets)
    sums = resampled_sums(np.stack(columns, axis=1))
    assert sums is not None, "a difference needs at least two sequences"
    ratios = sums[:, : len(nll)] / sums[:, len(nll) :]
    low, high = stretched(quantiles(ratios.mean(1)), value, len(columns[0]))
    between = 0.0
    if len(by_seed) > 1:
        error = statistics.stdev(by_seed) / math.sqrt(len(by_seed))
        between = t_quantile(len(by_seed) - 1) * error
    return Difference(
        value,
        value - math.hypot(value - low, between),
        value + math.hypot(high - value, between),
        len(by_seed),
        setting,
    )


def _outcome(whole: Difference, settings: Sequence[Difference], margin: float) -> tuple[str, str]:
    if margin:
        if -margin < whole.low and whole.high < margin:
            return HOLDS, ""
        if whole.low >= margin or whole.high <= -margin:
            return CONTRADICTED, ""
        return NOT_TESTABLE, f"the interval is wider than the margin of {margin:g} nats"
    against = [each for each in settings if each.high < 0]
    if whole.high < 0:
        return CONTRADICTED, ""
    if against:
        worst = min(against, key=lambda each: each.value)
        return CONTRADICTED, f"{worst} at {worst.setting}"
    if whole.low > 0:
        return HOLDS, ""
    return NOT_TESTABLE, "the interval of the difference contains 0"
