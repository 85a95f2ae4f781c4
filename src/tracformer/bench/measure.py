"""How time, memory and other people's load are measured."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

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


def least_time(run: Callable[[], object], rounds: int = 3, device: torch.device = torch.device("cpu")) -> float:  # noqa: B008
    """Seconds of the fastest of `rounds` runs after one that warms up. Fewer once PATIENCE is used up; a first run beyond it counts."""
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
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def growth(values: Mapping[int, float]) -> float | None:
    """The exponent of values by size; None where there are fewer than two sizes, or nothing grew."""
    sizes = sorted(values)
    if len(sizes) < 2 or min(values.values()) <= 0:
        return None
    return exponent(sizes, [values[size] for size in sizes])


def watch_growth() -> Callable[[], float]:
    """From now on; calling what is returned says by how many bytes the process grew since, at its peak."""
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
    named = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return named[0] if named else "unknown processor"


def _busy_seconds() -> float | None:
    """Of all cores since the system started, what other virtual machines took included."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = (float(word) for word in words[:8])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
