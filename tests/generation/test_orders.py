"""Each order against its definition."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tracformer.generation.orders import (
    CONFIDENCES,
    Ancestral,
    ByConfidence,
    GivenOrder,
    LeftToRight,
    Order,
    RandomOrder,
    orders_for,
    parse_order,
)

POSITIONS = torch.tensor([1, 2, 5, 8, 9])


def play(
    order: Order, positions: Tensor, logits: Tensor | None = None, seed: int = 0
) -> list[list[int]]:
    """Whose turns come one after the other; every answer is ascending and names at least one."""
    turns = []
    while len(positions):
        turn = order.turn(positions, logits, seed)
        assert len(turn) > 0
        assert turn.tolist() == sorted(set(turn.tolist()))
        turns.append(positions[turn].tolist())
        stay = torch.ones(len(positions), dtype=torch.bool)
        stay[turn] = False
        positions, logits = positions[stay], None if logits is None else logits[stay]
    return turns


def test_left_to_right() -> None:
    assert play(LeftToRight(), POSITIONS) == [[1], [2], [5], [8], [9]]
    assert play(LeftToRight(2), POSITIONS) == [[1, 2], [5, 8], [9]]


def test_a_callers_order_and_what_it_does_not_name() -> None:
    assert play(GivenOrder((9, 2, 5, 8, 1)), POSITIONS) == [[9], [2], [5], [8], [1]]
    # 0 is not open; 1, 5, 9 come last, left to right
    assert play(GivenOrder((8, 0, 2)), POSITIONS) == [[8], [2], [1], [5], [9]]
    assert play(GivenOrder((9, 2, 5, 8, 1), k=2), POSITIONS) == [[2, 9], [5, 8], [1]]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), k=st.integers(1, 6))
def test_random_order_is_one_permutation_of_the_seed_alone(seed: int, k: int) -> None:
    one_by_one = [
        position for turn in play(RandomOrder(), POSITIONS, seed=seed) for position in turn
    ]
    assert sorted(one_by_one) == POSITIONS.tolist()
    assert play(RandomOrder(k), POSITIONS, seed=seed) == [
        sorted(one_by_one[i : i + k]) for i in range(0, 5, k)
    ]
    some = POSITIONS[[0, 2, 3]]  # which other positions are open changes nothing
    assert [turn[0] for turn in play(RandomOrder(), some, seed=seed)] == [
        p for p in one_by_one if p in some.tolist()
    ]


def test_random_orders_are_equally_frequent() -> None:
    N = 900
    counts = Counter(
        tuple(turn[0] for turn in play(RandomOrder(), POSITIONS[:3], seed=seed))
        for seed in range(N)
    )
    chi = sum((count - N / 6) ** 2 / (N / 6) for count in counts.values())
    assert len(counts) == 6
    assert chi < 5 + 4 * math.sqrt(2 * 5)


def confidence(by: str, logits: list[float]) -> float:
    total = sum(math.exp(x) for x in logits)
    p = sorted((math.exp(x) / total for x in logits), reverse=True)
    return {"probability": p[0], "margin": p[0] - p[1], "entropy": sum(q * math.log(q) for q in p)}[
        by
    ]


@settings(max_examples=40, deadline=None)
@given(by=st.sampled_from(CONFIDENCES), k=st.integers(1, 5), seed=st.integers(0, 1000))
def test_by_confidence(by: str, k: int, seed: int) -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    sure = [confidence(by, row.tolist()) for row in logits]
    ranked = sorted(range(5), key=lambda i: -sure[i])
    assert ByConfidence(by, k).turn(POSITIONS, logits, 0).tolist() == sorted(ranked[:k])
    threshold = sorted(sure)[2] - 1e-9
    assert ByConfidence(by, threshold=threshold).turn(POSITIONS, logits, 0).tolist() == sorted(
        ranked[:3]
    )
    # none above: the surest
    assert ByConfidence(by, threshold=2.0).turn(POSITIONS, logits, 0).tolist() == ranked[:1]


@pytest.mark.parametrize("by", CONFIDENCES)
def test_confidence_of_impossible_tokens_and_of_one_token(by: str) -> None:
    certain = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, 0.0, -torch.inf]])
    assert ByConfidence(by).turn(POSITIONS[:2], certain, 0).tolist() == [0]
    assert ByConfidence(by).confidence(certain).isfinite().all()
    assert ByConfidence(by).turn(POSITIONS[:2], torch.zeros(2, 1), 0).tolist() == [0]


@pytest.mark.parametrize("by", CONFIDENCES)
@pytest.mark.parametrize(
    ("dtype", "noise"), [(torch.float64, 1e-15), (torch.float32, 3e-8)], ids=str
)
def test_among_equals_the_leftmost_whatever_the_last_bits(
    by: str, dtype: torch.dtype, noise: float
) -> None:
    logits = torch.tensor([0.3, -1.1, 0.9], dtype=dtype).repeat(5, 1)
    logits[3] *= 1 + noise
    logits[4, 0] += 4 * noise
    assert [turn[0] for turn in play(ByConfidence(by), POSITIONS, logits)] == POSITIONS.tolist()


@settings(max_examples=40, deadline=None)
@given(k=st.integers(1, 5), most=st.integers(1, 5), seed=st.integers(0, 1000))
def test_of_more_than_most_the_first_by_rank(k: int, most: int, seed: int) -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))

    def turn(order: Order, most: int | None = None) -> list[int]:
        found: list[int] = order.turn(POSITIONS, logits, seed, most).tolist()
        return found

    few = min(k, most)
    for more, fewer in (
        (LeftToRight(k), LeftToRight(few)),
        (RandomOrder(k), RandomOrder(few)),
        (ByConfidence("margin", k), ByConfidence("margin", few)),
        (GivenOrder((9, 2, 5, 8, 1), k), GivenOrder((9, 2, 5, 8, 1), few)),
    ):
        assert turn(more, most) == turn(fewer)
    assert turn(ByConfidence(threshold=0.0), most) == turn(ByConfidence(k=most))
    by_time = [
        POSITIONS.tolist().index(each[0]) for each in play(Ancestral(10**9), POSITIONS, seed=seed)
    ]
    assert turn(Ancestral(1), most) == sorted(by_time[:most])


def test_ancestral_steps_are_equally_likely_and_independent() -> None:
    """Of two positions and three steps, nine pairs of times: both at once with probability 1/3,
    else either first.
    """
    N = 900
    counts = Counter(str(play(Ancestral(3), POSITIONS[:2], seed=seed)) for seed in range(N))
    expected = {"[[1, 2]]": N / 3, "[[1], [2]]": N / 3, "[[2], [1]]": N / 3}
    assert counts.keys() == expected.keys()
    assert sum(
        (counts[key] - expected[key]) ** 2 / expected[key] for key in expected
    ) < 2 + 4 * math.sqrt(2 * 2)


def test_ancestral_limits() -> None:
    assert play(Ancestral(1), POSITIONS) == [POSITIONS.tolist()]
    turns = play(Ancestral(10**9), POSITIONS, seed=4)  # each in a step of its own
    assert play(Ancestral(2**53), POSITIONS, seed=4) == turns
    assert sorted(turns) == [[p] for p in POSITIONS.tolist()]
    # time is cut more coarsely, but runs the same way
    coarse = play(Ancestral(2), POSITIONS, seed=4)
    assert sorted(p for turn in coarse for p in turn) == POSITIONS.tolist()
    rank = {turn[0]: i for i, turn in enumerate(turns)}
    flat = [[rank[p] for p in turn] for turn in coarse]
    assert all(max(a) < min(b) for a, b in itertools.pairwise(flat))


def test_names() -> None:
    assert parse_order("left-to-right", k=2) == LeftToRight(2)
    assert parse_order("random") == RandomOrder()
    assert parse_order("ancestral", steps=7) == parse_order(None, steps=7) == Ancestral(7)
    assert parse_order(None, k=2) == LeftToRight(2)
    assert parse_order("entropy", k=3) == ByConfidence("entropy", 3)
    assert parse_order("margin", threshold=0.5) == ByConfidence("margin", threshold=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"text": "best"},
            "order is 'best'; allowed: left-to-right, random, ancestral, probability, entropy, "
            "margin",
        ),
        (
            {"text": "random", "threshold": 0.5},
            "a threshold goes with an order by confidence .*, not with 'random'",
        ),
        ({"text": "margin", "threshold": 0.5, "k": 2}, "k is 2 and threshold is 0.5"),
        ({"text": "random", "steps": 5}, "steps go with the order 'ancestral', not with 'random'"),
        ({"text": "ancestral", "k": 2}, "k is 2: the order 'ancestral' is set by steps"),
        ({"text": "ancestral", "steps": -1}, "steps is -1; it must be at least 1"),
        (
            {"text": "ancestral", "steps": 10**22},
            f"steps is {10**22}; it must be at least 1 and at most {2**53}",
        ),
        ({"text": "left-to-right", "k": 0}, "k is 0; at least one token a step"),
    ],
    ids=str,
)
def test_names_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_order(**arguments)  # type: ignore[arg-type]


def test_other_complaints() -> None:
    with pytest.raises(ValueError, match="the order names a position twice"):
        GivenOrder((1, 2, 1))
    with pytest.raises(ValueError, match="confidence is 'luck'"):
        ByConfidence("luck")
    with pytest.raises(ValueError, match="2 orders were given for 3 sequences"):
        orders_for([LeftToRight(), RandomOrder()], 3)
    with pytest.raises(
        ValueError, match="order is 'entropy'; give an order itself, for instance ByConfidence"
    ):
        orders_for("entropy", 3)  # type: ignore[arg-type]
    assert orders_for(LeftToRight(), 3) == [LeftToRight()] * 3
