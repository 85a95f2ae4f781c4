"""A list of steps that several processes work through together.

Each process takes the first step that is ready, not done and not held by another process. A step is
held by a lock that the operating system releases when the process ends for any reason; the next
process then continues what a killed process had begun.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracformer.devices import Ranks
from tracformer.files import lock_folder

WAIT = 2.0  # seconds between attempts to take a lock
ENDED, BUSY = -1, -2


@dataclass(frozen=True)
class Step:
    """A piece of work.

    Args:
        name: Unique name, also of its lock.
        done: Whether nothing is left to do, on disk or in this process.
        ready: Whether everything that it needs exists.
        do: Does the work; returns the signal that stopped it, or None.
    """

    name: str
    done: Callable[[], bool]
    ready: Callable[[], bool]
    do: Callable[[], int | None]


def run_steps(
    steps: Sequence[Step],
    locks: Path,
    ranks: Ranks,
    say: Callable[[str], None] = lambda text: None,
) -> int | None:
    """Do all steps, in order as far as they are ready, sharing them with other processes.

    A step that fails is reported and skipped; once the others are done, the first failure is
    raised. The ranks of one process group do every step together.

    Args:
        steps: The steps, the same in every process.
        locks: Folder of the locks.
        ranks: Ranks of this process group.
        say: Prints a line before each step, with the number of steps that are not done.

    Returns:
        The signal that stopped a step, or None if all are done.
    """
    left = list(steps)
    failures: list[Exception] = []
    while True:
        with ExitStack() as lock:
            number = _take(left, steps, locks, lock) if ranks.first else 0
            number = int(ranks.total([float(number)])[0])  # other ranks add 0
            if number == ENDED:
                break
            if number == BUSY:
                time.sleep(WAIT)
                continue
            step = steps[number]
            say(f"[{len(left)} left] {step.name}")
            try:
                signal = step.do()
            except Exception as error:
                if ranks.world > 1:  # the other ranks would wait for this one
                    raise
                traceback.print_exc(file=sys.stderr)
                failures.append(error)
                signal = None
            if step in left:
                left.remove(step)
            if signal is not None:
                return signal
    if failures:
        raise failures[0]
    return None


@contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """Hold a lock; wait while another process holds it."""
    while True:
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(folder))
            except BlockingIOError:
                time.sleep(WAIT)
                continue
            yield
            return


def _take(left: list[Step], steps: Sequence[Step], locks: Path, lock: ExitStack) -> int:
    """Return the number of the next step, held in `lock`; remove done steps from `left`."""
    busy = False
    for step in list(left):
        if step.done():
            left.remove(step)
            continue
        if not step.ready():
            continue
        with ExitStack() as trial:
            try:
                trial.enter_context(lock_folder(locks / step.name))
            except BlockingIOError:
                busy = True
                continue
            if step.done():  # another process finished it meanwhile
                left.remove(step)
                continue
            lock.enter_context(trial.pop_all())
            return steps.index(step)
    return BUSY if busy else ENDED
