"""An experiment as data: which models are trained how, and which tasks evaluate them.

`experiments/NAME.yaml` lists tasks with the models that they evaluate, or combines other
experiments. `experiments/scales/SCALE.yaml` defines these models at one size, the data sets, and
the values `$long`, `$span50`, ... that the tasks refer to. `read_experiment` combines the two and
applies the overrides of the command line. Models are shared: a model that one experiment has
trained is used by the next.

The classes are written top down: `Experiment` holds `DataSet`, `ModelPlan` and `TaskPlan`; a `Run`
is one model with one training seed.
"""

import copy
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from tracformer.evaluation.exact_sources import PREFIX as EXACT
from tracformer.evaluation.exact_sources import parse_exact
from tracformer.evaluation.task import Task, make_task
from tracformer.options import build, did_you_mean, option, place, raw_keys, read_yaml
from tracformer.reproduce.pilots import Pilots
from tracformer.training.train_config import TrainConfig, from_dict, read_preset

SIZES = "sizes"  # the one "task" that needs no weights
NO_PILOTS = "none"
READING = ("rows", "cross_documents")  # the keys of `train.data` that an experiment may set
NOT_TRAIN = {  # keys of `tracformer train` that are set in another way here
    "seed": "seeds=",
    "run": "out=",
    "until": "train.steps=, or pilots of a scale",
    "device": "device=",
}
OPTIONAL = ("plaid", "gpt2-fim")  # models that exist at some scales only; other scales skip them

T = TypeVar("T")


@dataclass(frozen=True)
class DataSet:
    """A data set that models are trained or evaluated on."""

    name: str
    source: str = option(
        "", "named sets joined by +; hf:OWNER/NAME; a file; a prepared folder or one of files"
    )
    tokenizer: str = option("", "tokenizer, as `tracformer prepare` takes it")
    documents: str = option("", "how files are split into documents; empty: as the named set")
    detokenize: str = option("", "detokenizer of files; empty: that of the named set")
    folder: str = option("", "folder with the files of named sets, instead of a download")

    def __post_init__(self) -> None:
        for key in ("source", "tokenizer"):
            if not getattr(self, key):
                raise ValueError(f"{key} is missing; it is required")


@dataclass(frozen=True)
class ModelPlan:
    """A model to train, or a published one."""

    name: str
    mode: str  # the mode it is evaluated in, unless a task names another
    data: str = option("", "data set that it is trained on")
    train: Mapping[str, Any] = option(dict, "options of `tracformer train`, and `preset`")
    seeds: tuple[int, ...] = option((0,), "training seeds")
    published: str = option("", "instead of training: a folder or hub id")
    family: str = option("", "family of a published model")
    trained_tokens: float = option(0.0, "training tokens of a published model, from its paper")
    pilots: str = option("", "model whose pilots choose the learning rate; empty: its own; or none")

    def __post_init__(self) -> None:
        if bool(self.train) == bool(self.published):
            raise ValueError("give either `train` or `published`")
        for key, instead in NOT_TRAIN.items():
            if key in self.train:
                raise ValueError(f"an experiment does not take train.{key}; use {instead}")
        data = self.train.get("data", {})
        if not isinstance(data, Mapping) or any(key not in READING for key in data):
            raise ValueError(
                f"an experiment takes {' and '.join(f'train.data.{key}' for key in READING)}; "
                "use data.NAME= to choose the data"
            )

    def config(self, data: str, run: str, seed: int) -> TrainConfig:
        """Return the training configuration for a data folder, a run folder and a seed."""
        reading = self.train.get("data", {})
        return from_dict(
            {**self.train, "data": {**reading, "source": data}, "run": run, "seed": seed}
        )

    @property
    def tokens(self) -> float:
        """Return the number of training tokens."""
        if self.published:
            return self.trained_tokens
        config = self.config("-", "-", 0)
        return float(config.steps * config.batch * config.length)


@dataclass(frozen=True)
class Run:
    """One model with one training seed; a published model has no seed."""

    plan: ModelPlan
    seed: int | None

    @property
    def name(self) -> str:
        """Return the name under which results are filed, such as "bart #0"."""
        return self.plan.name if self.seed is None else f"{self.plan.name} #{self.seed}"

    @property
    def number(self) -> int:
        """Return the position of the seed among the model's seeds."""
        return 0 if self.seed is None else self.plan.seeds.index(self.seed)

    @property
    def folder_name(self) -> str:
        """Return the name of the run's folder."""
        return f"{self.plan.name}-seed{self.seed}"


def runs_of(plan: ModelPlan) -> list[Run]:
    """Return the runs of a model, one for each seed."""
    return [Run(plan, None)] if plan.published else [Run(plan, seed) for seed in plan.seeds]


