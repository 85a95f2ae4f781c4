"""Options are written once: bounds, readers and flags are derived from dataclass fields."""

import argparse
import math
from dataclasses import asdict, dataclass, field

import pytest
import yaml

from tracformer.options import (
    add_arguments,
    build,
    check_options,
    did_you_mean,
    from_arguments,
    option,
    place,
    read_words,
    to_yaml,
)


@dataclass(frozen=True)
class Inner:
    rate: float = option(0.1, "learning rate", above=0)
    name: str = option("adam", "optimizer", choices=("adam", "muon"))

    def __post_init__(self) -> None:
        check_options(self, "inner.")


@dataclass(frozen=True)
class Outer:
    steps: int = option(10, "number of steps", low=1, metavar="N")
    share: float = option(1.0, "share of 100 % to keep", above=0, high=1)
    quick: bool = option(False, "skip the slow part")
    sizes: tuple[int, ...] = option((1, 2), "sizes")
    limit: int | None = option(None, "limit", low=0)
    path: str = option("", "file", raw=True)
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        check_options(self)


def test_build_converts_values_and_nested_groups() -> None:
    values = {"steps": "3", "sizes": "4/5", "quick": "yes", "inner": {"rate": "1e-3"}}
    assert build(Outer, values) == Outer(3, quick=True, sizes=(4, 5), inner=Inner(1e-3))
    assert build(Outer, {"sizes": [7], "limit": "none"}) == Outer(sizes=(7,))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"share": 0}, r"share is 0.0; it must be in \(0, 1\]"),
        ({"share": float("nan")}, "share is nan"),
        ({"limit": -1}, "limit is -1; it must be at least 0"),
        ({"steps": 1.5}, "steps is 1.5; it must be an integer"),
        ({"steps": True}, "steps is True; it must be an integer"),
        ({"quick": "maybe"}, "quick is 'maybe'; it must be true or false"),
        ({"sizes": {}}, "sizes is {}; it must be a list"),
        ({"step": 1}, "unknown option 'step'; did you mean 'steps'?"),
        ({"rate": 1}, "unknown option 'rate'; did you mean 'inner.rate'?"),
        ({"inner": 1}, "inner is 1; it must be a group of options, such as inner.rate"),
        ({"inner": {"rate": 0}}, "inner.rate is 0.0; it must be more than 0"),
        ({"inner": {"name": "sgd"}}, "inner.name is 'sgd'; it must be one of adam, muon"),
        ({"inner": {"rat": 1}}, "unknown option 'inner.rat'; did you mean 'inner.rate'?"),
    ],
)
def test_wrong_values_name_the_option_and_what_is_allowed(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(Outer, values)


def test_words_are_read_as_yaml_except_raw_ones() -> None:
    words = ["steps=5", "path=0012", "inner.rate=1e-3", "sizes=[3,4]"]
    values: dict[str, object] = {}
    for key, value in read_words(words, Outer).items():
        place(values, key, value)
    assert build(Outer, values) == Outer(5, sizes=(3, 4), path="0012", inner=Inner(1e-3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps"], "'steps' is not of the form key=value"),
        (["=3"], "'=3' is not of the form key=value"),
        (["a=1", "a=2"], "a is given twice, as 'a=1' and 'a=2'"),
        (["a=[1"], r"a=\[1 is not YAML at line 1"),
    ],
)
def test_wrong_words_are_quoted(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_words(words)


def test_flags_are_derived_and_only_given_ones_are_read() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Outer)
    text = " ".join(parser.format_help().split())
    assert "--steps N number of steps (default: 10)" in text
    assert "share of 100 % to keep (default: 1)" in text
    assert from_arguments(Outer, parser.parse_args([])) == {}
    given = from_arguments(Outer, parser.parse_args(["--steps", "4", "--quick", "--limit", "3"]))
    assert given == {"steps": 4, "quick": True, "limit": 3}
    with pytest.raises(ValueError, match=r"--share is 2.0; it must be in \(0, 1\]"):
        from_arguments(Outer, parser.parse_args(["--share", "2"]))


def test_a_far_name_lists_the_known_ones() -> None:
    assert did_you_mean("zzz", ["b", "a"]) == "; known: a, b"


@dataclass(frozen=True)
class Required:
    name: str
    rate: float = option(0.1, "rate", above=0, below=math.inf)

    def __post_init__(self) -> None:
        check_options(self)


def test_required_values_and_finite_bounds() -> None:
    with pytest.raises(ValueError, match="name is missing; it is required"):
        build(Required, {})
    with pytest.raises(ValueError, match="rate is inf; it must be finite and more than 0"):
        build(Required, {"name": "a", "rate": "inf"})


def test_yaml_with_help_reads_back() -> None:
    text = to_yaml(asdict(Outer(steps=3, sizes=(4, 5))), Outer)
    assert "# number of steps\nsteps: 3\n" in text
    assert "  # optimizer: adam, muon\n  name: adam" in text
    assert build(Outer, yaml.safe_load(text)) == Outer(steps=3, sizes=(4, 5))
