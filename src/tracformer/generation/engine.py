"""Many requests at once: one thread that alone computes with the model, and steps the sequences of all requests together.

    engine = Engine(lm.model)
    with engine.request() as request:            # in any thread, as many at a time as one likes
        lm.on(request).infill("Once [[3-8]] lived.")

A request that comes while others are halfway joins them at the next step, and gets exactly what it would get alone (in float32: but for
candidates that all but tie). Whole passes, such as scores and those of a reverse process, take turns with the steps.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tracformer.generation.filling import Filling
from tracformer.generation.job import Job
from tracformer.generation.request import Cancelled, Closed, DeadlineExceeded, End, Request, Work
from tracformer.generation.runner import Here, Runner
from tracformer.model.base import ConditionalModel

__all__ = ["Cancelled", "Closed", "DeadlineExceeded", "Engine", "Here", "Load", "Request", "Runner"]


@dataclass(frozen=True)
class Load:
    rows: int  # sequences being filled
    waiting: int  # sequences that wait for a row
    capacity: int  # rows in all
    steps: int  # so far
    tokens: int  # filled so far


class Engine:
    """At most `rows` sequences are filled at a time; those beyond wait, in the order of their coming."""

    def __init__(self, model: ConditionalModel, *, rows: int = 64) -> None:
        if rows < 1:
            raise ValueError(f"rows is {rows}; it must be at least 1")
        self.model = model.eval()
        self._filling = Filling(model, rows, model.config.max_length)
        self.changed = threading.Condition()  # guards all below
        self._coming: list[Work] = []
        self._jobs: dict[Job, Work] = {}
        self._calls: deque[Work] = deque()
        self.open_requests = 0  # requests inside their `with`
        self._closing = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tracformer-engine", daemon=True)
        self._thread.start()

    def request(self, deadline: float | None = None) -> Request:
        """One client's share of the engine. deadline: a value of `time.monotonic()`, after which its calls raise DeadlineExceeded."""
        self.require_open()
        return Request(self, deadline)

    @property
    def load(self) -> Load:
        filling = self._filling
        with self.changed:
            coming = sum(work.job.left for work in self._coming if work.job is not None)
        return Load(len(filling.rows), len(filling.waiting) + coming, filling.capacity, filling.steps, filling.tokens)

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take nothing new, and end. `drain`: first finish what runs, for at most `timeout` seconds; what is then left raises Cancelled."""
        with self.changed:
            self._closing = True
            self._stopping |= not drain
            self.changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive() and not self._stopping:
            self.close(drain=False)

    # ---- from requests' threads

    def submit(self, work: Work) -> None:
        with self.changed:
            if work.request.ended is not None:
                raise work.request.ended
            if not work.request.entered:
                self.require_open()
            if self._stopping:
                raise Cancelled("the engine was closed")
            work.request.works.append(work)
            self._coming.append(work)
            self.changed.notify_all()

    def require_open(self) -> None:
        if self._closing:
            raise Closed("the engine is closed: it finishes what it has and takes nothing new")

    # ---- the engine's own thread

    @torch.no_grad()
    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._turn()
            except Exception as error:  # whatever it was, others are still to be served
                self._start_over(error)

    def _turn(self) -> bool:
        """One pass of a call, one step. False: the end."""
        with self.changed:
            while not (self._coming or self._jobs or self._calls or self._stopping or (self._closing and self.open_requests == 0)):
                self.changed.wait()
            idle = not (self._coming or self._jobs or self._calls)
            if self._stopping or idle:
                self._give_up(Cancelled("the engine was closed"))
                return False
            self._sort()
            call = self._calls.popleft() if self._calls else None
        if call is not None and call.wanted:
            self._advance(call)
        if self._jobs:
            self._end(self._filling.step())
        return True

    def _sort(self) -> None:
        """New work to where it belongs, and away with what was given up."""
        for work in self._coming:
            if work.job is None:
                self._calls.append(work)
            else:
                self._jobs[work.job] = work
                self._filling.add(work.job)
        self._coming = []
        now = time.monotonic()
        for work in (*self._jobs.values(), *self._calls):
            work.request.check(now)
        gone = [job for job, work in self._jobs.items() if not work.wanted]
        self._filling.drop(gone)
        for job in gone:
            del self._jobs[job]

    def _advance(self, call: Work) -> None:
        """By one pass; the next one's turn is behind those who came meanwhile."""
        assert call.passes is not None
        try:
            next(call.passes)
        except StopIteration as done:
            call.mail.put(End(done.value))
        except BaseException as error:  # the caller's, whatever it is
            call.mail.put(End(error=error))
        else:
            with self.changed:
                self._coming.append(call)

    def _end(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            with self.changed:
                work = self._jobs.pop(job)
            work.mail.put(End())

    def _start_over(self, error: Exception) -> None:
        """A failure that is no job's own: nothing is known of those that had begun. Those that only waited go on waiting."""
        self._filling.reset()
        jobs = list(self._jobs)
        lost = [job for job in jobs if job.begun] or jobs
        for job in jobs:
            if job in lost:
                job.error = RuntimeError(f"a step of the engine failed: {error!r}")
                job.error.__cause__ = error
            else:
                self._filling.add(job)
        self._end(lost)

    def _give_up(self, why: Cancelled) -> None:
        self._stopping = True
        self._filling.drop(list(self._jobs))
        for work in (*self._coming, *self._jobs.values(), *self._calls):
            work.mail.put(End(error=why))
