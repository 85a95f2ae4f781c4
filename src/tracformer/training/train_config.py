"""The configuration of a training run: frozen dataclasses whose fields carry help and bounds.

`load_config` fills a `TrainConfig` from a preset (a YAML file) and `key=value` words. `recipe` and
`canonical_recipe` say what decides the weights, for checkpoints and for `tracformer reproduce`.
"""

import copy
import dataclasses
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tracformer.attention import implementations
from tracformer.baselines import find_family
from tracformer.contexts import parse as parse_strategy
from tracformer.data import parse_validation
from tracformer.model.config import ModelConfig
from tracformer.options import (
    build,
    check_options,
    convert,
    did_you_mean,
    option,
    place,
    read_words,
    read_yaml,
)
from tracformer.renames import first_names, present_names
from tracformer.training.clock import parse_decays
from tracformer.training.objectives import OBJECTIVES, parse_objective

DEFAULT_PRESET = "laptop"  # of a model, if none is named
OLD_KEYS: Mapping[str, str] = {}  # names of keys in older files; see `tracformer.renames`
# Keys that recipes of older versions lack, by their first names, with the value that they imply.
LATER_KEYS: Mapping[str, Any] = {
    "optimizer.schedule": "cosine",
    "optimizer.decay": 0.5,
    "optimizer.decays": "",
    "minutes": 0.0,
    "threads": 0,
}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with the paper's settings (Tables 5 and 10), or Muon on the layers' matrices.

    With `name="muon"`, AdamW updates the parameters that Muon does not.
    """

    name: str = option("adamw", "optimizer", choices=("adamw", "muon"))
    lr: float = option(6e-4, "peak learning rate", above=0, below=math.inf)
    schedule: str = option(
        "cosine",
        "after the warm-up: cosine decay, or wsd (constant, then linear decay)",
        choices=("cosine", "wsd"),
    )
    final_lr: float = option(
        -1.0, "learning rate at the end; -1: lr / 10 for cosine, 0 for wsd", low=0, below=math.inf
    )
    warmup: int = option(1000, "steps of linear warm-up", low=0)
    decay: float = option(0.5, "wsd: share of all steps in the final decay", above=0, high=1)
    decays: str = option(
        "",
        "wsd: decays that the clock began in another run, as START-END:SHARE; replaces `decay`",
        raw=True,
    )
    beta1: float = option(0.9, "AdamW: decay of the first moment", low=0, below=1)
    beta2: float = option(0.95, "AdamW: decay of the second moment", low=0, below=1)
    weight_decay: float = option(0.1, "weight decay, on matrices only", low=0, below=math.inf)
    clip: float = option(1.0, "largest gradient norm", above=0)
    matrix_lr: float = option(
        -1.0, "muon: peak learning rate of its matrices; -1: lr", above=0, below=math.inf
    )
    momentum: float = option(0.95, "muon: momentum", low=0, below=1)
    nesterov: bool = option(True, "muon: use Nesterov momentum")

    def __post_init__(self) -> None:
        check_options(self, "optimizer.")
        if self.final_lr == -1.0:
            object.__setattr__(self, "final_lr", self.lr / 10 if self.schedule == "cosine" else 0.0)
        if self.final_lr > self.lr:
            raise ValueError(
                f"optimizer.final_lr is {self.final_lr!r}; it must be at most optimizer.lr "
                f"({self.lr})"
            )
        parse_decays(self.decays)
        unused = [(key, "optimizer.schedule is wsd") for key in ("decay", "decays")]
        unused = [] if self.schedule == "wsd" else unused
        if self.name != "muon":
            unused += [
                (key, "optimizer.name is muon") for key in ("matrix_lr", "momentum", "nesterov")
            ]
        for key, condition in unused:
            if getattr(self, key) != getattr(OptimizerConfig, key):
                raise ValueError(
                    f"optimizer.{key} is {getattr(self, key)!r}; leave it out unless {condition}"
                )

    @property
    def rate_of_matrices(self) -> float:
        """Return Muon's peak learning rate; `lr` unless `matrix_lr` is set."""
        return self.lr if self.matrix_lr == -1.0 else self.matrix_lr


