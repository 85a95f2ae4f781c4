"""Strategies draw their laws and have names; streams of contexts do not depend on batches."""

import math
import re
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts import literal
from tracformer.contexts import (
    MIXED,
    Empty,
    Middle,
    Mixture,
    Prefix,
    RandomRatio,
    RandomTokens,
    Ranges,
    Spans,
    Strategy,
    UniformRatio,
    draw_contexts,
    parse,
    sequence_rng,
)
from tracformer.spans import DLogistic, Geometric

ALL: list[Strategy] = [
    Empty(),
    Spans(0.5, Geometric(50)),
    Spans(1, DLogistic(15, 3)),
    RandomRatio(0.3),
    RandomTokens(2),
    UniformRatio(),
    Middle(),
    Prefix(0.5),
    Ranges(((0, 1),)),
    Ranges(((0.1, 0.4), (0.6, 0.9))),
    MIXED,
]


def targets(strategy: Strategy, length: int, rng: np.random.Generator) -> list[int]:
    context = strategy.draw(length, rng)
    assert context.shape == (length,)
    assert context.dtype == np.bool_
    return np.flatnonzero(~context).tolist()


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_a_target_in_any_length(strategy: Strategy) -> None:
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 10, 64):
        assert targets(strategy, length, rng)


@pytest.mark.parametrize("strategy", ALL, ids=str)
@pytest.mark.parametrize("length", [0, -1, 2.0, None])
def test_bad_length(strategy: Strategy, length: object) -> None:
    with pytest.raises(ValueError, match=f"length is {length!r}"):
        strategy.draw(length, np.random.default_rng(0))  # type: ignore[arg-type]


def test_empty() -> None:
    # NumPy's integers count
    assert Empty().draw(np.arange(4)[3], np.random.default_rng(0)).shape == (3,)
    assert targets(Empty(), 5, np.random.default_rng(0)) == [0, 1, 2, 3, 4]


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0, 1, exclude_min=True), st.integers(0, 2**32))
def test_exact_count(length: int, p: float, seed: int) -> None:
    for strategy in (RandomRatio(p), Spans(p, Geometric(5))):
        assert len(targets(strategy, length, np.random.default_rng(seed))) == max(
            1, round(p * length)
        )


def test_a_number_of_tokens() -> None:
    rng = np.random.default_rng(0)
    drawn = [targets(RandomTokens(2), 6, rng) for _ in range(200)]
    assert {len(each) for each in drawn} == {2}
    assert len({tuple(each) for each in drawn}) == 15  # every pair
    assert list(targets(RandomTokens(9), 4, rng)) == [0, 1, 2, 3]


def test_random_ratio_favours_no_set() -> None:
    rng = np.random.default_rng(0)
    drawn = Counter(tuple(targets(RandomRatio(0.4), 5, rng)) for _ in range(5000))
    pairs: list[tuple[int, ...]] = list(combinations(range(5), 2))
    literal.check_frequencies(drawn, dict.fromkeys(pairs, 0.1))


def test_uniform_ratio_is_diffusion_with_a_target() -> None:
    """P(R) is the integral of u^k (1-u)^(T-k) over u, given that R is not empty."""
    T = 4
    law = {
        subset: math.factorial(k)
        * math.factorial(T - k)
        / math.factorial(T + 1)
        / (1 - 1 / (T + 1))
        for k in range(1, T + 1)
        for subset in combinations(range(T), k)
    }
    rng = np.random.default_rng(0)
    literal.check_frequencies(
        Counter(tuple(targets(UniformRatio(), T, rng)) for _ in range(8000)), law
    )


def test_middle_favours_no_run() -> None:
    rng = np.random.default_rng(0)
    drawn = Counter(tuple(targets(Middle(), 4, rng)) for _ in range(5000))
    runs = [tuple(range(first, last)) for first, last in combinations(range(5), 2)]
    literal.check_frequencies(drawn, dict.fromkeys(runs, 1 / len(runs)))


def test_prefix() -> None:
    rng = np.random.default_rng(0)
    assert targets(Prefix(0.5), 5, rng) == [2, 3, 4]
    assert targets(Prefix(0), 3, rng) == [0, 1, 2]
    assert targets(Prefix(0.999), 3, rng) == [2]
    assert targets(Prefix(0.29), 100, rng)[0] == 29  # 0.29 * 100 is 28.999999999999996
    assert targets(Prefix(0.58), 100, rng)[0] == 58


