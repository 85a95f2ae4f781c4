"""Training checkpoints, and the state of a run that they store.

A checkpoint is a folder `step-00001000` of safetensors and JSON; no file is a pickle. It is written
under another name, flushed, listed with hashes in a manifest, and renamed last, so that a crash
never leaves a damaged checkpoint unnoticed. Tensors are cut by rows into one file per rank, with an
index of the rows in each file, so that a run may resume with another number of ranks.

- `CheckpointWriter`, `Reader`: one checkpoint on disk.
- `newest_intact`, `prune`: the checkpoints of a run.
- `State`: what a run saves: weights, optimizer, averaged weights, step, position in the data.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tracformer.devices import Ranks, local
from tracformer.files import flush, sha256_of
from tracformer.model import ConditionalModel, ModelConfig
from tracformer.model.storage import save_tensors
from tracformer.renames import present_names, present_tensor_name
from tracformer.training.clock import Clock
from tracformer.training.optimizer import Optimizer
from tracformer.training.train_config import OLD_KEYS

MANIFEST = "manifest.json"
STATE = "state.json"
WEIGHTS = "weights"  # the kind of tensors that every checkpoint has
FORMAT = 1


class DamagedCheckpointError(ValueError):
    """A checkpoint is damaged; the message says how."""


@dataclass(frozen=True)
class RowRange:
    """A rank's part of a tensor: rows start..stop of a tensor of shape `shape`."""

    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass
class Shard:
    """The part of a checkpoint that one rank writes: its rows of every tensor, by name."""

    tensors: dict[str, Tensor]
    rows: dict[str, RowRange]


def folder_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the checkpoints, newest first; they may be damaged."""
    found = (
        [
            (int(m[1]), entry)
            for entry in folder.iterdir()
            if (m := re.fullmatch(r"step-(\d{8,})", entry.name))
        ]
        if folder.is_dir()
        else []
    )
    return sorted(found, reverse=True)


class CheckpointWriter:
    """Writes one checkpoint.

    One rank calls `begin`, every rank `write_shard`, and after a barrier one rank calls `finish`.

    Args:
        folder: Folder of all checkpoints of the run.
        step: Step of this checkpoint.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.final = folder / folder_name(step)
        self.part = folder / f".{folder_name(step)}.part"

    def begin(self) -> None:
        """Make the folder; an abandoned attempt at the same step is removed."""
        self.part.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.part, ignore_errors=True)
        self.part.mkdir()

    def write_shard(self, kind: str, shard: Shard, rank: int = 0, world: int = 1) -> None:
        """Write the tensors of one rank; `kind` is WEIGHTS, "optimizer" or "ema"."""
        stem = f"{kind}-{rank:05d}-of-{world:05d}"
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in shard.tensors.items()
        }
        save_tensors(tensors, self.part / f"{stem}.safetensors")
        rows = {
            name: {"shape": r.shape, "start": r.start, "stop": r.stop}
            for name, r in shard.rows.items()
        }
        (self.part / f"{stem}.index.json").write_text(json.dumps(rows))

    def finish(self, state: Mapping[str, Any]) -> Path:
        """Write state and manifest, flush all files, and rename the folder to its final name."""
        (self.part / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=1))
        files = sorted(entry for entry in self.part.iterdir())
        hashes = {
            entry.name: {"sha256": sha256_of(entry), "bytes": entry.stat().st_size}
            for entry in files
        }
        (self.part / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": hashes}, indent=1))
        for entry in self.part.iterdir():
            flush(entry)
        flush(self.part)
        if self.final.exists():  # the same step again, after a resume from an older one
            shutil.rmtree(self.final)
        os.rename(self.part, self.final)
        flush(self.final.parent)
        return self.final

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.part, ignore_errors=True)


