"""One thread that runs generation requests of many threads on one model.

Who runs the model for the text level: the caller's own thread (`Here`), or an engine that many
callers share (`engine.Request`).

One client's share of an engine: calls that block in the client's thread, while the engine's
computes.

Many requests at once: one thread that alone computes with the model, and steps the sequences of all
requests together.

    engine = Engine(lm.model)
    with engine.request() as request:            # in any thread, as many at a time as one likes
        lm.on(request).infill("Once [[3-8]] lived.")

A request that comes while others are halfway joins them at the next step, and gets exactly what it
would get alone (in float32: but for candidates that all but tie). Whole passes, such as scores and
those of a reverse process, take turns with the steps.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, Unpack

import torch
from torch import Tensor

from tracformer.generation.decode import fill, reverse_process
from tracformer.generation.scheduler import Filled, Filling, Job, Revealed, Rules, Watch
from tracformer.generation.sessions import Session, open_session
from tracformer.model.base import ConditionalModel, Passes, at_once
from tracformer.model.batch import Batch

if TYPE_CHECKING:
    pass


A = TypeVar("A")


class Runner(Protocol):
    @property
    def model(self) -> ConditionalModel:
        """For its configuration, and what it can answer; to be computed with only inside `call`."""
        ...

    def fill(self, batch: Batch, mode: str = "car", **rules: Unpack[Rules]) -> Filled:
        """As `generation.decode.fill`.

        `watch` is called in the caller's thread; `only` and `stop` in any.
        """
        ...

    def session(self, batch: Batch, mode: str) -> Session:
        """As `generation.sessions.open_session`."""
        ...

    def call(self, f: Callable[[], A]) -> A:
        """What f returns, which may compute with the model: whole passes. Without gradients."""
        ...


class Here:
    """In the caller's thread, at once."""

    def __init__(self, model: ConditionalModel) -> None:
        self.model = model

    def fill(self, batch: Batch, mode: str = "car", **rules: Unpack[Rules]) -> Filled:
        return fill(self.model, batch, mode, **rules)

    def session(self, batch: Batch, mode: str) -> Session:
        return open_session(self.model, batch, mode)

    def call(self, f: Callable[[], A]) -> A:
        with torch.no_grad():
            return f()


class Cancelled(Exception):  # noqa: N818
    """The request was given up; nothing more is computed for it."""


class DeadlineExceeded(Cancelled):
    """Its time was over."""


class Closed(RuntimeError):  # noqa: N818
    """The engine takes nothing new."""


class Work:
    """One blocking call: a job for the filling loop, or passes of its own.

    What comes of it goes into the mail of the thread that waits.
    """

    def __init__(
        self, request: "Request", job: Job | None = None, passes: Passes[Any] | None = None
    ) -> None:
        self.request, self.job, self.passes = request, job, passes
        self.mail: queue.SimpleQueue[list[Revealed] | End] = queue.SimpleQueue()
        self.left = False  # nobody waits for it any more

    def hush(self) -> None:
        """Nobody wants to hear of tokens any more: no thread is woken for them."""
        assert self.job is not None
        self.job.watch = None

    @property
    def wanted(self) -> bool:
        return not self.left and self.request.ended is None


@dataclass(frozen=True)
class End:
    value: Any = None
    error: BaseException | None = None


