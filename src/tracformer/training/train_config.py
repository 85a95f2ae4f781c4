"""A run as data: frozen dataclasses that validate, filled from a preset file and
`key=value` words.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from tracformer.attention import implementations
from tracformer.baselines import find_family
from tracformer.contexts import parse as parse_strategy
from tracformer.data import parse_validation
from tracformer.model.config import ModelConfig
from tracformer.renames import first_names, present_names
from tracformer.training.objectives import parse_objective

PRECISIONS = ("auto", "float32", "bfloat16")
CHANGES = ("refuse", "take")
PARALLEL = ("ddp", "fsdp")
DEFAULT_PRESET = "laptop"  # of a model, where none is named
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")
OLD_KEYS: Mapping[str, str] = {}  # names of keys in older files; see `tracformer.renames`
# Keys that recipes of older versions lack, by their first names, with the value that is meant
# there.
LATER_KEYS: Mapping[str, Any] = {"optimizer.schedule": "cosine", "optimizer.decay": 0.5}
# names of files are not read as YAML
AS_WRITTEN = ("data.source", "data.validation", "run", "init")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with the paper's numbers (Tables 5 and 10); or Muon on the matrices of the layers, and
    AdamW on the rest.
    """

    name: str = "adamw"
    lr: float = 6e-4
    # after the warm-up: a cosine; or wsd, constant and then a linear decay
    schedule: str = "cosine"
    final_lr: float = -1.0  # at the end; -1: a tenth of lr for cosine (the paper's 6e-5), 0 for wsd
    warmup: int = 1000  # steps
    decay: float = 0.5  # wsd: the share of all steps over which the rate falls
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # on matrices only
    clip: float = 1.0  # largest gradient norm
    # muon: lr of its matrices, on the same schedule; -1: the same as lr, for its steps are scaled
    # to AdamW's size
    matrix_lr: float = -1.0
    momentum: float = 0.95  # muon
    nesterov: bool = True  # muon

    def __post_init__(self) -> None:
        _require(
            self.name in OPTIMIZERS, "optimizer.name", self.name, f"one of {', '.join(OPTIMIZERS)}"
        )
        _require(0 < self.lr < math.inf, "optimizer.lr", self.lr, "a positive number")
        _require(
            self.schedule in SCHEDULES,
            "optimizer.schedule",
            self.schedule,
            f"one of {', '.join(SCHEDULES)}",
        )
        if self.final_lr == -1.0:
            object.__setattr__(self, "final_lr", self.lr / 10 if self.schedule == "cosine" else 0.0)
        _require(
            0 <= self.final_lr <= self.lr,
            "optimizer.final_lr",
            self.final_lr,
            f"between 0 and optimizer.lr ({self.lr})",
        )
        _require(self.warmup >= 0, "optimizer.warmup", self.warmup, "zero or more steps")
        _require(0 < self.decay <= 1, "optimizer.decay", self.decay, "in (0, 1]")
        _require(
            self.schedule == "wsd" or self.decay == OptimizerConfig.decay,
            "optimizer.decay",
            self.decay,
            "left out unless optimizer.schedule is wsd",
        )
        _require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "in [0, 1)")
        _require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "in [0, 1)")
        _require(
            0 <= self.weight_decay < math.inf,
            "optimizer.weight_decay",
            self.weight_decay,
            "zero or more",
        )
        _require(self.clip > 0, "optimizer.clip", self.clip, "a positive number")
        if self.name == "muon":
            follows = self.matrix_lr == -1.0
            _require(
                follows or 0 < self.matrix_lr < math.inf,
                "optimizer.matrix_lr",
                self.matrix_lr,
                "a positive number, or -1 for optimizer.lr",
            )
            _require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "in [0, 1)")
        else:
            for key in ("matrix_lr", "momentum", "nesterov"):
                value = getattr(self, key)
                _require(
                    value == getattr(OptimizerConfig, key),
                    f"optimizer.{key}",
                    value,
                    "left out unless optimizer.name is muon",
                )

    @property
    def rate_of_matrices(self) -> float:
        """Muon's, at its height: one that is not named follows `lr`, whatever `lr` becomes."""
        return self.lr if self.matrix_lr == -1.0 else self.matrix_lr


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how text becomes rows."""

    # a prepared folder, a file, folder or glob (text, JSONL, FASTA), a named data set, or
    # hf:OWNER/NAME
    source: str = ""
    # the fraction to hold back where there is no such split; or the file, folder or glob that is
    # this split
    validation: str = "0.05"
    # auto, byte, char, dna, rna, nucleotide, protein, bpe:SIZE, a folder or a hub id
    tokenizer: str = "auto"
    rows: str = "packed"  # packed: blocks of text; records: one document a row
    # may a packed row hold the end of one document and the start of the next?
    cross_documents: bool = True

    def __post_init__(self) -> None:
        parse_validation(self.validation)
        _require(self.rows in ("packed", "records"), "data.rows", self.rows, "packed or records")


@dataclass(frozen=True)
class TrainConfig:
    data: DataConfig = field(default_factory=DataConfig)
    # `family`, `preset` and any field of the family's configuration
    model: Mapping[str, Any] = field(default_factory=dict)
    objective: str = ""  # empty: the family's own, for Tracformer all-modes
    contexts: str = ""  # replaces the objective's own context strategy
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: str = ""  # the folder of checkpoints, log and model
    # a trained model to start from: its folder, its run's, a bundled name, an id of the hub
    init: str = ""
    steps: int = 0  # 0: chosen by the size of the data
    # leave off after this step, as if interrupted; the same command without it goes on. 0: after
    # the last
    until: int = 0
    batch: int = 32  # sequences of the global batch
    micro_batch: int = 0  # sequences at once on a device; 0: all of its part
    length: int = 0  # tokens of a row; 0: the model's max_length
    seed: int = 0
    precision: str = "auto"  # auto: bfloat16 where the device computes in it, else float32
    # Tracformer's: native where it serves (the CPU), else triton on a GPU, else blocked
    attention: str = "native"
    compile: bool = False
    checkpoint_activations: bool = False
    ema: float = 0.0  # decay of averaged weights; 0: none
    parallel: str = "ddp"  # under torchrun
    device: str = "auto"
    log_every: int = 10
    eval_every: int = 500
    eval_sequences: int = 256
    eval_contexts: tuple[str, ...] = (
        "span:p=0.5,mean=50",
        "span:p=0.2,mean=10",
        "span:p=0.8,mean=10",
    )
    save_every: int = 500
    keep: int = 2  # checkpoints, at least two
    # of the recipe, in a run that has begun; "take": the run goes on with them
    changes: str = "refuse"

    def __post_init__(self) -> None:
        _require(self.steps >= 0, "steps", self.steps, "zero or more")
        _require(self.until >= 0, "until", self.until, "zero or more")
        _require(self.batch >= 1, "batch", self.batch, "at least 1")
        _require(self.micro_batch >= 0, "micro_batch", self.micro_batch, "zero or more")
        _require(self.length >= 0, "length", self.length, "zero or more")
        _require(
            self.precision in PRECISIONS,
            "precision",
            self.precision,
            f"one of {', '.join(PRECISIONS)}",
        )
        _require(
            self.parallel in PARALLEL, "parallel", self.parallel, f"one of {', '.join(PARALLEL)}"
        )
        _require(
            self.attention in implementations(),
            "attention",
            self.attention,
            f"one of {', '.join(implementations())}",
        )
        _require(0 <= self.ema < 1, "ema", self.ema, "in [0, 1)")
        _require(self.changes in CHANGES, "changes", self.changes, f"one of {', '.join(CHANGES)}")
        _require(
            self.keep >= 2,
            "keep",
            self.keep,
            "at least 2: the newest may be the one a crash cut short",
        )
        for name in ("log_every", "eval_every", "eval_sequences", "save_every"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        family = find_family(str(self.model.get("family", "tracformer")))
        # otherwise `init` decides what the model is, and so the default
        if "family" in self.model or not self.init:
            object.__setattr__(self, "objective", self.objective or family.objective)
        if self.objective:
            parse_objective(self.objective, self.contexts)
        for strategy in self.eval_contexts:
            parse_strategy(strategy)
        kind = family.config_class
        preset = _convert(self.model.get("preset", DEFAULT_PRESET), str, "model.preset")
        _require(
            preset in kind.presets, "model.preset", preset, f"one of {', '.join(kind.presets)}"
        )
        hints = {**{f.name: f.type for f in dataclasses.fields(kind)}, "family": str, "preset": str}
        if "vocab_size" in self.model:
            raise ValueError(
                f"model.vocab_size is {self.model['vocab_size']!r}; the tokeniser decides it: "
                "leave it out"
            )
        for key in self.model:
            if key not in hints:
                raise ValueError(_unknown(f"model.{key}", [f"model.{name}" for name in hints]))
        object.__setattr__(
            self,
            "model",
            {key: _convert(value, hints[key], f"model.{key}") for key, value in self.model.items()},
        )

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The model that this run trains, for a tokeniser of so many tokens."""
        values = dict(self.model)
        kind = find_family(values.pop("family", "tracformer")).config_class
        preset = values.pop("preset", DEFAULT_PRESET)
        return kind.preset(
            preset, **{"modes": self.modes(kind), **values, "vocab_size": vocab_size}
        )

    def modes(self, kind: type[ModelConfig]) -> tuple[str, ...]:
        """What a model of this kind is trained to answer."""
        asked = {part.mode for part in parse_objective(self.objective, self.contexts).parts}
        learned = kind.modes_trained_by(asked, self.model)
        modes = tuple(mode for mode in kind.possible_modes if mode in learned)
        if asked - set(modes):
            can = ", ".join(kind.possible_modes)
            raise ValueError(
                f"objective {self.objective!r} asks for {', '.join(sorted(asked))}; "
                f"{kind.model_type} answers {can}"
            )
        return modes

    def recipe(self) -> dict[str, Any]:
        """What decides the weights, save model, data and code.

        Not how many steps there are: a run may be asked for more.
        """
        told = ("objective", "contexts", "batch", "length", "seed", "ema")
        optimizer = {
            f"optimizer.{key}": value
            for key, value in dataclasses.asdict(self.optimizer).items()
            if key != "warmup"
        }
        rows = {f"data.{key}": getattr(self.data, key) for key in ("rows", "cross_documents")}
        return {**{key: getattr(self, key) for key in told}, **optimizer, **rows}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_config(words: Iterable[str], preset: str | None = None) -> TrainConfig:
    """A preset (a bundled name or a YAML file), changed by words such as `steps=100`
    or `optimizer.lr=1e-3`.
    """
    values = read_preset(preset) if preset else {}
    given: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is not of the form key=value")
        key = "data.source" if key == "data" else key  # short for it
        if key in given:
            several = (
                "; for several files write a glob, or `tracformer prepare A B --out FOLDER`"
                if key == "data.source"
                else ""
            )
            raise ValueError(
                f"{key} is given twice, as {given[key]!r} and {word!r}; give it once{several}"
            )
        given[key] = word
        # [0.1,0.4]&[0.6,0.9] is not YAML, and [0.25,0.75] no list
        ranges = key == "contexts" and text.startswith("[")
        _place(
            values,
            key,
            text if key in AS_WRITTEN or ranges else parse_yaml(text, word) if text else "",
        )
    return from_dict(values)


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    return _build(TrainConfig, present_names(values, OLD_KEYS), "")


