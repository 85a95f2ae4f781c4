"""Orders of filling: which open positions are filled in the next step.

In mode `ac` any position may come next, and every filled token becomes context for the rest. An
order depends only on the tokens filled so far and on its own random numbers, so the probability of
a sample is exact given its order.

- `Order`: the interface. `LeftToRight`, `RandomOrder`, `ByConfidence`, `GivenOrder`, `Ancestral`.
- `parse_order`, `order_options`: from and to the names that the command line and HTTP use.
- `orders_in`: the orders of a batch, checked against the mode.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tracformer.rng import ORDER, TIME, uniforms

CONFIDENCES = ("probability", "entropy", "margin")
MOST_STEPS = 2**53  # times are uniform numbers with 53 bits


class Order(Protocol):
    """Chooses the positions that are filled in the next step."""

    looks: bool  # whether it needs the logits of every open position

    def turn(
        self, positions: Tensor, logits: Tensor | None, seed: int, most: int | None = None
    ) -> Tensor:
        """Return the positions of one sequence that are filled now, at least one.

        Args:
            positions: (M,) open positions, ascending.
            logits: (M, V) the model's logits at these positions, if the order looks at them.
            seed: The sequence's seed.
            most: Maximum number of positions; the order's own ranking decides which. None: all.

        Returns:
            Indices into `positions`, ascending.
        """
        ...


@dataclass(frozen=True)
class LeftToRight:
    """Fill from left to right. With k = 1 this is exactly the chain rule.

    Args:
        k: Number of tokens per step.

    Example:
        >>> LeftToRight(2).turn(torch.tensor([3, 5, 8]), None, seed=0).tolist()
        [0, 1]
    """

    k: int = 1
    looks = False

    def __post_init__(self) -> None:
        _at_least_one(self.k)

    def turn(
        self, positions: Tensor, logits: Tensor | None, seed: int, most: int | None = None
    ) -> Tensor:
        return torch.arange(len(positions))[: self.k][:most]


@dataclass(frozen=True)
class RandomOrder:
    """Fill in a random order that depends on the seed alone.

    Args:
        k: Number of tokens per step.

    Example:
        >>> len(RandomOrder(2).turn(torch.tensor([3, 5, 8]), None, seed=0))
        2
    """

    k: int = 1
    looks = False

    def __post_init__(self) -> None:
        _at_least_one(self.k)

    def turn(
        self, positions: Tensor, logits: Tensor | None, seed: int, most: int | None = None
    ) -> Tensor:
        keys = uniforms([seed] * len(positions), positions, ORDER)
        return keys.argsort(stable=True)[: self.k][:most].sort().values


@dataclass(frozen=True)
class ByConfidence:
    """Fill the positions first at which the model is most confident.

    Of equally confident positions the leftmost comes first.

    Args:
        by: Measure of confidence. "probability": that of the most likely token; "entropy": minus
            the entropy, in nats; "margin": the probability of the most likely token minus that of
            the second.
        k: Number of tokens per step.
        threshold: Instead of k, fill all positions at least this confident, and at least one.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0], [0.0, 9.0]])
        >>> ByConfidence().turn(torch.tensor([3, 5]), logits, seed=0).tolist()
        [1]
    """

    by: str = "probability"
    k: int = 1
    threshold: float | None = None
    looks = True

    def __post_init__(self) -> None:
        _at_least_one(self.k)
        if self.by not in CONFIDENCES:
            raise ValueError(f"confidence is {self.by!r}; allowed: {', '.join(CONFIDENCES)}")
        if self.threshold is not None and math.isnan(self.threshold):
            raise ValueError("threshold is nan; it must be a number")
        if self.threshold is not None and self.k != 1:
            raise ValueError(
                f"k is {self.k} and threshold is {self.threshold}: give the number of tokens a "
                "step or a threshold, not both"
            )

    def turn(
        self, positions: Tensor, logits: Tensor | None, seed: int, most: int | None = None
    ) -> Tensor:
        assert logits is not None
        sure = self.confidence(logits).cpu()
        grain = 1e-10 if logits.dtype == torch.float64 else 1e-5
        # round, so that rounding noise does not decide between equals
        ranked = (sure / grain).round().argsort(descending=True, stable=True)
        if self.threshold is None:
            return ranked[: self.k][:most].sort().values
        above = ranked[(sure >= self.threshold)[ranked]]
        return above[:most].sort().values if len(above) else ranked[:1]

    def confidence(self, logits: Tensor) -> Tensor:
        """Return the confidence (M,) of each position from its logits (M, V)."""
        log_probs = logits.double().log_softmax(-1)
        if self.by == "entropy":
            return (log_probs.exp() * log_probs.clamp(min=-1e30)).sum(-1)
        best = log_probs.topk(min(2, logits.shape[-1]), dim=-1).values.exp()
        return (
            best[:, 0]
            if self.by == "probability" or best.shape[1] == 1
            else best[:, 0] - best[:, 1]
        )


@dataclass(frozen=True)
class GivenOrder:
    """Fill in a given order.

    Args:
        positions: Positions of the sequence. Those that are missing come last, left to right.
        k: Number of tokens per step.

    Example:
        >>> GivenOrder((8, 3)).turn(torch.tensor([3, 5, 8]), None, seed=0).tolist()
        [2]
    """

    positions: tuple[int, ...]
    k: int = 1
    looks = False

    def __post_init__(self) -> None:
        _at_least_one(self.k)
        if len(set(self.positions)) < len(self.positions):
            raise ValueError(f"the order names a position twice: {list(self.positions)}")

    def turn(
        self, positions: Tensor, logits: Tensor | None, seed: int, most: int | None = None
    ) -> Tensor:
        rank = {position: i for i, position in enumerate(self.positions)}
        ranks = torch.tensor([rank.get(int(p), len(rank) + int(p)) for p in positions])
        return ranks.argsort(stable=True)[: self.k][:most].sort().values


@dataclass(frozen=True)
class Ancestral:
    """Fill as the reverse process of masked diffusion does, in equal steps of time.

    Under the reverse process each target is filled at a uniform random time of its own, so a step
    fills the positions whose times fall into it. Steps without any are skipped.

    Args:
        steps: Number of steps.

    Example:
        >>> Ancestral(1).turn(torch.tensor([3, 5, 8]), None, seed=0).tolist()
        [0, 1, 2]
    """

    steps: int
    looks = False

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MOST_STEPS:
            raise ValueError(
                f"steps is {self.steps}; it must be at least 1 and at most {MOST_STEPS}"
            )

    def turn(
        self, positions: Tensor, logits: Tensor | None, seed: int, most: int | None = None
    ) -> Tensor:
        times = uniforms([seed] * len(positions), positions, TIME)
        step = (times * self.steps).long()
        # time runs from 1 to 0
        last = times.argsort(descending=True, stable=True)[: int((step == step.max()).sum())]
        return last[:most].sort().values


def parse_order(
    text: str | None, k: int = 1, threshold: float | None = None, steps: int = 0
) -> Order:
    """Return the order of a name.

    Args:
        text: left-to-right, random, ancestral, probability, entropy or margin. None: ancestral if
            steps are given, else left-to-right.
        k: Number of tokens per step.
        threshold: Threshold of an order by confidence.
        steps: Number of steps of the order ancestral; 0: 64.

    Raises:
        ValueError: The name is unknown, or a number does not go with it.
    """
    if text is None:
        text = "ancestral" if steps else "left-to-right"
    if threshold is not None and text not in CONFIDENCES:
        raise ValueError(
            f"a threshold goes with an order by confidence ({', '.join(CONFIDENCES)}), not with "
            f"{text!r}"
        )
    if steps and text != "ancestral":
        raise ValueError(f"steps go with the order 'ancestral', not with {text!r}")
    if text == "left-to-right":
        return LeftToRight(k)
    if text == "random":
        return RandomOrder(k)
    if text == "ancestral":
        if k != 1:
            raise ValueError(
                f"k is {k}: the order 'ancestral' is set by steps, not by tokens a step"
            )
        return Ancestral(steps or 64)
    if text in CONFIDENCES:
        return ByConfidence(text, k, threshold)
    raise ValueError(
        f"order is {text!r}; allowed: left-to-right, random, ancestral, {', '.join(CONFIDENCES)}"
    )


def order_options(order: Order) -> dict[str, Any]:
    """Return the options `order`, `k`, `threshold` and `steps` that name an order.

    Raises:
        ValueError: The order has no name, as a `GivenOrder`.
    """
    named: dict[str, Any] = {"k": 1, "threshold": None, "steps": 0}
    if isinstance(order, LeftToRight):
        return {**named, "order": "left-to-right", "k": order.k}
    if isinstance(order, RandomOrder):
        return {**named, "order": "random", "k": order.k}
    if isinstance(order, ByConfidence):
        return {**named, "order": order.by, "k": order.k, "threshold": order.threshold}
    if isinstance(order, Ancestral):
        return {**named, "order": "ancestral", "steps": order.steps}
    raise ValueError(
        f"order is {order!r}, which cannot be sent; allowed: LeftToRight, RandomOrder, "
        "ByConfidence, Ancestral"
    )


def orders_for(order: Order | Sequence[Order], batch: int) -> list[Order]:
    """Return one order for each sequence of a batch."""
    if isinstance(order, str):
        raise ValueError(
            f"order is {order!r}; give an order itself, for instance ByConfidence('entropy'), or "
            f"parse_order({order!r})"
        )
    if not isinstance(order, Sequence):
        return [order] * batch
    if len(order) != batch:
        raise ValueError(f"{len(order)} orders were given for {batch} sequences")
    return list(order)


def orders_in(mode: str, order: Order | Sequence[Order] | None, batch: int) -> list[Order]:
    """Return one order for each sequence of a batch, or raise ValueError if the mode has none."""
    orders = orders_for(LeftToRight() if order is None else order, batch)
    if mode != "ac" and any(each != LeftToRight() for each in orders):
        raise ValueError(
            f"mode {mode!r} goes from left to right, one token at a time; other orders are for "
            "mode 'ac'"
        )
    return orders


def _at_least_one(k: int) -> None:
    if k < 1:
        raise ValueError(f"k is {k}; at least one token a step")