def test_ranges_of_table_2() -> None:
    drawn = targets(Ranges(((0.1, 0.4), (0.6, 0.9))), 128, np.random.default_rng(0))
    assert drawn == [*range(12, 51), *range(76, 115)]  # floors of 12.8, 51.2, 76.8 and 115.2


@given(st.integers(0, 9999), st.integers(1, 10000), st.integers(1, 10**6))
def test_bounds_are_exact_decimals(a: int, b: int, length: int) -> None:
    a, b = sorted((a, b))
    low, high = math.floor(Fraction(a, 10000) * length), math.floor(Fraction(b, 10000) * length)
    if low == high:
        return
    context = Ranges(((a / 10000, b / 10000),)).draw(length, np.random.default_rng(0))
    assert not context[low:high].any()
    assert context[:low].all()
    assert context[high:].all()


def test_ranges_are_put_in_order() -> None:
    assert Ranges(((0.6, 0.9), (0.1, 0.4))) == Ranges(((0.1, 0.4), (0.6, 0.9)))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ((), "no range is given"),
        (((0.4, 0.1),), r"\[0.4,0.1\] is out of order.*0 <= a < b <= 1"),
        (((0.4, 0.4),), r"\[0.4,0.4\] is out of order"),
        (((-0.1, 0.4),), r"\[-0.1,0.4\] is out of order"),
        (((0.5, 1.1),), r"\[0.5,1.1\] is out of order"),
        (((0.5, float("nan")),), "nan"),
        (((0.6, 0.9), (0.1, 0.7)), r"\[0.1,0.7\] and \[0.6,0.9\] overlap"),
    ],
)
def test_bad_ranges(ranges: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ranges(ranges)


def test_ranges_may_touch() -> None:
    assert targets(Ranges(((0.1, 0.4), (0.4, 0.6))), 10, np.random.default_rng(0)) == [
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    ("ranges", "length", "expected"),
    [
        (((0.1, 0.4),), 2, [0]),  # its middle is 0.5
        (((0.1, 0.4), (0.6, 0.9)), 2, [0, 1]),
        (((0.1, 0.4), (0.6, 0.9)), 1, [0]),
        (((0.9, 1),), 1, [0]),
        (((0.5, 0.58),), 10, [5]),
        (((0, 0.05), (0.5, 1)), 10, [0, 5, 6, 7, 8, 9]),
    ],
)
def test_a_range_narrower_than_a_token_takes_the_one_at_its_middle(
    ranges: tuple[tuple[float, float], ...], length: int, expected: list[int]
) -> None:
    assert targets(Ranges(ranges), length, np.random.default_rng(0)) == expected


def test_mixed_is_algorithm_2() -> None:
    rng = np.random.default_rng(0)
    drawn = Counter(len(targets(MIXED, 40, rng)) for _ in range(5000))
    literal.check_frequencies(drawn, {40: 0.3, 34: 0.2, 20: 0.5})


def test_a_mixture_of_mixtures_is_spread_out() -> None:
    nested = Mixture((0.5, 0.5), (MIXED, UniformRatio()))
    assert nested == Mixture((0.15, 0.1, 0.25, 0.5), (*MIXED.parts, UniformRatio()))


def test_mixture_falls_on_the_last_part_when_weights_end_below_1() -> None:
    class Highest(np.random.Generator):
        def random(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
            return 1 - 2**-53

    mixture = Mixture((0.5, 0.5 - 1e-10), (Empty(), Prefix(0.5)))
    assert mixture.draw(4, Highest(np.random.PCG64(0))).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.3, 0.6), "0.3, 0.6 sum to 0.9; they must sum to 1"),
        ((1.5, -0.5), "a weight is 1.5"),
        ((1.0,), "1 weights and 2 parts"),
    ],
)
def test_bad_mixture(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(weights, (Empty(), UniformRatio()))


@pytest.mark.parametrize("p", [0, -0.1, 1.1, float("nan")])
def test_bad_ratio(p: float) -> None:
    with pytest.raises(ValueError, match=rf"p is {p!r}; .*\(0, 1\]"):
        RandomRatio(p)
    with pytest.raises(ValueError, match=rf"p is {p!r}; .*\(0, 1\]"):
        Spans(p, Geometric(50))


@pytest.mark.parametrize("fraction", [1, -0.1, float("nan")])
def test_bad_prefix(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"prefix is {fraction!r} .*\[0, 1\)"):
        Prefix(fraction)


# ---- streams of contexts

STRATEGY = parse("0.3*uniform+0.7*span:p=0.5,mean=4")
LENGTHS = [30, 17, 30, 1, 24, 8, 30, 29]


@given(st.permutations(range(len(LENGTHS))), st.integers(1, len(LENGTHS)))
def test_a_stream_does_not_depend_on_batches(order: list[int], size: int) -> None:
    whole = draw_contexts(STRATEGY, LENGTHS, seed=5, indices=range(len(LENGTHS)))
    for at in range(0, len(order), size):
        batch = order[at : at + size]
        part = draw_contexts(STRATEGY, [LENGTHS[i] for i in batch], seed=5, indices=batch, width=30)
        assert np.array_equal(part, whole[batch])


def test_seeds_and_indices_differ() -> None:
    rows = {
        draw_contexts(UniformRatio(), [64], seed, [index]).tobytes()
        for seed in range(10)
        for index in range(10)
    }
    assert len(rows) == 100


def test_extreme_keys() -> None:
    top = 2**64 - 1
    rows = {sequence_rng(seed, index).random() for seed in (0, 1, top) for index in (0, 1, top)}
    assert len(rows) == 9


def test_padding_is_given() -> None:
    contexts = draw_contexts(Empty(), np.array([2, 4]), 0, np.array([0, 1]), width=5)
    assert contexts.dtype == np.bool_
    assert contexts.tolist() == [
        [False, False, True, True, True],
        [False, False, False, False, True],
    ]
    assert draw_contexts(Empty(), [2, 4], 0, [0, 1]).shape == (2, 4)


def test_drawing_a_row_is_drawing_from_its_generator() -> None:
    row = draw_contexts(STRATEGY, [30], 7, [3])[0]
    assert np.array_equal(row, STRATEGY.draw(30, sequence_rng(7, 3)))


@pytest.mark.parametrize(
    ("lengths", "seed", "indices", "width", "message"),
    [
        ([], 0, [], None, "0 lengths and 0 indices"),
        ([3, 4], 0, [0], None, "2 lengths and 1 indices"),
        ([3], -1, [0], None, r"seed is -1; .*0\.\.2\^64-1"),
        ([3], 0, [2**64], None, f"index is {2**64}"),
        ([3], 0, [0], 2, "width is 2, less than the longest sequence of 3 tokens"),
        ([0], 0, [0], None, "length is 0"),
    ],
)
def test_wrong_lengths_seeds_and_indices_are_refused(
    lengths: list[int], seed: int, indices: list[int], width: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw_contexts(Empty(), lengths, seed, indices, width)


# ---- names of strategies

ratios = st.floats(0, 1, exclude_min=True)
means = st.floats(1, 1e9) | st.integers(1, 10**9)
laws = st.builds(Geometric, means) | st.builds(DLogistic, means, st.floats(1e-3, 1e9))


def build_ranges(bounds: list[float]) -> Ranges:
    ordered = sorted(bounds)[: len(bounds) // 2 * 2]
    return Ranges(tuple(zip(ordered[::2], ordered[1::2], strict=True)))


simple = st.one_of(
    st.builds(Empty),
    st.builds(UniformRatio),
    st.builds(Middle),
    st.builds(Spans, ratios, laws),
    st.builds(RandomRatio, ratios),
    st.builds(RandomTokens, st.integers(1, 1000)),
    st.builds(Prefix, st.floats(0, 1, exclude_max=True)),
    st.builds(build_ranges, st.lists(st.floats(0, 1), min_size=2, max_size=6, unique=True)),
)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    shares = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=4))
    parts = [draw(simple | st.just(MIXED)) for _ in shares]
    return Mixture(tuple(share / sum(shares) for share in shares), tuple(parts))


@given(simple | mixtures() | st.just(MIXED))
def test_a_name_reads_back(strategy: Strategy) -> None:
    assert parse(strategy.name) == strategy
    assert parse(str(strategy)).name == strategy.name


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("empty", Empty()),
        ("uniform", UniformRatio()),
        ("mixed", MIXED),
        ("middle", Middle()),
        ("prefix:0.5", Prefix(0.5)),
        ("random:0.3", RandomRatio(0.3)),
        ("tokens:1", RandomTokens(1)),
        ("span:p=0.5,mean=50", Spans(0.5, Geometric(50))),
        (" span : mean = 50 , p = .5 , law = geometric ", Spans(0.5, Geometric(50))),
        ("span:p=0.5,mean=15,sd=3,law=dlogistic", Spans(0.5, DLogistic(15, 3))),
        ("[0.25,0.75]", Ranges(((0.25, 0.75),))),
        ("[0.6, 0.9] & [0.1, 0.4]", Ranges(((0.1, 0.4), (0.6, 0.9)))),
        ("0.3*empty+0.2*span:p=0.85,mean=50+0.5*span:p=0.5,mean=50", MIXED),
        ("0.5*[0,0.5] + 0.5*prefix:0.5", Mixture((0.5, 0.5), (Ranges(((0, 0.5),)), Prefix(0.5)))),
        ("0.5*mixed+0.5*uniform", Mixture((0.5, 0.5), (MIXED, UniformRatio()))),
    ],
)
def test_reads(text: str, strategy: Strategy) -> None:
    assert parse(text) == strategy


