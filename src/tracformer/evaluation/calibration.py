"""The task `calibration`: if a model gives its likeliest token 70%, is it right 70% of the time?

    ECE = sum over bins of |sum of (right - confidence) in the bin| / number of targets

Targets are binned by confidence, the probability of the likeliest token. The absolute value turns
noise into error: even a calibrated model has a positive ECE, the more so the fewer targets a bin
holds. For n independent targets that are right with probabilities c, the sum of (right - c) is
about normal, and a bin shows sqrt(2/pi sum of c (1 - c)) by chance. A note says so where this is
much of the figure. The interval resamples sequences and is reflected about the estimate (basic
bootstrap), because resampling adds such noise once more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracformer.contexts import Spans
from tracformer.evaluation.bootstrap import LEVEL, ratio, resampled, share_interval
from tracformer.evaluation.provenance import array_hash
from tracformer.evaluation.questions import Floats, by_sequence
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Sequences, TextTask
from tracformer.model.batch import Batch
from tracformer.options import option
from tracformer.spans import Geometric

LOGITS_AT_ONCE = 2**25  # 256 MiB in float64
# sums over the targets in a bin; `variance` is that of c (1 - c)
SUMS = ("targets", "right", "confidence", "variance")


@dataclass(frozen=True)
class Calibration(TextTask):
    """Expected calibration error, accuracy and mean confidence for each share of targets."""

    name = "calibration"
    modes = ("car", "ac", "ar")  # a bound has no probability of a single token

    sequences: int = option(200, "number of sequences; 0 takes all", low=0)
    ratios: tuple[float, ...] = option((0.2, 0.5, 0.8), "shares of targets")
    mean: float = option(10.0, "mean length of a span, in tokens")
    bins: int = option(15, "bins of confidence", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategies()  # raises for spans that are not allowed

    def strategies(self) -> list[Spans]:
        """Return spans for each share of targets."""
        return [Spans(p, Geometric(self.mean)) for p in self.ratios]

    def contexts(self, read: Sequences) -> list[Flags]:
        """Return a context (N, T) for each share of targets; padding counts as given."""
        inside = np.arange(read.tokens.shape[1]) < read.lengths[:, None]
        return [
            read.contexts(strategy, self.seed, self.count_eos) | ~inside
            for strategy in self.strategies()
        ]

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Return hashes of the windows and contexts."""
        read = self.read(subject)
        return {
            "data": read.hash,
            "contexts": array_hash([np.packbits(each) for each in self.contexts(read)]),
        }

    def run(self, subject: Subject, progress: Progress) -> Result:
        """Return figures and reliability diagrams."""
        self.check(subject)
        read = self.read(subject)
        progress.start(f"{subject.name} {subject.mode}: {self.name}", len(read) * len(self.ratios))
        rows: list[ResultRow] = []
        details: dict[str, Any] = {}
        logits = subject.model.config.vocab_size * read.tokens.shape[1]  # of one sequence
        at_once = max(1, min(subject.batch, LOGITS_AT_ONCE // logits))
        names = [f"{what}-{number}" for what in SUMS for number in range(self.bins)]
        for share, strategy, context in zip(
            self.ratios, self.strategies(), self.contexts(read), strict=True
        ):

            def compute(numbers: range, context: Flags = context) -> dict[str, Floats]:
                sums = binned(subject, read, context, numbers, self.bins)
                return dict(zip(names, sums.reshape(len(names), -1), strict=True))

            found = by_sequence(
                subject, compute, names, len(read), progress, f"ratio-{share:g}", at_once
            )
            sums = np.stack([found[name] for name in names])
            sums = sums.reshape(len(SUMS), self.bins, len(read))
            details[strategy.name] = {
                "bins": reliability(sums),
                "chance": by_chance(sums),
                "targets": sums[0].sum(0),
            }
            rows += figures({"contexts": strategy.name, "ratio": share}, sums, subject)
        return self.result(subject, rows, details)


@torch.no_grad()
def binned(subject: Subject, read: Sequences, context: Flags, numbers: range, bins: int) -> Floats:
    """Return the sums over the targets of each bin of confidence, (SUMS, bins, sequences)."""
    rows = slice(numbers.start, numbers.stop)
    tokens, given = (torch.from_numpy(x[rows]).to(subject.device) for x in (read.tokens, context))
    lengths = torch.from_numpy(read.lengths[rows]).to(subject.device)
    found = np.zeros((len(SUMS), bins, len(numbers)))
    if bool(given.all()):
        return found
    logits = subject.model.logits_at(Batch(tokens, given, lengths), subject.mode, ~given)
    top = logits.double().log_softmax(1).max(1)
    confidence = top.values.exp().cpu().numpy()
    right = (top.indices == tokens[~given]).cpu().numpy()
    sequence = (~given).nonzero()[:, 0].cpu().numpy()
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    for number, values in enumerate(
        (np.ones(len(right)), right, confidence, confidence * (1.0 - confidence))
    ):
        np.add.at(found[number], (place, sequence), values)
    return found


def reliability(sums: Floats) -> list[dict[str, float]]:
    """Return edges, mean confidence, accuracy and number of targets of each non-empty bin."""
    bins = sums.shape[1]
    totals = sums.sum(2)  # (SUMS, bins)
    return [
        {
            "low": b / bins,
            "high": (b + 1) / bins,
            "confidence": confidence / count,
            "accuracy": right / count,
            "targets": int(count),
        }
        for b, (count, right, confidence, _) in enumerate(totals.T.tolist())
        if count
    ]


def by_chance(sums: Floats) -> float:
    """Return the ECE that a calibrated model would show on these targets."""
    spread = np.sqrt(2.0 / np.pi * sums[3].sum(1))  # (bins,)
    return float(spread.sum() / sums[0].sum())


def expected_error(sums: Floats) -> tuple[float, float | None, float | None]:
    """Return the ECE and the ends of its interval from sums (SUMS, bins, sequences)."""
    targets, right, confidence, _ = sums
    gaps = right - confidence  # (bins, sequences)
    value = sum(abs(ratio(gap, targets.sum(0))) for gap in gaps)
    drawn = [
        resampled(gap, targets.sum(0)) for gap in gaps
    ]  # the resamples are the same for all bins
    if drawn[0] is None:
        return value, None, None
    errors = sum(np.abs(each) for each in drawn if each is not None)
    low, high = np.quantile(errors, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return value, max(0.0, 2 * value - float(high)), max(0.0, 2 * value - float(low))


def figures(setting: Mapping[str, Any], sums: Floats, subject: Subject) -> list[ResultRow]:
    """Return rows of ECE, accuracy and confidence from sums (SUMS, bins, sequences)."""
    targets, right, confidence, _ = sums.sum(1)  # (sequences,) each
    if not targets.any():
        raise ValueError(
            f"no sequence has a target under contexts {setting['contexts']!r}; use longer windows, "
            "or count_eos=true"
        )
    counts: dict[str, Any] = {
        "kind": subject.kind,
        "sequences": len(targets),
        "targets": int(targets.sum()),
        "note": subject.note,
    }
    value, low, high = expected_error(sums)
    chance = by_chance(sums)
    noisy = (
        f"about {chance:.2g} of it is chance: with so few targets even a calibrated model shows "
        "that"
        if chance > value / 2
        else ""
    )
    note = "; ".join(filter(None, (noisy, subject.note)))
    rows = [ResultRow("ece", setting, value, low, high, **{**counts, "note": note})]
    for name, part in (("accuracy", right), ("confidence", confidence)):
        low, high = share_interval(part, targets) or (None, None)
        rows.append(ResultRow(name, setting, ratio(part, targets), low, high, **counts))
    return rows
