"""An experiment as data, and its data sets.

An experiment of the paper as data: which models, trained how and on what, are put to which
tasks, at which scale.

`experiments/NAME.yaml` names models and tasks, or other experiments that it puts together;
`experiments/scales/SCALE.yaml` says what those models are at that size, which data sets they read,
and what the values `$long`, `$span50`, ... of the tasks are. Models are shared: what one experiment
has trained, the next finds.

The data sets of an experiment, prepared once under its folder: from the hub by name, or from files
that the user has.

A set that models are trained on is prepared whole. One that they are only asked about is read as
validation text alone; its tokeniser does not matter then, for every model reads the text in its own
tokens.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from tracformer.data import (
    DataSource,
    PreparedData,
    is_made_from,
    named_sets,
    open_source,
    open_sources,
    prepare,
    require_tokenizer,
)
from tracformer.data.hub import HUB_PREFIX
from tracformer.data.shards import MANIFEST_FILE
from tracformer.data.sources import reading_of, split_files
from tracformer.evaluation.exact_sources import PREFIX as EXACT
from tracformer.evaluation.exact_sources import parse_exact
from tracformer.evaluation.task import Task, make_task
from tracformer.options import raw_keys, read_yaml
from tracformer.reproduce.pilots import Pilots
from tracformer.training.train_config import (
    TrainConfig,
    from_dict,
    read_preset,
)

SIZES = "sizes"  # the one "task" that needs no weights
DEFAULT_SCALE = "mini"  # of experiments that name none
NO_PILOTS = "none"
READING = ("rows", "cross_documents")  # of `train.data`; which data is read, a data set says
NOT_TRAIN = {  # keys of `tracformer train` that something else decides
    "seed": "seeds=",
    "run": "out=",
    "until": "train.steps=, or pilots of a scale",
    "device": "device=",
}
OPTIONAL = ("plaid", "gpt2-fim")  # models at some scales only: others leave them out


@dataclass(frozen=True)
class DataSet:
    name: str
    # named sets, joined by +; hf:OWNER/NAME; a file; or a folder: prepared, or with files named
    # train, valid and test
    source: str
    tokenizer: str
    documents: str = ""  # of text files; empty: as the named set of this name is read
    detokenize: str = ""
    folder: str = ""  # with the files of named sets, instead of a download


@dataclass(frozen=True)
class ModelPlan:
    name: str
    mode: str  # the mode it is asked in, unless a task says otherwise
    data: str = ""  # the data set it is trained on
    # keys of `tracformer train`, and `preset`
    train: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    published: str = ""  # instead of training: a folder or an id of the hub
    family: str = ""  # of a published model
    trained_tokens: float = 0.0  # of a published model, as the paper says
    pilots: str = ""  # whose pilots choose its learning rate: empty, its own; a model; or none

    def config(self, data: str, run: str, seed: int) -> TrainConfig:
        """What `tracformer train` is told."""
        told = self.told
        reading = {key: value for key, value in told.get("data", {}).items() if key in READING}
        return from_dict({**told, "data": {**reading, "source": data}, "run": run, "seed": seed})

    @property
    def told(self) -> dict[str, Any]:
        """`train`, with what its preset says where it says nothing."""
        values = dict(self.train)
        preset = values.pop("preset", None)
        return {**(read_preset(preset) if preset else {}), **values}

    @property
    def tokens(self) -> float:
        """Tokens seen in training."""
        if self.published:
            return self.trained_tokens
        config = self.config("-", "-", 0)
        return float(config.steps * config.batch * config.length)


@dataclass(frozen=True)
class TaskPlan:
    task: str
    models: tuple[str, ...]
    options: Mapping[str, Any]  # `data` is a data set's name
    mode: str = ""  # empty: each model's own
    left_out: tuple[str, ...] = ()  # models that the scale does not have

    def make(self, options: Mapping[str, Any]) -> Task:
        return make_task(self.task, {**self.options, **options})


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    about: str
    paper: tuple[str, ...]  # its tables and figures
    scale: str
    scale_about: str
    vocab_size: int
    data: Mapping[str, DataSet]
    models: Mapping[str, ModelPlan]  # those that the tasks name
    tasks: tuple[TaskPlan, ...]
    pilots: Pilots | None = None  # None: learning rates are those of the models' plans
    pace: Mapping[str, float] = field(default_factory=dict)  # tokens per second and core, by model

    def trained(self) -> list[ModelPlan]:
        """Models whose weights some task asks for."""
        wanted = {name for task in self.tasks if task.task != SIZES for name in task.models}
        return [model for name, model in self.models.items() if name in wanted]

    def learnt_from(self) -> list[DataSet]:
        """Data sets that some model is to be trained on."""
        plans = [
            plan
            for model in self.trained()
            for plan in (model, self.models[self.piloted_by(model)])
        ]
        return [
            self.data[name] for name in dict.fromkeys(plan.data for plan in plans if plan.train)
        ]

    def piloted_by(self, model: ModelPlan) -> str:
        """Return the name of the model whose pilots choose the rate; its own if it has none."""
        return model.pilots if model.pilots not in ("", NO_PILOTS) else model.name

    def training(self) -> list[tuple[str, float]]:
        """Return all training, pilots included, as pairs of a model and the tokens
        it is trained on.
        """
        work = [
            (model.name, model.tokens)
            for model in self.trained()
            if model.train
            for _ in model.seeds
        ]
        owners = {
            self.piloted_by(model)
            for model in self.trained()
            if model.train and model.pilots != NO_PILOTS
        }
        if (pilots := self.pilots) is not None:
            for name in owners:
                config = self.models[name].config("-", "-", 0)
                work += [(name, pilots.tokens(config)) for _ in pilots.rates]
        return work

    def vocabulary_of(self, model: ModelPlan) -> int:
        """Tokens of a model that is trained here: as many as `bpe:N` makes of its
        data, or the scale's number.
        """
        data = self.data[model.data]
        if data.source.startswith(EXACT):
            return parse_exact(data.source).tokenizer.vocab_size
        kind, _, size = data.tokenizer.partition(":")
        return int(size) if kind == "bpe" else self.vocab_size

    def only_read(self) -> list[DataSet]:
        """Data sets on which models are evaluated and none is trained."""
        asked = dict.fromkeys(
            str(task.options["data"]) for task in self.tasks if task.options.get("data")
        )
        return [self.data[name] for name in asked if self.data[name] not in self.learnt_from()]


def experiment_names() -> list[str]:
    return _names("experiments")


def scale_names() -> list[str]:
    return _names("experiments/scales")


def read_experiment(
    name: str, scale: str = "", changes: Mapping[str, str] | None = None
) -> Experiment:
    """A bundled experiment or a YAML file of one's own, at a bundled scale or that of a file;
    empty: the experiment's own, or mini.

    `changes`: `data` (a folder that holds the files of all sets), `data.NAME` (a place),
    `data.NAME.KEY`, `models.NAME` (a folder instead of training), `only` (models, others are left
    out), `train.KEY` (of `tracformer train`, for every model), `values.NAME` (of the scale),
    `seeds`, `tokenizer`.
    """
    document = _load(name, "experiments", experiment_names(), "experiment")
    scale = scale or document.get("scale", DEFAULT_SCALE)
    sizes = _load(scale, "experiments/scales", scale_names(), "scale")
    parts = _parts(name, document)
    _check_keys(
        sizes,
        f"scale {scale}",
        ("about", "vocab_size", "values", "data", "models"),
        ("pilots", "pace"),
    )
    data = {key: _data_set(key, each) for key, each in sizes["data"].items()}
    models = {key: _model(key, each) for key, each in sizes["models"].items()}
    _check_pilots(models)
    changes = dict(changes or {})
    only = changes.pop("only", None)
    values = _values(sizes["values"], changes)
    tasks = _merged(
        _task(each, values, models, f"experiment {part}")
        for part, own in parts.items()
        for each in own["tasks"]
    )
    if left_out := document.get("without"):
        tasks = _only(
            tasks, [model for task in tasks for model in task.models if model not in left_out]
        )
    tasks = tasks if only is None else _only(tasks, only.split(","))
    named = {model for task in tasks for model in task.models}
    named |= {models[model].pilots for model in named}
    models = {key: model for key, model in models.items() if key in named}
    data, models = _changed(data, models, changes)
    for task in tasks:
        if task.options.get("data") and task.options["data"] not in data:
            raise ValueError(
                f"experiment {name}: data is {task.options['data']!r}; scale {scale} has: "
                f"{', '.join(data)}"
            )
    return Experiment(
        name=Path(name).stem,
        title=document["title"],
        about=document.get("about", "").strip(),
        paper=tuple(
            dict.fromkeys(place for part in parts.values() for place in part.get("paper", ()))
        ),
        scale=Path(scale).stem,
        scale_about=sizes["about"].strip(),
        vocab_size=sizes["vocab_size"],
        data=data,
        models=models,
        tasks=tuple(tasks),
        pilots=_pilots(sizes["pilots"]) if "pilots" in sizes else None,
        pace={key: float(value) for key, value in sizes.get("pace", {}).items()},
    )


def _parts(name: str, document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The experiment itself, or the bundled ones that it puts together."""
    parts = {name: document}
    if "parts" in document:
        _check_keys(
            document, f"experiment {name}", ("title", "parts"), ("about", "without", "scale")
        )
        parts = {
            part: _load(part, "experiments", experiment_names(), "experiment")
            for part in document["parts"]
        }
    for part, values in parts.items():
        _check_keys(values, f"experiment {part}", ("title", "tasks"), ("about", "paper", "scale"))
        if not isinstance(values["tasks"], list) or not values["tasks"]:
            raise ValueError(
                f"experiment {part}: tasks is {values['tasks']!r}; list at least one, such as - "
                f"{{task: ratios, models: [bart]}}"
            )
    return parts