def canonical_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe in the form in which recipes of all versions compare, and hash, alike.

    Keys have their first names, so that a rename changes nothing; `LATER_KEYS` at the value that
    older recipes imply are left out, so that a new key changes nothing either.

    Args:
        recipe: Groups of training keys, such as `recipe.json` of `tracformer reproduce` holds.
    """
    found = first_names(recipe, OLD_KEYS)
    if isinstance(model := found.get("model"), dict):
        kind = find_family(model.get("family", "tracformer")).config_class
        found["model"] = first_names(model, kind.old_config_keys)
    for path, value in LATER_KEYS.items():
        group, _, key = path.rpartition(".")
        keys = found.get(group, {}) if group else found
        if key in keys and keys[key] == value:
            del keys[key]
    return found


def read_preset(name: str) -> dict[str, Any]:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise FileNotFoundError(f"there is no preset file {name}")
        text = path.read_text()
    else:
        bundled = resources.files("tracformer.training") / "presets" / f"{name}.yaml"
        if not bundled.is_file():
            raise ValueError(
                f"preset is {name!r}; available: {', '.join(preset_names())}, or a YAML file"
            )
        text = bundled.read_text()
    values = parse_yaml(text, name)
    if not isinstance(values, dict):
        raise ValueError(f"preset {name} does not hold keys and values")
    return values


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(
            f"{where} is not YAML{place}: {getattr(error, 'problem', None) or error}"
        ) from error


def preset_names() -> list[str]:
    folder = resources.files("tracformer.training") / "presets"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def _place(values: dict[str, Any], key: str, value: Any) -> None:
    """`a.b=c` goes to values["a"]["b"]."""
    *path, last = key.split(".")
    for part in path:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{key}: {part} is a value, not a group of keys")
        values = inner
    values[last] = value


def _build(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise ValueError(
                _unknown(
                    prefix + key, [prefix + name for name in hints] + _nested_names(hints, prefix)
                )
            )
    return kind(**{key: _convert(value, hints[key], prefix + key) for key, value in values.items()})


def _convert(value: Any, hint: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{key} is {value!r}; it must be a group of keys, such as "
                f"{key}.{dataclasses.fields(hint)[0].name}=..."
            )
        return _build(typing.cast(type[Any], hint), value, f"{key}.")
    origin = typing.get_origin(hint) or hint
    if origin is tuple:
        if isinstance(value, str | list | tuple):
            return tuple(str(item) for item in ([value] if isinstance(value, str) else value))
        raise ValueError(f"{key} is {value!r}; it must be a list, such as {key}=[a,b]")
    if origin in (dict, Mapping) or origin is typing.get_origin(Mapping[str, Any]):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{key} is {value!r}; it must be a group of keys, such as {key}.preset=tiny"
            )
        return dict(value)
    if origin is bool and isinstance(value, bool):
        return value
    if origin is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if origin is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as a string
        except (TypeError, ValueError):
            pass
    if origin is str and isinstance(value, str | int | float | types.NoneType):
        return "" if value is None else str(value)
    raise ValueError(f"{key} is {value!r}; it must be of type {origin.__name__}")


def _nested_names(hints: Mapping[str, Any], prefix: str) -> list[str]:
    return [
        f"{prefix}{name}.{f.name}"
        for name, hint in hints.items()
        if dataclasses.is_dataclass(hint)
        for f in dataclasses.fields(hint)
    ]


def _unknown(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    by_last = {name.rsplit(".", 1)[-1]: name for name in names}
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    near = near or [
        by_last[n]
        for n in difflib.get_close_matches(key.rsplit(".", 1)[-1], list(by_last), n=1, cutoff=0.6)
    ]
    return f"there is no configuration key {key!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
    )


def _require(holds: bool, key: str, value: Any, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{key} is {value!r}; it must be {allowed}")
