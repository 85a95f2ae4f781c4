"""Connections: how slowly a client may send headers and read answers, and how many there may be.

uvicorn has no limit for these. `Connection` adds them to its HTTP protocol. `ConnectionLimits`
keeps the connections of one server in their order, so that the oldest idle one makes room for a new
one: clients that connect and send nothing cannot keep others out. `queue_connections` makes room
for bursts of new ones. `report_loop_errors` logs what the event loop itself reports, such as a lack
of file descriptors, as JSON and not too often.
"""

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tracformer.server.middleware import log_event

BACKLOG = 16  # connections that are accepted in one step of the event loop
STEPS = 4  # from accepting a connection to closing the one that made room for it
QUEUED = 1024  # connections that the kernel keeps until they are accepted
SPARE_DESCRIPTORS = 32  # for files, and for sockets of the event loop
REPEAT_SECONDS = 10.0  # a kind of error of the event loop is logged once in this time
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b'Connection: close\r\n\r\n{"error": {"message": "too many connections; try again later", '
    b'"type": "unavailable_error", "param": null, "code": "connections"}}'
)


class ConnectionLimits:
    """The connections of one server that wait for the headers of a request.

    Args:
        most: Number of connections; fewer if the process may open too few files.
        header_timeout: Seconds for the headers of a request to arrive.
        read_timeout: Seconds in which a client must read some of an answer that waits for it.
    """

    def __init__(self, most: int, header_timeout: float, read_timeout: float) -> None:
        self.most, self.header_timeout = min(most, _free_descriptors()), header_timeout
        self.read_timeout = read_timeout
        self.idle: dict[Connection, None] = {}  # the oldest first

    def make_room(self) -> bool:
        """Close the connection that is idle for longest; return whether there was one."""
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        oldest.give_up()
        return True


class Connection(H11Protocol):
    """uvicorn's HTTP protocol, with time limits for headers and readers and a limit of connections.

    Args:
        limits: Limits of the server.
        **options: Passed to uvicorn's protocol.
    """

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self.limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None  # runs while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # any byte that waits starts the reader's timer
        if len(self.connections) > self.limits.most and not self.limits.make_room():
            transport.write(FULL)
            transport.close()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_watching_reader()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_watching_reader()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close this connection at once: its client is too slow."""
        self._stop_watching()
        # Free its place now: the transport reports the end only in the next step of the loop.
        self.connections.discard(self)
        self.transport.abort()

    def _watch_reader(self, waiting: int) -> None:
        """Close this connection if none of the bytes that wait is read in time."""

        def check() -> None:
            left = self.transport.get_write_buffer_size()
            if left < waiting:
                self._watch_reader(left)
            else:
                self.give_up()

        self._reader = self.loop.call_later(self.limits.read_timeout, check)

    def _stop_watching_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def _watch(self) -> None:
        """Start the timer if this connection waits for headers, and stop it if not."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_timeout, self.give_up)
            self.limits.idle[self] = None

    def _stop_watching(self) -> None:
        self.limits.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def queue_connections(sockets: Iterable[Any]) -> None:
    """Let the kernel keep more new connections than are accepted in one step.

    It drops those beyond, and their clients wait for a second before they try again.

    Args:
        sockets: Sockets that listen.
    """
    for each in sockets:
        with socket.socket(fileno=os.dup(each.fileno())) as same:
            same.listen(QUEUED)


def report_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log errors of the event loop as JSON lines, each kind once in `REPEAT_SECONDS`.

    When file descriptors run out, asyncio stops accepting connections for a second and tries again;
    it reports that for every connection that waits.
    """
    logged: dict[str, float] = {}

    def report(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        out = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
        event = "out of file descriptors" if out else "event loop failed"
        now = time.monotonic()
        if now - logged.get(event, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        logged[event] = now
        log_event(event, logging.ERROR, None if out else error)

    loop.set_exception_handler(report)


def _free_descriptors() -> int:
    """Return how many connections the process can hold without running out of descriptors."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 2**31
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return 2**31
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 64
    return max(1, limit - used - STEPS * BACKLOG - SPARE_DESCRIPTORS)
