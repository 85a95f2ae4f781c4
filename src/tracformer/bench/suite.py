"""Run the benchmarks: every piece in a fresh process, saved at once; then the tables.

run         measure what is not measured yet, and return the rows
Store       `results.json`, from which an interrupted run continues
tables      the rows as tables
"""

import datetime
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tracformer import bench
from tracformer.bench import (
    FAILED,
    BenchRow,
    Figures,
    Measured,
    Measurement,
    Scale,
    attention_speed,
    fill_latency,
    generation_speed,
    training_speed,
)
from tracformer.devices import processor_name
from tracformer.evaluation.result_files import code_version
from tracformer.files import write_atomically
from tracformer.report.tables import NEITHER, Line, Table

PARTS: dict[str, tuple[Measurement, ...]] = {
    "machine": bench.MEASUREMENTS,
    "attention": attention_speed.MEASUREMENTS,
    "training": training_speed.MEASUREMENTS,
    "generation": generation_speed.MEASUREMENTS,
    "fills": fill_latency.MEASUREMENTS,
}
ON_GPU = ("machine", "attention")


@dataclass(frozen=True)
class BenchPiece:
    """One case of a measurement."""

    name: str
    measure: Callable[..., Figures]
    arguments: Mapping[str, Any]


def chosen_parts(only: str, device: str = "cpu") -> list[str]:
    """Return the parts to run.

    Args:
        only: Names separated by commas; empty for all. `machine` is always included, because other
            parts are compared with its figures.
        device: "cpu" or "cuda".
    """
    allowed = ON_GPU if device.startswith("cuda") else tuple(PARTS)
    names = [name.strip() for name in only.split(",") if name.strip()] or list(allowed)
    for name in names:
        if name not in PARTS:
            raise ValueError(f"--only is {name!r}; allowed: {', '.join(PARTS)}")
        if name not in allowed:
            raise ValueError(
                f"--only is {name!r}, which is measured on the CPU only; on {device}: "
                f"{', '.join(allowed)}"
            )
    return [name for name in PARTS if name in names or name == "machine"]


def pieces_of(scale: Scale, parts: Sequence[str]) -> list[BenchPiece]:
    """Return all pieces of some parts."""
    return [
        BenchPiece(f"{each.name}/{case}", each.measure, arguments)
        for part in parts
        for each in PARTS[part]
        for case, arguments in each.cases(scale).items()
    ]


