"""Checks before a request reaches its protocol, its log line and the metrics.

Checked are the Host and Origin headers, the API key, and size and structure of the body. The log
holds one JSON object per line; metrics are Prometheus metrics. Neither ever contains the texts of
requests.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tracformer.server import Settings
from tracformer.server.schema import (
    AUTHENTICATION,
    SERVER,
    TIMEOUT,
    ApiError,
    ClientGoneError,
    body_of,
)

if TYPE_CHECKING:
    from tracformer.server.queue import Backend

# paths that need no API key; nor do the page's files
OPEN = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")
PAGE = "/page/"
PROBES = ("/health", "/metrics")  # orchestrators call them by any host name
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# Bytes of a body that are read and thrown away after a refusal: a client that sends all before it
# reads would else find its connection reset instead of the answer.
DISCARDED = 2**25
# A string, or a byte that opens, separates or closes values. Possessive, so that it is linear.
JSON_PART = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{\]},]', re.DOTALL)
PARTS_AT_ONCE = 8192  # of a body that are checked in one step of the event loop
CLIENT_GONE = 499  # status in the log of a client that disconnected before its answer
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'",
}


LOGGER = logging.getLogger("tracformer.server")


class JsonFormatter(logging.Formatter):
    """Write a log record as one line of JSON.

    An exception appears by its type and traceback only: its message may quote a text.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["trace"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)
            ]
        return json.dumps(line)


def configure_logging(level: str) -> None:
    """Send the logs of the server and of uvicorn to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    # uvicorn's own info messages repeat what the server logs
    for name, least in (
        (LOGGER.name, level.upper()),
        ("tracformer", "WARNING"),
        ("uvicorn", "WARNING"),
        ("asyncio", "WARNING"),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def log_event(
    event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any
) -> None:
    """Write one event to the log.

    Args:
        event: Name of the event.
        level: Level of the `logging` module.
        error: Exception to log with its traceback.
        fields: Further fields of the line: numbers and names, never texts of a request.
    """
    LOGGER.log(level, event, extra={"fields": fields}, exc_info=error)


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one server.

    Each server has its own registry, so that two servers in one process do not add up.

    Args:
        backend: Returns the loaded model's backend, or None while it is loading.
    """

    def __init__(self, backend: "Callable[[], Backend | None]") -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tracformer_requests", "Requests answered.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "tracformer_request_seconds",
            "From arrival to the last byte.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.queued = Histogram(
            "tracformer_queued_seconds",
            "Time in the queue.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first = Histogram(
            "tracformer_first_token_seconds",
            "From arrival to the first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "tracformer_tokens", "Tokens of finished requests.", ["kind"], registry=self.registry
        )
        self.gone = Counter(
            "tracformer_gone",
            "Clients that disconnected before the end of their answer.",
            registry=self.registry,
        )
        self.registry.register(_LoadCollector(backend))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _LoadCollector(Collector):
    """Gauges that are read from the engine and the gate when Prometheus scrapes."""

    def __init__(self, backend: "Callable[[], Backend | None]") -> None:
        self.backend = backend

    def collect(self) -> Iterable[Metric]:
        backend = self.backend()
        yield GaugeMetricFamily(
            "tracformer_ready", "1 when the model is loaded.", float(backend is not None)
        )
        if backend is None:
            return
        load, gate = backend.engine.load, backend.gate
        for name, description, value in (
            ("requests_running", "Requests that run.", gate.running),
            ("requests_waiting", "Requests in the queue.", gate.waiting),
            ("rows_running", "Rows in flight.", load.rows),
            ("rows_waiting", "Rows that wait to be admitted.", load.waiting),
            ("rows_capacity", "Maximum number of rows in flight.", load.capacity),
        ):
            yield GaugeMetricFamily(f"tracformer_{name}", description, value)
        for name, description, value in (
            ("steps", "Steps of the engine.", load.steps),
            ("tokens", "Tokens generated, those for choosing lengths included.", load.tokens),
        ):
            yield CounterMetricFamily(f"tracformer_engine_{name}", description, value)


@dataclass
class LogEntry:
    """What is logged about a request. `fields` are set by the protocol: numbers, never texts."""

    id: str
    path: str
    start: float
    status: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


