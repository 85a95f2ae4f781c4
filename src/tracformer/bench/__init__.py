"""Benchmarks of speed and memory, as ratios against other systems on the same machine.

A part is one file with a list of `Measurement`s: what is measured, in which cases, and how the
figures become rows of the table. Every case of a measurement is a piece: it runs in a fresh process
and is saved at once, so an interrupted run loses one piece at most.

    here                  what a measurement is, sizes, timing; the part `machine`, with the
                          machine's own limits
    suite                 the parts: running, saving, tables
    attention_speed       attention alone: time, growth with the length, memory
    training_speed        training steps and long sequences, against systems of equal size
    generation_speed      generation with the cache, the engine under requests, memory
    fill_latency          time to a fill at the defaults: cold command line, Python, HTTP
"""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tracformer.devices import processor_name

Figures = dict[str, Any]
"""Numbers of one piece by name, as JSON holds them."""

FAILED = "failed"  # the figure that says why a piece has no others


@dataclass(frozen=True)
class Scale:
    """How much is measured: `FULL`, `QUICK`, or other sizes.

    Attributes:
        name: Name of the scale.
        device: "cpu" or "cuda".
        dtype: Precision of the attention part.
        rounds: Number of timed runs of one thing; the fastest counts.
        product_shapes: Number of matrix shapes for the machine's limit.
        mebibytes: Memory that is read for the machine's limit.
        heads: Attention heads.
        head_size: Size of an attention head.
        n_max: Encoder scopes; 32 is the wider of the paper's two settings.
        lengths: Sequence lengths for encoder attention.
        decoder_lengths: Sequence lengths for decoder attention.
        masks_up_to: Largest length for dense masks and for `reference`.
        causal_up_to: Largest length for dense causal attention.
        memory_lengths: Sequence lengths for memory of attention.
        presets: (preset, batch) of the training steps, each at its own length.
        changes: Changes to those presets, for tests.
        peers: Systems to compare with.
        generation_preset: Preset of the generation part.
        batches: Batch sizes of cached generation.
        tokens: Tokens to generate.
        generation_rounds: Runs of one thing in generation; the median counts.
        requests: Simultaneous requests to the engine.
        fills: Texts of the fills at the defaults.
        long_lengths: Lengths of long sequences.
        long_preset: Preset for long sequences.
    """

    name: str
    device: str = "cpu"
    dtype: str = "float32"
    rounds: int = 3
    product_shapes: int = 5
    mebibytes: int = 512
    heads: int = 9
    head_size: int = 64
    n_max: int = 32
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    decoder_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    masks_up_to: int = 4096
    causal_up_to: int = 16384
    memory_lengths: tuple[int, ...] = (1024, 4096, 8192)
    presets: tuple[tuple[str, int], ...] = (("laptop", 16), ("laptop-long", 4), ("paper-small", 2))
    changes: Mapping[str, Any] | None = None
    peers: tuple[str, ...] = ("gpt2", "bert", "bart")
    generation_preset: str = "paper-small"
    batches: tuple[int, ...] = (1, 16)
    tokens: int = 32
    generation_rounds: int = 5
    requests: int = 32
    fills: tuple[str, ...] = ("5 tokens", "12 tokens", "[[]]", "two [[]]", "four [[]]")
    long_lengths: tuple[int, ...] = (8192, 16384, 32768)
    long_preset: str = "laptop-32k"


FULL = Scale("full")
QUICK = Scale(
    "quick",
    rounds=1,
    product_shapes=3,
    mebibytes=256,
    lengths=(512, 1024, 2048),
    decoder_lengths=(512, 1024),
    masks_up_to=1024,
    causal_up_to=2048,
    memory_lengths=(1024,),
    presets=(("laptop", 2),),
    generation_preset="laptop",
    tokens=16,
    generation_rounds=2,
    requests=8,
    fills=("5 tokens", "[[]]"),
    long_lengths=(2048, 4096),
)


