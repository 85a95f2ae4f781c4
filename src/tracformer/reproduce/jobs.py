"""A list of jobs that several processes work off together.

Each process takes the first job that is ready, not done and held by no other process. A job is held
by a lock that the operating system releases when the process ends, however it ends; what a killed
process had begun is taken up by the next one.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracformer.distributed import Ranks
from tracformer.files import held

WAIT = 2.0  # seconds between looks at what other processes hold
ENDED, BUSY = -1, -2


@dataclass(frozen=True)
class Job:
    """A piece of work.

    Args:
        name: Unique name; it is the name of the lock.
        done: Whether there is nothing left to do, on disk or in this process.
        ready: Whether everything that it needs is there.
        do: Does the work; returns the signal that stopped it, or None.
        model: Name of the model that it trains, if it trains one.
        tokens: Tokens that it trains on.
    """

    name: str
    done: Callable[[], bool]
    ready: Callable[[], bool]
    do: Callable[[], int | None]
    model: str = ""
    tokens: float = 0.0


def work_off(
    jobs: Sequence[Job],
    locks: Path,
    ranks: Ranks,
    begin: Callable[[Job, Sequence[Job]], None] = lambda job, left: None,
) -> int | None:
    """Do all jobs, in order as far as they are ready, sharing them with other processes.

    A job that fails is reported and passed over, and the others are done; then the first failure is
    raised. Ranks of one process group do every job together.

    Args:
        jobs: The jobs, the same in every process.
        locks: Folder of the locks.
        ranks: Ranks of this process group.
        begin: Called before a job, with the job and all jobs that are not done.

    Returns:
        The signal that stopped a job, or None if all are done.
    """
    left = list(jobs)
    failures: list[Exception] = []
    while True:
        with ExitStack() as lock:
            number = _take(left, jobs, locks, lock) if ranks.first else 0
            number = int(ranks.total([float(number)])[0])  # other ranks add 0
            if number == ENDED:
                break
            if number == BUSY:
                time.sleep(WAIT)
                continue
            job = jobs[number]
            begin(job, left)
            try:
                signal = job.do()
            except Exception as error:
                if ranks.world > 1:  # the other ranks would wait for this one
                    raise
                traceback.print_exc(file=sys.stderr)
                failures.append(error)
                signal = None
            if job in left:
                left.remove(job)
            if signal is not None:
                return signal
    if failures:
        raise failures[0]
    return None


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Hold a lock, once no other process does."""
    while True:
        with ExitStack() as stack:
            try:
                stack.enter_context(held(folder))
            except BlockingIOError:
                time.sleep(WAIT)
                continue
            yield
            return


def _take(left: list[Job], jobs: Sequence[Job], locks: Path, lock: ExitStack) -> int:
    """Return the number of the next job, held in `lock`; jobs that are done leave the list."""
    busy = False
    for job in list(left):
        if job.done():
            left.remove(job)
            continue
        if not job.ready():
            continue
        with ExitStack() as trial:
            try:
                trial.enter_context(held(locks / job.name))
            except BlockingIOError:
                busy = True
                continue
            if job.done():  # another process finished it meanwhile
                left.remove(job)
                continue
            lock.enter_context(trial.pop_all())
            return jobs.index(job)
    return BUSY if busy else ENDED
