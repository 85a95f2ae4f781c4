"""Tasks by name, their options, and the models that they are run on.

- `Subject`: a model in one mode, with what a task needs to query it.
- `Task`: base class of all tasks. A task is a frozen dataclass whose fields are its options, so
  that `ratios:mean=10,sequences=100` on the command line, an entry of a YAML file and
  `make_task("ratios", {"mean": 10})` mean the same.
- `register_task`: adds a task. A new task here is one class and one line in `_tasks`.
- `evaluate`: runs models on tasks and keeps the results in a folder; it reuses those that the
  folder has. `load_subjects` loads models that are written as [NAME=]FOLDER[@MODE].
- `Progress`: progress bars of tasks.
"""

import contextlib
import dataclasses
import importlib
import re
import shutil
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch

from tracformer import loading, plugins
from tracformer.data.tokenizer import Tokenizer
from tracformer.devices import Ranks
from tracformer.evaluation.result_files import Result, ResultRow, describe, file_name, weights_hash
from tracformer.model.base import ConditionalModel, check_mode, preferred_mode
from tracformer.model.fast_step import check_kind
from tracformer.options import check_options, convert, did_you_mean
from tracformer.progress import ProgressBar
from tracformer.training.log import read_training

ONE_RANK = Ranks(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Subject:
    """A model in one mode, and what a task needs to query it.

    Args:
        model: The model.
        tokenizer: Its tokenizer; None for models of bare symbols.
        name: Name of the model in results.
        mode: Mode in which it answers.
        batch: Sequences at once; affects speed and memory, never the figures.
        ranks: Processes that share the work; all of them end with the same result.
        reference: Tokenizer that cuts the text windows, the same for all models that are compared.
            None stands for the model's own.
        scratch: Folder in which a task may keep finished blocks, to resume from.
        training: How the weights were trained, see `training.log.describe_training`, if known.
    """

    model: ConditionalModel
    tokenizer: Tokenizer | None
    name: str
    mode: str
    batch: int = 32
    ranks: Ranks = ONE_RANK
    reference: Tokenizer | None = None
    scratch: Path | None = None
    training: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_mode(self.model.config, self.mode)
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}; it must be at least 1")

    @property
    def device(self) -> torch.device:
        """Device of the model's weights."""
        return self.model.head.device

    @property
    def family(self) -> str:
        """Name of the model's system, such as "tracformer"."""
        return self.model.config.model_type

    @property
    def kind(self) -> str:
        """Kind of the model's answers in this mode: exact, marginal or bound."""
        return self.model.answers[self.mode]

    @property
    def note(self) -> str:
        """The limitation of the mode, shown beside its figures; empty if there is none."""
        limit = self.model.limits.get(self.mode)
        return f"mode {self.mode} {limit}" if limit else ""

    @cached_property
    def weights(self) -> str:
        """Hash of the model's configuration and weights."""
        return weights_hash(self.model)


class Progress:
    """Progress of one task after another, as bars on standard error.

    A task calls `start` and `step`; whatever runs tasks calls `finish` after each.

    Args:
        tasks: Number of tasks; with more than one, bars show "[2/5]".
        enabled: False draws nothing.
    """

    finished = 0
    _bar: ProgressBar | None = None

    def __init__(self, tasks: int = 1, enabled: bool = False) -> None:
        self.tasks, self.enabled = tasks, enabled

    def start(self, what: str, total: int) -> None:
        """Begin a new bar of `total` steps."""
        self.close()
        place = f"[{self.finished + 1}/{self.tasks}] " if self.tasks > 1 else ""
        self._bar = ProgressBar(f"{place}{what}", total, enabled=self.enabled)

    def step(self, done: int = 1) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(done)

    def finish(self) -> None:
        """Count a task as done."""
        self.close()
        self.finished += 1

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@dataclass(frozen=True)
class Task(ABC):
    """Base class of tasks. Subclasses are frozen dataclasses; their fields are the options.

    Every option has a default and is made by `tracformer.options.option`.

    Example:
        >>> from tracformer.options import option
        >>> @dataclass(frozen=True)
        ... class Size(Task):
        ...     name = "size"
        ...     unit: float = option(1.0, "parameters per unit", above=0)
        ...
        ...     def run(self, subject: Subject, progress: Progress) -> Result:
        ...         size = subject.model.num_parameters() / self.unit
        ...         return self.result(subject, [ResultRow("size", {}, size)])
        >>> register_task("size", Size)
        >>> parse_task("size:unit=1e6").options
        {'unit': 1000000.0}
        >>> _ = _tasks.pop("size")
    """

    name: ClassVar[str]
    modes: ClassVar[tuple[str, ...] | None] = None  # modes that it works in; None: all
    # Raised by hand when figures of the same model change: results are then made again.
    schema: ClassVar[int] = 1
    # Options that older results lack, with the value that they had there. `options` omits them at
    # this value, so that older results stay valid.
    later_options: ClassVar[Mapping[str, Any]] = {}
    # Whether a stored result may be reused. False for measurements of the machine.
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its value; an existing path is cut to its last name."""
        values = dataclasses.asdict(self)
        for key, implied in self.later_options.items():
            if values[key] == implied:
                del values[key]
        return {key: _last_name(value) for key, value in values.items()}

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Return hashes of what the model will be shown, by name ("data", "contexts", ...).

        They are part of a result's identity and known before the task runs.
        """
        return {}

    @abstractmethod
    def run(self, subject: Subject, progress: Progress) -> Result:
        """Return the result of the task for a model."""

    def canonical(self, subject: Subject) -> "Task":
        """Return the task with every option that has no effect on this model at its default.

        A stored result is then found whatever the value of such an option.
        """
        return self

    def check(self, subject: Subject) -> None:
        """Raise ValueError if the task cannot be run on this model in this mode."""
        if self.modes is not None and subject.mode not in self.modes:
            raise ValueError(
                f"task {self.name!r} works in mode {' or '.join(self.modes)}, but {subject.name} "
                f"is to answer in mode {subject.mode!r}; it was trained for: "
                f"{', '.join(subject.model.config.modes)}"
            )

    def manifest(self, subject: Subject) -> dict[str, Any]:
        """Return what identifies a result of this task and how it is made."""
        return describe(subject, self.schema, self.inputs(subject))

    def result(
        self, subject: Subject, rows: list[ResultRow], details: Mapping[str, Any] | None = None
    ) -> Result:
        """Return a result with these rows."""
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


