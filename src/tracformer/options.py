"""Options written once: dataclass fields that carry their help text and bounds.

A set of options is a frozen dataclass whose fields are made by `option`. Everything else is derived
from the fields:

- `check_options` enforces bounds and choices; call it in `__post_init__`.
- `build` makes an instance from a mapping such as a YAML file holds; dataclasses may be nested.
- `read_words` reads `key=value` words, with dotted keys for nested groups.
- `add_arguments` and `from_arguments` make command-line flags and read them back.
- `to_yaml` writes values as YAML with the help texts as comments.
- `did_you_mean` suggests the nearest known name.

This module imports neither torch nor any other module of the package.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Bounds(NamedTuple):
    """What the values of an option must satisfy. None means no limit on that side."""

    low: float | None = None  # at least
    high: float | None = None  # at most
    above: float | None = None  # more than
    below: float | None = None  # less than
    choices: tuple[str, ...] | Callable[[], Iterable[str]] = ()

    def names(self) -> tuple[str, ...]:
        """Return the allowed names; empty if any is."""
        return tuple(self.choices() if callable(self.choices) else self.choices)

    def allow(self, value: Any) -> bool:
        """Return whether a value lies within the bounds; NaN does not."""
        if names := self.names():
            return value in names
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def describe(self) -> str:
        """Return the bounds in words, as in "must be ..."."""
        if names := self.names():
            return f"one of {', '.join(names)}"
        low = self.above if self.low is None else self.low
        high = self.below if self.high is None else self.high
        if low is not None and high is not None and math.isfinite(high):
            opening = "(" if self.low is None else "["
            closing = ")" if self.high is None else "]"
            return f"in {opening}{low:g}, {high:g}{closing}"
        if low is not None:
            finite = "" if high is None else "finite and "
            return f"{finite}{'at least' if self.above is None else 'more than'} {low:g}"
        return f"at most {high:g}" if self.below is None else f"less than {high:g}"


class OptionInfo(NamedTuple):
    """What a field made by `option` carries."""

    help: str
    bounds: Bounds | None
    metavar: str | None
    flags: tuple[str, ...]  # flags on the command line; empty: derived from the name
    raw: bool  # True: `key=value` words keep the value as written instead of reading it as YAML


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] | Callable[[], Iterable[str]] = (),
    metavar: str | None = None,
    flags: Sequence[str] = (),
    raw: bool = False,
) -> Any:
    """Return a dataclass field with help text and bounds.

    Args:
        default: Default value, or a class or function that makes it if it is callable.
        help: One line for `--help`, the HTTP schema and the documentation.
        low: Smallest allowed number.
        high: Largest allowed number.
        above: Numbers must be more than this.
        below: Numbers must be less than this.
        choices: Allowed strings, or a function that returns them.
        metavar: Placeholder of the value in `--help`.
        flags: Flags on the command line, if they differ from the field's name.
        raw: Keep the value of a `key=value` word as written (names of files, for instance).
    """
    bounds = Bounds(low, high, above, below, choices if callable(choices) else tuple(choices))
    info = OptionInfo(help, None if bounds == Bounds() else bounds, metavar, tuple(flags), raw)
    kind = {"default_factory" if callable(default) else "default": default}
    field: Any = dataclasses.field(**kind, metadata={"option": info})
    return field


def option_fields(kind: Any) -> dict[str, OptionInfo]:
    """Return the options of a dataclass or an instance, by field name, in order."""
    return {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(kind)
        if "option" in field.metadata
    }


def default_of(kind: type[Any], name: str) -> Any:
    """Return the default value of a field."""
    [field] = [field for field in dataclasses.fields(kind) if field.name == name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def check_options(instance: Any, prefix: str = "") -> None:
    """Raise ValueError if a field violates its bounds.

    A field that holds its default is not checked: a default such as -1 may stand for "automatic".

    Args:
        instance: An instance of a dataclass with `option` fields.
        prefix: Put before the names in messages, such as "optimizer.".
    """
    # mypy does not take a class for hashable
    for name, bounds, default in _bounded_fields(type(instance)):  # type: ignore[arg-type]
        value = getattr(instance, name)
        if value is not None and value != default and not bounds.allow(value):
            raise ValueError(f"{prefix}{name} is {value!r}; it must be {bounds.describe()}")


@lru_cache
def _bounded_fields(kind: type[Any]) -> tuple[tuple[str, Bounds, Any], ...]:
    """Return name, bounds and default of each option that has bounds."""
    return tuple(
        (name, info.bounds, default_of(kind, name))
        for name, info in option_fields(kind).items()
        if info.bounds is not None
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest known name, or a list of the known names.

    Names with dots are also compared by their last part.

    >>> did_you_mean("optimzer.lr", ["optimizer.lr", "steps"])
    "; did you mean 'optimizer.lr'?"
    """
    names = sorted(known)
    near = get_close_matches(word, names, n=1)
    if not near:
        by_last = {name.rsplit(".", 1)[-1]: name for name in names}
        near = [by_last[last] for last in get_close_matches(word.rsplit(".", 1)[-1], by_last, n=1)]
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"


