"""What a benchmark consists of: pieces, their figures, sizes and timing.

What a run has measured, on disk after every piece; and the lines of its table.

How time, memory and other people's load are measured.

How much is measured: the full run, a quick look, or sizes of your own.
"""

import datetime
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tracformer.files import write_atomically

Figures = dict[str, Any]  # numbers by name, as JSON holds them
FAILED = "failed"  # the figure that says why a piece has no others


@dataclass(frozen=True)
class BenchPiece:
    """One measurement: a function of a module, called in a fresh process with plain arguments."""

    name: str  # PART/...
    measure: Callable[..., Figures]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 5.0  # about, on two cores: for the time left

    @property
    def part(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class BenchRow:
    """A line of the table.

    `ratio` has no unit, so it can be compared across machines; `of` says of what. A target is one
    of the ratio.
    """

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


class Measured:
    """The figures of pieces that were measured and did not fail."""

    def __init__(self, pieces: Mapping[str, Figures]) -> None:
        self.pieces = pieces

    def get(self, name: str) -> Figures | None:
        figures = self.pieces.get(name)
        return None if figures is None or FAILED in figures else figures

    def under(self, prefix: str) -> dict[str, Figures]:
        """Those whose name begins so, by the rest of their name, in the order of measurement."""
        names = (name for name in self.pieces if name.startswith(prefix))
        return {
            name.removeprefix(prefix): figures
            for name in names
            if (figures := self.get(name)) is not None
        }


class Store:
    """`results.json` of a folder: which run it is, and every piece so far with the arguments it was
    measured with.
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
                    f"{self.path.parent} holds a run whose {key} was {run.get(key)!r}, and is now "
                    f"{self.run[key]!r}: "
                    "their figures do not belong together; use another --out, or --fresh to start "
                    "over"
                )
        self.pieces, self.arguments, self.begun = pieces, arguments, begun

    def has(self, piece: BenchPiece) -> bool:
        """Measured already, in the same way; what failed is tried again."""
        figures = self.pieces.get(piece.name)
        return (
            figures is not None
            and FAILED not in figures
            and self.arguments.get(piece.name) == _plain(piece.arguments)
        )

    def put(self, piece: BenchPiece, figures: Figures) -> None:
        self.pieces[piece.name] = figures
        self.arguments[piece.name] = _plain(piece.arguments)
        self.save([])

    def save(self, rows: list[BenchRow]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, self.document(rows))

    def document(self, rows: list[BenchRow]) -> str:
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


PATIENCE = 8.0  # seconds: what takes longer is not repeated


def wait(device: torch.device) -> None:
    """Until all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], object], device: torch.device = torch.device("cpu")) -> float:  # noqa: B008
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


def least_time(
    run: Callable[[], object],
    rounds: int = 3,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> float:
    """Seconds of the fastest of `rounds` runs after one that warms up.

    Fewer once PATIENCE is used up; a first run beyond it counts.
    """
    first = timed(run, device)
    if first > PATIENCE:
        return first
    times: list[float] = []
    while len(times) < rounds and (not times or sum(times) < PATIENCE):
        times.append(timed(run, device))
    return min(times)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through (log size, log value).

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    if len(sizes) < 2:
        raise ValueError(f"a growth exponent needs at least two sizes; there is {len(sizes)}")
    x, y = ([math.log(value) for value in values] for values in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def growth(values: Mapping[int, float]) -> float | None:
    """The exponent of values by size; None where there are fewer than two sizes, or
    nothing grew.
    """
    sizes = sorted(values)
    if len(sizes) < 2 or min(values.values()) <= 0:
        return None
    return exponent(sizes, [values[size] for size in sizes])


def watch_growth() -> Callable[[], float]:
    """From now on; calling what is returned says by how many bytes the process grew
    since, at its peak.
    """
    from tracformer.evaluation.speed import watch_memory

    peak = watch_memory(torch.device("cpu"))
    before = peak()
    return lambda: max(0.0, peak() - before)


class Neighbours:
    """How many cores others kept busy since this was made (Linux; elsewhere unknown)."""

    def __init__(self) -> None:
        self.wall, self.all, self.own = time.monotonic(), _busy_seconds(), _own_seconds()

    def cores(self) -> float | None:
        busy = _busy_seconds()
        if busy is None or self.all is None:
            return None
        passed = max(time.monotonic() - self.wall, 1e-9)
        return max(0.0, (busy - self.all - (_own_seconds() - self.own)) / passed)


def load_average() -> float | None:
    """Of the last minute, this process included."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def processor_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        import platform

        return platform.processor() or platform.machine()
    named = [
        line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))
    ]
    return named[0] if named else "unknown processor"


def _busy_seconds() -> float | None:
    """Of all cores since the system started, what other virtual machines took included."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = (
        float(word) for word in words[:8]
    )
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@dataclass(frozen=True)
class Scale:
    name: str
    device: str = "cpu"
    dtype: str = "float32"  # of the attention part
    rounds: int = 3  # timed runs of one thing, of which the fastest counts

    # machine
    matmul_shapes: int = 5
    bandwidth_mebibytes: int = 512

    # attention: n_max 32 is the wider of the paper's two settings
    heads: int = 9
    head_size: int = 64
    n_max: int = 32
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    decoder_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    masks_up_to: int = 4096  # dense masks, and the reference
    causal_up_to: int = 16384
    # torch.compile takes most of a minute for each layer
    compiled_lengths: tuple[int, ...] = (1024,)
    memory_lengths: tuple[int, ...] = (1024, 4096, 8192)

    # training: (preset, batch), each at its own length; the first attention and precision are what
    # the target is about
    presets: tuple[tuple[str, int], ...] = (("laptop", 16), ("laptop-long", 4), ("paper-small", 2))
    shrink: Mapping[str, Any] | None = None  # changes to those presets, for tests
    peers: tuple[str, ...] = ("gpt2", "bert", "bart")
    compile_preset: str = "laptop"

    # equal weight operations a token: (length, batch)
    wide: tuple[tuple[int, int], ...] = ((1024, 1), (4096, 1))
    wide_width: int = 768
    wide_heads: int = 12
    wide_vocab: int = 50257
    wide_rounds: int = 2

    # generation
    generation_preset: str = "paper-small"
    batches: tuple[int, ...] = (1, 16)
    tokens: int = 32
    generation_rounds: int = 5
    requests: int = 32  # at once, of the engine

    # long sequences
    long_lengths: tuple[int, ...] = (8192, 16384, 32768)
    long_preset: str = "laptop-32k"


FULL = Scale("full")

QUICK = Scale(
    "quick",
    rounds=1,
    matmul_shapes=3,
    bandwidth_mebibytes=256,
    lengths=(512, 1024, 2048),
    decoder_lengths=(512, 1024),
    masks_up_to=1024,
    causal_up_to=2048,
    compiled_lengths=(),
    memory_lengths=(1024,),
    presets=(("laptop", 2),),
    compile_preset="",
    wide=((1024, 1),),
    wide_width=192,
    wide_heads=3,
    wide_vocab=4096,
    wide_rounds=1,
    generation_preset="laptop",
    tokens=16,
    generation_rounds=2,
    requests=8,
    long_lengths=(2048, 4096),
)
