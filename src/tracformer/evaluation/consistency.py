"""Two tasks on whether a model's probabilities are right: `calibration` and `orders`.

`calibration`: if a model gives its likeliest token 70%, is it right 70% of the time?

    ECE = sum over bins of |sum of (right - confidence) in the bin| / number of targets

Targets are binned by confidence, the probability of the likeliest token. The absolute value turns
noise into error: even a calibrated model has a positive ECE, the more so the fewer targets a bin
holds. For n independent targets that are right with probabilities c, the sum of (right - c) is
about normal, and a bin shows sqrt(2/pi sum of c (1 - c)) by chance. A note says so where this is
much of the figure. The interval resamples sequences and is reflected about the estimate (basic
bootstrap), because resampling adds such noise once more.

`orders`: is a sequence equally probable along every order of its tokens (Fig. 2)?

    log p(x) = sum over i of log p(x_order[i] | x_order[<i], x_C)

is the same for every order if all conditionals belong to one joint distribution. `order_log_prob`
computes the terms along a given order, under any model that has mode `ac`.

The conditionals of all n! orders are those of n 2^(n-1) pairs of a token and a set of earlier ones,
and one pass answers all tokens outside a set. `along_all_orders` therefore takes 2^n - 1 passes for
each sequence: 31 instead of 600 for five tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.contexts import Spans
from tracformer.data.tokenizer import AlphabetError
from tracformer.devices import wide
from tracformer.evaluation.bootstrap import LEVEL, mean_interval, ratio, resampled, share_interval
from tracformer.evaluation.questions import Floats, by_sequence
from tracformer.evaluation.result_files import Result, ResultRow, array_hash
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Sequences, TextTask
from tracformer.model.base import ConditionalModel
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


TOKENS_AT_ONCE = 2**14


@torch.no_grad()
def order_log_prob(
    model: ConditionalModel,
    batch: Batch,
    order: Tensor,
    *,
    rows_at_once: int | None = None,
) -> Tensor:
    """Return the log-probability of each target given all that come earlier in an order, (B, T).

    Args:
        model: A model that has mode `ac`.
        batch: Sequences, of which some tokens may be given.
        order: (T,) or (B, T), a permutation of 0..T-1 in each row. Its entries for given tokens
            and padding are ignored.
        rows_at_once: Targets for which the network runs together, one row each.

    Returns:
        (B, T) log-probabilities, zero where given or padded.
    """
    tokens, (B, T) = batch.tokens, batch.tokens.shape
    turn = _turns(order.to(tokens.device), B, T)  # (B, T): when each position is revealed
    targets = batch.targets()
    b, position = targets.nonzero(as_tuple=True)  # (N,) each
    values = []
    for rows in torch.arange(len(b), device=tokens.device).split(
        rows_at_once or max(1, TOKENS_AT_ONCE // T)
    ):
        i, p = b[rows], position[rows]
        earlier = turn[i] < turn[i, p][:, None]
        wanted = torch.zeros_like(earlier)
        wanted[torch.arange(len(rows), device=tokens.device), p] = True
        known = batch.select(i).with_context(batch.context[i] | earlier)
        logits = model.logits_at(known, "ac", wanted)
        log_probs = logits.to(wide(logits.dtype)).log_softmax(-1)
        values.append(log_probs.gather(1, tokens[i, p].long()[:, None])[:, 0])
    found = torch.cat(values) if values else torch.zeros(0, device=tokens.device)
    return found.new_zeros(B, T).masked_scatter(targets, found)


def _turns(order: Tensor, B: int, T: int) -> Tensor:
    """Return when each position is revealed, (B, T)."""
    if order.shape not in ((T,), (B, T)):
        raise ValueError(f"order has shape {tuple(order.shape)}; it must be ({T},) or ({B}, {T})")
    order = order.long().expand(B, T)
    if not torch.equal(order.sort(1).values, torch.arange(T, device=order.device).expand(B, T)):
        raise ValueError(f"order must hold each of the positions 0..{T - 1} once in every row")
    return order.argsort(1)


LONGEST = 7  # tokens: 5,040 orders
FIGURES = ("highest", "lowest", "spread", "order_std", "forward", "reverse")


@dataclass(frozen=True)
class Orders(TextTask):
    """Log-likelihood of short sequences along all orders of their tokens.

    Rows, means over sequences: `spread`, the highest log-likelihood over orders less the lowest;
    `order_std`, the standard deviation over orders; `log_prob`, forward and reverse. The last also
    for one fixed text.
    """

    name = "orders"
    modes = ("ac",)

    length: int = option(
        5, f"tokens of each sequence, at most {LONGEST} because of n! orders", low=2, high=LONGEST
    )
    sequences: int = option(2000, "number of sequences; 0 takes all", low=0)
    text: str = option("The cat is cute", "a text to read forward and in reverse; empty: none")
    bins: int = option(40, "bins of the histogram of spreads", low=1)

    def read(self, subject: Subject) -> Sequences:
        """Return windows of `length` tokens of the model's own tokenizer."""
        return super().read(replace(subject, reference=None))

    def canonical(self, subject: Subject) -> "Orders":
        """Return the task without seed and count_eos: nothing is drawn, all tokens are targets."""
        return replace(self, seed=0, count_eos=False)

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Return the hash of the windows."""
        return {"data": self.read(subject).hash}

    def run(self, subject: Subject, progress: Progress) -> Result:
        """Return figures over all orders, and a histogram of the spreads."""
        self.check(subject)
        tokens = self.read(subject).tokens
        progress.start(f"{subject.name} {subject.mode}: {self.name}", len(tokens))

        def compute(numbers: range) -> dict[str, Floats]:
            return summarised(along_all_orders(subject, tokens[numbers.start : numbers.stop]))

        found = by_sequence(subject, compute, FIGURES, len(tokens), progress, "orders")
        rows = [_row(metric, {}, found[metric], self.length) for metric in ("spread", "order_std")]
        rows += [
            _row("log_prob", {"order": order}, found[order], self.length)
            for order in ("forward", "reverse")
        ]
        details: dict[str, Any] = {
            "sequences": found,
            "histogram": histogram(found["spread"], self.bins),
            "orders": len(orders(self.length)),
        }
        if self.text:
            details["text"], more = self._of_text(subject)
            rows += more
        return self.result(subject, rows, details)

    def _of_text(self, subject: Subject) -> tuple[dict[str, Any], list[ResultRow]]:
        """Return details and rows of the fixed text in both directions (Fig. 2a)."""
        tokenizer = subject.tokenizer
        assert tokenizer is not None  # checked by `read`
        try:
            ids = tokenizer.encode(self.text)
        except AlphabetError as error:
            return {"text": self.text, "note": f"left out: {error}"}, []
        if len(ids) > subject.model.config.max_length:
            return {
                "text": self.text,
                "note": f"left out: it has {len(ids)} tokens, more than the model takes",
            }, []
        tokens, forward = torch.tensor([ids], device=subject.device), torch.arange(len(ids))
        batch = Batch(tokens, torch.zeros_like(tokens, dtype=torch.bool))
        steps = {
            name: order_log_prob(subject.model, batch, order, rows_at_once=subject.batch)[0]
            .double()
            .tolist()
            for name, order in (("forward", forward), ("reverse", forward.flip(0)))
        }
        rows = [
            ResultRow(
                "log_prob",
                {"text": self.text, "order": name},
                sum(each),
                kind="marginal",
                sequences=1,
                targets=len(ids),
            )
            for name, each in steps.items()
        ]
        return {
            "text": self.text,
            "tokens": [tokenizer.decode([token], inside=i > 0) for i, token in enumerate(ids)],
            **steps,
        }, rows


@torch.no_grad()
def along_all_orders(subject: Subject, tokens: NDArray[np.int64]) -> Floats:
    """Return log-likelihoods (B, n!) of sequences (B, n) along each of `orders(n)`."""
    B, n = tokens.shape
    given = torch.tensor(
        [[bool(number >> t & 1) for t in range(n)] for number in range(2**n - 1)],
        device=subject.device,
    )
    # (B * sets, n)
    repeated = torch.from_numpy(tokens).to(subject.device).repeat_interleave(len(given), 0)
    log_probs = subject.model.log_prob(Batch(repeated, given.repeat(B, 1)), subject.mode)
    # (B, sets, n): log p(x_t | x_S) for every set S and t outside it
    table = log_probs.double().cpu().numpy().reshape(B, len(given), n)
    every = orders(n)
    return np.asarray(table[:, sets_before(every), every].sum(2))


@cache
def orders(n: int) -> NDArray[np.int64]:
    """Return all orders of n positions, (n!, n); the first is forward, the last reverse."""
    return np.array(list(permutations(range(n))))


def sets_before(every: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the set of positions before each one in its order, (n!, n).

    A set is a number whose bit t stands for position t.
    """
    bits = 1 << every
    return np.cumsum(bits, axis=1) - bits


def summarised(values: Floats) -> dict[str, Floats]:
    """Return FIGURES of each sequence, (B,) each, from log-likelihoods (B, n!)."""
    highest, lowest = values.max(1), values.min(1)
    return {
        "highest": highest,
        "lowest": lowest,
        "spread": highest - lowest,
        "order_std": values.std(1),
        "forward": values[:, 0],
        "reverse": values[:, -1],
    }


def histogram(values: Floats, bins: int) -> dict[str, list[float]]:
    """Return edges and counts of a histogram that begins at 0."""
    counts, edges = np.histogram(values, bins=bins, range=(0.0, max(float(values.max()), 1e-6)))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _row(metric: str, setting: Mapping[str, Any], values: Floats, length: int) -> ResultRow:
    low, high = mean_interval(values) or (None, None)
    return ResultRow(
        metric,
        setting,
        float(values.mean()),
        low,
        high,
        "marginal",
        len(values),
        len(values) * length,
    )
