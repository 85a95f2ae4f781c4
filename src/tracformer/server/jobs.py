"""One request's work: it waits for its turn, runs in a worker thread, tells of tokens as they come, and can be given up at any time."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from tracformer.generation.language import LanguageModel
from tracformer.generation.results import Arrival
from tracformer.server import errors
from tracformer.server.limits import Gate

A = TypeVar("A")
Watch = Callable[[list[Arrival]], None]
Ask = Callable[[LanguageModel, Watch], A]  # runs in a thread: the model to ask, and whom to tell of tokens


class Gone(Exception):
    """The client went away: nobody reads the answer."""


class _Cancelled(Exception):
    pass


class Desk:
    """Where jobs are handed in: the model, its threads and the gate before them."""

    def __init__(self, lm: LanguageModel, rows: int, queue: int) -> None:
        self.lm, self.gate = lm, Gate(rows, queue)
        self.lock = threading.Lock()
        self.threads = ThreadPoolExecutor(rows, thread_name_prefix="request")

    def start(self, http: Request, ask: Ask[A], seconds: float) -> "Job[A]":
        return Job(self, http, ask, seconds)

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)


class Job(Generic[A]):
    """`async for` gives the tokens in batches as they come, then `result` is there. A job that fails raises at the end of the loop."""

    def __init__(self, desk: Desk, http: Request, ask: Ask[A], seconds: float) -> None:
        self.desk, self.ask, self.seconds = desk, ask, seconds
        self.arrived = time.monotonic()
        self.started = self.first = self.ended = 0.0  # when it left the queue, when its first token came, when it was done
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[list[Arrival] | None] = asyncio.Queue()  # None: nothing more will come
        self._why: Exception | None = None  # it was given up
        self._cancelled = threading.Event()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._told.put_nowait(None))
        self._listener = asyncio.create_task(self._listen(http))
        self._timer = self._loop.call_later(seconds, self.give_up, errors.late(seconds))

    async def __aiter__(self) -> AsyncIterator[list[Arrival]]:
        try:
            while (arrivals := await self._told.get()) is not None:
                yield arrivals
            if self._why is not None:
                raise self._why
            try:
                self.result = self._task.result()
            except ValueError as mistake:
                raise errors.Problem(400, str(mistake)) from mistake
        finally:
            self.give_up(Gone())
            self._listener.cancel()
            self._timer.cancel()

    async def done(self) -> A:
        async for _ in self:
            pass
        return self.result

    def give_up(self, why: Exception) -> None:
        """Free what the job holds; whoever waits for it is told why."""
        if self._why is not None or self._task.done():
            return
        self._why = why
        if not self.started:
            self._task.cancel()
        self._cancelled.set()
        self._told.put_nowait(None)

    async def _run(self) -> A:
        async with self.desk.gate.turn():
            self.started = time.monotonic()
            result = await self._loop.run_in_executor(self.desk.threads, self._work)
            self.ended = time.monotonic()
            return result

    def _work(self) -> A:
        """In a thread of its own."""

        def watch(arrivals: list[Arrival]) -> None:
            if self._cancelled.is_set():
                raise _Cancelled
            self.first = self.first or time.monotonic()
            self._loop.call_soon_threadsafe(self._told.put_nowait, arrivals)

        with self.desk.lock:
            return self.ask(self.desk.lm, watch)

    async def _listen(self, http: Request) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.give_up(Gone())

    def timings(self, tokens: int) -> dict[str, Any]:
        """Milliseconds, as the client is told them."""
        spent = self.ended - self.started
        return {
            "queued_ms": _ms(self.started - self.arrived),
            "first_token_ms": _ms(self.first - self.arrived) if self.first else None,
            "total_ms": _ms(self.ended - self.arrived),
            "tokens_per_second": round(tokens / spent, 3) if spent > 0 else None,
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
