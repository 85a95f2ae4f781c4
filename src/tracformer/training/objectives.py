"""What is minimised: from a batch of tokens, who is given, in which mode each sequence is asked,
and what its terms weigh.

An objective is a mixture of parts; each sequence draws one, keyed by (seed, its number in the
stream), so the mixture does not depend on batch size, workers or ranks. Every term is -log p of a
target; parts differ in mode, context and weight:

- `car` (Eq. 7) and `ac` (Eq. 8): span contexts as in the paper's small-scale runs.
- `paper-mix`: the paper's OpenWebText objective, CAR with the contexts of Algorithm 2.
- `all-modes`: our own, one model for every question: CAR, AC and true AR rows.
- `ar`: plain left to right.
- `fim`: fill in the middle, as left-to-right models are taught it: half the rows reordered around a
  hole, some around several.
- `diffusion`: masked diffusion on the AC network. With k targets of n drawn uniformly, weight n/k,
  the expected sum is the continuous-time NELBO of the sequence; k follows a low-discrepancy
  sequence along the stream, which lowers the variance of every batch.
- `denoise`: every token is a target, and the model draws its own noise (SEDD, MDLM, D3PM, PLAID);
  what `contexts` give is never noised.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracformer.contexts import Strategy, sequence_rng
from tracformer.contexts import parse as parse_strategy

SPANS = "span:p=0.5,mean=50"


@dataclass(frozen=True)
class Part:
    share: float
    mode: str  # car, ac, ar or diffusion
    contexts: str  # the strategy that draws who is given
    # "targets": each target counts once; "nelbo": n/k each, and the sequence counts n
    weighting: str = "targets"


@dataclass(frozen=True)
class Objective:
    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Question:
    """One sequence of a batch, ready to be asked."""

    mode: str
    context: NDArray[np.bool_]  # (T,), True where given
    weight: float  # of each target's term
    count: int  # what the sequence adds to the divisor


OBJECTIVES: dict[str, tuple[Part, ...]] = {
    "car": (Part(1.0, "car", SPANS),),
    "ac": (Part(1.0, "ac", SPANS),),
    "ar": (Part(1.0, "ar", "empty"),),
    "paper-mix": (Part(1.0, "car", "mixed"),),
    "all-modes": (
        Part(0.5, "car", "mixed"),
        Part(0.25, "ac", "uniform"),
        Part(0.25, "ar", "empty"),
    ),
    "fim": (Part(0.5, "car", f"0.8*middle+0.2*{SPANS}"), Part(0.5, "ar", "empty")),
    "diffusion": (Part(1.0, "ac", "uniform", weighting="nelbo"),),
    "denoise": (Part(1.0, "diffusion", "empty"),),
}


def parse_objective(name: str, contexts: str = "") -> Objective:
    """A named objective; `contexts` replaces the strategy of its parts, except AR
    and `nelbo` ones.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective is {name!r}; available: {', '.join(OBJECTIVES)}")
    parts = OBJECTIVES[name]
    if contexts:
        parse_strategy(contexts)
        if all(part.mode == "ar" or part.weighting == "nelbo" for part in parts):
            raise ValueError(
                f"contexts is {contexts!r}, but objective {name!r} fixes its own contexts; leave "
                "contexts empty"
            )
        parts = tuple(
            Part(p.share, p.mode, contexts) if p.mode != "ar" and p.weighting == "targets" else p
            for p in parts
        )
    return Objective(name, parts)


class Questioner:
    """Draws the question for any sequence of the stream."""

    def __init__(self, objective: Objective, seed: int) -> None:
        self.objective = objective
        self.seed = seed
        self._strategies: list[Strategy] = [
            parse_strategy(part.contexts) for part in objective.parts
        ]
        self._shares = np.cumsum([part.share for part in objective.parts])

    def ask(self, number: int, length: int) -> Question:
        """The question for sequence `number` of the stream, of so many tokens."""
        rng = sequence_rng(self.seed, number)
        chosen = min(
            int(np.searchsorted(self._shares, rng.random(), side="right")),
            len(self._strategies) - 1,
        )
        part = self.objective.parts[chosen]
        if part.weighting == "nelbo":
            k = 1 + int(low_discrepancy(self.seed, number) * length)
            context = np.ones(length, dtype=np.bool_)
            context[rng.permutation(length)[:k]] = False
            return Question(part.mode, context, weight=length / k, count=length)
        context = self._strategies[chosen].draw(length, rng)
        return Question(part.mode, context, weight=1.0, count=int(length - context.sum()))

    def ask_all(self, numbers: Sequence[int], lengths: Sequence[int]) -> list[Question]:
        return [self.ask(number, length) for number, length in zip(numbers, lengths, strict=True)]


def low_discrepancy(seed: int, number: int) -> float:
    """Point `number` of a Kronecker sequence in [0, 1): any stretch of the stream
    covers the interval evenly.
    """
    golden = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
    start = int(np.random.Generator(np.random.Philox(key=seed)).integers(2**63))
    return ((start + number * golden) % 2**64) / 2**64