def _merged(tasks: Iterable[TaskPlan]) -> list[TaskPlan]:
    """One task where several ask the same: experiments share questions, and at a small scale two
    data sets may be one.
    """
    merged: list[TaskPlan] = []
    for task in tasks:
        for number, known in enumerate(merged):
            if (known.task, known.mode, known.options) == (task.task, task.mode, task.options):
                merged[number] = dataclasses.replace(
                    known, models=tuple(dict.fromkeys((*known.models, *task.models)))
                )
                break
        else:
            merged.append(task)
    return merged


def _pilots(values: Mapping[str, Any]) -> Pilots:
    _check_keys(values, "pilots", ("rates", "share"))
    return Pilots(tuple(float(rate) for rate in values["rates"]), float(values["share"]))


def _only(tasks: list[TaskPlan], wanted: Sequence[str]) -> list[TaskPlan]:
    """The tasks of these models alone."""
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


def _data_set(name: str, values: Mapping[str, Any]) -> DataSet:
    _check_keys(values, f"data set {name}", ("source", "tokenizer"), ("documents", "detokenize"))
    return DataSet(name, **values)


def _model(name: str, values: Mapping[str, Any]) -> ModelPlan:
    _check_keys(
        values,
        f"model {name}",
        ("mode",),
        ("data", "train", "seeds", "published", "family", "trained_tokens", "pilots"),
    )
    plan = ModelPlan(name, **{**values, "seeds": tuple(values.get("seeds", (0,)))})
    if bool(plan.train) == bool(plan.published):
        raise ValueError(f"model {name} must have either `train` or `published`")
    _check_train(plan.train, f"model {name}")
    return plan


