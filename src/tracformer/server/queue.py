"""Admission of requests, and the threads that do their work.

- `Gate` admits a fixed number of requests, lets a few more wait, and refuses the rest.
- `QueuedRequest` is one request's work: it waits at the gate, runs in a worker thread, passes on
  what the work sends, and can be cancelled at any time.
- `Backend` is the loaded model with its engine, gate and threads.
- `Service` is what the protocols share: settings, model name, metrics and the backend.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from fastapi import Request as HttpRequest

from tracformer.generation.engine import Cancelled, Closed, DeadlineExceeded, Engine, Request
from tracformer.generation.language_model import LanguageModel
from tracformer.generation.results import NonFiniteError
from tracformer.server import Settings
from tracformer.server.middleware import Metrics, log_event
from tracformer.server.schema import (
    NOT_FOUND,
    SERVER,
    UNAVAILABLE,
    ApiError,
    ClientGoneError,
    busy,
    late,
)

LARGE = 10_000  # characters or tokens, which take a few milliseconds
RECENT = 64  # requests whose duration is averaged for the `Retry-After` header

R = TypeVar("R")
# Pass an item on to the reader of the request; None only records the time of the first token.
# Returns False once further items are of no use.
Send = Callable[[Any], bool]
# Runs in a worker thread, with a model whose calls go through the engine.
Work = Callable[[LanguageModel, Send], R]


class Gate:
    """Admit `slots` requests at a time; `queue` more wait in first-in, first-out order."""

    def __init__(self, slots: int, queue: int) -> None:
        self.slots, self.queue = slots, queue
        self.running = self.waiting = 0
        self._free = asyncio.Semaphore(slots)
        self._seconds: deque[float] = deque(maxlen=RECENT)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot, waiting for one if need be.

        Raises:
            ApiError: The queue is full (status 429).
        """
        if self._free.locked() and self.waiting >= self.queue:
            raise busy(
                f"the server is full: {self.running} requests are running and {self.waiting} are "
                "waiting; try again later",
                self.retry_after(),
            )
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds.append(time.monotonic() - start)
            self.running -= 1
            self._free.release()

    def retry_after(self) -> int:
        """Return in how many seconds the queue will be empty, judging by recent requests.

        Returns:
            A number from 1 to 60.
        """
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return max(1, min(60, math.ceil(mean * (self.waiting + 1) / self.slots)))


class Backend:
    """A loaded model: the engine that runs it, a gate, and a worker thread for each slot."""

    def __init__(self, lm: LanguageModel, rows: int, queue: int) -> None:
        self.lm = lm
        self.engine = Engine(lm.model, rows=rows)
        self.gate = Gate(rows, queue)
        self.threads = ThreadPoolExecutor(rows, thread_name_prefix="request")

    def close(self) -> None:
        """Cancel all requests that still run, and stop the threads."""
        self.engine.close(drain=False)
        self.threads.shutdown(wait=True, cancel_futures=True)


