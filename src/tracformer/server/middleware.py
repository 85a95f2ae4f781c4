"""Checks before a request reaches its protocol (origin, API key, body size), and its log line."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tracformer.server import Settings, errors
from tracformer.server.errors import ApiError
from tracformer.server.observability import Metrics, log_event
from tracformer.server.queue import ClientGoneError

# paths that need no API key; nor do the page's files
OPEN = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")
PAGE = "/page/"
CLIENT_GONE = 499  # status in the log of a client that disconnected before its answer
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'",
}


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
            self._check_access(path, scope["method"], Headers(scope=scope))
            await self.app(scope, await self._read_body(scope, receive), send_with_headers)
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
                    ApiError(
                        500, "internal error; the server's log has the details", errors.SERVER
                    ),
                )
        finally:
            self._record(entry, scope["method"])

    def _check_access(self, path: str, method: str, headers: Headers) -> None:
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
                errors.AUTHENTICATION,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _is_allowed(self, origin: str, host: str) -> bool:
        return (
            "*" in self.settings.origins
            or origin in self.settings.origins
            or origin.partition("://")[2] == host
        )

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body, up to the limit, and return a `receive` that replays it.

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
                408, "the body did not arrive in time", errors.TIMEOUT, code="timeout"
            ) from None
        messages = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay

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


async def _refuse(send: Send, path: str, problem: ApiError) -> None:
    """Send an error answer."""
    status, body = errors.body_of(problem, path)
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **problem.headers,
    }
    if status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body stays unread
    raw = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
