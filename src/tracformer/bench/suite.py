"""A run: every piece in a fresh process, saved as soon as it is there, so that a kill loses one piece at most."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tracformer.bench import attention, generation, long, machine, training, wide
from tracformer.bench.measure import processor_name
from tracformer.bench.results import FAILED, Figures, Found, Piece, Row, Store
from tracformer.bench.scale import Scale
from tracformer.bench.worker import OTHERS, measured
from tracformer.evaluation.manifest import code_version
from tracformer.evaluation.pace import duration

BUSY = 0.15  # cores that others may use before a figure is doubtful


PARTS: dict[str, Any] = {part.PART: part for part in (machine, attention, training, wide, generation, long)}
ON_GPU = ("machine", "attention")

Say = Callable[[str], None]


def chosen_parts(only: str, device: str = "cpu") -> list[str]:
    """Names separated by commas; empty: all. The machine's limits always come first: others are told in terms of them."""
    allowed = ON_GPU if device.startswith("cuda") else tuple(PARTS)
    names = [name.strip() for name in only.split(",") if name.strip()] or list(allowed)
    for name in names:
        if name not in PARTS:
            raise ValueError(f"--only names {name!r}; parts: {', '.join(PARTS)}")
        if name not in allowed:
            raise ValueError(f"--only names {name!r}, which is measured on the CPU alone; on {device}: {', '.join(allowed)}")
    return [name for name in PARTS if name in names or name == machine.PART]


def describe(scale: Scale) -> dict[str, Any]:
    """What must be the same for figures to stand in one table."""
    return {
        "scale": scale.name,
        "device": scale.device,
        "dtype": scale.dtype,
        "threads": torch.get_num_threads(),
        "processor": processor_name(),
        "torch": torch.__version__,
        **code_version(),
    }


def all_pieces(scale: Scale, parts: Sequence[str]) -> list[Piece]:
    return [piece for name in parts for piece in PARTS[name].pieces(scale)]


def run(scale: Scale, parts: Sequence[str], store: Store, say: Say, measure: Callable[[Piece], Figures] = measured) -> list[Row]:
    """Measure what the store does not have, and tell all that it has."""
    pieces = all_pieces(scale, parts)
    left = [piece for piece in pieces if not store.has(piece)]
    if len(left) < len(pieces):
        say(f"{len(pieces) - len(left)} of {len(pieces)} pieces are measured already: {store.path}")
    spent = expected = 0.0
    for number, piece in enumerate(left, start=1 + len(pieces) - len(left)):
        remaining = sum(each.seconds for each in left[number - 1 - len(pieces) + len(left) :])
        pace = spent / expected if expected else 1.0
        say(f"[{number}/{len(pieces)}] {piece.name}; about {duration(pace * remaining)} left")
        begun = time.monotonic()
        figures = measure(piece)
        if FAILED in figures:
            say(f"  failed: {figures[FAILED]}")
        store.put(piece, figures)
        spent, expected = spent + time.monotonic() - begun, expected + piece.seconds
    rows = rows_of(store.pieces)
    store.save(rows)
    return rows


def rows_of(pieces: Mapping[str, Figures]) -> list[Row]:
    found = Found(pieces)
    return [row for part in PARTS.values() for row in part.rows(found)]


def doubtful(pieces: Mapping[str, Figures]) -> list[str]:
    """Pieces during which others kept the machine busy."""
    return [name for name, figures in pieces.items() if (figures.get(OTHERS) or 0.0) > BUSY]


def default_folder(scale: Scale) -> Path:
    return Path("bench-results") / (scale.name if scale.device == "cpu" else f"{scale.name}-{scale.device.replace(':', '-')}")