class QueuedRequest(Generic[R]):
    """One request's work, from the queue to its result.

    `async for` yields what the work sends; `result` is set when the loop ends. Work that fails
    raises at the end of the loop. The work is cancelled when `seconds` have passed or when the
    client closes the connection.

    Args:
        backend: Where the work runs.
        http: The HTTP request; its disconnection is watched.
        work: The function to run in a worker thread.
        seconds: Time limit, including the time in the queue.
    """

    def __init__(self, backend: Backend, http: HttpRequest, work: Work[R], seconds: float) -> None:
        self.backend, self.work, self.seconds = backend, work, seconds
        self.arrived = time.monotonic()
        self.started = self.first = self.ended = 0.0  # left the queue, first token, finished
        self.result: R
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()  # None: no more items
        self._held: list[Any] = []  # the first item, once `begun` has seen it
        self._engine_request: Request | None = None
        self._cancelled_by: Exception | None = None
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._finish)
        self._watcher = asyncio.create_task(self._watch_client(http))
        self._timer = self._loop.call_later(seconds, self.cancel, late(seconds))

    async def begun(self) -> None:
        """Wait for the first item or the end.

        Work that fails before its first item raises here, while the status can still be set.
        """
        try:
            self._held = [await self._items.get()]
            if self._held == [None]:
                self._take_result()
        except BaseException:
            self._release()
            raise

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (item := await self._next()) is not None:
                yield item
            self._take_result()
        finally:
            self._release()

    @property
    def more(self) -> bool:
        """Whether an item is ready to be read."""
        return not self._items.empty()

    async def done(self) -> R:
        """Run to the end and return the result."""
        async for _ in self:
            pass
        return self.result

    def cancel(self, reason: Exception) -> None:
        """Free what the work holds; the reader gets `reason` raised."""
        if self._cancelled_by is not None or self._task.done():
            return
        self._cancelled_by = reason
        if self._engine_request is not None:
            self._engine_request.cancel()
        else:
            self._task.cancel()
        self._items.put_nowait(None)

    def timings(self, tokens: int) -> dict[str, Any]:
        """Return the times in milliseconds, as the client sees them."""
        seconds = self.ended - self.started
        return {
            "queued_ms": _milliseconds(self.started - self.arrived),
            "first_token_ms": _milliseconds(self.first - self.arrived) if self.first else None,
            "total_ms": _milliseconds(self.ended - self.arrived),
            "tokens_per_second": round(tokens / seconds, 3) if seconds > 0 else None,
        }

    async def _next(self) -> Any:
        return self._held.pop() if self._held else await self._items.get()

    def _finish(self, task: "asyncio.Task[R]") -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved, also if no reader is left
        self._items.put_nowait(None)

    def _take_result(self) -> None:
        if self._cancelled_by is not None:
            raise self._cancelled_by
        try:
            self.result = self._task.result()
        except ValueError as mistake:
            raise ApiError(400, str(mistake)) from mistake
        except NonFiniteError as error:
            log_event("not finite", logging.ERROR, error)
            raise ApiError(500, str(error), SERVER, code="not_finite") from error
        except DeadlineExceeded as error:
            raise late(self.seconds) from error
        except (Cancelled, Closed) as error:
            raise ApiError(503, "the server is stopping", UNAVAILABLE, code="stopping") from error

    def _release(self) -> None:
        self.cancel(ClientGoneError())
        self._watcher.cancel()
        self._timer.cancel()

    async def _run(self) -> R:
        async with self.backend.gate.slot():
            self.started = time.monotonic()
            self._engine_request = self.backend.engine.request(self.arrived + self.seconds)
            result = await self._loop.run_in_executor(
                self.backend.threads, self._work_in_thread, self._engine_request
            )
            self.ended = time.monotonic()
            return result

    def _work_in_thread(self, request: Request) -> R:
        def send(item: Any) -> bool:
            self.first = self.first or time.monotonic()
            if item is not None:
                self._loop.call_soon_threadsafe(self._items.put_nowait, item)
            return item is not None

        with request:
            return self.work(self.backend.lm.on(request), send)

    async def _watch_client(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        http.scope["log_entry"].fields["gone"] = True
        self.cancel(ClientGoneError())


class Service:
    """What the protocols share: settings, model name, metrics and, once loaded, the model."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self.created = int(time.time())
        self.metrics = Metrics(lambda: self._backend)
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The loaded model; raises ApiError (503) while it is still loading."""
        if self._backend is None:
            raise ApiError(
                503, "Loading model", UNAVAILABLE, code="loading", headers={"Retry-After": "1"}
            )
        return self._backend

    def open(self, lm: LanguageModel) -> None:
        """Begin to answer requests with this model."""
        self._backend = Backend(lm, self.settings.rows, self.settings.queue)

    def close(self) -> None:
        """Cancel what still runs."""
        if self._backend is not None:
            self._backend.close()

    def start(
        self, http: HttpRequest, work: Work[R], seconds: float | None = None
    ) -> QueuedRequest[R]:
        """Queue a request's work.

        Args:
            http: The HTTP request.
            work: The function to run in a worker thread.
            seconds: Time limit the client asks for; the server's own limit still holds.
        """
        limit = self.settings.timeout
        return QueuedRequest(self.backend, http, work, min(seconds or limit, limit))

    def model_name(self, requested: str | None) -> str:
        """Return the model's name if `requested` is one of its names; else raise ApiError (404)."""
        known = (self.name, *self.settings.aliases)
        if requested in (None, "", *known) or "*" in known:
            return self.name
        raise ApiError(
            404,
            f"there is no model {requested!r} here; this server has {self.name!r}",
            NOT_FOUND,
            param="model",
            code="model_not_found",
        )

    def check_limit(self, name: str, value: int, limit: int) -> None:
        """Raise ApiError if a field asks for more than the server allows."""
        if value > limit:
            raise ApiError(
                400,
                f"{name} asks for {value}; the limit of this server is {limit}",
                param=name,
                code="limit",
            )

    def count(
        self, http: HttpRequest, request: QueuedRequest[Any], usage: Mapping[str, int]
    ) -> None:
        """Record a finished request in the metrics and its log entry."""
        metrics, timings = self.metrics, request.timings(usage["completion_tokens"])
        metrics.queued.observe(timings["queued_ms"] / 1000)
        if timings["first_token_ms"] is not None:
            metrics.first.observe(timings["first_token_ms"] / 1000)
        for kind in ("prompt", "completion"):
            metrics.tokens.labels(kind).inc(usage[f"{kind}_tokens"])
        http.scope["log_entry"].fields.update(
            queued_ms=timings["queued_ms"],
            first_token_ms=timings["first_token_ms"],
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
        )


async def off_the_loop(work: Callable[[], R], size: int) -> R:
    """Run work: in a thread if it is large, since all other requests wait for the event loop.

    Args:
        work: The function to run.
        size: Number of characters that it reads, or of tokens and candidates that it writes.
    """
    return await asyncio.to_thread(work) if size > LARGE else work()


def service_of(http: HttpRequest) -> Service:
    """Return the service that answers a request."""
    service: Service = http.app.state.service
    return service


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Return the `usage` object of an answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
