"""Results: one JSON file for one model on one task, with figures, intervals and origin.

- `Result` and its `ResultRow`s; `read_results` reads them. `file_name` derives a result's name from
  what identifies it, so that a finished result is found again.
- `describe` writes the manifest of a result: what identifies it, and the circumstances in which it
  was made.

A result is identified by its model's name, mode, task and options, and by three entries of the
manifest: `hashes` (weights, tokenizer, data, contexts), `schemas` (numbers of the family and the
task, raised by hand when their figures change) and `dtype`. No source file enters: moving or
renaming code leaves every result valid. The other entries are for information. No entry names the
machine's folders.

A file holds the SHA-256 of its other content, which is verified whenever it is read; files of older
versions have none.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

import tracformer
from tracformer.baselines import schema_of
from tracformer.evaluation.flops import training_flops
from tracformer.files import write_atomically
from tracformer.model.base import ConditionalModel
from tracformer.model.config import ModelConfig
from tracformer.renames import first_names

if TYPE_CHECKING:
    from tracformer.evaluation.task import Subject

FORMAT, VERSION = "tracformer-result", 1
CHECKSUM = "sha256"  # key in a file
SAMPLE = "sample"  # kind of figures of sampled text, beside exact, marginal and bound


@dataclass(frozen=True)
class ResultRow:
    """One figure of a result.

    Args:
        metric: perplexity, nll, bits_per_byte, kl, mauve, bertscore, bleu4, spread, ece, ...
        setting: What varies within the task, such as {"contexts": "span:p=0.5,mean=10"}.
        value: The figure.
        low: Lower end of the 95% interval, if there is one.
        high: Upper end of the 95% interval, if there is one.
        kind: exact, marginal, bound or sample; empty where none applies.
        sequences: Number of sequences behind the figure.
        targets: Number of predicted tokens behind the figure.
        note: Remarks to be shown beside the figure.
    """

    metric: str
    setting: Mapping[str, Any]
    value: float
    low: float | None = None
    high: float | None = None
    kind: str = ""
    sequences: int = 0
    targets: int = 0
    note: str = ""


@dataclass(frozen=True)
class Result:
    """The figures of one model on one task.

    Args:
        model: Name of the model, as shown.
        family: Its system, such as "tracformer".
        mode: The mode in which it answered.
        task: Name of the task.
        options: All options of the task; paths are cut to their last names.
        rows: The figures.
        details: Sums of each sequence, histograms, fills: what reports and paired differences need.
        manifest: What identifies the result and how it was made; see `describe`.

    Example:
        >>> row = ResultRow("perplexity", {"ratio": 0.5}, 12.5, kind="exact")
        >>> result = Result("ours", "tracformer", "car", "ratios", {}, (row,))
        >>> result.find("perplexity", ratio=0.5).value
        12.5
    """

    model: str
    family: str
    mode: str
    task: str
    options: Mapping[str, Any]
    rows: tuple[ResultRow, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def find(self, metric: str, **setting: Any) -> ResultRow:
        """Return the only row of this metric whose setting has these values.

        Raises:
            ValueError: No row or several rows match.
        """
        found = [
            row
            for row in self.rows
            if row.metric == metric
            and all(row.setting.get(key) == value for key, value in setting.items())
        ]
        if len(found) != 1:
            raise ValueError(
                f"{len(found)} rows of task {self.task!r} have metric {metric!r} and {setting}; "
                "name a setting that exactly one row has"
            )
        return found[0]

    def question(self, without: Sequence[str] = ()) -> str:
        """Return a key of the task and its options, without `draws` and the options `without`.

        Results that answer the same question have the same key, whether read from a file or new.
        """
        options = {
            key: value for key, value in self.options.items() if key not in ("draws", *without)
        }
        return f"{self.task} {json.dumps(plain(options), sort_keys=True)}"

    @property
    def schemas(self) -> dict[str, int]:
        """Schema numbers of family and task; 1 where the manifest has none."""
        return {"family": 1, "task": 1, **self.manifest.get("schemas", {})}

    @property
    def file_name(self) -> str:
        """Name of the result's file."""
        return file_name(self.model, self.mode, self.task, self.options, self.manifest)

    def to_dict(self) -> dict[str, Any]:
        """Return the result in the types of JSON."""
        values = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        return plain(
            {
                "format": FORMAT,
                "version": VERSION,
                **values,
                "rows": [dataclasses.asdict(row) for row in self.rows],
            }
        )

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return a result from what `to_dict` made; ValueError for other formats or versions."""
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(
                f"it has format {document.get('format')!r}, version {document.get('version')!r}; "
                f"this program reads {FORMAT!r}, version {VERSION}"
            )
        values = {key: value for key, value in document.items() if key not in ("format", "version")}
        if (known := values.pop(CHECKSUM, None)) is not None:
            rest = {key: value for key, value in document.items() if key != CHECKSUM}
            if digest(rest) != known:
                raise ValueError("its content does not match its SHA-256; it is damaged or edited")
        return cls(
            **{**values, "rows": tuple(ResultRow(**_row_numbers(row)) for row in values["rows"])}
        )

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write the result atomically to a folder, under its own name; return the path."""
        path = Path(folder) / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        document = self.to_dict()
        document[CHECKSUM] = digest(document)
        write_atomically(
            path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        )
        return path

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a result from its file; ValueError if it holds something else."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a readable result: {error}; if an evaluation wrote it, delete it "
                "and run the same command again"
            ) from error