class RequestGuard:
    """ASGI middleware that checks and logs every request.

    Args:
        app: The application to protect.
        settings: Key, allowed origins and limits.
        metrics: Where requests are counted.
        paths: Paths that appear in logs and metrics; all others are "other".
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, paths: frozenset[str]
    ) -> None:
        self.app, self.settings, self.metrics, self.paths = app, settings, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        # paths that clients make up stay out of logs and metrics
        label = path if path in self.paths else PAGE if path.startswith(PAGE) else "other"
        entry = LogEntry(secrets.token_hex(8), label, time.monotonic())
        scope["log_entry"] = entry

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = entry.id
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            try:
                self._check_access(path, scope["method"], Headers(scope=scope))
                body = await self._read_body(scope, receive)
            except ApiError as problem:
                # a body that is too slow is not waited for again
                rest = _nothing if problem.status == 408 else partial(self._discard_body, receive)
                await _refuse(send_with_headers, path, problem, rest)
                return
            await self._check_structure(body)
            messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, replay, send_with_headers)
        except ApiError as problem:
            await _refuse(send_with_headers, path, problem)
        except ClientGoneError:
            pass
        except Exception as error:  # a bug of ours: the traceback goes to the log only
            log_event("failed", logging.ERROR, error, id=entry.id, path=label)
            if not entry.status:
                await _refuse(
                    send_with_headers,
                    path,
                    ApiError(500, "internal error; the server's log has the details", SERVER),
                )
        finally:
            self._record(entry, scope["method"])

    def _check_access(self, path: str, method: str, headers: Headers) -> None:
        if path not in PROBES and not all(map(self._is_here, headers.getlist("host") or [""])):
            raise ApiError(
                403,
                "this server is not called by the name in the Host header; start it with "
                "--allowed-host to permit it",
                code="host",
            )
        origin = headers.get("origin")
        if (
            origin is not None
            and method not in ("GET", "HEAD", "OPTIONS")
            and not self._is_allowed(origin, headers.get("host", ""))
        ):
            raise ApiError(
                403,
                "web pages of this origin may not call this server; start it with "
                "--allow-origin to permit them",
                code="origin",
            )
        key = self.settings.api_key
        if key is None or path in OPEN or path.startswith(PAGE) or method == "OPTIONS":
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("latin-1"), key.encode()):
            raise ApiError(
                401,
                "this server needs an API key, sent as `Authorization: Bearer KEY`",
                AUTHENTICATION,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _is_here(self, host: str) -> bool:
        """Return whether a Host header names this server.

        A web page elsewhere can let its own name point to this machine, and a browser then takes
        this server for the page's own. It cannot do so with a number, which is no name.
        """
        name = re.sub(r":\d*$", "", host.strip().lower()).removeprefix("[").removesuffix("]")
        bound = self.settings.host.lower()
        if name in (*LOCAL_NAMES, bound) or "*" in self.settings.hosts:
            return True
        if bound in ("0.0.0.0", "::"):  # all addresses of this machine
            try:
                ipaddress.ip_address(name)
                return True
            except ValueError:
                pass
        return name in map(str.lower, self.settings.hosts)

    def _is_allowed(self, origin: str, host: str) -> bool:
        return (
            "*" in self.settings.origins
            or origin in self.settings.origins
            or origin.partition("://")[2] == host
        )

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body.

        Raises:
            ApiError: The body is too large or too slow.
            ClientGoneError: The client disconnected before the end of the body.
        """
        limit = self.settings.limits.body
        too_large = ApiError(
            413,
            f"the body has more than {limit} bytes, the limit of this server",
            code="too_large",
        )
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isascii() or not declared.isdecimal() or int(declared[:20]) > limit:
            raise too_large
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    parts.append(message.get("body", b""))
                    size, more = size + len(parts[-1]), message.get("more_body", False)
                    if size > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(
                408, "the body did not arrive in time", TIMEOUT, code="timeout"
            ) from None
        return b"".join(parts)

    async def _check_structure(self, body: bytes) -> None:
        """Raise ApiError if the JSON of a body has too many values or is nested too deeply.

        Parsing and validating it holds up all other requests, so this bounds how long that takes.
        """
        limits = self.settings.limits
        opened = body.count(b"[") + body.count(b"{")
        if opened <= limits.depth and opened + body.count(b",") + 1 <= limits.values:
            return
        values, depth = 1, 0
        for number, part in enumerate(JSON_PART.finditer(body)):
            byte = body[part.start()]
            if byte in b"[{":
                depth += 1
            elif byte in b"]}":
                depth -= 1
            values += byte in b"[{,"
            for name, value, limit in (
                ("values", values, limits.values),
                ("levels", depth, limits.depth),
            ):
                if value > limit:
                    raise ApiError(
                        400,
                        f"the body's JSON has more than {limit} {name}, the limit of this server",
                        code="limit",
                    )
            if number % PARTS_AT_ONCE == PARTS_AT_ONCE - 1:
                await asyncio.sleep(0)

    async def _discard_body(self, receive: Receive) -> None:
        """Read and throw away the rest of a body, up to limits of size and time."""
        size, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.body_timeout):
                while more and size < DISCARDED:
                    message = await receive()
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)

    def _record(self, entry: LogEntry, method: str) -> None:
        seconds = time.monotonic() - entry.start
        status = entry.status or CLIENT_GONE
        if status == CLIENT_GONE or entry.fields.get("gone"):
            self.metrics.gone.inc()
        self.metrics.requests.labels(entry.path, str(status)).inc()
        self.metrics.seconds.labels(entry.path).observe(seconds)
        known = (
            method
            if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
            else "other"
        )
        log_event(
            "request",
            id=entry.id,
            method=known,
            path=entry.path,
            status=status,
            ms=round(seconds * 1000, 1),
            **entry.fields,
        )


async def _nothing() -> None:
    pass


async def _refuse(
    send: Send,
    path: str,
    problem: ApiError,
    discard: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Send an error answer.

    Args:
        send: Sends to the client.
        path: Decides the shape of the answer.
        problem: The error.
        discard: Reads the rest of a request that was not read, before the connection is closed.
    """
    status, body = body_of(problem, path)
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **problem.headers,
    }
    if discard is not None:
        headers["Connection"] = "close"  # a part of the body may stay unread
    raw = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": discard is not None})
    if discard is not None:
        await discard()
        await send({"type": "http.response.body", "body": b""})