@dataclass(frozen=True)
class TaskPlan:
    """A task and the models that it evaluates."""

    task: str
    models: tuple[str, ...]
    mode: str = option("", "mode of all models; empty: each model's own")
    options: Mapping[str, Any] = option(dict, "options of the task; `data` names a data set")
    left_out: tuple[str, ...] = ()  # models that the scale does not have

    def make(self, options: Mapping[str, Any]) -> Task:
        """Return the task, with more options."""
        return make_task(self.task, {**self.options, **options})


@dataclass(frozen=True)
class ExperimentFile:
    """What the YAML file of an experiment contains."""

    title: str
    about: str = ""
    paper: tuple[str, ...] = ()  # tables and figures of the paper
    scale: str = "mini"  # scale if the user names none
    tasks: tuple[Any, ...] = ()
    parts: tuple[str, ...] = ()  # instead of tasks: bundled experiments to combine
    without: tuple[str, ...] = ()  # models of the parts to leave out


@dataclass(frozen=True)
class ScaleFile:
    """What the YAML file of a scale contains."""

    about: str
    vocab_size: int
    values: Mapping[str, Any]
    data: Mapping[str, Any]
    models: Mapping[str, Any]
    pilots: Pilots | None = None
    pace: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """Tasks, and the models and data sets that they need, at one scale."""

    name: str
    title: str
    about: str
    paper: tuple[str, ...]  # its tables and figures
    scale: str
    scale_about: str
    vocab_size: int
    data: Mapping[str, DataSet]
    models: Mapping[str, ModelPlan]  # those of the tasks, and those whose pilots they use
    tasks: tuple[TaskPlan, ...]
    pilots: Pilots | None = None  # None: learning rates are those of the models' plans
    pace: Mapping[str, float] = field(default_factory=dict)  # tokens per second and core, by model

    def trained(self) -> list[ModelPlan]:
        """Return the models whose weights some task needs, published ones included."""
        wanted = {name for task in self.tasks if task.task != SIZES for name in task.models}
        return [model for name, model in self.models.items() if name in wanted]

    def training_sets(self) -> list[DataSet]:
        """Return the data sets that some model or pilot is trained on."""
        plans = [
            plan
            for model in self.trained()
            for plan in (model, self.models[self.pilots_owner(model)])
        ]
        return [
            self.data[name] for name in dict.fromkeys(plan.data for plan in plans if plan.train)
        ]

    def evaluation_sets(self) -> list[DataSet]:
        """Return the data sets on which models are evaluated and none is trained."""
        names = dict.fromkeys(
            str(task.options["data"]) for task in self.tasks if task.options.get("data")
        )
        return [self.data[name] for name in names if self.data[name] not in self.training_sets()]

    def pilots_owner(self, model: ModelPlan) -> str:
        """Return the name of the model whose pilots choose the rate; its own by default."""
        return model.pilots if model.pilots not in ("", NO_PILOTS) else model.name

    def training(self) -> list[tuple[str, float]]:
        """Return all training, pilots included, as pairs of a model and its training tokens."""
        trained = [model for model in self.trained() if model.train]
        work = [(model.name, model.tokens) for model in trained for _ in model.seeds]
        if self.pilots is not None:
            for name in {self.pilots_owner(model) for model in trained if model.pilots != "none"}:
                config = self.models[name].config("-", "-", 0)
                work += [(name, self.pilots.tokens(config)) for _ in self.pilots.rates]
        return work

    def vocabulary_of(self, model: ModelPlan) -> int:
        """Return the vocabulary size of a model that is trained here."""
        data = self.data[model.data]
        if data.source.startswith(EXACT):
            return parse_exact(data.source).tokenizer.vocab_size
        kind, _, size = data.tokenizer.partition(":")
        return int(size) if kind == "bpe" else self.vocab_size


def experiment_names() -> list[str]:
    """Return the names of the bundled experiments."""
    return _names("experiments")


def scale_names() -> list[str]:
    """Return the names of the bundled scales."""
    return _names("experiments/scales")