@dataclass(frozen=True)
class BenchRow:
    """A row of the table.

    Attributes:
        what: What was measured.
        setting: Under which conditions.
        value: The figure, with its unit.
        unit: Unit of the figure.
        ratio: A ratio without a unit, which can be compared across machines.
        of: What the ratio compares with.
        note: A remark.
    """

    what: str
    setting: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    of: str = ""
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return setting, figure, ratio, what the ratio is of, and the note, as text."""
        value = "" if self.value is None else f"{number(self.value)} {self.unit}".strip()
        ratio = "" if self.ratio is None else number(self.ratio)
        return (self.setting, value, ratio, self.of, self.note)


class Measured:
    """Figures of the pieces that were measured and did not fail."""

    def __init__(self, pieces: Mapping[str, Figures]) -> None:
        self.pieces = {name: each for name, each in pieces.items() if FAILED not in each}

    def get(self, name: str) -> Figures | None:
        """Return the figures of a piece."""
        return self.pieces.get(name)

    def cases(self, measurement: str) -> dict[str, Figures]:
        """Return the figures of all cases of a measurement, in the order of measurement."""
        start = f"{measurement}/"
        return {
            name.removeprefix(start): figures
            for name, figures in self.pieces.items()
            if name.startswith(start)
        }

    def by_length(self, measurement: str) -> dict[int, Figures]:
        """Return the same if the cases are lengths."""
        return {int(case): figures for case, figures in self.cases(measurement).items()}


@dataclass(frozen=True)
class Measurement:
    """Something to measure in several cases.

    Attributes:
        name: PART/NAME.
        measure: A function of a module with plain arguments, called in a fresh process.
        cases: The arguments of each case, by its name, at a scale.
        rows: The rows of the table.
    """

    name: str
    measure: Callable[..., Figures]
    cases: Callable[[Scale], Mapping[str, Mapping[str, Any]]]
    rows: Callable[[Measured], list[BenchRow]]


# ---- measuring

CPU = torch.device("cpu")
PATIENCE = 8.0  # seconds: what takes longer is not repeated


def timed(run: Callable[[], object], device: torch.device = CPU) -> float:
    """Return the seconds of a call, with all its work on the device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def least_time(run: Callable[[], object], rounds: int = 3, device: torch.device = CPU) -> float:
    """Return the seconds of the fastest of several calls, after one that warms up.

    There are fewer calls if they take longer than PATIENCE; a first call that does is the result.
    """
    first = timed(run, device)
    if first > PATIENCE:
        return first
    times: list[float] = []
    while len(times) < rounds and (not times or sum(times) < PATIENCE):
        times.append(timed(run, device))
    return min(times)


def growth(values: Mapping[int, float]) -> float | None:
    """Return the exponent with which values grow with a size.

    It is the slope of the least-squares line through (log size, log value). None if there are
    fewer than two sizes, or nothing grew.

    >>> round(growth({1: 3, 2: 12, 4: 48}), 6)
    2.0
    """
    if len(values) < 2 or min(values.values()) <= 0:
        return None
    x, y = ([math.log(each) for each in some] for some in (values, values.values()))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)


def watch_growth() -> Callable[[], float]:
    """Return a function that returns by how many bytes the process grew since now, at its peak."""
    from tracformer.evaluation.speed import watch_memory

    peak = watch_memory(CPU)
    before = peak()
    return lambda: max(0.0, peak() - before)


def over(value: float, unit: float | None) -> float | None:
    """Return a ratio; None if the unit is zero, as memory that did not grow."""
    return value / unit if unit else None


def number(value: float) -> str:
    """Return a number with two or three significant digits.

    >>> number(1234.5), number(12.34), number(0.6789), number(0.0)
    ('1234', '12.3', '0.68', '0.00')
    """
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


# ---- the part `machine`: limits of training (matrix products) and of generation (reading weights)

LIMITS = "machine/limits"
PRECISIONS = ("float32", "bfloat16")
SHAPES = (  # rows, inner size, columns
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 768, 3072),
    (2048, 3072, 768),
    (3072, 3072, 3072),
)


