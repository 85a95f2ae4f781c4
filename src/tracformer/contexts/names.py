"""Strings that name a strategy, in configurations and on the command line.

empty                                        nothing is given
span:p=0.5,mean=50                           Algorithm 1, geometric lengths
span:p=0.5,mean=15,sd=3,law=dlogistic        Algorithm 1, discretised logistic lengths
mixed                                        Algorithm 2
[0.1,0.4]&[0.6,0.9]                          these fractions of the sequence are targets
prefix:0.5                                   the first half is given
middle                                       the targets are one run between two uniform cuts
random:0.3                                   30% of the tokens are targets, anywhere
tokens:1                                     one target, anywhere; all other tokens are given
uniform                                      any number of targets, anywhere
0.7*span:p=0.5,mean=50+0.3*uniform           a mixture; the weights sum to 1
"""

import re
from collections.abc import Callable
from difflib import get_close_matches

from tracformer.contexts.lengths import DLogistic, Geometric, LengthLaw
from tracformer.contexts.strategies import (
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
)

LAWS = ("geometric", "dlogistic")
SPAN_KEYS = ("p", "mean", "sd", "law")


def parse(text: str) -> Strategy:
    """The strategy that `text` names; a ValueError quotes the text and says what is allowed.

    >>> parse("prefix:0.5")
    Prefix(fraction=0.5)
    >>> parse("span: mean=50, p=0.50").name
    'span:p=0.5,mean=50'
    """
    if not isinstance(text, str):
        raise ValueError(f"a context is {text!r}, not a string; write one such as 'span:p=0.5,mean=50' or, in quotes, '[0.25,0.75]'")
    try:
        return _parse_mixture(text) if "*" in text or "+" in text else _parse_one(text)
    except ValueError as error:
        raise ValueError(f"context {text!r}: {error}") from None


def _parse_mixture(text: str) -> Mixture:
    weights: list[float] = []
    parts: list[Strategy] = []
    for piece in text.split("+"):
        weight, star, part = piece.partition("*")
        if not star:
            raise ValueError(f"{piece.strip()!r} has no weight; a mixture is written like 0.5*empty+0.5*uniform")
        weights.append(_number("a weight", weight))
        parts.append(_parse_one(part))
    return Mixture(tuple(weights), tuple(parts))


def _parse_one(text: str) -> Strategy:
    if text.strip().startswith("["):
        return _parse_ranges(text)
    name, colon, values = (part.strip() for part in text.partition(":"))
    if name not in _PARSERS:
        raise ValueError(f"no strategy is called {name!r}{_nearest(name, _PARSERS)}; known: {', '.join(_PARSERS)}, [a,b]&[c,d]")
    if colon and not values:
        raise ValueError(f"nothing follows the colon of {text.strip()!r}")
    return _PARSERS[name](values)


def _parse_span(values: str) -> Strategy:
    fields: dict[str, str] = {}
    for item in values.split(",") if values else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"{item.strip()!r} is not of the form key=value; a span is written like span:p=0.5,mean=50")
        if key not in SPAN_KEYS:
            raise ValueError(f"a span has no {key!r}{_nearest(key, SPAN_KEYS)}; allowed: {', '.join(SPAN_KEYS)}")
        if key in fields:
            raise ValueError(f"{key!r} is given twice")
        fields[key] = value
    for key in ("p", "mean"):
        if key not in fields:
            raise ValueError(f"{key!r} is missing; a span is written like span:p=0.5,mean=50")
    return Spans(_number("p", fields["p"]), _length_law(fields))


def _length_law(fields: dict[str, str]) -> LengthLaw:
    mean, law = _number("mean", fields["mean"]), fields.get("law", "geometric")
    if law not in LAWS:
        raise ValueError(f"law is {law!r}{_nearest(law, LAWS)}; allowed: {', '.join(LAWS)}")
    if law == "dlogistic":
        if "sd" not in fields:
            raise ValueError("'sd' is missing; law=dlogistic is written like span:p=0.5,mean=15,sd=3,law=dlogistic")
        return DLogistic(mean, _number("sd", fields["sd"]))
    if "sd" in fields:
        raise ValueError(f"sd is {fields['sd']!r}, but geometric lengths have only a mean; leave it out or add law=dlogistic")
    return Geometric(mean)


def _parse_ranges(text: str) -> Ranges:
    ranges: list[tuple[float, float]] = []
    for piece in text.split("&"):
        match = re.fullmatch(r"\s*\[([^\[\],]*),([^\[\],]*)\]\s*", piece)
        if match is None:
            raise ValueError(f"{piece.strip()!r} is not a range [a,b]; ranges are written like [0.1,0.4]&[0.6,0.9]")
        ranges.append((_number("a bound", match[1]), _number("a bound", match[2])))
    return Ranges(tuple(ranges))


def _plain(name: str, strategy: Strategy) -> Callable[[str], Strategy]:
    """A strategy without numbers."""

    def build(values: str) -> Strategy:
        if values:
            raise ValueError(f"{name!r} takes no values, but {values!r} follows it")
        return strategy

    return build


def _one_number(name: str, build: Callable[[float], Strategy]) -> Callable[[str], Strategy]:
    def read(values: str) -> Strategy:
        if not values:
            raise ValueError(f"{name!r} needs a number, such as {name}:0.5")
        return build(_number(name, values))

    return read


def _parse_tokens(values: str) -> Strategy:
    if not values.isdecimal():
        raise ValueError(f"tokens is {values!r}; it must be a positive integer, as in tokens:1")
    return RandomTokens(int(values))


_PARSERS: dict[str, Callable[[str], Strategy]] = {
    "empty": _plain("empty", Empty()),
    "middle": _plain("middle", Middle()),
    "mixed": _plain("mixed", MIXED),
    "prefix": _one_number("prefix", Prefix),
    "random": _one_number("random", RandomRatio),
    "span": _parse_span,
    "tokens": _parse_tokens,
    "uniform": _plain("uniform", UniformRatio()),
}


def _number(what: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{what} is {text.strip()!r}; it must be a number") from None


def _nearest(word: str, known: tuple[str, ...] | dict[str, Callable[[str], Strategy]]) -> str:
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