def in_fresh_process(piece: BenchPiece) -> Figures:
    """Return the figures of a piece, or why it failed; a failure does not end the run."""
    task = [piece.measure.__module__, piece.measure.__qualname__, dict(piece.arguments)]
    done = subprocess.run(
        [sys.executable, "-c", "from tracformer.bench.suite import answer; answer()"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        return figures
    if done.returncode < 0:
        signal = -done.returncode
        return {FAILED: f"its process was killed by signal {signal}; was there enough memory?"}
    lines = done.stderr.strip().splitlines()
    return {FAILED: lines[-1] if lines else f"its process ended with code {done.returncode}"}


def answer() -> None:
    """Measure the piece on standard input and print its figures, both as JSON."""
    module, function, arguments = json.load(sys.stdin)
    print("\n" + json.dumps(getattr(importlib.import_module(module), function)(**arguments)))


def run(
    scale: Scale,
    parts: Sequence[str],
    store: "Store",
    say: Callable[[str], None],
    measure: Callable[[BenchPiece], Figures] = in_fresh_process,
) -> dict[str, list[BenchRow]]:
    """Measure what the store does not have, and return the rows of each part that it has.

    Args:
        scale: Sizes.
        parts: Parts to measure.
        store: Where figures are saved.
        say: Called with lines about the progress.
        measure: Runs a piece.
    """
    pieces = pieces_of(scale, parts)
    done = sum(store.has(piece) for piece in pieces)
    if done:
        say(f"{done} of {len(pieces)} pieces are already measured: {store.path}")
    for piece in [piece for piece in pieces if not store.has(piece)]:
        done += 1
        say(f"[{done}/{len(pieces)}] {piece.name}")
        figures = measure(piece)
        if FAILED in figures:
            say(f"  failed: {figures[FAILED]}")
        store.put(piece, figures)
    rows = rows_of(store.pieces)
    store.save(rows)
    return rows


def rows_of(pieces: Mapping[str, Figures]) -> dict[str, list[BenchRow]]:
    """Return the rows of each part that has any."""
    found = Measured(pieces)
    rows = {part: [row for each in PARTS[part] for row in each.rows(found)] for part in PARTS}
    return {part: each for part, each in rows.items() if each}


def tables(rows: Mapping[str, Sequence[BenchRow]]) -> list[Table]:
    """Return one table for each part."""
    columns = ("setting", "measured", "ratio", "of what", "note")
    return [
        Table(
            name=part,
            title=part.capitalize(),
            columns=columns,
            lines=tuple(Line(row.what, "", row.cells()) for row in each),
            better=NEITHER,
            head="what",
            align="lrrll",
        )
        for part, each in rows.items()
    ]


def markdown(rows: Mapping[str, Sequence[BenchRow]], about: Mapping[str, Any]) -> str:
    """Return the tables as Markdown, under a line about the machine."""
    machine = (
        f"`{about['processor']}`, {about['threads']} threads, PyTorch {about['torch']}, scale "
        f"`{about['scale']}`."
    )
    parts = [f"### {table.title}\n\n{table.to_markdown()}" for table in tables(rows)]
    return "\n\n".join([machine, *parts]).rstrip() + "\n"


def describe(scale: Scale) -> dict[str, Any]:
    """Return what must be equal for figures to be in one table."""
    return {
        "scale": scale.name,
        "device": scale.device,
        "dtype": scale.dtype,
        "threads": torch.get_num_threads(),
        "processor": processor_name(),
        "torch": torch.__version__,
        **code_version(),
    }


def default_folder(scale: Scale) -> Path:
    """Return the folder of a run if none is given."""
    on = "" if scale.device == "cpu" else f"-{scale.device.replace(':', '-')}"
    return Path("bench-results") / f"{scale.name}{on}"


class Store:
    """`results.json` in a folder: the run, and the figures and arguments of every piece so far.

    Args:
        folder: The folder.
        run: What `describe` returns. A file of another run is refused.
        fresh: Start over, whatever the folder has.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], fresh: bool = False) -> None:
        self.path = folder / "results.json"
        self.run = dict(run)
        self.pieces: dict[str, Figures] = {}
        self.arguments: dict[str, Any] = {}
        self.begun = _now()
        if self.path.exists() and not fresh:
            self._resume()

    def _resume(self) -> None:
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            run, pieces, arguments, begun = (
                document[key] for key in ("run", "pieces", "arguments", "begun")
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} is not a result of `tracformer bench` ({error}); use another --out, "
                "or --fresh"
            ) from error
        for key in self.run:
            if run.get(key) != self.run[key]:
                raise ValueError(
                    f"{self.path.parent} has a run whose {key} is {run.get(key)!r}, but now it is "
                    f"{self.run[key]!r}: their figures cannot be in one table; use another --out, "
                    "or --fresh to start over"
                )
        self.pieces, self.arguments, self.begun = pieces, arguments, begun

    def has(self, piece: BenchPiece) -> bool:
        """Return whether a piece was measured with the same arguments and did not fail."""
        figures = self.pieces.get(piece.name)
        return (
            figures is not None
            and FAILED not in figures
            and self.arguments.get(piece.name) == _plain(piece.arguments)
        )

    def put(self, piece: BenchPiece, figures: Figures) -> None:
        """Save the figures of a piece."""
        self.pieces[piece.name] = figures
        self.arguments[piece.name] = _plain(piece.arguments)
        self.save({})

    def save(self, rows: Mapping[str, Sequence[BenchRow]]) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, self.document(rows))

    def document(self, rows: Mapping[str, Sequence[BenchRow]]) -> str:
        """Return the text of the file."""
        content = {
            "run": self.run,
            "begun": self.begun,
            "written": _now(),
            "table": [{"part": part, **asdict(row)} for part in rows for row in rows[part]],
            "pieces": self.pieces,
            "arguments": self.arguments,
        }
        return json.dumps(content, indent=1) + "\n"


def _plain(arguments: Mapping[str, Any]) -> Any:
    """Return arguments as they come back from JSON, with lists instead of tuples."""
    return json.loads(json.dumps(dict(arguments)))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
