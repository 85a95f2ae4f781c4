"""The task `speed`: tokens that a model fills per second, and the memory that it takes.

The figures depend on the machine and its load: compare models that were measured one after the
other.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracformer.contexts import Context, draw_contexts, parse
from tracformer.evaluation.result_files import Result, ResultRow, array_hash
from tracformer.evaluation.task import Progress, Subject, Task
from tracformer.generation.decode import fill
from tracformer.generation.orders import Ancestral
from tracformer.model.batch import Batch
from tracformer.options import option

NOTE = "of this machine: compare models measured one after the other"
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Speed(Task):
    """Filled tokens per second (median of the rounds), and peak memory in MiB.

    Memory is what the process, or on a GPU its allocator, holds at most while it fills, weights
    included.
    """

    name = "speed"
    lasting = False

    length: int = option(128, "tokens of each sequence", low=1)
    sequences: int = option(4, "sequences that are filled together", low=1)
    holes: str = option("[0.25,0.75]", "the targets, as a context strategy")
    rounds: int = option(5, "rounds, after one that is not counted", low=1)
    cached: bool = option(True, "use the model's cache if it has one")
    steps: int | None = option(None, "steps of a diffusion model; none: its own number")
    seed: int = option(0, "random seed")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse(self.holes)  # raises for an unknown strategy

    def check(self, subject: Subject) -> None:
        """Raise ValueError if the model does not take sequences of this length."""
        super().check(subject)
        if self.length > subject.model.config.max_length:
            raise ValueError(
                f"length is {self.length}; {subject.name} takes at most "
                f"{subject.model.config.max_length} tokens"
            )

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Return hashes of the tokens and contexts."""
        return {
            "data": array_hash([self._tokens(subject)]),
            "contexts": array_hash([self._context()]),
        }

    def run(self, subject: Subject, progress: Progress) -> Result:
        """Return speed and memory; one rank measures while the others wait."""
        self.check(subject)
        progress.start(f"{subject.name} {subject.mode}: {self.name}", self.rounds + 1)
        seconds, peak = (
            self._measure(subject, progress) if subject.ranks.first else ([0.0] * self.rounds, 0.0)
        )
        *seconds, peak = subject.ranks.total([*seconds, peak])
        targets = int((~self._context()).sum())
        speeds = [targets / each for each in seconds]
        counts: dict[str, Any] = {"sequences": self.sequences, "targets": targets}
        note = f"{NOTE}; {self.rounds} rounds from {min(speeds):.4g} to {max(speeds):.4g}"
        setting = {"holes": self.holes, "length": self.length, "cached": self.cached}
        rows = [
            ResultRow("tokens_per_second", setting, statistics.median(speeds), note=note, **counts),
            ResultRow("peak_memory_mib", setting, peak / MEBIBYTE, note=NOTE, **counts),
        ]
        return self.result(subject, rows, {"seconds": seconds, "threads": torch.get_num_threads()})

    def _tokens(self, subject: Subject) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        return np.random.default_rng(self.seed).integers(
            subject.model.config.vocab_size, size=(self.sequences, self.length)
        )

    def _context(self) -> Context:
        return draw_contexts(
            parse(self.holes), [self.length] * self.sequences, self.seed, range(self.sequences)
        )

    def _measure(self, subject: Subject, progress: Progress) -> tuple[list[float], float]:
        """Return the seconds of each round, and the peak of memory in bytes."""
        tokens, context = (
            torch.from_numpy(each).to(subject.device)
            for each in (self._tokens(subject), self._context())
        )
        order = (
            Ancestral(self.steps)
            if subject.mode == "diffusion" and self.steps is not None
            else None
        )
        seconds = []
        peak = watch_memory(subject.device)
        for number in range(self.rounds + 1):
            _wait(subject.device)
            start = time.perf_counter()
            fill(
                subject.model,
                Batch(tokens, context),
                subject.mode,
                seed=self.seed + number,
                order=order,
                cached=self.cached,
            )
            _wait(subject.device)
            seconds.append(time.perf_counter() - start)
            progress.step()
        return seconds[1:], peak()


def watch_memory(device: torch.device) -> Callable[[], float]:
    """Return a function that returns the peak of memory since now, in bytes.

    On the CPU it is the resident memory of the process. Only Linux can reset it; elsewhere the
    function returns the peak since the process started.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: float(torch.cuda.max_memory_allocated(device))
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        import resource  # not everywhere either

        unit = 1 if sys.platform == "darwin" else 1024
        return lambda: float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return _resident_peak


def _resident_peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