def read_experiment(
    name: str, scale: str = "", changes: Mapping[str, str] | None = None
) -> Experiment:
    """Return an experiment at a scale.

    Args:
        name: A bundled experiment or a YAML file.
        scale: A bundled scale or a YAML file; empty: the experiment's default.
        changes: Overrides. The keys are paths into the scale's file: `values.NAME`,
            `data.NAME.KEY`, `models.NAME.KEY`, with `data.NAME` short for its source and
            `models.NAME` for a published folder instead of training. The following apply to several
            models or data sets: `seeds`, `train.KEY` (any option of `tracformer train`),
            `tokenizer`, and `data` (a folder with the files of all sets). `only` lists the models
            to keep.

    Raises:
        ValueError: A name or value is wrong.
        FileNotFoundError: The YAML file does not exist.
    """
    document = _read_experiment(name)
    scale = scale or document.scale
    changes = dict(changes or {})
    only = changes.pop("only", None)
    sizes = _read_scale(scale, changes)
    data = {
        key: _build(DataSet, each, f"data set {key}", name=key) for key, each in sizes.data.items()
    }
    models = {
        key: _build(ModelPlan, each, f"model {key}", name=key) for key, each in sizes.models.items()
    }
    parts = {part: _read_experiment(part) for part in document.parts} or {name: document}
    for part, values in parts.items():
        if not values.tasks or values.parts:
            raise ValueError(
                f"experiment {part}: tasks is {list(values.tasks)!r}; list at least one, such as "
                "- {task: ratios, models: [bart]}, or list other experiments as parts"
            )
    if document.parts and document.tasks:
        raise ValueError(f"experiment {name}: give either tasks or parts, not both")
    tasks = _merged(
        _task(each, sizes.values, models, f"experiment {part}")
        for part, values in parts.items()
        for each in values.tasks
    )
    if document.without:
        tasks = _only(
            tasks, [m for task in tasks for m in task.models if m not in document.without]
        )
    tasks = tasks if only is None else _only(tasks, only.split(","))
    for task in tasks:
        if task.options.get("data") and task.options["data"] not in data:
            raise ValueError(
                f"experiment {name}: data is {task.options['data']!r}; scale {scale} has: "
                f"{', '.join(data)}"
            )
    named = {model for task in tasks for model in task.models}
    _check_pilots(models, named)
    named |= {models[model].pilots for model in named}
    return Experiment(
        name=Path(name).stem,
        title=document.title,
        about=document.about.strip(),
        paper=tuple(dict.fromkeys(table for part in parts.values() for table in part.paper)),
        scale=Path(scale).stem,
        scale_about=sizes.about.strip(),
        vocab_size=sizes.vocab_size,
        data=data,
        models={key: model for key, model in models.items() if key in named},
        tasks=tuple(tasks),
        pilots=sizes.pilots,
        pace={key: float(value) for key, value in sizes.pace.items()},
    )


def _merged(tasks: Iterable[TaskPlan]) -> list[TaskPlan]:
    """Merge tasks with equal options: experiments, and data sets at a small scale, may coincide."""
    merged: list[TaskPlan] = []
    for task in tasks:
        for number, known in enumerate(merged):
            if (known.task, known.mode, known.options) == (task.task, task.mode, task.options):
                models = tuple(dict.fromkeys((*known.models, *task.models)))
                merged[number] = dataclasses.replace(known, models=models)
                break
        else:
            merged.append(task)
    return merged


def _only(tasks: list[TaskPlan], wanted: Sequence[str]) -> list[TaskPlan]:
    """Return the tasks with only these models."""
    known = list(dict.fromkeys(name for task in tasks for name in task.models))
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(
            f"only has {unknown[0]!r}; the experiment's models are: {', '.join(known)}"
        )
    kept = [
        dataclasses.replace(task, models=tuple(name for name in task.models if name in wanted))
        for task in tasks
    ]
    return [task for task in kept if task.models]


def _check_pilots(models: Mapping[str, ModelPlan], used: Collection[str]) -> None:
    """Reject pilots of a model that does not exist or has no pilots of its own."""
    for model in models.values():
        if model.pilots in ("", NO_PILOTS):
            continue
        owner = models.get(model.pilots)
        if owner is None or owner.pilots or (not owner.train and model.name in used):
            raise ValueError(
                f"model {model.name}: pilots is {model.pilots!r}; it must be a trained model with "
                f"its own pilots, or {NO_PILOTS}"
            )


def _task(
    values: Any, scale: Mapping[str, Any], models: Mapping[str, ModelPlan], where: str
) -> TaskPlan:
    task = _build(TaskPlan, values, f"a task of {where}")
    names = tuple(name for name in task.models if name in models)
    left_out = tuple(name for name in task.models if name not in models)
    if not names or any(name not in OPTIONAL for name in left_out):
        raise ValueError(
            f"{where}: models are {list(task.models)}; the scale has: {', '.join(models)}"
        )
    options = {key: _value(value, scale, where) for key, value in task.options.items()}
    return dataclasses.replace(task, models=names, options=options, left_out=left_out)


