"""Whose turn it is: so many requests run, so many wait, and the next one is told to come back later."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tracformer.server import errors

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
                f"{self.running} requests are running and {self.waiting} are waiting, which is as many as this server takes; "
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
        """Seconds until all who wait now have had their turn, were requests to take as long as the last ones did; at least 1."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return max(1, min(60, math.ceil(mean * (self.waiting + 1) / self.slots)))
