"""Run a function over a stream of tasks in several local processes, in order and in bounded memory.

    for result in ordered_map(make_work, arguments, tasks, workers=4):
        ...

Each process calls `make_work(*arguments)` once, for instance to load a model, and the function that
it returns once per task. Results come in the order of the tasks. A process that dies is replaced,
and its tasks run again.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2  # tasks per worker that are read before the oldest result is taken
DEATHS = 3  # replacements of dead workers without a result in between
_work: Callable[[Any], Any]  # of a worker process


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(workers: int) -> None:
    """Raise ValueError unless this is a number of processes."""
    if workers < 1:
        raise ValueError(f"workers is {workers}; it is the number of processes, at least 1")


def ordered_map(
    make_work: Callable[..., Callable[[T], R]],
    arguments: Sequence[Any],
    tasks: Iterable[T],
    workers: int = 1,
) -> Iterator[R]:
    """Yield the result of each task, in order.

    At most `AHEAD * workers` tasks are in memory. With one worker or a single task, everything runs
    in this process. Otherwise processes are started with "spawn", so `make_work`, its arguments,
    tasks and results must be picklable, and a script that calls this needs the usual
    `if __name__ == "__main__":`.

    Args:
        make_work: Called once in each process; returns the function to run.
        arguments: Its arguments.
        tasks: The tasks. Running one again must do no harm.
        workers: Number of processes.

    Raises:
        RuntimeError: Processes die again and again, for instance for lack of memory.
    """
    check_workers(workers)
    rest = iter(tasks)
    first = list(islice(rest, 2))
    if workers == 1 or len(first) < 2:
        if first:
            work = make_work(*arguments)
            yield from map(work, chain(first, rest))
        return
    yield from _Pool(make_work, arguments, workers).run(chain(first, rest))


class _Pool:
    """Processes that run tasks, and are replaced if one dies."""

    def __init__(
        self, make_work: Callable[..., Any], arguments: Sequence[Any], workers: int
    ) -> None:
        self.make_work, self.arguments, self.workers = make_work, arguments, workers
        self.executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self.workers,
            multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(self.make_work, self.arguments),
        )

    def run(self, tasks: Iterator[Any]) -> Iterator[Any]:
        """Yield the results in order."""
        waiting: deque[tuple[Any, Future[Any] | None]] = deque()
        deaths = 0
        try:
            while True:
                while len(waiting) < AHEAD * self.workers:
                    try:
                        task = next(tasks)
                    except StopIteration:
                        break
                    waiting.append((task, self._submit(task)))
                if not waiting:
                    return
                future = waiting[0][1]
                try:
                    if future is None:
                        raise BrokenProcessPool
                    result = future.result()
                except BrokenProcessPool:
                    deaths += 1
                    if deaths > DEATHS:
                        raise RuntimeError(
                            f"worker processes died {deaths} times without finishing a task; use "
                            "fewer workers if memory is short"
                        ) from None
                    self.executor.shutdown(wait=False)
                    self.executor = self._start()
                    waiting = deque(
                        (task, done if _is_finished(done) else self._submit(task))
                        for task, done in waiting
                    )
                    continue
                deaths = 0
                waiting.popleft()
                yield result
        finally:
            self.executor.shutdown(wait=True, cancel_futures=True)

    def _submit(self, task: Any) -> Future[Any] | None:
        try:
            return self.executor.submit(_run_task, task)
        except BrokenProcessPool:  # noticed when the oldest result is taken
            return None


def _is_finished(future: Future[Any] | None) -> bool:
    return (
        future is not None
        and future.done()
        and not isinstance(future.exception(), BrokenProcessPool)
    )


def _start_worker(make_work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads the results
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = make_work(*arguments)


def _end_with_parent() -> None:
    """End this process when its parent is killed; it would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_task(task: Any) -> Any:
    return _work(task)