class Request:
    """A runner (see `runner.Runner`) whose calls block in the thread that makes them, while the
    engine computes.

    As a context manager it tells the engine when a client that makes several calls is done: a
    closing engine waits for that.
    """

    def __init__(self, engine: "Engine", deadline: float | None) -> None:
        self.engine, self.deadline = engine, deadline
        self.ended: Cancelled | None = None
        self.entered = False
        self.works: list[Work] = []  # that are waited for

    @property
    def model(self) -> ConditionalModel:
        return self.engine.model

    def __enter__(self) -> Self:
        with self.engine.changed:
            self.engine.require_open()
            self.entered = True
            self.engine.open_requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self.engine.changed:
            self.entered = False
            self.engine.open_requests -= 1
            self.engine.changed.notify_all()

    def cancel(self) -> None:
        """From any thread: its rows are free before the next step, and its waiting
        calls raise Cancelled.
        """
        self._end(Cancelled("the request was cancelled"))

    def fill(self, batch: Batch, mode: str = "car", **rules: Unpack[Rules]) -> Filled:
        watch = rules.pop("watch", None)
        job = Job(self.model.config, batch, mode, **rules)
        if mode == "diffusion":
            told: list[Revealed] = []
            job.watch = told.extend
            filled: Filled = self._wait(Work(self, passes=reverse_process(self.model, job)))
            if watch is not None:
                watch(told)
            return filled
        if not job.done:
            work = Work(self, job)
            job.watch = None if watch is None else work.mail.put
            self._wait(work, watch)
        return job.result()

    def session(self, batch: Batch, mode: str) -> Session:
        return _Session(self, self.call(lambda: open_session(self.model, batch, mode)))

    def call(self, f: Callable[[], A]) -> A:
        result: A = self._wait(Work(self, passes=at_once(f)))
        return result

    def check(self, now: float) -> None:
        """Ends the request if its time is over."""
        if self.deadline is not None and now >= self.deadline:
            self._end(DeadlineExceeded("the request's deadline has passed"))

    def _wait(self, work: Work, watch: Watch | None = None) -> Any:
        self.check(time.monotonic())
        self.engine.submit(work)
        try:
            while True:
                left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
                try:
                    letter = work.mail.get(timeout=left)
                except queue.Empty:
                    self.check(time.monotonic())
                    continue
                if self.ended is not None:
                    raise self.ended
                if not isinstance(letter, End):
                    if watch is not None and watch(letter) is False:
                        work.hush()
                        watch = None
                elif letter.error is not None:
                    raise letter.error
                else:
                    return letter.value
        finally:
            self._leave(work)

    def _leave(self, work: Work) -> None:
        with self.engine.changed:
            work.left = True
            self.works.remove(work)

    def _end(self, why: Cancelled) -> None:
        with self.engine.changed:
            if self.ended is None:
                self.ended = why
                for work in self.works:
                    work.mail.put(End(error=why))
                self.engine.changed.notify_all()


class _Session:
    """A session of the request's own: only what asks the model goes to the engine's thread."""

    def __init__(self, request: Request, inner: Session) -> None:
        self.request, self.inner = request, inner

    def admit(self, batch: Batch) -> Tensor:
        return self.request.call(lambda: self.inner.admit(batch))

    def release(self, rows: Tensor | Sequence[int]) -> None:
        self.inner.release(rows)

    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self.request.call(lambda: self.inner.logits(rows, positions))

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self.inner.reveal(rows, positions, tokens)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        return type(self)(self.request, self.inner.select(rows))


__all__ = ["Cancelled", "Closed", "DeadlineExceeded", "Engine", "Here", "Load", "Request", "Runner"]


@dataclass(frozen=True)
class Load:
    rows: int  # sequences being filled
    waiting: int  # sequences that wait for a row
    capacity: int  # rows in all
    steps: int  # so far
    tokens: int  # filled so far


class Engine:
    """At most `rows` sequences are filled at a time; those beyond wait, in the order
    of their coming.
    """

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
        """One client's share of the engine.

        deadline: a value of `time.monotonic()`, after which its calls raise DeadlineExceeded.
        """
        self.require_open()
        return Request(self, deadline)

    @property
    def load(self) -> Load:
        filling = self._filling
        with self.changed:
            coming = sum(work.job.left for work in self._coming if work.job is not None)
        return Load(
            len(filling.rows),
            len(filling.waiting) + coming,
            filling.capacity,
            filling.steps,
            filling.tokens,
        )

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take nothing new, and end.

        `drain`: first finish what runs, for at most `timeout` seconds; what is then left raises
        Cancelled.
        """
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
            while not (
                self._coming
                or self._jobs
                or self._calls
                or self._stopping
                or (self._closing and self.open_requests == 0)
            ):
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
        """A failure that is no job's own: nothing is known of those that had begun.

        Those that only waited go on waiting.
        """
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