def test_names() -> None:
    assert str(MIXED) == "mixed"
    assert Spans(1, Geometric(50.0)).name == "span:p=1,mean=50"
    assert Mixture((0.25, 0.75), (Empty(), Ranges(((0, 0.5),)))).name == "0.25*empty+0.75*[0,0.5]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "unknown strategy ''; known: [a,b]&[c,d], empty, middle, mixed, prefix, random, span, "
            "tokens, uniform",
        ),
        ("spam:p=0.5,mean=50", "unknown strategy 'spam'; did you mean 'span'?"),
        ("unifrom", "; did you mean 'uniform'?"),
        ("prefix", "'prefix' needs a number, such as prefix:0.5"),
        ("prefix:", "nothing follows the colon of 'prefix:'"),
        ("prefix:half", "prefix is 'half'; it must be a number"),
        ("prefix:1", "must lie in [0, 1)"),
        ("tokens:0", "tokens is 0; it must be a positive integer"),
        ("tokens:some", "tokens is 'some'; it must be a positive integer, as in tokens:1"),
        ("random:0", "p is 0.0; the share of targets must lie in (0, 1]"),
        ("empty:3", "'empty' takes no values, but '3' follows it"),
        ("span", "'p' is missing"),
        ("span:p=0.5", "'mean' is missing"),
        ("span:0.5,50", "'0.5' is not of the form key=value"),
        ("span:p=0.5,mean=50,", "'' is not of the form key=value"),
        ("span:p=0.5,p=0.6,mean=50", "'p' is given twice"),
        (
            "span:p=0.5,maen=50",
            "a span has no 'maen'; did you mean 'mean'?",
        ),
        ("span:p=1.5,mean=50", "p is 1.5; the share of targets must lie in (0, 1]"),
        ("span:p=nan,mean=50", "p is nan"),
        ("span:p=0.5,mean=0", "mean is 0.0; a mean span length must lie in [1, 1e+09]"),
        (
            "span:p=0.5,mean=50,sd=3",
            "sd is '3', but geometric lengths have only a mean; leave it out or add law=dlogistic",
        ),
        ("span:p=0.5,mean=50,law=dlogistic", "'sd' is missing"),
        (
            "span:p=0.5,mean=50,law=dlogistics",
            "law is 'dlogistics'; did you mean 'dlogistic'?",
        ),
        ("[0.1,0.4", "'[0.1,0.4' is not a range [a,b]"),
        ("[0.1]", "'[0.1]' is not a range [a,b]"),
        ("[0.1,0.4]&", "'' is not a range [a,b]"),
        ("[0.1,x]", "a bound is 'x'; it must be a number"),
        ("[0.4,0.1]", "[0.4,0.1] is out of order"),
        ("[0.1,0.5]&[0.4,0.6]", "[0.1,0.5] and [0.4,0.6] overlap"),
        ("empty+uniform", "'empty' has no weight; a mixture is written like 0.5*empty+0.5*uniform"),
        ("half*empty", "a weight is 'half'; it must be a number"),
        ("0.5*empty+0.4*uniform", "the weights 0.5, 0.4 sum to 0.9; they must sum to 1"),
        ("0.5*empty+0.5*unifrom", "unknown strategy 'unifrom'; did you mean 'uniform'?"),
        ("0*empty+1*uniform", "a weight is 0.0"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"context {text!r}: ")) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [0.5, [0.1, 0.4], None])
def test_not_a_string(value: object) -> None:
    """YAML reads an unquoted [0.1,0.4] as a list."""
    with pytest.raises(
        ValueError, match=re.escape(f"a context is {value!r}, not a string; ") + ".*in quotes"
    ):
        parse(value)  # type: ignore[arg-type]
