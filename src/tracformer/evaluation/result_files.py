"""What an evaluation leaves behind: one JSON file for one model on one task, with every figure, its
interval and where it came from.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np

from tracformer.files import write_atomically

FORMAT, VERSION = "tracformer-result", 1
SAMPLE = "sample"  # beside exact, marginal and bound: a figure of drawn text


@dataclass(frozen=True)
class ResultRow:
    """One figure."""

    # perplexity, nll, bits_per_byte, kl, mauve, bertscore, bleu4, spread, ece, tokens_per_second,
    # ...
    metric: str
    # what varies inside the task: {"contexts": "span:p=0.5,mean=10", "ratio": 0.5, "spans":
    # "Geometric(10)"}
    setting: Mapping[str, Any]
    value: float
    low: float | None = None  # 95% interval
    high: float | None = None
    kind: str = ""  # exact, marginal, bound, sample, or nothing where the word does not apply
    sequences: int = 0
    targets: int = 0
    note: str = ""


@dataclass(frozen=True)
class Result:
    """One model on one task."""

    model: str  # the name shown
    family: str
    mode: str
    task: str
    options: Mapping[str, Any]  # the task's options in full; a folder by its last name alone
    rows: tuple[ResultRow, ...]
    # per-sequence sums, histograms, fills: what a report needs to go deeper
    details: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def find(self, metric: str, **setting: Any) -> ResultRow:
        """The one row of this metric whose setting has these values."""
        found = [
            r
            for r in self.rows
            if r.metric == metric
            and all(r.setting.get(key) == value for key, value in setting.items())
        ]
        if len(found) != 1:
            raise ValueError(
                f"{len(found)} rows of task {self.task!r} have metric {metric!r} and {setting}; "
                "exactly one was asked for"
            )
        return found[0]

    def question(self, without: Sequence[str] = ()) -> str:
        """What was asked, as a key: the same for a result that was read from its file and one just
        made. How many draws an estimate was made from is no part of it.
        """
        options = {
            key: value for key, value in self.options.items() if key not in ("draws", *without)
        }
        return f"{self.task} {json.dumps(plain(options), sort_keys=True)}"

    @property
    def schemas(self) -> dict[str, int]:
        """Of family and task, under which the figures were made; 1 of results that do not say."""
        return {"family": 1, "task": 1, **self.manifest.get("schemas", {})}

    @property
    def file_name(self) -> str:
        return file_name(self.model, self.mode, self.task, self.options, self.manifest)

    def to_dict(self) -> dict[str, Any]:
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
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(
                f"format {document.get('format')!r}, version {document.get('version')!r}; this "
                f"program reads {FORMAT!r}, version {VERSION}"
            )
        values = {key: value for key, value in document.items() if key not in ("format", "version")}
        return cls(
            **{**values, "rows": tuple(ResultRow(**_row_numbers(row)) for row in values["rows"])}
        )

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write the result under its own name, whole or not at all."""
        path = Path(folder) / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        )
        return path

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a result that can be read: {error}; "
                "if an evaluation wrote it, delete it, and the same command writes it again"
            ) from error


def read_results(*places: str | PathLike[str]) -> list[Result]:
    """The results in files, and anywhere in folders; other JSON files are passed over."""
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
    asked = {
        "options": options,
        "hashes": manifest.get("hashes", {}),
        "dtype": manifest.get("dtype"),
    }
    if "schemas" in manifest:
        asked["schemas"] = manifest["schemas"]
    words = (re.sub(r"[^\w.+]+", "_", word).strip("._") for word in (model, mode, task))
    return f"{'-'.join(words)}-{digest(asked)[:12]}.json"


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(
        json.dumps(plain(value), sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def plain(value: Any) -> Any:
    """The value in JSON's own types; numbers that JSON lacks as the strings "inf",
    "-inf" and "nan".
    """
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
        return True  # let `load` complain by name
    return isinstance(document, dict) and document.get("format") == FORMAT