def _value(value: Any, scale: Mapping[str, Any], where: str) -> Any:
    """Return a value with references such as `$long` replaced by the scale's values."""
    if isinstance(value, list):
        return [_value(each, scale, where) for each in value]
    if not (isinstance(value, str) and value.startswith("$")):
        return value
    if value[1:] not in scale:
        raise ValueError(
            f"{where} uses {value}; the scale has: {', '.join('$' + key for key in scale)}"
        )
    return scale[value[1:]]


def _override(sizes: dict[str, Any], changes: Mapping[str, str]) -> None:
    """Apply overrides to the document of a scale."""
    for key, text in changes.items():
        head, name, rest = (*key.split(".", 2), "", "")[:3]
        values: Any = text
        if key == "seeds":
            values = text.split(",")
            paths = [f"models.{each}.seeds" for each in sizes["models"]]
        elif key == "tokenizer":
            paths = [f"data.{each}.tokenizer" for each in sizes["data"]]
        elif key == "data":
            paths = [f"data.{each}.folder" for each in sizes["data"]]
        elif head == "train" and name:
            option_name = key.removeprefix("train.")
            values = text if option_name in raw_keys(TrainConfig) else read_yaml(text, key)
            trained = [each for each, model in sizes["models"].items() if model.get("train")]
            paths = [f"models.{each}.{key}" for each in trained]
        elif head in ("values", "data", "models") and name in sizes[head]:
            if head == "models" and not rest:
                model = sizes["models"][name]
                for unused in ("train", "family", "trained_tokens"):
                    model.pop(unused, None)
            elif head != "data":
                values = read_yaml(text, key)
            paths = [
                key
                if rest or head == "values"
                else f"{key}.{'source' if head == 'data' else 'published'}"
            ]
        else:
            known = [
                f"{group}.{each}" for group in ("values", "data", "models") for each in sizes[group]
            ]
            known += ["seeds", "tokenizer", "only", "train.KEY", "data"]
            raise ValueError(f"unknown option {key!r}{did_you_mean(key, known)}")
        for path in paths:
            place(sizes, path, values)


def _names(folder: str) -> list[str]:
    entries = (resources.files("tracformer.reproduce") / folder).iterdir()
    return sorted(e.name.removesuffix(".yaml") for e in entries if e.name.endswith(".yaml"))


def _read(name: str, folder: str, what: str) -> Any:
    """Return what a YAML file contains: a bundled one, or the user's."""
    if Path(name).suffix in (".yaml", ".yml"):
        if not Path(name).is_file():
            raise FileNotFoundError(f"{what} file {name} does not exist")
        return read_yaml(Path(name).read_text(encoding="utf-8"), name)
    if name not in _names(folder):
        raise ValueError(
            f"{what} is {name!r}; available: {', '.join(_names(folder))}, or a YAML file"
        )
    bundled = resources.files("tracformer.reproduce") / folder / f"{name}.yaml"
    return read_yaml(bundled.read_text(encoding="utf-8"), name)


def _read_experiment(name: str) -> ExperimentFile:
    values = _read(name, "experiments", "experiment")
    return _build(ExperimentFile, values, f"experiment {name}")


def _read_scale(name: str, changes: Mapping[str, str]) -> ScaleFile:
    """Return a scale with presets filled in and overrides applied."""
    values = _read(name, "experiments/scales", "scale")
    _build(ScaleFile, values, f"scale {name}")  # checks the structure that is changed below
    # YAML aliases are one object: copies keep an override of one model from changing others.
    models = {key: _expanded(copy.deepcopy(each), key) for key, each in values["models"].items()}
    values = {**values, "models": models, "data": copy.deepcopy(values["data"])}
    _override(values, changes)
    return _build(ScaleFile, values, f"scale {name}")


def _expanded(model: Any, name: str) -> dict[str, Any]:
    """Return the entry of a model with the values of its preset filled in."""
    if not isinstance(model, Mapping) or not isinstance(model.get("train", {}), Mapping):
        raise ValueError(f"model {name} is {model!r}; it must be a mapping, as must its `train`")
    train = dict(model.get("train", {}))
    if "preset" in train:
        preset = read_preset(train.pop("preset"))
        kept = {key: value for key, value in preset.items() if key not in (*NOT_TRAIN, "data")}
        reading = {key: preset["data"][key] for key in READING if key in preset.get("data", {})}
        train = {**kept, **({"data": reading} if reading else {}), **train}
    return {**model, "train": train}


def _build(kind: type[T], values: Any, where: str, **fixed: Any) -> T:
    """Return a dataclass from part of a YAML file; errors name the part."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}; it must be a mapping of keys to values")
    try:
        return build(kind, {**fixed, **values})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