def prune(
    folder: Path, keep: int, written: Path | None = None, intact: Collection[Path] = ()
) -> None:
    """Remove old checkpoints, and unfinished ones that a crash left behind.

    Args:
        folder: Folder of all checkpoints of the run.
        keep: Number of intact checkpoints to keep.
        written: The checkpoint that was just written; it is always kept.
        intact: Checkpoints that this process wrote or read, which need not be checked.
    """
    kept = 0
    for _, path in list_checkpoints(folder):
        if path == written:
            kept += 1
        elif kept >= keep:
            shutil.rmtree(path, ignore_errors=True)
        elif path in intact or _damage(path) is None:
            kept += 1
    for entry in folder.glob(".step-*.part"):
        shutil.rmtree(entry, ignore_errors=True)


def check(path: Path) -> None:
    """Compare every file of a checkpoint with the size and hash in its manifest.

    Raises:
        DamagedCheckpointError: A file is missing or differs.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {
            name: (entry["sha256"], entry["bytes"]) for name, entry in manifest["files"].items()
        }
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path.name} has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpointError(f"{path.name}/{MANIFEST} is not readable") from None
    if not any(name.startswith(f"{WEIGHTS}-") for name in files):
        raise DamagedCheckpointError(f"{path.name} holds no weights")
    for name, (digest, size) in files.items():
        entry = path / name
        if not entry.is_file():
            raise DamagedCheckpointError(f"{path.name}/{name} is missing")
        if entry.stat().st_size != size:
            raise DamagedCheckpointError(
                f"{path.name}/{name} has {entry.stat().st_size} bytes, but {size} were written"
            )
        if sha256_of(entry) != digest:
            raise DamagedCheckpointError(
                f"{path.name}/{name} differs from what was written (SHA-256)"
            )


def newest_intact(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint, and a message for each newer one that is damaged."""
    skipped: list[str] = []
    for _, path in list_checkpoints(folder):
        damage = _damage(path)
        if damage is None:
            return path, skipped
        skipped.append(damage)
    return None, skipped


def _damage(path: Path) -> str | None:
    try:
        check(path)
    except DamagedCheckpointError as damage:
        return str(damage)
    return None


class Reader:
    """Reads an intact checkpoint, whatever number of ranks wrote it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = json.loads((path / STATE).read_text())
        if self.state["format"] != FORMAT:
            raise DamagedCheckpointError(
                f"{path.name} has format {self.state['format']}; this version reads {FORMAT}"
            )

    def has(self, kind: str) -> bool:
        """Return whether there are tensors of a kind."""
        return bool(self._indices(kind))

    def names(self, kind: str) -> set[str]:
        """Return the names under which tensors of a kind were saved."""
        return {name for index in self._indices(kind).values() for name in index}

    def rows(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return rows start..stop of a tensor, gathered from the files that contain them."""
        pieces: list[Tensor] = []
        # files are sorted by rank, which is the order of rows
        for file, index in self._indices(kind).items():
            if name in index:
                first, last = index[name]["start"], index[name]["stop"]
                low = min(max(start, first), last)
                high = max(low, min(stop, last))
                with safe_open(self.path / file, framework="pt") as tensors:
                    pieces.append(tensors.get_slice(name)[low - first : high - first])
        if not pieces:
            raise DamagedCheckpointError(f"{self.path.name} has no {kind} tensor {name}")
        return torch.cat(pieces)

    def _indices(self, kind: str) -> dict[str, dict[str, Any]]:
        indices = sorted(self.path.glob(f"{kind}-*.index.json"))
        return {
            index.name.replace(".index.json", ".safetensors"): json.loads(index.read_text())
            for index in indices
        }


