"""Listen, and stop well: SIGTERM lets the requests that are there finish, then leaves."""

import asyncio
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn

from tracformer.generation.language import LanguageModel
from tracformer.server import logs
from tracformer.server.app import build
from tracformer.server.service import Service
from tracformer.server.settings import Settings

# The engine's thread gives up the interpreter's lock at every operation of PyTorch, and waits this long for a thread that holds it.
# Python's own 5 ms are as long as a whole step.
SWITCH_SECONDS = 1e-4
LAST_WORDS = 10  # seconds for answers to go out once the work behind them was given up


class Server(uvicorn.Server):
    """uvicorn's, which on SIGTERM or SIGINT stops listening and waits for running requests, at most `settings.drain` seconds. What is left
    then, or when SIGINT comes a second time, is answered with 503.
    """

    def __init__(self, load: Callable[[], LanguageModel], name: str, settings: Settings) -> None:
        self.failed = False
        self.drain = settings.drain
        sys.setswitchinterval(SWITCH_SECONDS)
        app = build(load, name, settings, self._stop)
        self.service: Service = app.state.service
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,  # ours says it
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=math.ceil(settings.drain) + LAST_WORDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A server that was asked to stop and did has not failed: uvicorn would raise the signal again and end with its code."""
        if threading.current_thread() is not threading.main_thread():  # only that one may
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @property
    def port(self) -> int:
        """The one that was free, where port 0 was asked for."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            logs.tell("listening", host=self.config.host, port=self.port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        patience = asyncio.create_task(self._wait_then_give_up())
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn waits for nothing then
            await patience
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS)
            await self.lifespan.shutdown()
        patience.cancel()

    async def _wait_then_give_up(self) -> None:
        end = time.monotonic() + self.drain
        while not self.force_exit and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(0.1, left))
        await asyncio.to_thread(self.service.close)

    def _stop(self) -> None:
        self.failed = self.should_exit = True
