"""What a model can be asked: tasks by name, their options, and the subject they are put to.

A task is a frozen dataclass whose fields are its options, so that `ratios:mean=10,sequences=100`,
an entry of a YAML file and a call from Python all say the same. A new task is one class and one
line in `_tasks`, or a call of `register_task` from outside.
"""

import dataclasses
import importlib
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from tracformer.data.tokenizer import Tokenizer
from tracformer.distributed import Ranks
from tracformer.evaluation import provenance as manifest
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.model.base import ConditionalModel, check_mode

ALONE = Ranks(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Subject:
    """A model in one mode, and what a task needs to put questions to it."""

    model: ConditionalModel
    tokenizer: Tokenizer | None  # None for models of bare symbols
    name: str
    mode: str
    batch: int = 32  # sequences at once: a matter of speed and memory, never of numbers
    ranks: Ranks = ALONE  # each rank does its share, and all of them end with the same result
    # whose windows of text are read; None: its own. The same for all models that are compared
    reference: Tokenizer | None = None
    # a folder in which a task may keep what it has so far, to resume from
    scratch: Path | None = None

    def __post_init__(self) -> None:
        check_mode(self.model.config, self.mode)
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}; at least one sequence must be asked at once")

    @property
    def device(self) -> torch.device:
        return self.model.head.device

    @property
    def family(self) -> str:
        return self.model.config.model_type

    @property
    def kind(self) -> str:
        """exact, marginal or bound."""
        return self.model.answers[self.mode]

    @property
    def note(self) -> str:
        """What the mode cannot do, to be shown wherever its figures are."""
        limit = self.model.limits.get(self.mode)
        return f"mode {self.mode} {limit}" if limit else ""

    @cached_property
    def weights(self) -> str:
        return manifest.weights_hash(self.model)


class Progress(Protocol):
    """Told of the work as it is done; `total` and `done` count whatever the task counts."""

    def start(self, what: str, total: int) -> None: ...

    def step(self, done: int = 1) -> None: ...


class Silent:
    """Progress that nobody watches."""

    def start(self, what: str, total: int) -> None:
        return

    def step(self, done: int = 1) -> None:
        return


@dataclass(frozen=True)
class Task(ABC):
    """Subclasses are frozen dataclasses; their fields, all with defaults, are the options."""

    name: ClassVar[str]
    modes: ClassVar[tuple[str, ...] | None] = None  # that it can ask in; None: any
    # raised when figures of the same model change; results are made again
    schema: ClassVar[int] = 1
    # Options that older results lack, with the value that they had there: at it `options` omits
    # them.
    later_options: ClassVar[Mapping[str, Any]] = {}
    # does a finished result answer the same question again? False: it belongs to the hour it was
    # made
    lasting: ClassVar[bool] = True

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its value, without anything of this machine: a path by
        its last name alone.
        """
        values = dataclasses.asdict(self)
        for key, implied in self.later_options.items():
            if values[key] == implied:
                del values[key]
        return {key: _nameless(value) for key, value in values.items()}

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Hashes of what the model will be shown, by name ("data", "contexts", ...), known before
        the task runs.
        """
        return {}

    @abstractmethod
    def run(self, subject: Subject, progress: Progress) -> Result: ...

    def asked_of(self, subject: Subject) -> "Task":
        """The task without those of its options that change nothing for this subject, so that its
        answer is found under any of them.
        """
        return self

    def check(self, subject: Subject) -> None:
        """A mode that the task cannot ask in is an error, before any work."""
        if self.modes is not None and subject.mode not in self.modes:
            raise ValueError(
                f"task {self.name!r} asks in mode {' or '.join(self.modes)}, and {subject.name} is "
                f"to answer in mode {subject.mode!r}; "
                f"it was trained for: {', '.join(subject.model.config.modes)}"
            )

    def manifest(self, subject: Subject) -> dict[str, Any]:
        return manifest.describe(subject, self.schema, self.inputs(subject))

    def result(
        self, subject: Subject, rows: list[ResultRow], details: Mapping[str, Any] | None = None
    ) -> Result:
        """The rows with everything that belongs beside them."""
        return Result(
            model=subject.name,
            family=subject.family,
            mode=subject.mode,
            task=self.name,
            options=self.options,
            rows=tuple(rows),
            details=details or {},
            manifest=self.manifest(subject),
        )


