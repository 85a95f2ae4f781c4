import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    parse,
)
from tracformer.spans import DLogistic, Geometric

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