def _check_pilots(models: Mapping[str, ModelPlan]) -> None:
    """Refuse pilots of a model that is not there, or that leaves its rate to another one."""
    for model in models.values():
        if model.pilots in ("", NO_PILOTS):
            continue
        owner = models.get(model.pilots)
        if owner is None or not owner.train or owner.pilots:
            raise ValueError(
                f"model {model.name}: pilots is {model.pilots!r}; it must be a trained model with "
                f"pilots of its own, or {NO_PILOTS}"
            )


def _check_train(train: Mapping[str, Any], where: str) -> None:
    """Keys that would be passed over are refused."""
    for key, instead in NOT_TRAIN.items():
        if key in train:
            raise ValueError(f"{where}: an experiment does not take train.{key}; use {instead}")
    data = train.get("data", {})
    if not isinstance(data, Mapping) or any(key not in READING for key in data):
        raise ValueError(
            f"{where}: an experiment takes {' and '.join(f'train.data.{key}' for key in READING)}; "
            "data.NAME= says which data is read"
        )


def _task(
    values: Mapping[str, Any], scale: Mapping[str, Any], models: Mapping[str, ModelPlan], where: str
) -> TaskPlan:
    _check_keys(values, f"a task of {where}", ("task", "models"), ("mode", "options"))
    if not isinstance(values["models"], list):
        raise ValueError(
            f"a task of {where}: models is {values['models']!r}; it must be a list of names, such "
            "as [bart]"
        )
    if not isinstance(values.get("options", {}), Mapping):
        raise ValueError(
            f"a task of {where}: options is {values['options']!r}; it must hold keys and values, "
            f"such as {{mean: 3}}"
        )
    options = {key: _value(value, scale, where) for key, value in values.get("options", {}).items()}
    names = tuple(name for name in values["models"] if name in models)
    unknown = [name for name in values["models"] if name not in models and name not in OPTIONAL]
    if unknown or not names:
        raise ValueError(
            f"{where}: models are {values['models']}; the scale has: {', '.join(models)}"
        )
    left_out = tuple(name for name in values["models"] if name not in models)
    return TaskPlan(values["task"], names, options, values.get("mode", ""), left_out)


