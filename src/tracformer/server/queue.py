"""Admission of requests, and their work in threads.

Whose turn it is: so many requests run, so many wait, and the next one is told to come back
later.

What a token is called in the answers of OpenAI's and llama.cpp's protocols.

One request's work: it waits for its turn, runs in a worker thread, tells of tokens as they come,
and can be given up at any time.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Generic, TypeVar

from starlette.requests import Request as Http

from tracformer.generation.engine import Cancelled, Closed, DeadlineExceeded, Engine, Request
from tracformer.generation.language_model import LanguageModel
from tracformer.generation.token_text import bytes_of
from tracformer.server import errors
from tracformer.server.errors import UNAVAILABLE, ApiError, late

REMEMBERED = 64  # requests whose time is remembered for the advice to come back


class Gate:
    """`slots` requests run at once, `queue` wait in the order they came."""

    def __init__(self, slots: int, queue: int) -> None:
        self.slots, self.queue = slots, queue
        self.running = self.waiting = 0
        self._free = asyncio.Semaphore(slots)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Holds a slot. A full queue raises at once; giving up while waiting leaves no trace."""
        if self._free.locked() and self.waiting >= self.queue:
            raise errors.busy(
                f"{self.running} requests are running and {self.waiting} are waiting, which is as "
                "many as this server takes; "
                "come back later",
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
        """Seconds until all who wait now have had their turn, were requests to take as long as the
        last ones did; at least 1.
        """
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return max(1, min(60, math.ceil(mean * (self.waiting + 1) / self.slots)))


class Names:
    """Token id to its text; bytes that are no text by themselves are named
    `bytes:\\xe2\\x82`, as OpenAI does.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def __getitem__(self, token_id: int) -> str:
        text = self.lm.spelling.token(token_id)
        raw = self.raw(token_id) if "\ufffd" in text else b""
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if raw else text

    def raw(self, token_id: int) -> bytes:
        """Its own bytes; none where only the tokeniser knows them."""
        text = self.lm.spelling.token(token_id)
        if "\ufffd" not in text:
            return text.encode()
        if self.lm.tokenizer.kind == "byte":
            return bytes([token_id])
        byte = self.lm.tokenizer.bytes_of_ids.get(token_id)
        return self._spelt[token_id] if byte is None else bytes([byte])

    @cached_property
    def _spelt(self) -> list[bytes]:
        return bytes_of(self.lm.tokenizer.tokens())


A = TypeVar("A")
# None: a token came, and nobody wants to hear of others; returns whether somebody does
Tell = Callable[[Any], bool]
# runs in a thread: the model to ask, and whom to tell of what comes before the result
Ask = Callable[[LanguageModel, Tell], A]


class ClientGoneError(Exception):
    """The client went away: nobody reads the answer."""


class Desk:
    """Where jobs are handed in: the engine that runs the model, a thread for each job that runs,
    and the gate before them.
    """

    def __init__(self, lm: LanguageModel, rows: int, queue: int) -> None:
        self.lm, self.names = lm, Names(lm)
        self.engine = Engine(lm.model, rows=rows)
        self.gate = Gate(rows, queue)
        self.threads = ThreadPoolExecutor(rows, thread_name_prefix="request")

    def start(self, http: Http, ask: Ask[A], seconds: float) -> "Job[A]":
        return Job(self, http, ask, seconds)

    def close(self) -> None:
        """What still runs is cancelled: whoever wanted to wait for it has done so."""
        self.engine.close(drain=False)
        self.threads.shutdown(wait=True, cancel_futures=True)


class Job(Generic[A]):
    """`async for` gives what the work tells, and then `result` is there.

    A job that fails raises at the end of the loop.
    """

    def __init__(self, desk: Desk, http: Http, ask: Ask[A], seconds: float) -> None:
        self.desk, self.ask, self.seconds = desk, ask, seconds
        self.arrived = time.monotonic()
        # when it left the queue, when its first token came, when it was done
        self.started = self.first = self.ended = 0.0
        self.result: A
        self._loop = asyncio.get_running_loop()
        self._told: deque[Any] = deque()  # None: nothing more will come
        self._news = asyncio.Event()  # something was told
        self._woken = False  # and the loop knows, or will soon
        self._request: Request | None = None
        self._why: Exception | None = None  # it was given up
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)
        self._listener = asyncio.create_task(self._listen(http))
        self._timer = self._loop.call_later(seconds, self.give_up, late(seconds))

    async def begun(self) -> None:
        """Returns when there is something to tell; a job that fails before that raises, while the
        answer's status can still say so.
        """
        try:
            await self._news.wait()
            if self._told[0] is None:
                self._take()
        except BaseException:
            self._leave()
            raise

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (told := await self._hear()) is not None:
                yield told
            self._take()
        finally:
            self._leave()

    @property
    def more(self) -> bool:
        """Something was told that was not heard yet."""
        return bool(self._told)

    async def done(self) -> A:
        async for _ in self:
            pass
        return self.result

    def give_up(self, why: Exception) -> None:
        """Free what the job holds; whoever waits for it is told why."""
        if self._why is not None or self._task.done():
            return
        self._why = why
        if self._request is not None:
            self._request.cancel()
        else:
            self._task.cancel()
        self._say(None)

    def timings(self, tokens: int) -> dict[str, Any]:
        """Milliseconds, as the client is told them."""
        spent = self.ended - self.started
        return {
            "queued_ms": _ms(self.started - self.arrived),
            "first_token_ms": _ms(self.first - self.arrived) if self.first else None,
            "total_ms": _ms(self.ended - self.arrived),
            "tokens_per_second": round(tokens / spent, 3) if spent > 0 else None,
        }

    def _ended(self, task: "asyncio.Task[A]") -> None:
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits for it any more
        self._say(None)

    def _say(self, what: Any) -> None:
        """From any thread. The loop is woken once for all that it has not heard."""
        self._told.append(what)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._news.set)

    async def _hear(self) -> Any:
        while not self._told:
            self._woken = False
            self._news.clear()
            # what was said before `_woken` fell is here; what is said after it wakes the loop
            if not self._told:
                await self._news.wait()
        return self._told.popleft()

    def _take(self) -> None:
        if self._why is not None:
            raise self._why
        try:
            self.result = self._task.result()
        except ValueError as mistake:
            raise ApiError(400, str(mistake)) from mistake
        except DeadlineExceeded as error:
            raise late(self.seconds) from error
        except (Cancelled, Closed) as error:
            raise ApiError(503, "the server is stopping", UNAVAILABLE, code="stopping") from error

    def _leave(self) -> None:
        self.give_up(ClientGoneError())
        self._listener.cancel()
        self._timer.cancel()

    async def _run(self) -> A:
        async with self.desk.gate.turn():
            self.started = time.monotonic()
            self._request = self.desk.engine.request(self.arrived + self.seconds)
            result = await self._loop.run_in_executor(self.desk.threads, self._work, self._request)
            self.ended = time.monotonic()
            return result

    def _work(self, request: Request) -> A:
        """In a thread of its own."""

        def tell(what: Any) -> bool:
            self.first = self.first or time.monotonic()
            if what is not None:
                self._say(what)
            return what is not None

        with request:
            return self.ask(self.desk.lm.on(request), tell)

    async def _listen(self, http: Http) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        http.scope["entry"].fields["gone"] = True
        self.give_up(ClientGoneError())


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
