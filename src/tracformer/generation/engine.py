"""One thread that runs generation requests of many threads on one model.

    engine = Engine(lm.model)
    with engine.request() as request:            # in any thread, any number at a time
        lm.on(request).infill("Once [[3-8]] lived.")

- `Engine`: the thread. It alone runs the model and advances the rows of all requests together.
- `Request`: one client's share of an engine; its calls block in the client's thread.
- `Work`: one such call, and the queue through which its results come back.

A request that arrives while others are halfway joins them at the next step, and gets exactly what
it would get alone (in float32: except where two candidates are almost equally likely). Whole
passes, such as scores and those of a reverse process, take turns with the steps.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, Unpack

import torch
from torch import Tensor

from tracformer.generation.decode import Runner, reverse_process
from tracformer.generation.fill_request import Filled, FillRequest, FillRules
from tracformer.generation.results import Token, TokenCallback
from tracformer.generation.scheduler import Scheduler, Session, open_session
from tracformer.model.base import ConditionalModel, Passes, at_once
from tracformer.model.batch import Batch

A = TypeVar("A")


class Cancelled(Exception):  # noqa: N818
    """The request was cancelled; nothing more is computed for it."""


class DeadlineExceeded(Cancelled):
    """The request's deadline has passed."""


class Closed(RuntimeError):  # noqa: N818
    """The engine is closed and takes no new requests."""


@dataclass(frozen=True)
class CallResult:
    """The end of a blocking call: its value, or the error it raises."""

    value: Any = None
    error: BaseException | None = None


class Work:
    """One blocking call: rows for the scheduler, or whole passes.

    Results go through `mail` to the thread that waits for them.
    """

    def __init__(
        self,
        request: "Request",
        fill: FillRequest | None = None,
        passes: Passes[Any] | None = None,
    ) -> None:
        self.request, self.fill, self.passes = request, fill, passes
        self.mail: queue.SimpleQueue[list[Token] | CallResult] = queue.SimpleQueue()
        self.abandoned = False  # no thread waits for it any more

    @property
    def wanted(self) -> bool:
        """Whether a thread still waits for the result."""
        return not self.abandoned and self.request.ended is None

    def stop_streaming(self) -> None:
        """Detach the token callback; the call still runs to completion."""
        assert self.fill is not None
        self.fill.callback = None

    def receive(self, timeout: float | None) -> list[Token] | CallResult | None:
        """Wait for the next tokens or the end; None if the time is over first."""
        try:
            return self.mail.get(timeout=timeout)
        except queue.Empty:
            return None


class Request(Runner):
    """One client's share of an engine: its calls block until the engine has run them.

    Use it as a context manager around several calls; an engine that is closing waits for its end.

    Args:
        engine: The engine, which runs the model.
        deadline: A value of `time.monotonic()`; later calls raise `DeadlineExceeded`. None: none.
    """

    def __init__(self, engine: "Engine", deadline: float | None = None) -> None:
        super().__init__(engine.model)
        self.engine, self.deadline = engine, deadline
        self.ended: Cancelled | None = None  # why no more calls are run
        self.entered = False
        self.works: list[Work] = []  # calls that a thread waits for; guarded by the engine

    def __enter__(self) -> Self:
        self.engine.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.leave(self)

    def cancel(self) -> None:
        """Free the request's rows before the next step; its waiting calls raise `Cancelled`."""
        self.engine.end(self, Cancelled("the request was cancelled"))

    def fill(self, batch: Batch, mode: str = "car", **rules: Unpack[FillRules]) -> Filled:
        """Fill a batch, see `decode.fill`.

        The callback is called in the calling thread; `only` and `stop` in the engine's.
        """
        callback = rules.pop("callback", None)
        fill = FillRequest(self.model.config, batch, mode, **rules)
        if mode == "diffusion":
            tokens: list[Token] = []
            fill.callback = tokens.extend
            filled: Filled = self._run(Work(self, passes=reverse_process(self.model, fill)))
            if callback is not None:
                callback(tokens)
            return filled
        if not fill.done:
            work = Work(self, fill)
            fill.callback = None if callback is None else work.mail.put
            self._run(work, callback)
        return fill.result()

    def open_session(self, batch: Batch, mode: str) -> Session:
        """Return a session whose model runs in the engine's thread."""
        return RemoteSession(self, self.call(lambda: open_session(self.model, batch, mode)))

    def call(self, f: Callable[[], A]) -> A:
        """Return f(), run in the engine's thread. Gradients are off."""
        result: A = self._run(Work(self, passes=at_once(f)))
        return result

    def check_deadline(self, now: float) -> None:
        """End the request if its deadline has passed."""
        if self.deadline is not None and now >= self.deadline:
            self.engine.end(self, DeadlineExceeded("the request's deadline has passed"))

    def _run(self, work: Work, callback: TokenCallback | None = None) -> Any:
        """Hand in a call, pass on its tokens, and return its value."""
        self.check_deadline(time.monotonic())
        self.engine.submit(work)
        try:
            while True:
                left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
                mail = work.receive(left)
                if mail is None:
                    self.check_deadline(time.monotonic())
                elif self.ended is not None:
                    raise self.ended
                elif not isinstance(mail, CallResult):
                    if callback is not None and callback(mail) is False:
                        work.stop_streaming()
                        callback = None
                elif mail.error is not None:
                    raise mail.error
                else:
                    return mail.value
        finally:
            self.engine.abandon(work)


