"""What a run has measured, on disk after every piece; and the lines of its table."""

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tracformer.files import write_atomically

Figures = dict[str, Any]  # numbers by name, as JSON holds them
FAILED = "failed"  # the figure that says why a piece has no others


@dataclass(frozen=True)
class Piece:
    """One measurement: a function of a module, called in a fresh process with plain arguments."""

    name: str  # PART/...
    measure: Callable[..., Figures]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 5.0  # about, on two cores: for the time left

    @property
    def part(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Row:
    """A line of the table. `ratio` has no unit, so it can be compared across machines; `of` says of what. A target is one of the ratio."""

    part: str
    what: str
    setting: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    of: str = ""
    target: float | None = None
    at_most: bool = False  # the target is a ceiling
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.target is None or self.ratio is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target

    def to_dict(self) -> Figures:
        return {**asdict(self), "met": self.met}


def over(value: float, unit: float | None) -> float | None:
    """A ratio, where there is one: memory may not have grown at all."""
    return value / unit if unit else None


class Found:
    """The figures of pieces that were measured and did not fail."""

    def __init__(self, pieces: Mapping[str, Figures]) -> None:
        self.pieces = pieces

    def get(self, name: str) -> Figures | None:
        figures = self.pieces.get(name)
        return None if figures is None or FAILED in figures else figures

    def under(self, prefix: str) -> dict[str, Figures]:
        """Those whose name begins so, by the rest of their name, in the order of measurement."""
        names = (name for name in self.pieces if name.startswith(prefix))
        return {name.removeprefix(prefix): figures for name in names if (figures := self.get(name)) is not None}


class Store:
    """`results.json` of a folder: which run it is, and every piece so far with the arguments it was measured with."""

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
            run, pieces, arguments, begun = (document[key] for key in ("run", "pieces", "arguments", "begun"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is not a result of `tracformer bench` ({error}); use another --out, or --fresh") from error
        for key in self.run:
            if run.get(key) != self.run[key]:
                raise ValueError(
                    f"{self.path.parent} holds a run whose {key} was {run.get(key)!r}, and is now {self.run[key]!r}: "
                    f"their figures do not belong together; use another --out, or --fresh to start over"
                )
        self.pieces, self.arguments, self.begun = pieces, arguments, begun

    def has(self, piece: Piece) -> bool:
        """Measured already, in the same way; what failed is tried again."""
        figures = self.pieces.get(piece.name)
        return figures is not None and FAILED not in figures and self.arguments.get(piece.name) == _plain(piece.arguments)

    def put(self, piece: Piece, figures: Figures) -> None:
        self.pieces[piece.name] = figures
        self.arguments[piece.name] = _plain(piece.arguments)
        self.save([])

    def save(self, rows: list[Row]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, self.document(rows))

    def document(self, rows: list[Row]) -> str:
        content = {
            "run": self.run,
            "begun": self.begun,
            "written": _now(),
            "table": [row.to_dict() for row in rows],
            "pieces": self.pieces,
            "arguments": self.arguments,
        }
        return json.dumps(content, indent=1) + "\n"


def _plain(arguments: Mapping[str, Any]) -> Any:
    """As they come back from JSON: tuples as lists."""
    return json.loads(json.dumps(dict(arguments)))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
