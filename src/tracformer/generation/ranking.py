"""Rank fills of one text.

- `reread`: by both estimates of their log-probability.
- `scored`: the scores by which quality `best` ranks its candidates, of all lengths.
- `left_to_right`, `distinct`: what both need.

With `reread`, candidates are ranked by two estimates of one number, from the same model:

    log p(fill | before, after) = log p(fill | before)
                                  + log p(after | before, fill) - log p(after | before)

Mode `car` gives the left side: it knows what follows from the start. Mode `ar` gives the right
side, and notices where what follows no longer fits. The last term is the same for all fills of a
text. The two estimates err in different places, so their sum is better than either.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from tracformer.generation.continuation import joined
from tracformer.generation.decode import Runner
from tracformer.generation.results import Infilled
from tracformer.generation.template import BlankLayout, to_batch

# Quality `best` ranks fills of all lengths by log p of the fill in `car` + log p of the whole text
# in `ar` + a reward for the length L of each blank, LENGTH_REWARD * L**LENGTH_POWER. Without a
# reward short fills win, and one that grows with every token alike lets some fills run on.
# Measured by benchmarks/length_reward.py, which prints the mean error of the length in holes of 3
# to 16 tokens.
LENGTH_REWARD, LENGTH_POWER = 2.7, 0.7


def scored(
    runner: Runner,
    results: Sequence[Infilled],
    log_prior: Callable[[tuple[int, ...]], float],
    batch: int,
    *,
    twice: bool,
) -> list[Infilled]:
    """Return fills with the scores by which quality `best` ranks them.

    Args:
        runner: Runs the model.
        results: Fills of one text, which may differ in their lengths.
        log_prior: Logarithm of the prior of the lengths of the blanks.
        batch: Number of sequences per pass.
        twice: Add the log-probability of the whole text in mode `ar`.
    """
    again = [0.0] * len(results)
    if twice:
        again = left_to_right(runner, [result.token_ids for result in results], batch)
    lengths = [lengths_of(result) for result in results]
    scores = [
        result.log_prob + whole + length_reward(vector, twice=twice) + log_prior(vector)
        for result, whole, vector in zip(results, again, lengths, strict=True)
    ]
    return [replace(result, score=score) for result, score in zip(results, scores, strict=True)]


def length_reward(lengths: Sequence[int], *, twice: bool) -> float:
    """Return what the lengths of the blanks add to a score of one or two log-probabilities."""
    reward = LENGTH_REWARD * sum(length**LENGTH_POWER for length in lengths)
    return reward if twice else reward / 2


def lengths_of(result: Infilled) -> tuple[int, ...]:
    """Return the number of tokens of each blank."""
    return tuple(len(span.token_ids) for span in result.spans)


def log_joint(result: Infilled) -> float:
    """Return the log-probability of a fill together with its lengths, if these were weighed."""
    choice = result.length_choice
    if choice is None:
        return result.log_prob
    chosen = choice.lengths.index(choice.chosen)
    return result.log_prob + choice.log_probabilities[chosen]


def reread(
    runner: Runner, results: Sequence[Infilled], own: Sequence[float], batch: int
) -> list[Infilled]:
    """Return fills of one text, ranked by both estimates of their log-probability.

    Args:
        runner: Runs the model.
        results: The fills.
        own: The first estimate of each, in nats.
        batch: Number of sequences per pass.
    """
    again = left_to_right(runner, [result.token_ids for result in results], batch)
    # the first estimate in mode `ar` is part of the second
    both = [
        second if result.mode == "ar" else first + second
        for result, first, second in zip(results, own, again, strict=True)
    ]
    order = sorted(range(len(results)), key=lambda i: -both[i])
    note = (
        f"of {len(results)} candidates, ranked also by the whole text: log p %.3f from left to "
        "right"
    )
    return [replace(results[i], note=joined(results[i].note, note % again[i])) for i in order]


@torch.no_grad()
def left_to_right(runner: Runner, sequences: Sequence[Sequence[int]], batch: int) -> list[float]:
    """Return the log-probability of each whole sequence in mode `ar`.

    Tokens with which all sequences begin are scored once.
    """
    shared = _shared(sequences)

    def log_probs(some: Sequence[Sequence[int]], known: int) -> list[float]:
        layouts = [
            BlankLayout(
                list(each), [i < known for i in range(len(each))], (known,), (len(each) - known,)
            )
            for each in some
        ]
        asked = to_batch(layouts, runner.model.head.device)
        found = runner.call(partial(runner.model.log_prob, asked, "ar"))
        values: list[float] = found.double().sum(1).tolist()
        return values

    [start] = log_probs([sequences[0][:shared]], 0) if shared else [0.0]
    rest: list[float] = []
    for i in range(0, len(sequences), batch):
        rest += log_probs(sequences[i : i + batch], shared)
    return [start + value for value in rest]


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all sequences begin with, and none consists of."""
    shared = min((len(each) - 1 for each in sequences), default=0)
    for i in range(shared):
        if any(each[i] != sequences[0][i] for each in sequences):
            return i
    return shared


def distinct(results: Sequence[Infilled]) -> list[Infilled]:
    """Return the first result of each text."""
    first: dict[str, Infilled] = {}
    for result in results:
        first.setdefault(result.text, result)
    return list(first.values())