# Each name's class, as `module:class`, imported when first asked for.
_tasks: dict[str, str | type[Task]] = {
    "ratios": "tracformer.evaluation.perplexity:Ratios",
    "ranges": "tracformer.evaluation.perplexity:FixedRanges",
    "contexts": "tracformer.evaluation.perplexity:NamedContexts",
    "prefixes": "tracformer.evaluation.perplexity:Prefixes",
    "unconditional": "tracformer.evaluation.perplexity:Unconditional",
    "infilling": "tracformer.evaluation.fill_quality:Infilling",
    "orders": "tracformer.evaluation.order_consistency:Orders",
    "calibration": "tracformer.evaluation.calibration:Calibration",
    "exact": "tracformer.evaluation.exact:Exact",
    "speed": "tracformer.evaluation.speed:Speed",
    "domains": "tracformer.evaluation.domains:Domains",
}


def register_task(name: str, factory: str | type[Task]) -> None:
    """`factory` is a subclass of `Task`, or "module:class"."""
    _tasks[name] = factory


def task_names() -> tuple[str, ...]:
    return tuple(_tasks)


def task_class(name: str) -> type[Task]:
    if name not in _tasks:
        raise ValueError(
            f"there is no task {name!r}{_nearest(name, _tasks)}; available: {', '.join(_tasks)}"
        )
    factory = _tasks[name]
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        found: type[Task] = getattr(importlib.import_module(module), attribute)
        return found
    return factory


def make_task(
    name: str, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Task:
    """A task with these options; `defaults` fill those that it has and nobody named, and may hold
    others. Strings are read as written.
    """
    kind = task_class(name)
    types_of = typing.get_type_hints(kind)
    known = {part.name: types_of[part.name] for part in dataclasses.fields(kind)}
    for key in options:
        if key not in known:
            raise ValueError(
                f"task {name!r} has no option {key!r}{_nearest(key, known)}; it has: "
                f"{', '.join(known)}"
            )
    wanted = {**{key: value for key, value in (defaults or {}).items() if key in known}, **options}
    try:
        return kind(**{key: _read(key, value, known[key]) for key, value in wanted.items()})
    except ValueError as error:
        raise ValueError(f"task {name!r}: {error}") from error


def parse_task(text: str, defaults: Mapping[str, Any] | None = None) -> Task:
    """`NAME` or `NAME:KEY=VALUE,KEY=VALUE`. A list is written with slashes, `ratios=0.1/0.5`; a
    comma inside brackets separates nothing.

    >>> parse_task("ratios:mean=10,ratios=0.1/0.5").options["ratios"]
    (0.1, 0.5)
    """
    name, colon, rest = text.strip().partition(":")
    options: dict[str, str] = {}
    for item in re.split(r",(?![^\[]*\])", rest) if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise ValueError(
                f"task {text!r}: {item.strip()!r} is not of the form key=value; a task is written "
                "like ratios:mean=10,length=128"
            )
        if key in options:
            raise ValueError(f"task {text!r}: {key!r} is given twice")
        options[key] = value
    return make_task(name, options, defaults)


def _read(key: str, value: Any, kind: Any) -> Any:
    """A value as its field's type wants it: int, float, bool, str, a tuple of these, or None where
    that is allowed.
    """
    if isinstance(kind, types.UnionType):
        inner = [each for each in typing.get_args(kind) if each is not types.NoneType]
        if value is None or value == "none":
            return None
        return _read(key, value, inner[0])
    if typing.get_origin(kind) is tuple:
        items = (
            value.split("/")
            if isinstance(value, str)
            else value
            if isinstance(value, list | tuple)
            else [value]
        )
        return tuple(_read(key, item, typing.get_args(kind)[0]) for item in items)
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in words:
            raise ValueError(f"{key} is {value!r}; it must be true or false")
        return words[str(value).lower()]
    if kind in (int, float):
        try:
            if isinstance(value, bool) or (
                kind is int and isinstance(value, float) and not value.is_integer()
            ):
                raise ValueError
            return kind(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"{key} is {value!r}; it must be {'an integer' if kind is int else 'a number'}"
            ) from None
    return str(value) if isinstance(value, Path) else value


def _nameless(value: Any) -> Any:
    """A path that exists here is somebody's own business: its last name is enough."""
    if isinstance(value, str) and ("/" in value or "\\" in value) and Path(value).exists():
        return Path(value).name
    return value


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
