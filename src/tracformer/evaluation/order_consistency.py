"""The task `orders`: is a sequence equally probable along every order of its tokens (Fig. 2)?

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

from tracformer.data.tokenizer import AlphabetError
from tracformer.devices import wide
from tracformer.evaluation.bootstrap import mean_interval
from tracformer.evaluation.questions import Floats, by_sequence
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Sequences, TextTask
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.options import option

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