def _values(known: Mapping[str, Any], changes: dict[str, str]) -> dict[str, Any]:
    """The scale's values; `values.NAME` is taken out of the changes."""
    values = dict(known)
    for key in [key for key in changes if key.startswith("values.")]:
        if (name := key.removeprefix("values.")) not in values:
            raise ValueError(f"the scale has no value {name!r}; it has: {', '.join(values)}")
        values[name] = read_yaml(changes.pop(key), key)
    return values


def _value(value: Any, scale: Mapping[str, Any], where: str) -> Any:
    """`$long` is the scale's value of that name."""
    if isinstance(value, list):
        return [_value(each, scale, where) for each in value]
    if not (isinstance(value, str) and value.startswith("$")):
        return value
    if value[1:] not in scale:
        raise ValueError(
            f"{where} uses {value}; the scale has: {', '.join('$' + key for key in scale)}"
        )
    return scale[value[1:]]


def _changed(
    data: dict[str, DataSet], models: dict[str, ModelPlan], changes: Mapping[str, str]
) -> tuple[dict[str, DataSet], dict[str, ModelPlan]]:
    for key, value in changes.items():
        head, _, rest = key.partition(".")
        name, _, part = rest.partition(".")
        if key == "seeds":
            seeds = tuple(_integer(each) for each in value.split(","))
            models = {
                each: dataclasses.replace(model, seeds=seeds) for each, model in models.items()
            }
        elif key == "tokenizer":
            data = {
                each: dataclasses.replace(entry, tokenizer=value) for each, entry in data.items()
            }
        elif key == "data":
            data = {each: dataclasses.replace(entry, folder=value) for each, entry in data.items()}
        elif (
            head == "data" and name in data and part in ("", "documents", "detokenize", "tokenizer")
        ):
            data[name] = dataclasses.replace(data[name], **{part or "source": value})
        elif head == "train" and name:
            setting = value if rest in raw_keys(TrainConfig) else read_yaml(value, key)
            _check_train(_with({}, rest.split("."), setting), key)
            models = {
                each: dataclasses.replace(model, train=_with(model.told, rest.split("."), setting))
                if model.train
                else model
                for each, model in models.items()
            }
        elif head == "models" and name in models and not part:
            models[name] = dataclasses.replace(
                models[name], published=value, train={}, family="", trained_tokens=0.0
            )
        else:
            known = [
                "seeds",
                "tokenizer",
                "only",
                "train.KEY",
                "values.NAME",
                "data",
                *(f"data.{each}" for each in data),
                *(f"models.{each}" for each in models),
            ]
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ValueError(f"there is nothing called {key!r} to change{hint}")
    return data, models


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested groups in which one thing is another."""
    first, *rest = path
    inner = values.get(first)
    return {
        **values,
        first: _with(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value,
    }


def _integer(text: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"seeds has {text!r}; write them like seeds=0,1,2")
    return int(text)


def _check_keys(
    values: Mapping[str, Any], where: str, required: Sequence[str], others: Sequence[str] = ()
) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}; it must hold keys and values")
    if missing := [key for key in required if key not in values]:
        raise ValueError(f"{where} has no {missing[0]!r}; required: {', '.join(required)}")
    if unknown := [key for key in values if key not in (*required, *others)]:
        raise ValueError(f"{where} has {unknown[0]!r}; allowed: {', '.join((*required, *others))}")


def _names(folder: str) -> list[str]:
    place = resources.files("tracformer.reproduce") / folder
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in place.iterdir()
        if entry.name.endswith(".yaml")
    )


def _load(name: str, folder: str, known: Iterable[str], what: str) -> dict[str, Any]:
    if Path(name).suffix in (".yaml", ".yml"):
        if not Path(name).is_file():
            raise FileNotFoundError(f"there is no file {name} to read the {what} from")
        text = Path(name).read_text(encoding="utf-8")
    elif name in known:
        text = (resources.files("tracformer.reproduce") / folder / f"{name}.yaml").read_text(
            encoding="utf-8"
        )
    else:
        raise ValueError(f"{what} is {name!r}; available: {', '.join(known)}, or a YAML file")
    values = read_yaml(text, name)
    if not isinstance(values, dict):
        raise ValueError(f"{what} {name} does not hold keys and values")
    return values


def data_folder(root: Path, name: str, trained: bool) -> Path:
    """The last name is the data set's own: results name their data by it."""
    return root / ("data" if trained else "data/held-out") / name


