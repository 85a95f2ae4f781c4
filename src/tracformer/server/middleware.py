"""What every request passes before it reaches a protocol: key, origin, size of its body; and what
is noted of it afterwards.
"""

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

from tracformer.server import errors
from tracformer.server import observability as logs
from tracformer.server.errors import ApiError
from tracformer.server.observability import Metrics
from tracformer.server.queue import ClientGoneError
from tracformer.server.schema import Settings

# need no key; nor do the page's files
OPEN = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")
PAGE = "/page/"
CLIENT_GONE = 499  # in the log alone: nobody is there to be told
SAFETY = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'",
}


@dataclass
class Entry:
    """What the log says of a request. `fields` are the protocol's: numbers, never texts."""

    id: str
    path: str
    start: float
    status: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


class Front:
    """An ASGI application around another."""

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, paths: frozenset[str]
    ) -> None:
        self.app, self.settings, self.metrics, self.paths = app, settings, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        # what a client makes up is not kept
        label = path if path in self.paths else PAGE if path.startswith(PAGE) else "other"
        entry = Entry(secrets.token_hex(8), label, time.monotonic())
        scope["entry"] = entry

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = entry.id
                for name, value in SAFETY.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._admit(path, scope["method"], Headers(scope=scope))
            await self.app(scope, await self._whole_body(scope, receive), answer)
        except ApiError as problem:
            await _refuse(answer, path, problem)
        except ClientGoneError:
            pass
        # a mistake of ours: the client learns that, and the log where it was
        except Exception as error:
            logs.tell("failed", logging.ERROR, error, id=entry.id, path=label)
            if not entry.status:
                await _refuse(
                    answer,
                    path,
                    ApiError(
                        500, "the server made a mistake; its log has the details", errors.SERVER
                    ),
                )
        finally:
            self._note(entry, scope["method"])

    def _admit(self, path: str, method: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if (
            origin is not None
            and method not in ("GET", "HEAD", "OPTIONS")
            and not self._allowed(origin, headers.get("host", ""))
        ):
            raise ApiError(
                403,
                "pages of this origin may not call this server; it can be started with "
                "--allow-origin",
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
                "this server wants its API key, as `Authorization: Bearer KEY`",
                errors.AUTHENTICATION,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _allowed(self, origin: str, host: str) -> bool:
        return (
            "*" in self.settings.origins
            or origin in self.settings.origins
            or origin.partition("://")[2] == host
        )

    async def _whole_body(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the body, as far as it may go, and gives a `receive` that has it.

        A body that breaks off is nobody's request.
        """
        most = self.settings.limits.body
        too_large = ApiError(
            413,
            f"the body has more than {most} bytes, which is the most that this server reads",
            code="too_large",
        )
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isascii() or not declared.isdecimal() or int(declared[:20]) > most:
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
                    if size > most:
                        raise too_large
        except TimeoutError:
            raise ApiError(
                408, "the body did not come within the time allowed", errors.TIMEOUT, code="timeout"
            ) from None
        waiting = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def rest() -> Message:
            return waiting.pop() if waiting else await receive()

        return rest

    def _note(self, entry: Entry, method: str) -> None:
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
        logs.tell(
            "request",
            id=entry.id,
            method=known,
            path=entry.path,
            status=status,
            ms=round(seconds * 1000, 1),
            **entry.fields,
        )


async def _refuse(send: Send, path: str, problem: ApiError) -> None:
    status, body = errors.body_of(problem, path)
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **problem.headers,
    }
    if status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    raw = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