def build(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Return an instance of a dataclass from a mapping of names to values.

    Args:
        kind: The dataclass. Fields may be dataclasses themselves, built from nested mappings.
        values: Values as YAML or JSON gives them; each is converted to the type of its field.
        prefix: Put before the names in messages, such as "optimizer.".

    Raises:
        ValueError: A name is unknown, a value has the wrong type, or a required one is missing.
    """
    hints = typing.get_type_hints(kind)
    names = {field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, kind))}
    for key in values:
        if key not in names:
            known = [prefix + name for name in names]
            for name, hint in names.items():
                if dataclasses.is_dataclass(hint):
                    known += [f"{prefix}{name}.{inner.name}" for inner in dataclasses.fields(hint)]
            raise ValueError(f"unknown option {prefix + key!r}{did_you_mean(prefix + key, known)}")
    for field in dataclasses.fields(typing.cast(Any, kind)):
        no_default = (field.default, field.default_factory) == (dataclasses.MISSING,) * 2
        if no_default and field.name not in values:
            raise ValueError(f"{prefix}{field.name} is missing; it is required")
    return kind(**{key: convert(value, names[key], prefix + key) for key, value in values.items()})


def convert(value: Any, hint: Any, name: str) -> Any:
    """Return a value as the type of its field requires, or raise ValueError.

    Strings are read as numbers, booleans or lists (items separated by `/`) where the field has such
    a type. `none` stands for None where that is allowed.
    """
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, Mapping):
            first = dataclasses.fields(hint)[0].name
            raise ValueError(
                f"{name} is {value!r}; it must be a group of options, such as {name}.{first}=..."
            )
        return build(typing.cast(type[Any], hint), value, f"{name}.")
    origin = typing.get_origin(hint) or hint
    if origin in (types.UnionType, typing.Union):
        inner = [each for each in typing.get_args(hint) if each is not types.NoneType]
        if value is None or value == "none":
            return None
        return convert(value, inner[0], name)
    if origin is tuple:
        kind = typing.get_args(hint)[0]
        single = (str, int, float) if kind in (int, float) else (str,)
        if not isinstance(value, (*single, list, tuple)):
            raise ValueError(f"{name} is {value!r}; it must be a list, such as {name}=[a,b]")
        items = value.split("/") if isinstance(value, str) else value
        items = items if isinstance(items, list | tuple) else [items]
        return tuple(convert(item, kind, name) for item in items)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}; it must be a group of options")
        return dict(value)
    reader = {bool: _boolean, int: _integer, float: _number, str: _string}.get(origin)
    if reader is None:
        return value
    try:
        return reader(value)
    except (TypeError, ValueError, OverflowError):
        expected = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        raise ValueError(f"{name} is {value!r}; it must be {expected[origin]}") from None


def _boolean(value: Any) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int) and str(value).lower() in words:
        return words[str(value).lower()]
    raise ValueError


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)  # YAML reads 1e-3 as a string


def _string(value: Any) -> str:
    if isinstance(value, str | int | float | types.NoneType):
        return "" if value is None else str(value)
    raise ValueError


def read_yaml(text: str, where: str) -> Any:
    """Return what a YAML text holds; `where` names it in the message of a ValueError."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{where} is not YAML{place}: {problem}") from error


