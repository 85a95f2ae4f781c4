"""One client's share of an engine: calls that block in the client's thread, while the engine's computes."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from torch import Tensor

from tracformer.generation.fill import reverse_process
from tracformer.generation.job import Filled, Job, Revealed, Rules, Watch
from tracformer.generation.passes import Passes, at_once
from tracformer.generation.sessions import Session, open_session
from tracformer.model.base import ConditionalModel

if TYPE_CHECKING:
    from tracformer.generation.engine import Engine

A = TypeVar("A")


class Cancelled(Exception):  # noqa: N818
    """The request was given up; nothing more is computed for it."""


class DeadlineExceeded(Cancelled):
    """Its time was over."""


class Closed(RuntimeError):  # noqa: N818
    """The engine takes nothing new."""


class Work:
    """One blocking call: a job for the filling loop, or passes of its own. What comes of it goes into the mail of the thread that waits."""

    def __init__(self, request: "Request", job: Job | None = None, passes: Passes[Any] | None = None) -> None:
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
    """A runner (see `runner.Runner`) whose calls block in the thread that makes them, while the engine computes.

    As a context manager it tells the engine when a client that makes several calls is done: a closing engine waits for that.
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
        """From any thread: its rows are free before the next step, and its waiting calls raise Cancelled."""
        self._end(Cancelled("the request was cancelled"))

    def fill(self, tokens: Tensor, context: Tensor, mode: str = "car", lengths: Tensor | None = None, **rules: Unpack[Rules]) -> Filled:
        watch = rules.pop("watch", None)
        job = Job(self.model.config, tokens, context, mode, lengths, **rules)
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

    def session(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor) -> Session:
        return _Session(self, self.call(lambda: open_session(self.model, tokens, context, mode, lengths)))

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

    def admit(self, tokens: Tensor, context: Tensor, lengths: Tensor) -> Tensor:
        return self.request.call(lambda: self.inner.admit(tokens, context, lengths))

    def release(self, rows: Tensor | Sequence[int]) -> None:
        self.inner.release(rows)

    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self.request.call(lambda: self.inner.logits(rows, positions))

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self.inner.reveal(rows, positions, tokens)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        return type(self)(self.request, self.inner.select(rows))
