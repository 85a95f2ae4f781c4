"""Run the benchmark and print its tables.

The table of a run, as text for a terminal and as markdown.

A run: every piece in a fresh process, saved as soon as it is there, so that a kill loses one piece
at most.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tracformer.bench import attention_speed as attention
from tracformer.bench import generation_speed as generation
from tracformer.bench import long_sequences as long
from tracformer.bench import machine
from tracformer.bench import training_speed as training
from tracformer.bench import wide_models as wide
from tracformer.bench.pieces import (
    FAILED,
    BenchPiece,
    BenchRow,
    Figures,
    Measured,
    Scale,
    Store,
    processor_name,
)
from tracformer.bench.worker import OTHERS, measured
from tracformer.evaluation.provenance import code_version
from tracformer.reproduce import duration

HEADS = ("what", "setting", "measured", "ratio", "of what", "target")
RIGHT = (2, 3)  # columns of numbers


def number(value: float) -> str:
    """
    >>> number(1234.5), number(12.34), number(0.6789), number(0.0)
    ('1234', '12.3', '0.68', '0.00')
    """
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def cells(row: BenchRow) -> list[str]:
    value = "" if row.value is None else f"{number(row.value)} {row.unit}".strip()
    return [
        row.what,
        row.setting,
        value,
        "" if row.ratio is None else number(row.ratio),
        row.of,
        target(row),
    ]


def target(row: BenchRow) -> str:
    """
    >>> target(BenchRow("p", "w", "s", ratio=0.7, target=0.65))
    'at least 0.65: met'
    >>> target(BenchRow("p", "w", "s", ratio=1.2, target=1.05, at_most=True))
    'at most 1.05: not met'
    """
    if row.target is None:
        return ""
    wanted = f"{'at most' if row.at_most else 'at least'} {row.target:g}"
    return wanted if row.met is None else f"{wanted}: {'met' if row.met else 'not met'}"


def text(rows: Sequence[BenchRow]) -> str:
    """One table, a heading for each part."""
    body = [cells(row) for row in rows]
    widths = [max(len(line[i]) for line in [list(HEADS), *body]) for i in range(len(HEADS))]

    def line(words: Sequence[str]) -> str:
        padded = (
            word.rjust(width) if i in RIGHT else word.ljust(width)
            for i, (word, width) in enumerate(zip(words, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    lines = [line(HEADS)]
    part = ""
    for row, words in zip(rows, body, strict=True):
        if row.part != part:
            part = row.part
            lines += ["", part]
        lines.append(line(words))
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines)


def markdown(rows: Sequence[BenchRow], run: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Tables to paste: first every figure that has a target, then a table a part."""
    told = [
        f"`{run['processor']}`, {run['threads']} threads, PyTorch {run['torch']}, scale "
        f"`{run['scale']}`."
    ]
    parts = [" ".join([*told, *notes])]
    if aimed := [row for row in rows if row.target is not None]:
        parts.append("### Targets\n\n" + _grid(aimed))
    for part in dict.fromkeys(row.part for row in rows):
        parts.append(
            f"### {part.capitalize()}\n\n"
            + _grid([row for row in rows if row.part == part], notes=True)
        )
    return "\n\n".join(parts) + "\n"


def _grid(rows: Sequence[BenchRow], notes: bool = False) -> str:
    heads = [*HEADS, *(["note"] if notes and any(row.note for row in rows) else [])]
    lines = [_bar(heads), _bar(["---:" if i in RIGHT else "---" for i in range(len(heads))])]
    for row in rows:
        lines.append(_bar([*cells(row), *([row.note] if len(heads) > len(HEADS) else [])]))
    return "\n".join(lines)


def _bar(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"


def warnings(pieces: Mapping[str, Figures], doubtful: Sequence[str]) -> list[str]:
    """Sentences about figures that are missing or mean little."""
    told = [
        f"{name} failed: {figures[FAILED]}."
        for name, figures in pieces.items()
        if FAILED in figures
    ]
    if doubtful:
        shown = ", ".join(doubtful[:4]) + (
            f" and {len(doubtful) - 4} more" if len(doubtful) > 4 else ""
        )
        told.append(
            f"Others kept the machine busy during {len(doubtful)} of {len(pieces)} pieces "
            f"({shown}): these figures mean little."
        )
    return told


BUSY = 0.15  # cores that others may use before a figure is doubtful


PARTS: dict[str, Any] = {
    part.PART: part for part in (machine, attention, training, wide, generation, long)
}
ON_GPU = ("machine", "attention")

Say = Callable[[str], None]


def chosen_parts(only: str, device: str = "cpu") -> list[str]:
    """Names separated by commas; empty: all.

    The machine's limits always come first: others are told in terms of them.
    """
    allowed = ON_GPU if device.startswith("cuda") else tuple(PARTS)
    names = [name.strip() for name in only.split(",") if name.strip()] or list(allowed)
    for name in names:
        if name not in PARTS:
            raise ValueError(f"--only names {name!r}; parts: {', '.join(PARTS)}")
        if name not in allowed:
            raise ValueError(
                f"--only names {name!r}, which is measured on the CPU alone; on {device}: "
                f"{', '.join(allowed)}"
            )
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


def all_pieces(scale: Scale, parts: Sequence[str]) -> list[BenchPiece]:
    return [piece for name in parts for piece in PARTS[name].pieces(scale)]


def run(
    scale: Scale,
    parts: Sequence[str],
    store: Store,
    say: Say,
    measure: Callable[[BenchPiece], Figures] = measured,
) -> list[BenchRow]:
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


def rows_of(pieces: Mapping[str, Figures]) -> list[BenchRow]:
    found = Measured(pieces)
    return [row for part in PARTS.values() for row in part.rows(found)]


def doubtful(pieces: Mapping[str, Figures]) -> list[str]:
    """Pieces during which others kept the machine busy."""
    return [name for name, figures in pieces.items() if (figures.get(OTHERS) or 0.0) > BUSY]


def default_folder(scale: Scale) -> Path:
    return Path("bench-results") / (
        scale.name if scale.device == "cpu" else f"{scale.name}-{scale.device.replace(':', '-')}"
    )
