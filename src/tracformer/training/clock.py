"""The time of a run: what was spent, when the decay begins, and where it ends.

A run with a budget of minutes holds the learning rate and lets it fall linearly to its end when
the remaining time requires it. The number of steps follows from the clock, so the decay is aimed
again whenever the pace changes. Every aim is noted as a `Decay`; a run with `steps=` and the same
`optimizer.decays` computes the same rates, hence the same weights.
"""

import itertools
import math
import re
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

DECAY_SHARE = 0.35  # share of the budget in the decay
# A run that is stopped early decays for this share of the time spent, within these seconds.
QUICK_SHARE, QUICK_LEAST, QUICK_MOST = 0.15, 5.0, 60.0
AIM_AGAIN = 0.05  # aim again if the remaining number of steps changes by more than this share
RECENT = 20  # steps whose mean time is the pace
NEVER = 1 << 62


class Decay(NamedTuple):
    """One aim of the decay: from `share` of the rate at step `start` linearly to 0 at `end`."""

    start: int
    end: int
    share: float

    def __str__(self) -> str:
        return f"{self.start}-{self.end}:{self.share!r}"


@lru_cache
def parse_decays(text: str) -> tuple[Decay, ...]:
    """Return decays from a text such as "800-1100:1.0,900-1080:0.66".

    Raises:
        ValueError: The text is of another form, or its steps are not in order.
    """
    decays = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)-(\d+):([\d.e-]+)", part.strip())
        if match is None or int(match[1]) >= int(match[2]):
            raise ValueError(
                f"optimizer.decays is {text!r}; it must be a list of START-END:SHARE, such as "
                "800-1100:1.0"
            )
        decays.append(Decay(int(match[1]), int(match[2]), float(match[3])))
    if any(b.start < a.start for a, b in itertools.pairwise(decays)):
        raise ValueError(f"optimizer.decays is {text!r}; its steps must be in order")
    return tuple(decays)


def share_at(decays: Sequence[Decay], step: int) -> float:
    """Return the share of the rate that is left at a step, counted from 0."""
    current = next((decay for decay in reversed(decays) if decay.start <= step), None)
    if current is None:
        return 1.0
    left = max(0, current.end - step) / (current.end - current.start)
    return current.share * left


class Clock:
    """Counts the time of a run over all its parts, and ends it when the budget is used.

    Args:
        seconds: Budget; infinite if the run has none.
        began: `time.monotonic()` at the start of this process's work.
    """

    def __init__(self, seconds: float = math.inf, began: float | None = None) -> None:
        self.seconds = seconds
        self.began = time.monotonic() if began is None else began
        self.before = 0.0  # seconds spent by earlier processes
        self.reserve = 0.0  # seconds to keep for what follows the last step
        self.decays: list[Decay] = []
        self.stopped = False  # a signal shortened the run
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def limited(self) -> bool:
        """Return whether the run has a budget."""
        return math.isfinite(self.seconds)

    @property
    def spent(self) -> float:
        """Return the seconds spent so far, over all parts of the run."""
        return self.before + time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Return the seconds that are left for training steps."""
        return self.seconds - self.spent - self.reserve

    @property
    def end(self) -> int:
        """Return the last step, once the decay has begun."""
        return self.decays[-1].end if self.decays else NEVER

    def stop(self) -> None:
        """Shorten the budget so that the run decays quickly and ends."""
        if not self.stopped:
            self.stopped = True
            quick = min(QUICK_MOST, max(QUICK_LEAST, QUICK_SHARE * self.spent))
            self.seconds = min(self.seconds, self.spent + quick + self.reserve)

    def tick(self, step: int, seconds: float) -> int:
        """Note the time of a step; begin the decay or aim it again if the time requires it.

        Args:
            step: Number of steps taken.
            seconds: Time that the last one took.

        Returns:
            The last step of the run; `NEVER` before the decay.
        """
        self._recent.append(seconds)
        pace = sum(self._recent) / len(self._recent)
        target = step + max(1, int(self.left / max(pace, 1e-9)))
        if not self.decays:
            if self.stopped or self.left <= DECAY_SHARE * self.seconds:
                self.aim(step, target)
        elif step < self.end and abs(target - self.end) > max(1.0, AIM_AGAIN * (self.end - step)):
            self.aim(step, target)
        return self.end

    def aim(self, step: int, end: int) -> None:
        """Let the rate fall from its present share at `step` to 0 at `end`."""
        self.decays.append(Decay(step, end, share_at(self.decays, step)))

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"seconds": round(self.spent, 3), "decays": ",".join(map(str, self.decays))}

    def restore(self, saved: dict[str, Any], seconds: float = 0.0) -> None:
        """Continue the count of an earlier part of the run.

        Args:
            saved: What `describe` returned.
            seconds: Time spent that was logged after the checkpoint, which a crash lost.
        """
        self.before = max(float(saved.get("seconds", 0.0)), seconds)
        self.decays = list(parse_decays(saved.get("decays", "")))
