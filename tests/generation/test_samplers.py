"""Orders and samplers: which position is next, and which token."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import needs_compiler
from tracformer.generation import samplers
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
from tracformer.generation.samplers import PLAIN, Pick, Sampler, adjusted, choose, truncated
from tracformer.rng import inverse_cdf

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


# ---- samplers


def normal(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * scale
    )


def survivors(scores: Tensor) -> set[int]:
    return set((scores > -torch.inf).nonzero()[:, 0].tolist())


def probabilities(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def literal(logits: list[float], sampler: Sampler) -> set[int]:
    """What top-k, then top-p, then min-p leave of distinct logits, likeliest first."""
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    if sampler.top_k:
        ranked = ranked[: sampler.top_k]
    if sampler.top_p < 1:
        p, reached, kept = probabilities([logits[i] for i in ranked]), 0.0, []
        for i, share in zip(ranked, p, strict=True):
            kept.append(i)
            reached += share
            if reached >= sampler.top_p:
                break
        ranked = kept
    p = probabilities([logits[i] for i in ranked])
    return {i for i, share in zip(ranked, p, strict=True) if share >= sampler.min_p * max(p)}


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 30),
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, 35),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.99),
    first=st.sampled_from([2, 1024]),
)
def test_truncation_is_its_definition(
    size: int, seed: int, top_k: int, top_p: float, min_p: float, first: int
) -> None:
    logits = normal(3, size, seed=seed)
    sampler = Sampler(top_k=top_k, top_p=top_p, min_p=min_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers, "NUCLEUS_FIRST", first)
        kept = truncated(logits, sampler)
    for row, before in zip(kept, logits, strict=True):
        assert survivors(row) == literal(before.tolist(), sampler)
        assert torch.equal(row[row > -torch.inf], before[row > -torch.inf])


def test_the_likeliest_token_always_stays() -> None:
    logits = normal(20, 11)
    for sampler in (Sampler(top_k=1), Sampler(top_p=1e-9), Sampler(min_p=1.0)):
        kept = truncated(logits, sampler)
        assert torch.equal(kept.argmax(1), logits.argmax(1))
        assert ((kept > -torch.inf).sum(1) == 1).all()


def test_truncation_never_brings_back_a_forbidden_token() -> None:
    logits = normal(50, 6)
    sampler = Sampler(top_k=5, top_p=0.999999, banned=(0, 1, 2, 3))
    kept = adjusted(logits, sampler, [Pick(sampler, 0.5)] * 50)
    assert (kept[:, :4] == -torch.inf).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_divides_the_logits(temperature: float) -> None:
    logits, sampler = normal(4, 9), Sampler(temperature=temperature)
    scores = adjusted(logits, sampler, [Pick(sampler, 0.5)] * 4)
    torch.testing.assert_close(scores.softmax(1), (logits / temperature).softmax(1))


def test_temperature_zero_and_very_low_ones_take_the_likeliest_token() -> None:
    logits = normal(40, 9)
    draws = torch.rand(40, generator=torch.Generator().manual_seed(1)).tolist()
    for temperature in (0.0, 1e-6, 1e-310):
        sampler = Sampler(temperature=temperature)
        assert torch.equal(
            choose(logits, [Pick(sampler, u) for u in draws]).tokens, logits.argmax(1)
        )


def test_frequencies_are_the_probabilities() -> None:
    N, V = 60_000, 12
    p = normal(V, seed=3, scale=1.0).softmax(0)
    p[[0, 5, 11]] = 0.0
    p = p / p.sum()
    u = torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = torch.bincount(inverse_cdf(p.expand(N, V), u), minlength=V)
    assert not counts[[0, 5, 11]].any()
    possible = p > 0
    chi = ((counts - N * p)[possible] ** 2 / (N * p[possible])).sum()
    assert chi < 8 + 4 * (2 * 8) ** 0.5  # 8 degrees of freedom, four standard deviations


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(
        st.sampled_from([0.0, 0.0, 1e-300, 1e-17, 0.1, 1 / 3, 1.0]), min_size=1, max_size=9
    ).filter(any),
    u=st.sampled_from([0.0, 1e-300, 1e-17, 0.3, 1 / 3, 0.5, 1 - 2**-53])
    | st.floats(0, 1, exclude_max=True),
)
def test_no_number_picks_an_impossible_token(weights: list[float], u: float) -> None:
    p = torch.tensor([weights], dtype=torch.float64)
    (token,) = inverse_cdf(p, torch.tensor([u], dtype=torch.float64)).tolist()
    assert weights[token] > 0


def test_a_number_next_to_one_picks_the_last_possible_token() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    assert inverse_cdf(p, torch.full((2,), 1 - 2**-53, dtype=torch.float64)).tolist() == [1, 3]
    assert inverse_cdf(p, torch.zeros(2, dtype=torch.float64)).tolist() == [0, 0]


def test_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 2.0, -2.0]])
    sampler = Sampler(repetition_penalty=4.0)
    # twice is not worse than once
    scores = adjusted(logits, sampler, [Pick(sampler, 0.5, seen=[0, 1, 0, 2])])[0]
    expected = torch.tensor([0.5, -8.0, 0.0, 2.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(scores.softmax(0), expected.softmax(0))
    assert logits[0, 0] == 2.0  # the caller's logits are untouched


@settings(max_examples=80, deadline=None)
@given(left=st.lists(st.integers(0, 2), max_size=12), n=st.integers(1, 4))
def test_no_ngram_occurs_twice(left: list[int], n: int) -> None:
    """A token is out exactly if it would complete an n-gram that already stands to the left."""
    V = 4  # token 3 never occurs, so something is always left
    ngrams = {tuple(left[i : i + n]) for i in range(len(left) - n + 1)}
    expected = {
        token
        for token in range(V)
        if (len(left) < n - 1) or tuple([*left, token][-n:]) not in ngrams
    }
    sampler = Sampler(no_repeat_ngram=n)
    assert (
        survivors(adjusted(torch.zeros(1, V), sampler, [Pick(sampler, 0.5, left=left)])[0])
        == expected
    )


def test_banned_allowed_and_only_meet() -> None:
    sampler = Sampler(banned=(1,), allowed=(0, 1, 2, 3))
    picks = [Pick(sampler, 0.5), Pick(sampler, 0.5, only=[1, 2, 5])]
    first, second = adjusted(torch.zeros(2, 6), sampler, picks)
    assert survivors(first) == {0, 2, 3}
    assert survivors(second) == {2}


@pytest.mark.parametrize(
    ("sampler", "pick"),
    [
        (Sampler(banned=(0, 1, 2)), {}),
        (Sampler(banned=(1,)), {"only": [1]}),
        (Sampler(allowed=(0,)), {"only": [2]}),
        (PLAIN, {"only": []}),
        (Sampler(no_repeat_ngram=1), {"left": [0, 1, 2]}),
        (Sampler(no_repeat_ngram=1, allowed=(0, 1)), {"left": [0, 1]}),
        (Sampler(no_repeat_ngram=1, temperature=0.0), {"left": [0, 1, 2]}),
    ],
    ids=str,
)
def test_nothing_left_is_an_error(sampler: Sampler, pick: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no token is left to choose from"):
        choose(torch.zeros(1, 3), [Pick(sampler, 0.5, **pick)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram is -2"),
        ({"required": (3,), "banned": (3,)}, "token 3 is both required and banned"),
        ({"required": (3,), "allowed": (4,)}, "token 3 is required but not allowed"),
        ({"banned": (3, 4), "allowed": (4,)}, "every allowed token is banned"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**values)


def test_ids_may_be_any_sequence() -> None:
    given = Sampler(banned=[3], allowed=torch.tensor([1, 2]), required=np.array([2]))  # type: ignore[arg-type]
    assert given == Sampler(banned=(3,), allowed=(1, 2), required=(2,))
    assert choose(torch.zeros(1, 5), [Pick(given, 0.9)]).tokens.tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_end_that_comes_too_early_is_not_chosen(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0]], dtype=dtype)
    for sampler in (
        PLAIN,
        Sampler(temperature=0.0),
        Sampler(banned=(0,)),
        Sampler(repetition_penalty=1.1),
    ):
        for u in (0.1, 0.5, 0.9):
            assert choose(logits, [Pick(sampler, u)]).tokens.tolist() == [1]
            (token,) = choose(logits, [Pick(sampler, u, never=1)]).tokens.tolist()
            assert token != 1
            assert token not in sampler.banned


@pytest.mark.parametrize("field", ["banned", "allowed", "required"])
@pytest.mark.parametrize("token", [-1, 5])
def test_ids_out_of_range(field: str, token: int) -> None:
    sampler = Sampler(**{field: (token,)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{field} token {token} is out of range; ids are 0..4"):
        choose(torch.zeros(1, 5), [Pick(sampler, 0.5)])
    with pytest.raises(ValueError, match=f"token {token} is out of range; ids are 0..4"):
        choose(torch.zeros(1, 5), [Pick(PLAIN, 0.5, only=[token])])


def test_a_row_gets_in_a_batch_what_it_gets_alone() -> None:
    kinds = [
        PLAIN,
        Sampler(temperature=0.0),
        Sampler(top_p=0.7),
        Sampler(top_k=3, min_p=0.1),
        Sampler(repetition_penalty=1.7, no_repeat_ngram=2),
        Sampler(banned=(0, 1), temperature=1.8),
    ]
    N = 60
    logits = normal(N, 9, seed=5)
    draws = torch.rand(N, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()
    picks = [
        Pick(
            kinds[i % 6],
            u,
            left=[i % 9, 2, i % 9],
            seen=[i % 9, 2],
            only=range(2, 7) if i % 4 == 0 else None,
        )
        for i, u in enumerate(draws)
    ]
    together = choose(logits, picks).tokens
    assert together.tolist() == [
        int(choose(logits[i : i + 1], [pick]).tokens) for i, pick in enumerate(picks)
    ]


SAMPLERS = st.builds(
    Sampler,
    temperature=st.sampled_from([0.0, 1e-310, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 300]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    banned=st.sampled_from([(), (0,), (1, 2, 3)]),
    allowed=st.sampled_from([(), (0, 2, 4)]),
)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(SAMPLERS, min_size=1, max_size=5),
    vocab_size=st.sampled_from([5, 16, 67, 700]),
    digits=st.sampled_from([0, 2, 7]),  # few: many tokens tie
    only=st.sampled_from([None, (0, 1, 2, 4)]),
    never=st.sampled_from([None, 4]),
    missing=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_compiled_and_plain_code_choose_the_same_tokens(
    kinds: list[Sampler],
    vocab_size: int,
    digits: int,
    only: tuple[int, ...] | None,
    never: int | None,
    missing: bool,
    seed: int,
) -> None:
    logits = normal(4 * len(kinds), vocab_size, seed=seed).round(decimals=digits).float()
    if missing:
        logits[:, 3] = -torch.inf
    draws = torch.rand(
        len(logits), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    draws[0], draws[-1] = 0.0, 1 - 2**-53
    picks = [
        Pick(kinds[i % len(kinds)], u, only=only if i % 2 else None, never=never)
        for i, u in enumerate(draws.tolist())
    ]
    compiled, plain = samplers._compiled(logits, picks), samplers._plain(logits, picks)
    assert compiled.tokens.tolist() == plain.tokens.tolist()
    torch.testing.assert_close(compiled.drawn, plain.drawn, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(compiled.own, plain.own, rtol=1e-12, atol=1e-12)


@needs_compiler
def test_rows_that_remember_are_chosen_beside_those_that_do_not() -> None:
    logits = normal(6, 9, seed=8).float()
    kinds = [PLAIN, Sampler(no_repeat_ngram=1)]
    picks = [Pick(kinds[i % 2], 0.4, left=[0, 1, 2]) for i in range(6)]
    mixed, plain = choose(logits, picks), samplers._plain(logits, picks)
    assert mixed.tokens.tolist() == plain.tokens.tolist()
    torch.testing.assert_close(mixed.own, plain.own)