def to_yaml(values: Mapping[str, Any], kind: Any = None, indent: str = "") -> str:
    """Return values as YAML, each under a comment with its help text.

    Args:
        values: Names and values; groups are nested mappings.
        kind: The dataclass that they belong to; None writes no comments.
        indent: Indentation of every line.
    """
    import yaml

    fields = option_fields(kind) if kind is not None else {}
    hints = typing.get_type_hints(kind) if kind is not None else {}
    lines = []
    for key, value in values.items():
        if key in fields:
            help, bounds = fields[key].help, fields[key].bounds
            names = bounds.names() if bounds is not None else ()
            listed = "" if all(name in help for name in names) else f": {', '.join(names)}"
            lines.append(f"{indent}# {help}{listed}")
        if isinstance(value, Mapping) and value:
            inner = hints.get(key)
            inner = inner if dataclasses.is_dataclass(inner) else None
            lines += [f"{indent}{key}:", to_yaml(value, inner, f"{indent}  ")]
            continue
        plain = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump({key: plain}, default_flow_style=True, width=10**6).strip()
        lines.append(indent + text[1:-1])
    return "\n".join(lines)


def read_words(
    words: Iterable[str],
    kind: type[Any] | None = None,
    short: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """Return `key=value` words as a mapping from dotted keys to values; values are read as YAML.

    Args:
        words: Words such as "steps=100" or "optimizer.lr=1e-3".
        kind: The dataclass they are for. Its `raw` options keep their values as written.
        short: Short names of keys, such as {"data": "data.source"}.

    Raises:
        ValueError: A word has no `=`, a key is given twice, or a value is not YAML.
    """
    raw = raw_keys(kind) if kind is not None else ()
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is not of the form key=value")
        key = short.get(key, key)
        if key in given:
            raise ValueError(f"{key} is given twice, as {given[key]!r} and {word!r}; give it once")
        given[key] = word
        values[key] = text if key in raw or not text else read_yaml(text, word)
    return values


def raw_keys(kind: type[Any], prefix: str = "") -> set[str]:
    """Return the dotted names of options whose values are kept as written."""
    keys = {prefix + name for name, info in option_fields(kind).items() if info.raw}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            inner = typing.cast(type[Any], hints[field.name])
            keys |= raw_keys(inner, f"{prefix}{field.name}.")
    return keys


def place(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `values["a"]["b"]` for the key "a.b"; groups are made as needed."""
    *path, last = key.split(".")
    for part in path:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{key}: {part} is a value, not a group of options")
        values = inner
    values[last] = value


def flag_of(name: str, info: OptionInfo | None = None) -> str:
    """Return the longest flag of an option: `top_k` is `--top-k`."""
    return info.flags[-1] if info is not None and info.flags else f"--{name.replace('_', '-')}"


def add_arguments(parser: Any, kind: type[Any], names: Collection[str] | None = None) -> None:
    """Add a flag for each option of a dataclass to an argparse parser or group.

    Numbers, strings and booleans become flags; other types are the caller's business. A flag that
    is not given leaves no attribute in the namespace, so that `from_arguments` can tell.

    Args:
        parser: Parser or argument group.
        kind: The dataclass.
        names: The fields to add; all if None.
    """
    hints = typing.get_type_hints(kind)
    for name, info in option_fields(kind).items():
        simple = simple_type(hints[name])
        if (names is not None and name not in names) or simple is None:
            continue
        default = default_of(kind, name)
        flags = info.flags or (flag_of(name),)
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        text = info.help.replace("%", "%%")
        if simple is bool:
            common["action"] = "store_false" if default else "store_true"
        else:
            common |= {"type": simple, "metavar": info.metavar or name.upper()}
            if default not in (None, "") and "default" not in text:
                text += f" (default: {default:g})" if simple is float else f" (default: {default})"
        action = parser.add_argument(*flags, help=text, **common)
        if info.bounds is not None and info.bounds.choices and simple is str:
            # what the shell's completion offers (argcomplete)
            action.completer = partial(_allowed_names, info.bounds)


def _allowed_names(bounds: Bounds, **completion: Any) -> tuple[str, ...]:
    return bounds.names()


def from_arguments(
    kind: type[Any], arguments: argparse.Namespace, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the options that were given on the command line, by field name.

    Raises:
        ValueError: A value violates its bounds; the message names the flag.
    """
    given: dict[str, Any] = {}
    for name, info in option_fields(kind).items():
        if (names is not None and name not in names) or not hasattr(arguments, name):
            continue
        value = getattr(arguments, name)
        if info.bounds is not None and not info.bounds.allow(value):
            flag = flag_of(name, info)
            raise ValueError(f"{flag} is {value!r}; it must be {info.bounds.describe()}")
        given[name] = value
    return given


def simple_type(hint: Any) -> type[Any] | None:
    """Return bool, int, float or str for a hint that is one of these, or one of them or None."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(hint) if kind in (bool, int, float, str)]
        return kinds[0] if kinds else None
    return hint if hint in (bool, int, float, str) else None