def read_results(*places: str | PathLike[str]) -> list[Result]:
    """Return the results in files and, at any depth, in folders.

    Other JSON files in folders are skipped.

    Raises:
        FileNotFoundError: A place does not exist.
        ValueError: A file is not a readable result.
    """
    results = []
    for place in map(Path, places):
        if not place.exists():
            raise FileNotFoundError(
                f"{place} does not exist; results are written by `tracformer eval --out {place}`"
            )
        inside = place.rglob("*.json") if place.is_dir() else [place]
        visible = [
            path
            for path in inside
            if not any(part.startswith(".") for part in path.relative_to(place).parts)
        ]
        results += [
            Result.load(path) for path in sorted(visible) if not place.is_dir() or _is_result(path)
        ]
    return results


def file_name(
    model: str, mode: str, task: str, options: Mapping[str, Any], manifest: Mapping[str, Any]
) -> str:
    """Return the name by which a finished result is found again.

    Its parts identify a result: model (system and seed), mode, task, options, and the manifest's
    `hashes`, `schemas` and `dtype`. Results of older versions have no `schemas`, but a hash of the
    source among their `hashes`.
    """
    identity = {
        "options": options,
        "hashes": manifest.get("hashes", {}),
        "dtype": manifest.get("dtype"),
    }
    if "schemas" in manifest:
        identity["schemas"] = manifest["schemas"]
    words = (re.sub(r"[^\w.+]+", "_", word).strip("._") for word in (model, mode, task))
    return f"{'-'.join(words)}-{digest(identity)[:12]}.json"


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(
        json.dumps(plain(value), sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def plain(value: Any) -> Any:
    """Return a value in the types of JSON; "inf", "-inf" and "nan" stand for such numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _row_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {
        key: None if row.get(key) is None else float(row[key]) for key in ("value", "low", "high")
    }
    return {**row, **numbers}


def _is_result(path: Path) -> bool:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return True  # `load` raises an error that names the file
    # A damaged format must not hide a result.
    return isinstance(document, dict) and (
        document.get("format") == FORMAT or {"task", "rows", CHECKSUM} <= document.keys()
    )


PACKAGE = Path(tracformer.__file__).parent


def describe(subject: "Subject", task_schema: int, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a result.

    Args:
        subject: The model that answers.
        task_schema: `Task.schema` of the task.
        inputs: Hashes of what the model is shown, by name.
    """
    return {
        "hashes": {
            "weights": subject.weights,
            "tokenizer": "" if subject.tokenizer is None else subject.tokenizer.fingerprint,
            **inputs,
        },
        "schemas": {"family": schema_of(subject.family), "task": task_schema},
        "dtype": str(subject.model.head.dtype).removeprefix("torch."),
        "model": describe_model(subject.model),
        **({"training": described} if (described := describe_training(subject)) else {}),
        **code_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": device_name(subject.device),
        "processes": subject.ranks.world,
        "batch": subject.batch,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
    }


def describe_model(model: ConditionalModel) -> dict[str, Any]:
    """Return a model's sizes and its whole configuration."""
    sizes = {
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(embeddings=False),
    }
    return {**sizes, "config": model.config.to_dict()}


def describe_training(subject: "Subject") -> dict[str, Any]:
    """Return what a model's folder says of its training, with the operations that it took."""
    if not subject.training:
        return {}
    facts = dict(subject.training)
    keys = ("objective", "contexts", "length", "tokens")
    if all(key in facts for key in keys):
        facts["flops"] = training_flops(subject.model.config, *(facts[key] for key in keys))
    return facts


def weights_hash(model: ConditionalModel) -> str:
    """Return the SHA-256 of a model's configuration and of the contents of its tensors.

    Tensors enter as the sorted list of (dtype, shape, SHA-256 of the bytes), without their names: a
    renamed parameter, class or module leaves the hash as it is. So do two equally shaped tensors
    that change places; code that reads the same file differently must raise its family's schema.
    """
    contents = []
    for tensor in model.tensors().values():
        held = tensor.detach().cpu().contiguous()
        content = hashlib.sha256(held.flatten().view(torch.uint8).numpy().data).hexdigest()
        contents.append(f"{held.dtype} {tuple(held.shape)} {content}")
    parts = [config_hash(model.config), *sorted(contents)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def config_hash(config: ModelConfig) -> str:
    """Return the SHA-256 of a configuration; neither a renamed nor a new key changes it.

    Each field enters under the first name that it had (`ModelConfig.old_config_keys`), beside the
    family's name in `config.json`. A field at its default is left out, so that models made before
    the field existed keep their hash.
    """
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.default is dataclasses.MISSING or getattr(config, field.name) != field.default
    }
    named = {"model_type": config.model_type, **first_names(values, config.old_config_keys)}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def array_hash(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    """Return the SHA-256 of arrays with their types and shapes."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(f"{array.dtype.str} {array.shape}".encode())
        whole.update(np.ascontiguousarray(array).data)
    return whole.hexdigest()


@cache
def code_version() -> dict[str, str]:
    """Return the package's version and, where it runs from a git checkout, the commit.

    The commit ends in `+changes` if files of the package differ from it, and is empty elsewhere.
    """
    commit = ""
    if _git("ls-files", "--error-unmatch", "__init__.py"):  # else some other project's repository
        changes = "+changes" if _git("status", "--porcelain", ".") else ""
        commit = _git("rev-parse", "HEAD") + changes
    return {"code": tracformer.__version__, "commit": commit}


def _git(*words: str) -> str:
    """Return what a git command prints in the package's folder; empty if it fails."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 10}
    try:
        done = subprocess.run(["git", *words], cwd=PACKAGE, **how)
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(done.stdout).strip()


def command_line(words: list[str]) -> str:
    """Return the command as it was typed, each path cut to its last name.

    In a folder that holds all these files, the command repeats the run.
    """
    if not words:
        return ""
    program = Path(words[0])
    # python -m tracformer
    ours = program.parent.name == "cli" or (program.parent.name, program.name) == (
        "tracformer",
        "__main__.py",
    )
    name = "tracformer" if ours else program.name
    return " ".join([name, *map(_cut, words[1:])])


def _cut(word: str) -> str:
    """Return a word with local paths cut: `ratios:data=/home/me/text` -> `ratios:data=text`."""
    parts = []
    for part in word.split(","):
        key, equals, value = part.rpartition("=")
        looks_local = value.startswith(("/", "~", "./", "../")) or (
            ("/" in value or "\\" in value) and Path(value).exists()
        )
        parts.append(f"{key}{equals}{Path(value).name if looks_local else value}")
    return ",".join(parts)


def device_name(device: torch.device) -> str:
    """Return the kind of a device, with the model of a GPU."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