def limits(
    device: str, shapes: Sequence[tuple[int, int, int]], mebibytes: int, rounds: int
) -> Figures:
    """Measure operations per second of matrix products, and bytes read and copied per second."""
    on = torch.device(device)
    figures: Figures = {
        "processor": processor_name(on),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "torch": torch.__version__,
    }
    for precision in PRECISIONS:
        rates = {}
        for m, k, n in shapes:
            dtype = getattr(torch, precision)
            a, b = (torch.randn(size, device=on).to(dtype) for size in ((m, k), (k, n)))
            seconds = least_time(partial(torch.mm, a, b), 2 * rounds, on)
            rates[f"{m}x{k}x{n}"] = 2.0 * m * k * n / seconds
        figures[f"products_{precision}"] = rates
        figures[f"rate_{precision}"] = max(rates.values())
    return {**figures, **_bandwidths(mebibytes, on, rounds)}


def _bandwidths(mebibytes: int, device: torch.device, rounds: int) -> Figures:
    """Measure bytes per second: reading, copying, and a matrix times one row in PyTorch."""
    from tracformer.native import available

    width = 4096
    weights = torch.ones(mebibytes * 2**18 // width, width, device=device)
    target, row = torch.empty_like(weights), torch.ones(width, device=device)
    size = float(weights.numel() * weights.element_size())
    native = device.type == "cpu" and available()
    read = partial(Tensor.sum, weights)
    if native:
        torch.ops.tracformer.large_pages([weights])  # as generation does with its weights
        read = partial(torch.ops.tracformer.streamed_sum, weights)
    runs: dict[str, tuple[Callable[[], object], float]] = {
        "read": (read, size),
        "copy": (lambda: target.copy_(weights), 2 * size),
        "matrix_vector": (lambda: weights @ row, size),
    }
    rates = {
        name: moved / least_time(each, 2 * rounds, device) for name, (each, moved) in runs.items()
    }
    return {**rates, "read_by": "native code" if native else "PyTorch's sum"}


def product_rate(found: Measured, precision: str = "float32") -> float | None:
    """Return the operations per second of matrix products."""
    figures = found.get(f"{LIMITS}/all")
    return None if figures is None else float(figures[f"rate_{precision}"])


def read_bandwidth(found: Measured) -> float | None:
    """Return the bytes per second of the fastest reading.

    A matrix product that reads faster than the sum shows that the sum was disturbed.
    """
    figures = found.get(f"{LIMITS}/all")
    return None if figures is None else max(float(figures["read"]), float(figures["matrix_vector"]))


def _limit_cases(scale: Scale) -> Mapping[str, Mapping[str, Any]]:
    return {
        "all": {
            "device": scale.device,
            "shapes": SHAPES[: scale.product_shapes],
            "mebibytes": scale.mebibytes,
            "rounds": scale.rounds,
        }
    }


def _limit_rows(found: Measured) -> list[BenchRow]:
    figures, read = found.get(f"{LIMITS}/all"), read_bandwidth(found)
    if figures is None or read is None:
        return []
    rows = []
    for precision in PRECISIONS:
        rates, rate = figures[f"products_{precision}"], figures[f"rate_{precision}"]
        setting = f"{precision}, {max(rates, key=rates.get)}"
        ratio = None if precision == "float32" else rate / figures["rate_float32"]
        of = "" if ratio is None else "float32"
        rows.append(BenchRow("matrix product", setting, rate / 1e9, "GFLOP/s", ratio, of))
    rows.append(BenchRow("memory read", f"float32, by {figures['read_by']}", read / 1e9, "GB/s"))
    for what, setting, name in (
        ("memory copy", "read and written", "copy"),
        ("matrix times one row", "float32, PyTorch", "matrix_vector"),
    ):
        rate = figures[name]
        rows.append(BenchRow(what, setting, rate / 1e9, "GB/s", rate / read, "read"))
    return rows


MEASUREMENTS = (Measurement(LIMITS, limits, _limit_cases, _limit_rows),)
