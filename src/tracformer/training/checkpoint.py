"""Checkpoints that survive: written beside, flushed, named by hash in a manifest, renamed last; read only when whole.

A checkpoint is a folder `step-00001000` of safetensors and JSON. Tensors are cut by rows into one file per rank, with an index that says
which rows lie where, so that a run may go on with another number of ranks. No file is a pickle.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tracformer.files import flush, sha256_of
from tracformer.model.storage import save_tensors

MANIFEST = "manifest.json"
STATE = "state.json"
WEIGHTS = "weights"  # the kind of shard that every checkpoint has
FORMAT = 1


class DamagedCheckpointError(ValueError):
    """A checkpoint that must not be used, and why."""


@dataclass(frozen=True)
class Rows:
    """A rank's part of a tensor: rows start..stop of a tensor of shape `shape`."""

    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass
class Shard:
    """What one rank writes: its rows of every tensor, by name."""

    tensors: dict[str, Tensor]
    rows: dict[str, Rows]


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete-looking checkpoints, newest first."""
    found = (
        [(int(m[1]), entry) for entry in folder.iterdir() if (m := re.fullmatch(r"step-(\d{8,})", entry.name))] if folder.is_dir() else []
    )
    return sorted(found, reverse=True)


class Writer:
    """One checkpoint being written. Every rank calls `write_shard`; then one of them, after a barrier, calls `finish`."""

    def __init__(self, folder: Path, step: int) -> None:
        self.final = folder / folder_name(step)
        self.part = folder / f".{folder_name(step)}.part"

    def begin(self) -> None:
        """Once, before any shard: an abandoned attempt at the same step is removed."""
        self.part.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.part, ignore_errors=True)
        self.part.mkdir()

    def write_shard(self, kind: str, shard: Shard, rank: int = 0, world: int = 1) -> None:
        """`kind` is WEIGHTS, optimizer or ema."""
        stem = f"{kind}-{rank:05d}-of-{world:05d}"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.tensors.items()}
        save_tensors(tensors, self.part / f"{stem}.safetensors")
        rows = {name: {"shape": r.shape, "start": r.start, "stop": r.stop} for name, r in shard.rows.items()}
        (self.part / f"{stem}.index.json").write_text(json.dumps(rows))

    def finish(self, state: Mapping[str, Any]) -> Path:
        """State, manifest, flush, rename. Until the rename nothing of it counts."""
        (self.part / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=1))
        files = sorted(entry for entry in self.part.iterdir())
        hashes = {entry.name: {"sha256": sha256_of(entry), "bytes": entry.stat().st_size} for entry in files}
        (self.part / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": hashes}, indent=1))
        for entry in self.part.iterdir():
            flush(entry)
        flush(self.part)
        if self.final.exists():  # the same step again: only after a resume from an older one
            shutil.rmtree(self.final)
        os.rename(self.part, self.final)
        flush(self.final.parent)
        return self.final

    def abandon(self) -> None:
        shutil.rmtree(self.part, ignore_errors=True)


def prune(folder: Path, keep: int, written: Path | None = None, whole: Collection[Path] = ()) -> None:
    """Remove what is older than the newest `keep` whole checkpoints, and parts that a crash left behind; never what was just written.

    whole: those that need no reading to be known as whole, since this process wrote or read them.
    """
    kept = 0
    for _, path in list_checkpoints(folder):
        if path == written:
            kept += 1
        elif kept >= keep:
            shutil.rmtree(path, ignore_errors=True)
        elif path in whole or _damage(path) is None:
            kept += 1
    for entry in folder.glob(".step-*.part"):
        shutil.rmtree(entry, ignore_errors=True)


def check(path: Path) -> None:
    """Every file that the manifest names is there, of its size and hash; else DamagedCheckpointError says what is wrong."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {name: (entry["sha256"], entry["bytes"]) for name, entry in manifest["files"].items()}
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
            raise DamagedCheckpointError(f"{path.name}/{name} has {entry.stat().st_size} bytes where {size} were written")
        if sha256_of(entry) != digest:
            raise DamagedCheckpointError(f"{path.name}/{name} differs from what was written (SHA-256)")


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each newer one that is not."""
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
    """A whole checkpoint, whatever number of ranks wrote it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = json.loads((path / STATE).read_text())
        if self.state["format"] != FORMAT:
            raise DamagedCheckpointError(f"{path.name} has format {self.state['format']}; this version reads {FORMAT}")

    def has(self, kind: str) -> bool:
        return bool(self._indices(kind))

    def names(self, kind: str) -> set[str]:
        """Return the names under which tensors of a kind were saved."""
        return {name for index in self._indices(kind).values() for name in index}

    def rows(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, gathered from the files that hold them."""
        pieces: list[Tensor] = []
        for file, index in self._indices(kind).items():  # in the order of ranks, which is the order of rows
            if name in index:
                first, last = index[name]["start"], index[name]["stop"]
                low = min(max(start, first), last)
                high = max(low, min(stop, last))
                with safe_open(self.path / file, framework="pt") as tensors:
                    pieces.append(tensors.get_slice(name)[low - first : high - first])
        if not pieces:
            raise DamagedCheckpointError(f"{self.path.name} holds no {kind} tensor {name}")
        return torch.cat(pieces)

    def _indices(self, kind: str) -> dict[str, dict[str, Any]]:
        indices = sorted(self.path.glob(f"{kind}-*.index.json"))
        return {index.name.replace(".index.json", ".safetensors"): json.loads(index.read_text()) for index in indices}