def prepare_data(data: DataSet, root: Path, trained: bool) -> PreparedData:
    """The prepared folder, made if it is not there; one made from something else is refused."""
    folder = data_folder(root, data.name, trained)
    if data.source.startswith(EXACT):
        return _draw(folder, data)
    place = Path(data.source)
    tokenizer = "byte" if data.tokenizer.startswith("bpe:") and not trained else data.tokenizer
    if (place / MANIFEST_FILE).is_file():
        return _link(folder, place.resolve(), data.name)
    try:
        sources = split_sources(data, trained)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. {_how_to_get(data, folder)}") from error
    if not (folder / MANIFEST_FILE).is_file():
        try:
            return prepare(folder, sources, tokenizer)
        except (ValueError, ImportError) as error:
            if _is_named(data):
                raise type(error)(f"{error}. {_how_to_get(data, folder)}") from error
            raise
    prepared = PreparedData.open(folder)
    if not is_made_from(prepared, sources):
        raise ValueError(
            f"{folder} was prepared from other data than {data.source}; use another out=FOLDER, or "
            f"remove {folder}"
        )
    require_tokenizer(tokenizer, prepared, f"the tokeniser of {data.name}")
    return prepared


def _draw(folder: Path, data: DataSet) -> PreparedData:
    """Return sequences of a source of the exact benchmark, drawn once."""
    drawn = parse_exact(data.source)
    if not (folder / MANIFEST_FILE).is_file():
        return prepare(folder, drawn.splits(), drawn.tokenizer)
    prepared = PreparedData.open(folder)
    sizes = {name: split.documents for name, split in prepared.manifest.splits.items()}
    if prepared.tokenizer.fingerprint != drawn.tokenizer.fingerprint or sizes != drawn.sizes:
        raise ValueError(
            f"{folder} holds other sequences than {data.source}; use another out=FOLDER, or remove "
            f"{folder}"
        )
    return prepared


def require_there(data: DataSet) -> None:
    """What the user named is there; what is to be fetched is not asked for."""
    if data.source.startswith(EXACT):
        return
    place = data.folder if _is_named(data) else data.source
    if place and not Path(place).exists():
        raise FileNotFoundError(f"data set {data.name!r}: there is no {place}")


def split_sources(data: DataSet, trained: bool) -> dict[str, DataSource]:
    """By split; only `validation` for a set that nothing is trained on."""
    if _is_named(data):
        splits = open_sources(data.source, folder=data.folder or None)
    else:
        options = reading_of(data.name, data.documents, data.detokenize)
        place = Path(data.source)
        files = split_files(place) if place.is_dir() else {}
        splits = {name: open_source(each, **options) for name, each in files.items()} or {
            "train": open_source(data.source, **options)
        }
    if trained:
        if "train" not in splits:
            raise FileNotFoundError(
                f"data set {data.name!r} is to be trained on, and {data.source} has no file called "
                "train"
            )
        return splits
    return {
        "validation": next(
            splits[name] for name in ("validation", "test", "train") if name in splits
        )
    }


def _is_named(data: DataSet) -> bool:
    return bool(named_sets(data.source)) or data.source.startswith(HUB_PREFIX)


def _link(folder: Path, place: Path, name: str) -> PreparedData:
    """A folder that was prepared elsewhere, under the data set's own name."""
    if folder.is_symlink() or folder.exists():
        if folder.resolve() != place:
            raise ValueError(
                f"{folder} already holds other data for {name} than {place}; use another "
                f"out=FOLDER, or remove {folder}"
            )
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(place, target_is_directory=True)
    return PreparedData.open(folder)


def _how_to_get(data: DataSet, folder: Path) -> str:
    fetched = data.source if _is_named(data) else data.name
    return (
        f"Data set {data.name!r} was looked for in {folder} and as {data.source!r}. Fetch it where "
        "there is a network, "
        f"`tracformer prepare {fetched} --out FOLDER`, and give data.{data.name}=FOLDER; or name "
        f"text files: data.{data.name}=FILE, "
        "or a folder with files called train, valid and test; or data=FOLDER, in which all sets lie"
    )