@dataclass(frozen=True)
class DataConfig:
    """The training text, and how it is cut into rows."""

    source: str = option(
        "",
        "a prepared folder, a file, folder or glob (text, JSONL, FASTA), a named data set, or "
        "hf:OWNER/NAME",
        raw=True,
    )
    validation: str = option(
        "0.05",
        "fraction to hold out if the data has no validation split; or the file, folder or glob of "
        "that split",
        raw=True,
    )
    tokenizer: str = option(
        "auto",
        "auto, byte, char, dna, rna, nucleotide, protein, bpe:SIZE, a folder or a hub id",
    )
    rows: str = option(
        "packed",
        "packed: fixed-length blocks of text; records: one document per row",
        choices=("packed", "records"),
    )
    cross_documents: bool = option(True, "let a packed row contain parts of several documents")
    identity_weights: float = option(
        0.0,
        "aligned records: weight a sequence by 1 / number of sequences that agree with "
        "it in at least this share of the columns, such as 0.8; 0: all alike",
        above=0,
        high=1,
    )

    def __post_init__(self) -> None:
        check_options(self, "data.")
        if self.identity_weights and self.rows != "records":
            raise ValueError(
                f"data.identity_weights is {self.identity_weights!r}; it needs data.rows=records"
            )
        parse_validation(self.validation)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that configures a training run; `tracformer train --keys` lists it with help.

    Args:
        data: Training text and how it is cut into rows, a `DataConfig`.
        model: `family`, `preset` and any field of the family's configuration.
        objective: Name of the objective; empty: the family's default.
        contexts: Context strategy that replaces the objective's own.
        optimizer: Optimizer and learning-rate schedule, an `OptimizerConfig`.
        run: Folder of checkpoints, log and model.
        init: Trained model to start from.
        steps: Optimizer steps; 0: chosen by the size of the data.
        minutes: Time to train, instead of a number of steps; 0: no limit.
        threads: Processor threads; 0: the machine's cores, fewer if it is busy.
        until: Stop after this step, as if interrupted; 0: never.
        batch: Sequences in a global batch.
        micro_batch: Sequences per forward pass on a device; 0: all at once.
        length: Tokens per row; 0: the model's max_length.
        seed: Random seed.
        precision: "auto", "float32" or "bfloat16".
        attention: Implementation of Tracformer's attention.
        compile: Compile the layers with torch.compile.
        checkpoint_activations: Recompute activations in the backward pass.
        ema: Decay of the averaged weights; 0: no averaging.
        parallel: "ddp" or "fsdp" under torchrun.
        device: "auto", "cpu", "cuda" or another PyTorch device.
        log_every: Steps between log records.
        eval_every: Steps between validations.
        eval_sequences: Held-out sequences per validation.
        eval_contexts: Context strategies of the validation.
        save_every: Steps between checkpoints.
        keep: Checkpoints to keep, at least 2.
        changes: Whether a resumed run may "take" other settings or must "refuse" them.

    Example:
        >>> config = TrainConfig(model={"preset": "tiny"}, steps=100)
        >>> config.objective
        'all-modes'
    """

    data: DataConfig = option(DataConfig, "training data")
    model: Mapping[str, Any] = option(
        dict, "`family`, `preset` and any field of the family's configuration"
    )
    objective: str = option(
        "",
        f"one of {', '.join(OBJECTIVES)}; empty: the family's default (all-modes for Tracformer)",
    )
    contexts: str = option("", "strategy that replaces the contexts of the objective", raw=True)
    optimizer: OptimizerConfig = option(OptimizerConfig, "optimizer and learning-rate schedule")
    run: str = option("", "folder of checkpoints, log and model; empty: runs/NAME", raw=True)
    init: str = option(
        "",
        "trained model to start from: a model or run folder, a bundled name, or a hub id",
        raw=True,
    )
    steps: int = option(0, "optimizer steps; 0: chosen by the size of the data", low=0)
    minutes: float = option(
        0.0,
        "time to train instead of a number of steps, with everything before and after it; 0: none",
        above=0,
        below=math.inf,
    )
    threads: int = option(
        0, "processor threads; 0: the machine's cores, fewer if it is busy", low=1
    )
    until: int = option(
        0,
        "stop after this step, as if interrupted; the same command without it continues. 0: never",
        low=0,
    )
    batch: int = option(32, "sequences in a global batch", low=1)
    micro_batch: int = option(0, "sequences per forward pass on a device; 0: all at once", low=0)
    length: int = option(0, "tokens per row; 0: the model's max_length", low=0)
    seed: int = option(0, "random seed")
    precision: str = option(
        "auto",
        "auto: bfloat16 on GPUs that support it, else float32",
        choices=("auto", "float32", "bfloat16"),
    )
    attention: str = option(
        "native",
        "Tracformer's attention: native (CPU) falls back to triton on a GPU, else to blocked",
        choices=implementations,
    )
    compile: bool = option(False, "compile the layers with torch.compile")
    checkpoint_activations: bool = option(False, "recompute activations in the backward pass")
    ema: float = option(0.0, "decay of the averaged weights; 0: no averaging", low=0, below=1)
    parallel: str = option("ddp", "data parallelism under torchrun", choices=("ddp", "fsdp"))
    device: str = option("auto", "auto, cpu, cuda or mps")
    log_every: int = option(10, "steps between log records", low=1)
    eval_every: int = option(500, "steps between validations", low=1)
    eval_sequences: int = option(256, "held-out sequences per validation", low=1)
    eval_contexts: tuple[str, ...] = option(
        ("span:p=0.5,mean=50", "span:p=0.2,mean=10", "span:p=0.8,mean=10"),
        "context strategies of the validation",
    )
    save_every: int = option(500, "steps between checkpoints", low=1)
    keep: int = option(
        2, "checkpoints to keep, at least 2: a crash may damage the newest one", low=2
    )
    changes: str = option(
        "refuse",
        "a resumed run whose recipe differs: refuse it, or take the new settings from there on",
        choices=("refuse", "take"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        family = find_family(str(self.model.get("family", "tracformer")))
        # With `init` and no family, the loaded model decides the family and so the objective.
        if "family" in self.model or not self.init:
            object.__setattr__(self, "objective", self.objective or family.objective)
        if self.minutes and self.steps:
            raise ValueError(
                f"steps is {self.steps} and minutes is {self.minutes:g}; give one of them: a "
                "number of steps, or the time to train"
            )
        if self.objective:
            parse_objective(self.objective, self.contexts)
        for strategy in self.eval_contexts:
            parse_strategy(strategy)
        object.__setattr__(self, "model", _checked_model(self.model, family.config_class))

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Return the configuration of the model that this run trains."""
        values = dict(self.model)
        kind = find_family(values.pop("family", "tracformer")).config_class
        preset = values.pop("preset", "") or default_preset(kind)
        values = {"modes": self.modes(kind), **values, "vocab_size": vocab_size}
        return kind.preset(preset, **values) if kind.presets else kind.from_dict(values)

    def modes(self, kind: type[ModelConfig]) -> tuple[str, ...]:
        """Return the modes that a model of this kind learns under the objective.

        Raises:
            ValueError: The objective has a mode that such models do not support.
        """
        needed = {part.mode for part in parse_objective(self.objective, self.contexts).parts}
        learned = kind.modes_trained_by(needed, self.model)
        modes = tuple(mode for mode in kind.possible_modes if mode in learned)
        if needed - set(modes):
            raise ValueError(
                f"objective {self.objective!r} needs mode {', '.join(sorted(needed))}; "
                f"{kind.model_type} supports {', '.join(kind.possible_modes)}"
            )
        return modes

    def recipe(self) -> dict[str, Any]:
        """Return what decides the weights, apart from model, data and code.

        The number of steps is not part of it: a finished run may be continued.
        """
        keys = ("objective", "contexts", "batch", "length", "seed", "ema")
        optimizer = {
            f"optimizer.{key}": value
            for key, value in dataclasses.asdict(self.optimizer).items()
            if key != "warmup"
        }
        reading = ("rows", "cross_documents", "identity_weights")
        rows = {f"data.{key}": getattr(self.data, key) for key in reading}
        return {**{key: getattr(self, key) for key in keys}, **optimizer, **rows}

    def to_dict(self) -> dict[str, Any]:
        """Return all values as nested dictionaries; `from_dict` reads them back."""
        return dataclasses.asdict(self)