class RemoteSession:
    """A session of one request; calls that run the model go to the engine's thread."""

    def __init__(self, request: Request, inner: Session) -> None:
        self.request, self.inner = request, inner

    def admit(self, batch: Batch) -> Tensor:
        """Take in sequences, see `Session`."""
        return self.request.call(lambda: self.inner.admit(batch))

    def release(self, rows: Tensor | Sequence[int]) -> None:
        """Free rows."""
        self.inner.release(rows)

    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return logits at pairs of a row and a position."""
        return self.request.call(lambda: self.inner.logits(rows, positions))

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Tell the session which tokens were chosen."""
        self.inner.reveal(rows, positions, tokens)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return a session of some of the sequences."""
        return type(self)(self.request, self.inner.select(rows))

    def rearrange(self, sources: Sequence[int], since: int) -> None:
        """Let rows continue others, see `Session`."""
        self.inner.rearrange(sources, since)


@dataclass(frozen=True)
class Load:
    """How busy an engine is."""

    rows: int  # in flight
    waiting: int  # rows that wait for a place
    capacity: int  # maximum number of rows in flight
    steps: int  # in total
    tokens: int  # in total


class Engine:
    """Run generation requests from many threads on one model.

    A single worker thread advances all active rows together, one token per step. New requests join
    at the next step. The sampled tokens do not depend on which other requests are active.

    Args:
        model: Model to run; it is switched to eval mode.
        rows: Maximum number of rows in flight. Further rows wait in first-in, first-out order.

    Raises:
        ValueError: `rows` is less than 1.

    Example:
        >>> import tracformer
        >>> lm = tracformer.load("stories")
        >>> engine = tracformer.Engine(lm.model, rows=8)
        >>> with engine.request() as request:
        ...     [fill] = lm.on(request).infill("Once upon a [[1]],", temperature=0)
        >>> fill.spans[0].text
        ' time'
        >>> engine.close()
    """

    def __init__(self, model: ConditionalModel, *, rows: int = 64) -> None:
        if rows < 1:
            raise ValueError(f"rows is {rows}; it must be at least 1")
        self.model = model.eval()
        self._scheduler = Scheduler(model, rows, model.config.max_length)
        self._changed = threading.Condition()  # guards all below, and the requests' `works`
        self._submitted: list[Work] = []
        self._filling: dict[FillRequest, Work] = {}
        self._calls: deque[Work] = deque()
        self._entered = 0  # requests inside their `with`
        self._closing = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tracformer-engine", daemon=True)
        self._thread.start()

    def request(self, deadline: float | None = None) -> Request:
        """Return a client's share of the engine.

        Args:
            deadline: A value of `time.monotonic()`, after which calls raise `DeadlineExceeded`.

        Raises:
            Closed: The engine is closed.
        """
        self._require_open()
        return Request(self, deadline)

    @property
    def load(self) -> Load:
        """How busy the engine is."""
        scheduler = self._scheduler
        with self._changed:
            submitted = sum(work.fill.left for work in self._submitted if work.fill is not None)
        return Load(
            len(scheduler.rows),
            len(scheduler.waiting) + submitted,
            scheduler.capacity,
            scheduler.steps,
            scheduler.tokens,
        )

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no new requests, and stop the thread.

        Args:
            drain: First finish what runs; False: cancel it.
            timeout: Maximum number of seconds for that; what is left then raises `Cancelled`.
        """
        with self._changed:
            self._closing = True
            self._stopping |= not drain
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive() and not self._stopping:
            self.close(drain=False)

    # ---- called by requests, in their threads

    def enter(self, request: Request) -> None:
        """Note that a client begins several calls."""
        with self._changed:
            self._require_open()
            request.entered = True
            self._entered += 1

    def leave(self, request: Request) -> None:
        """Note that a client has made its last call."""
        with self._changed:
            request.entered = False
            self._entered -= 1
            self._changed.notify_all()

    def submit(self, work: Work) -> None:
        """Queue a call, or raise if its request has ended or the engine is closed."""
        with self._changed:
            if work.request.ended is not None:
                raise work.request.ended
            if not work.request.entered:
                self._require_open()
            if self._stopping:
                raise Cancelled("the engine was closed")
            work.request.works.append(work)
            self._submitted.append(work)
            self._changed.notify_all()

    def abandon(self, work: Work) -> None:
        """Note that no thread waits for a call any more."""
        with self._changed:
            work.abandoned = True
            work.request.works.remove(work)

    def end(self, request: Request, why: Cancelled) -> None:
        """End a request; its waiting calls raise `why`."""
        with self._changed:
            if request.ended is None:
                request.ended = why
                for work in request.works:
                    work.mail.put(CallResult(error=why))
                self._changed.notify_all()

    def _require_open(self) -> None:
        if self._closing:
            raise Closed("the engine is closed: it finishes what it has and takes nothing new")

    # ---- the engine's own thread

    @torch.no_grad()
    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._turn()
            except Exception as error:  # other requests must still be served
                self._start_over(error)

    def _turn(self) -> bool:
        """Run one pass of a call and one step of the scheduler. Return False at the end."""
        with self._changed:
            while not (
                self._submitted
                or self._filling
                or self._calls
                or self._stopping
                or (self._closing and self._entered == 0)
            ):
                self._changed.wait()
            idle = not (self._submitted or self._filling or self._calls)
            if self._stopping or idle:
                self._cancel_all(Cancelled("the engine was closed"))
                return False
            self._sort()
            call = self._calls.popleft() if self._calls else None
        if call is not None and call.wanted:
            self._advance(call)
        if self._filling:
            self._finish(self._scheduler.step())
        return True

    def _sort(self) -> None:
        """Start submitted calls, and drop those that are not wanted any more."""
        for work in self._submitted:
            if work.fill is None:
                self._calls.append(work)
            else:
                self._filling[work.fill] = work
                self._scheduler.add(work.fill)
        self._submitted = []
        now = time.monotonic()
        for work in (*self._filling.values(), *self._calls):
            work.request.check_deadline(now)
        gone = [fill for fill, work in self._filling.items() if not work.wanted]
        self._scheduler.drop(gone)
        for fill in gone:
            del self._filling[fill]

    def _advance(self, call: Work) -> None:
        """Run one pass of a call; its next pass queues behind calls that arrived meanwhile."""
        assert call.passes is not None
        try:
            next(call.passes)
        except StopIteration as done:
            call.mail.put(CallResult(done.value))
        except BaseException as error:  # raised again in the caller's thread
            call.mail.put(CallResult(error=error))
        else:
            with self._changed:
                self._submitted.append(call)

    def _finish(self, fills: Iterable[FillRequest]) -> None:
        for fill in fills:
            with self._changed:
                work = self._filling.pop(fill)
            work.mail.put(CallResult())

    def _start_over(self, error: Exception) -> None:
        """Recover from a failure that belongs to no single request.

        Requests that had begun are lost; those that only waited are queued again.
        """
        self._scheduler.reset()
        fills = list(self._filling)
        lost = [fill for fill in fills if fill.begun] or fills
        for fill in fills:
            if fill in lost:
                fill.error = RuntimeError(f"a step of the engine failed: {error!r}")
                fill.error.__cause__ = error
            else:
                self._scheduler.add(fill)
        self._finish(lost)

    def _cancel_all(self, why: Cancelled) -> None:
        self._stopping = True
        self._scheduler.drop(list(self._filling))
        for work in (*self._submitted, *self._filling.values(), *self._calls):
            work.mail.put(CallResult(error=why))