class State:
    """Everything that a run must remember to resume.

    Args:
        model: The model in training.
        optimizer: Its optimizer.
        ranks: Ranks of the run.
        sharded: Whether the weights are sharded over the ranks.
        ema: Decay of the averaged weights; 0: none.
        data: Fingerprint of the training data.
        recipe: Settings that a resumed run must share, unless `take_changes`.
        take_changes: Accept other settings from the point of resumption on.
        clock: Counts the time of the run; None starts one without a budget.
    """

    def __init__(
        self,
        model: ConditionalModel,
        optimizer: Optimizer,
        ranks: Ranks,
        sharded: bool,
        ema: float,
        data: str,
        recipe: Mapping[str, Any] | None = None,
        take_changes: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.recipe, self.take_changes = dict(recipe or {}), take_changes
        # earlier recipes of the run, each with the step until which it was used
        self.earlier: list[dict[str, Any]] = []
        self.model, self.optimizer, self.ranks, self.sharded, self.decay, self.data = (
            model,
            optimizer,
            ranks,
            sharded,
            ema,
            data,
        )
        self.parameters = model.trained_parameters()
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.parameters.items()
        }
        self.step = 0
        self.position = 0  # number of rows of the stream that were used
        self.best = float("inf")  # lowest validation perplexity so far
        # processor time of the training steps, without validation and checkpoints
        self.cpu_seconds = 0.0
        self.average: dict[str, Tensor] = {}
        if ema:
            self.average = {name: local(p).detach().clone() for name, p in self.parameters.items()}

    def advance(self, sequences: int) -> None:
        """Count a step and its rows, and update the averaged weights."""
        self.step += 1
        self.position += sequences
        # a smaller decay at first, so that the random initial weights are soon forgotten
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        for name, mean in self.average.items():
            mean.lerp_(local(self.parameters[name]).detach(), 1.0 - decay)

    # ---- write a checkpoint

    def describe(self) -> dict[str, Any]:
        """Return everything but the tensors."""
        best = None if self.best == float("inf") else self.best
        return {
            "step": self.step,
            "position": self.position,
            "best": best,
            "cpu_seconds": round(self.cpu_seconds, 3),
            "clock": self.clock.describe(),
            "ema": self.decay,
            "optimizer": self.optimizer.name,
            "data": self.data,
            "model": self.model.config.to_dict(),
            "recipe": self.recipe,
            "earlier": self.earlier,
        }

    def shards(self) -> dict[str, Shard]:
        """Return the tensors to write by kind; empty on ranks that write nothing."""
        if not self.sharded and not self.ranks.first:
            return {}
        shards = {
            WEIGHTS: self._shard({name: local(p) for name, p in self.parameters.items()}),
            "optimizer": self._shard(self.optimizer.tensors(self.names)),
        }
        if self.average:
            shards["ema"] = self._shard(self.average)
        return shards

    def _shard(self, tensors: dict[str, Tensor]) -> Shard:
        rows = {}
        for name in tensors:
            shape = tuple(self.parameters[_parameter_name(name, self.parameters)].shape)
            start, stop = self.ranks.local_rows(shape[0]) if self.sharded else (0, shape[0])
            rows[name] = RowRange(shape, start, stop)
        return Shard(tensors, rows)

    # ---- read a checkpoint

    def load(self, reader: Reader) -> None:
        """Restore the state.

        Raises:
            ValueError: The checkpoint is of another model, optimizer, data or recipe.
        """
        run = f"the run in {reader.path.parent.parent}"
        saved, mine = _saved_config(reader, self.model.config), self.model.config.to_dict()
        if different := [
            key for key in mine if _plain(mine[key]) != _plain(saved.get(key)) and key != "dropout"
        ]:
            changes = ", ".join(
                f"{key} was {saved.get(key)!r} and is now {mine[key]!r}" for key in different
            )
            raise ValueError(
                f"{run} has another model: {changes}; use another run=FOLDER, or the old settings"
            )
        if (before := reader.state.get("optimizer", "adamw")) != self.optimizer.name:
            raise ValueError(
                f"{run} was trained with optimizer.name={before}, and {self.optimizer.name} cannot "
                f"continue from its state; use another run=FOLDER, or optimizer.name={before}"
            )
        if reader.state.get("data", self.data) != self.data:
            raise ValueError(
                f"{run} was trained on other data, or on the same data with another tokenizer; use "
                f"the old data, or another run=FOLDER (init={reader.path.parent.parent / 'model'} "
                "starts from its weights)"
            )
        self._compare_recipes(reader)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local(parameter).copy_(self._rows(reader, WEIGHTS, name))
        self.step, self.position = reader.state["step"], reader.state["position"]
        self.cpu_seconds = reader.state.get("cpu_seconds", 0.0)
        self.clock.restore(reader.state.get("clock", {}))
        self.best = float("inf") if reader.state["best"] is None else reader.state["best"]
        if self.step:
            tensors = {
                name: self._rows(reader, "optimizer", name)
                for name in self.optimizer.tensor_names(self.names)
            }
            self.optimizer.restore(self.names, tensors, self.step)
        if self.average:
            source = "ema" if reader.has("ema") else WEIGHTS
            for name, mean in self.average.items():
                mean.copy_(self._rows(reader, source, name))

    def _compare_recipes(self, reader: Reader) -> None:
        before = present_names(reader.state.get("recipe", {}), OLD_KEYS)
        self.earlier = list(reader.state.get("earlier", []))
        different = [
            key
            for key in before
            if key in self.recipe and _plain(self.recipe[key]) != _plain(before[key])
        ]
        if not different:
            return
        if not self.take_changes:
            changes = ", ".join(
                f"{key} was {before[key]!r} and is now {self.recipe[key]!r}" for key in different
            )
            raise ValueError(
                f"the run in {reader.path.parent.parent} is at step {reader.state['step']} with "
                f"another recipe: {changes}; use another run=FOLDER, the old settings, or "
                "changes=take to continue with the new ones"
            )
        self.earlier.append(
            {"until": reader.state["step"], **{key: before[key] for key in different}}
        )

    def _rows(self, reader: Reader, kind: str, name: str) -> Tensor:
        parameter = self.parameters[_parameter_name(name, self.parameters)]
        start, stop = (
            self.ranks.local_rows(parameter.shape[0]) if self.sharded else (0, parameter.shape[0])
        )
        rows = reader.rows(kind, self._saved_name(reader, kind, name), start, stop)
        if rows.shape != (stop - start, *parameter.shape[1:]):
            raise DamagedCheckpointError(
                f"{reader.path.name}: {name} has shape {tuple(rows.shape)}, expected "
                f"{(stop - start, *parameter.shape[1:])}"
            )
        return rows

    def _saved_name(self, reader: Reader, kind: str, name: str) -> str:
        """Return the name under which a tensor was saved, which may be one of an older version."""
        renames = self.model.config.old_tensor_names
        if not renames:
            return name
        for saved in reader.names(kind):
            moment, parameter = saved.split(".", 1) if kind == "optimizer" else ("", saved)
            present = present_tensor_name(parameter, renames)
            if name == (f"{moment}.{present}" if moment else present):
                return saved
        return name

    # ---- weights

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights; if they are sharded, every rank must call this."""
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
            for name, p in self.parameters.items()
        }

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Use the averaged weights, if there are any, in place of the trained ones."""
        if not self.average:
            yield
            return
        kept = {name: local(p).detach().clone() for name, p in self.parameters.items()}
        self._put(self.average)
        try:
            yield
        finally:
            self._put(kept)

    def _put(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                local(self.parameters[name]).copy_(tensor)


def _parameter_name(name: str, parameters: dict[str, Any]) -> str:
    """Return the parameter of a state tensor: `exp_avg.norm.weight` belongs to `norm.weight`."""
    return name if name in parameters else name.partition(".")[2]


def _saved_config(reader: Reader, config: ModelConfig) -> dict[str, Any]:
    """Return a checkpoint's model configuration under present names, with all fields."""
    saved: dict[str, Any] = reader.state["model"]
    try:
        return {key: _plain(value) for key, value in config.from_dict(saved).to_dict().items()}
    except ValueError:  # another family
        return saved


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