def default_preset(kind: type[ModelConfig], *wanted: str) -> str:
    """Return the first of the wanted presets that a kind of model has, else any; "" without one."""
    names = (*wanted, DEFAULT_PRESET, *kind.presets)
    return next((name for name in names if name in kind.presets), "")


def _checked_model(values: Mapping[str, Any], kind: type[ModelConfig]) -> dict[str, Any]:
    """Return the `model` group with each value converted to the type of its field."""
    if "vocab_size" in values:
        raise ValueError(
            f"model.vocab_size is {values['vocab_size']!r}; the tokenizer decides it: leave it out"
        )
    hints = typing.get_type_hints(kind)
    hints = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    hints |= {"family": str, "preset": str}
    converted = {}
    for key, value in values.items():
        if key not in hints:
            near = did_you_mean(f"model.{key}", (f"model.{name}" for name in hints))
            raise ValueError(f"unknown option 'model.{key}'{near}")
        converted[key] = convert(value, hints[key], f"model.{key}")
    preset = converted.get("preset", default_preset(kind))
    if kind.presets and preset not in kind.presets:
        raise ValueError(f"model.preset is {preset!r}; it must be one of {', '.join(kind.presets)}")
    return converted


def load_config(words: Iterable[str], preset: str | Mapping[str, Any] | None = None) -> TrainConfig:
    """Return a configuration from a preset and `key=value` words.

    Args:
        words: Changes such as "steps=100" or "optimizer.lr=1e-3"; "data=X" is "data.source=X".
        preset: Name of a bundled preset, a YAML file, or the nested values themselves.

    Raises:
        ValueError: An option is unknown, given twice or has a wrong value.
        FileNotFoundError: The preset file does not exist.
    """
    words = list(words)
    if sum(word.startswith(("data=", "data.source=")) for word in words) > 1:
        raise ValueError(
            "data.source is given twice; for several files write a glob, or run "
            "`tracformer prepare A B --out FOLDER` first"
        )
    values: dict[str, Any] = {}
    if preset:
        values = read_preset(preset) if isinstance(preset, str) else copy.deepcopy(dict(preset))
    for key, value in read_words(words, TrainConfig, {"data": "data.source"}).items():
        # ranges such as [0.25,0.75] are not read as YAML lists, but quotes may surround them
        place(values, key, value.strip("\"'") if key == "contexts" else value)
    return from_dict(values)


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration from nested dictionaries; keys may have older names."""
    return build(TrainConfig, present_names(values, OLD_KEYS))


def canonical_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe in the form in which recipes of all versions compare and hash alike.

    Keys get their first names, so that a rename changes nothing. `LATER_KEYS` at the value that
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
    """Return the values of a bundled preset or of a YAML file."""
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
    values = read_yaml(text, name)
    if not isinstance(values, dict):
        raise ValueError(f"preset {name} is not a mapping of options to values")
    return values


def preset_names() -> list[str]:
    """Return the names of the bundled presets."""
    folder = resources.files("tracformer.training") / "presets"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )
