"""Calibration: of the targets to whose likeliest token a model gives about 70%, is 70% right?

    ECE = sum over bins of |sum of (right - confidence) in the bin| / number of targets

The absolute value turns noise into error, so that even a calibrated model shows some, the more the
fewer targets a bin holds. Of n targets right with probabilities c, independently, the sum of (right
- c) is about normal: a bin shows sqrt(2/pi sum of c (1 - c)) by chance. That is told where it is
much of the figure. The interval resamples sequences, and is reflected about the estimate (the basic
bootstrap), for resampling adds such noise once more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tracformer.contexts import Geometric, Spans
from tracformer.evaluation.bootstrap import LEVEL, ratio, resampled, share_interval
from tracformer.evaluation.provenance import array_hash
from tracformer.evaluation.questions import Floats, by_sequence
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Sequences, TextTask
from tracformer.model.batch import Batch

LOGITS_AT_ONCE = 2**25  # 256 MiB in float64
# of the targets in a bin; the last is c (1 - c)
SUMS = ("targets", "right", "confidence", "variance")


@dataclass(frozen=True)
class Calibration(TextTask):
    """Rows for each share of targets: `ece`, `accuracy` of the likeliest token, and
    its mean `confidence`.
    """

    name = "calibration"
    modes = ("car", "ac", "ar")  # a bound has no probability of a single token

    sequences: int = 200
    ratios: tuple[float, ...] = (0.2, 0.5, 0.8)
    mean: float = 10.0  # of a span, in tokens
    bins: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strategies()
        if self.bins < 1:
            raise ValueError(f"bins is {self.bins}; there must be at least one")

    def strategies(self) -> list[Spans]:
        return [Spans(p, Geometric(self.mean)) for p in self.ratios]

    def contexts(self, read: Sequences) -> list[Flags]:
        inside = np.arange(read.tokens.shape[1]) < read.lengths[:, None]
        return [
            read.contexts(strategy, self.seed, self.count_eos) | ~inside
            for strategy in self.strategies()
        ]

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        read = self.read(subject)
        return {
            "data": read.hash,
            "contexts": array_hash([np.packbits(each) for each in self.contexts(read)]),
        }

    def run(self, subject: Subject, progress: Progress) -> Result:
        self.check(subject)
        read = self.read(subject)
        progress.start(f"{subject.name} {subject.mode}: {self.name}", len(read) * len(self.ratios))
        rows: list[ResultRow] = []
        details: dict[str, Any] = {}
        at_once = max(
            1,
            min(
                subject.batch,
                LOGITS_AT_ONCE // (subject.model.config.vocab_size * read.tokens.shape[1]),
            ),
        )
        names = [f"{what}-{number}" for what in SUMS for number in range(self.bins)]
        for ratio_of, strategy, context in zip(
            self.ratios, self.strategies(), self.contexts(read), strict=True
        ):

            def ask(numbers: range, context: Flags = context) -> dict[str, Floats]:
                return dict(
                    zip(
                        names,
                        binned(subject, read, context, numbers, self.bins).reshape(len(names), -1),
                        strict=True,
                    )
                )

            found = by_sequence(
                subject, ask, names, len(read), progress, f"ratio-{ratio_of:g}", at_once
            )
            sums = np.stack([found[name] for name in names]).reshape(
                len(SUMS), self.bins, len(read)
            )
            details[strategy.name] = {
                "bins": reliability(sums),
                "chance": by_chance(sums),
                "targets": sums[0].sum(0),
            }
            rows += figures({"contexts": strategy.name, "ratio": ratio_of}, sums, subject)
        return self.result(subject, rows, details)


@torch.no_grad()
def binned(subject: Subject, read: Sequences, context: Flags, numbers: range, bins: int) -> Floats:
    """(SUMS, bins, sequences): over the targets of each bin of confidence."""
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
    """The bins that hold a target: their edges, mean confidence, share that was
    right, and number of targets.
    """
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
    """The ECE that a calibrated model would show on so many targets."""
    spread = np.sqrt(2.0 / np.pi * sums[3].sum(1))  # (bins,)
    return float(spread.sum() / sums[0].sum())


def expected_error(sums: Floats) -> tuple[float, float | None, float | None]:
    """ECE and its interval from (SUMS, bins, sequences)."""
    targets, right, confidence, _ = sums
    gaps = right - confidence  # (bins, sequences)
    value = sum(abs(ratio(gap, targets.sum(0))) for gap in gaps)
    drawn = [resampled(gap, targets.sum(0)) for gap in gaps]  # of the same resamples
    if drawn[0] is None:
        return value, None, None
    errors = sum(np.abs(each) for each in drawn if each is not None)
    low, high = np.quantile(errors, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return value, max(0.0, 2 * value - float(high)), max(0.0, 2 * value - float(low))


def figures(setting: Mapping[str, Any], sums: Floats, subject: Subject) -> list[ResultRow]:
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
    shares = (("accuracy", right), ("confidence", confidence))
    value, low, high = expected_error(sums)
    chance = by_chance(sums)
    noisy = (
        f"about {chance:.2g} of it is chance: with so few targets even a calibrated model shows "
        "that"
        if chance > value / 2
        else ""
    )
    return [
        ResultRow(
            "ece",
            setting,
            value,
            low,
            high,
            **{**counts, "note": "; ".join(filter(None, (noisy, subject.note)))},
        ),
        *(
            ResultRow(
                name,
                setting,
                ratio(x, targets),
                *(share_interval(x, targets) or (None, None)),
                **counts,
            )
            for name, x in shares
        ),
    ]