# Classes by name, as "module:class"; they are imported on first use.
_tasks: dict[str, str | type[Task]] = {
    "ratios": "tracformer.evaluation.perplexity:Ratios",
    "ranges": "tracformer.evaluation.perplexity:FixedRanges",
    "contexts": "tracformer.evaluation.perplexity:NamedContexts",
    "prefixes": "tracformer.evaluation.perplexity:Prefixes",
    "unconditional": "tracformer.evaluation.perplexity:Unconditional",
    "infilling": "tracformer.evaluation.fill_quality:Infilling",
    "orders": "tracformer.evaluation.consistency:Orders",
    "calibration": "tracformer.evaluation.consistency:Calibration",
    "exact": "tracformer.evaluation.exact:Exact",
    "speed": "tracformer.evaluation.speed:Speed",
    "domains": "tracformer.evaluation.domains:Domains",
}


def register_task(name: str, factory: str | type[Task]) -> None:
    """Make a task known under a name.

    Args:
        name: Name of the task.
        factory: A subclass of `Task`, or "module:class", imported on first use.

    Example:
        >>> register_task("ratios", "tracformer.evaluation.perplexity:Ratios")
    """
    _tasks[name] = factory


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks: registered ones, and those of other packages and files."""
    _read_plugins()
    return tuple(_tasks)


def _read_plugins() -> None:
    """Register the tasks of included files and of installed packages."""
    plugins.run_included()
    for entry, _ in plugins.read_entry_points(plugins.TASKS, _tasks.__contains__):
        register_task(entry.name, entry.value)


def task_class(name: str) -> type[Task]:
    """Return the class of a task; ValueError if there is none of this name."""
    if name not in _tasks:
        _read_plugins()
    if name not in _tasks:
        raise ValueError(f"unknown task {name!r}{did_you_mean(name, _tasks)}")
    factory = _tasks[name]
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        found: type[Task] = getattr(importlib.import_module(module), attribute)
        return found
    return factory


def make_task(
    name: str, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Task:
    """Return a task with these options.

    Args:
        name: Name of the task.
        options: Options by name; strings are converted to the type of the option.
        defaults: Values for options that `options` lacks; names that the task lacks are ignored.

    Raises:
        ValueError: The task or an option is unknown, or a value is not allowed.
    """
    kind = task_class(name)
    hints = typing.get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    for key in options:
        if key not in known:
            raise ValueError(f"task {name!r} has no option {key!r}{did_you_mean(key, known)}")
    values = {**{key: value for key, value in (defaults or {}).items() if key in known}, **options}
    try:
        return kind(**{key: _convert(value, known[key], key) for key, value in values.items()})
    except ValueError as error:
        raise ValueError(f"task {name!r}: {error}") from error


def parse_task(text: str, defaults: Mapping[str, Any] | None = None) -> Task:
    """Return the task written as `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.

    A list is written with slashes, `ratios=0.1/0.5`; a comma inside brackets separates nothing.

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


def _convert(value: Any, hint: Any, key: str) -> Any:
    return convert(str(value) if isinstance(value, Path) else value, hint, key)


def _last_name(value: Any) -> Any:
    """Return the last name of an existing path, other values as they are.

    Results must not depend on where data lies on a machine.
    """
    if isinstance(value, str) and ("/" in value or "\\" in value) and Path(value).exists():
        return Path(value).name
    return value


PARTIAL = ".partial"  # folder inside that of the results, for blocks of unfinished tasks


def evaluate(
    subjects: Sequence[Subject],
    tasks: Sequence[Task],
    out: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Yield the result of each model on each task, as they finish.

    Args:
        subjects: Models.
        tasks: Tasks.
        out: Folder for the results. A result that it has already is read instead of computed again,
            if model name, mode, options, data, contexts, weights, tokenizer, schemas and dtype are
            the same and the task does not measure the machine. An interrupted task continues after
            its last finished block. None: keep nothing.
        progress: Progress bars; None: none.

    Raises:
        ValueError: A task does not work for a model; checked before any work.

    Example:
        >>> tasks = [make_task("ratios", {"data": "held-out.txt"})]  # doctest: +SKIP
        >>> results = list(evaluate(load_subjects(["runs/a"]), tasks, "results"))  # doctest: +SKIP
    """
    for task in tasks:
        for subject in subjects:
            task.check(subject)
    for task in tasks:
        for subject in subjects:
            yield _evaluated(
                subject,
                task.canonical(subject),
                None if out is None else Path(out),
                progress or Progress(),
            )


def _evaluated(subject: Subject, task: Task, out: Path | None, progress: Progress) -> Result:
    """Return a result from the folder, or run the task and save it there."""
    if out is None:
        return task.run(subject, progress)
    name = file_name(subject.name, subject.mode, task.name, task.options, task.manifest(subject))
    if task.lasting and (out / name).is_file():
        return Result.load(out / name)
    scratch = out / PARTIAL / name.removesuffix(".json")
    result = task.run(dataclasses.replace(subject, scratch=scratch), progress)
    if subject.ranks.first:
        result.save(out)
        shutil.rmtree(scratch, ignore_errors=True)
        # fails if another task or process keeps blocks there
        with contextlib.suppress(OSError):
            (out / PARTIAL).rmdir()
    subject.ranks.barrier()
    return result


def load_subjects(
    models: Iterable[str],
    modes: Sequence[str] = (),
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: Sequence[str] = ("float32",),
    batch: int = 32,
    verify: bool = True,
    ranks: Ranks = ONE_RANK,
) -> list[Subject]:
    """Load models for `evaluate`; the tokenizer of the first cuts the text windows for all.

    Args:
        models: Models as [NAME=]FOLDER[@MODE], FOLDER being a folder, a run or an id of the hub.
        modes: For models without @MODE: the first of these modes that the model has is used. If
            empty, the first of car, ac, ar that it has.
        device: Device of the models.
        dtype: Type of the weights and of the computation.
        weights: Kinds of rounded weights (see `model.fast_step`). Each model is loaded once for
            each kind, which becomes part of its name.
        batch: Sequences at once.
        verify: Check each model's files against its `checksums.json`.
        ranks: Processes that share the work.

    Raises:
        ValueError: Two models have the same name and mode, or a model lacks the mode.
    """
    for kind in weights:
        check_kind(kind)
    subjects: list[Subject] = []
    loaded: dict[tuple[Path, str], tuple[ConditionalModel, Tokenizer]] = {}
    for text, kind in product(models, weights):
        name, where, mode = parse_model(text)
        name = name if kind == "float32" else f"{name}-{kind}"
        folder = loading.find_folder(where)
        if (folder, kind) not in loaded:
            model, tokenizer = loading.read(folder, device, dtype, verify=verify)
            loaded[folder, kind] = model.lean(kind), tokenizer
        model, tokenizer = loaded[folder, kind]
        subject = Subject(
            model=model.eval(),
            tokenizer=tokenizer,
            name=name,
            mode=choose_mode(model, [mode] if mode else modes, name),
            batch=batch,
            ranks=ranks,
            reference=subjects[0].tokenizer if subjects else tokenizer,
            training=read_training(folder),
        )
        if any((other.name, other.mode) == (subject.name, subject.mode) for other in subjects):
            raise ValueError(
                f"two models are called {name!r} in mode {subject.mode}; give them different "
                "names by NAME=FOLDER"
            )
        subjects.append(subject)
    return subjects


def parse_model(text: str) -> tuple[str, str, str | None]:
    """Return name, place and mode of [NAME=]FOLDER[@MODE]; the name defaults to the folder's."""
    name, equals, place = text.partition("=")
    if not equals or any(
        Path(folder).exists() for folder in (text, text.rpartition("@")[0]) if folder
    ):
        name, place = "", text
    mode = None
    if "@" in place and not Path(place).exists():
        place, _, mode = place.rpartition("@")
    if not place:
        raise ValueError(f"{text!r} names no model; write FOLDER, NAME=FOLDER or NAME=FOLDER@MODE")
    folder = Path(place)
    if not name and folder.name in loading.PLACES:
        folder = folder.parent  # name a run by its folder, not by `best` or `model` in it
    return name or folder.resolve().name or place, place, mode


def choose_mode(model: ConditionalModel, modes: Sequence[str], name: str) -> str:
    """Return the first of `modes` that a model has, or its preferred mode if `modes` is empty.

    Raises:
        ValueError: The model has none of them; the message begins with `name`.
    """
    trained = model.config.modes
    if not modes:
        return preferred_mode(model.config)
    if (found := next((mode for mode in modes if mode in trained), None)) is not None:
        return found
    try:
        check_mode(model.config, modes[0])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    raise AssertionError("unreachable: check_mode raises for modes that were not trained")
