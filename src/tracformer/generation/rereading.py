"""A second opinion on fillings, from the same model: the whole text read from left to right.

    log p(filling | before, after) = log p(filling | before) + log p(after | before, filling) - log p(after | before)

Mode `car` answers the left side at once, knowing what follows from the start; mode `ar` answers the right side, and notices where what
follows no longer fits. The last term is the same for all fillings of a text. Two estimates of one number err in different places: the
sum of both makes up for some of it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from tracformer.generation.blanks import Laid, stack
from tracformer.generation.results import Infilled
from tracformer.generation.rules import joined
from tracformer.generation.runner import Runner
from tracformer.model.base import ConditionalModel


def require_left_to_right(model: ConditionalModel) -> None:
    if "ar" not in model.config.modes:
        modes = ", ".join(model.config.modes)
        raise ValueError(f"reread asks how texts read from left to right, in mode 'ar'; this model was trained for: {modes}")


def ranked(runner: Runner, results: Sequence[Infilled], own: Sequence[float], batch: int) -> list[Infilled]:
    """Fillings of one text, the best by both opinions first. own: the first opinion on each, in nats."""
    again = left_to_right(runner, [result.token_ids for result in results], batch)
    # Asked in mode `ar`, the first opinion is a part of the second.
    both = [second if result.mode == "ar" else first + second for result, first, second in zip(results, own, again, strict=True)]
    order = sorted(range(len(results)), key=lambda i: -both[i])
    said = f"of {len(results)} candidates, ranked by how the whole text reads too: log p %.3f from left to right"
    return [replace(results[i], note=joined(results[i].note, said % again[i])) for i in order]


@torch.no_grad()
def left_to_right(runner: Runner, sequences: Sequence[Sequence[int]], batch: int) -> list[float]:
    """log p of each whole sequence."""
    values: list[float] = []
    for start in range(0, len(sequences), batch):
        some = [Laid(list(sequence), [False] * len(sequence), (0,), (len(sequence),)) for sequence in sequences[start : start + batch]]
        asked = stack(some, runner.model.head.device)
        found = runner.call(partial(runner.model.log_prob, asked.tokens, asked.context, "ar", asked.lengths))
        values += found.double().sum(1).tolist()
    return values
