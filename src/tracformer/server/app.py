"""The application: routes, pages and documentation; the server that starts and stops it.

The model is loaded in a thread after the server has begun to listen; until then requests are
answered with 503.
"""

import asyncio
import html
import json
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from tracformer import __version__
from tracformer.generation.language_model import LanguageModel
from tracformer.server import Settings, llamacpp, mistral, native_protocol, openai
from tracformer.server.connections import (
    BACKLOG,
    Connection,
    ConnectionLimits,
    queue_connections,
    report_loop_errors,
)
from tracformer.server.middleware import RequestGuard, log_event
from tracformer.server.queue import Service, service_of
from tracformer.server.schema import INVALID, NOT_FOUND, ApiError, body_of, invalid

PAGE = Path(__file__).parent / "page"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TOKENIZER_KINDS = {"char": "characters", "byte": "bytes"}  # all others: pieces of words
ERRORS = {
    "400": "The request is wrong: a field, a value, a text that does not fit, or a limit.",
    "401": "The API key is missing or wrong.",
    "403": "The Host or Origin header names a host that is not allowed.",
    "408": "The request exceeded its time limit.",
    "413": "The body is too large.",
    "429": "The queue is full; the Retry-After header says when to try again.",
    "503": "The model is still loading, or the server is stopping.",
}
# The engine's thread releases the interpreter lock at every PyTorch operation, and waits this long
# for a thread that holds it. Python's default of 5 ms is as long as a whole step.
SWITCH_SECONDS = 1e-4
LAST_ANSWERS = 10  # seconds to send the answers of requests that were cancelled at shutdown


class Server(uvicorn.Server):
    """uvicorn's server, with the model loaded in the background and a graceful stop.

    On SIGTERM or SIGINT it stops listening and waits for running requests, at most `settings.drain`
    seconds. Requests that are left then, or at a second SIGINT, are answered with 503.

    Args:
        load: Returns the model; called once, in a thread.
        name: Name of the model.
        settings: Settings of the server.
    """

    def __init__(self, load: Callable[[], LanguageModel], name: str, settings: Settings) -> None:
        self.failed = False  # the model could not be loaded
        self.drain = settings.drain
        sys.setswitchinterval(SWITCH_SECONDS)
        app = make_app(load, name, settings, self._stop_failed)
        self.service: Service = app.state.service
        limits = ConnectionLimits(
            settings.connections, settings.header_timeout, settings.body_timeout
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, limits),  # type: ignore[arg-type]
                loop="asyncio",
                backlog=BACKLOG,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,  # RequestGuard logs requests
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=math.ceil(settings.drain) + LAST_ANSWERS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again at the end, as uvicorn would.

        A server that stopped because of a signal has not failed.
        """
        if threading.current_thread() is not threading.main_thread():  # signals need the main one
            yield
            return
        before = {
            each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @property
    def port(self) -> int:
        """The port it listens on, also where `settings.port` is 0."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Begin to listen."""
        report_loop_errors(asyncio.get_running_loop())
        await super().startup(sockets)
        if self.started:
            queue_connections(sock for server in self.servers for sock in server.sockets)
            log_event("listening", host=self.config.host, port=self.port)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Stop listening, and wait for running requests."""
        drain = asyncio.create_task(self._drain_then_cancel())
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn does not wait then
            await drain
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=LAST_ANSWERS)
            await self.lifespan.shutdown()
        drain.cancel()

    async def _drain_then_cancel(self) -> None:
        end = time.monotonic() + self.drain
        while not self.force_exit and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(0.1, left))
        await asyncio.to_thread(self.service.close)

    def _stop_failed(self) -> None:
        self.failed = self.should_exit = True


def make_app(
    load: Callable[[], LanguageModel],
    name: str,
    settings: Settings,
    on_failure: Callable[[], None] | None = None,
) -> FastAPI:
    """Return the application.

    Args:
        load: Returns the model; called once, in a thread, when the server has begun to listen.
        name: Name of the model.
        settings: Settings of the server.
        on_failure: Called if the model cannot be loaded.
    """
    service = Service(settings, name)

    async def load_model() -> None:
        try:
            lm = await asyncio.to_thread(load)
            service.open(lm)
        except Exception as error:
            log_event("model could not be loaded", logging.CRITICAL, error, reason=str(error))
            if on_failure is not None:
                on_failure()
            return
        log_event("ready", model=name, parameters=lm.model.num_parameters())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(load_model())
        yield
        loading.cancel()
        await asyncio.to_thread(service.close)
        log_event("stopped")

    app = FastAPI(
        title="tracformer",
        version=__version__,
        description="Fill blanks in texts, and score texts.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own page loads scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    for protocol in (native_protocol, openai, llamacpp, mistral):
        app.include_router(protocol.router)
    for kind, handler in (
        (ApiError, _answer_error),
        (RequestValidationError, _answer_invalid),
        (HTTPException, _answer_http_error),
    ):
        app.add_exception_handler(kind, handler)
    _add_pages(app)
    app.openapi = lambda: describe_api(app)  # type: ignore[method-assign]
    known = frozenset(app.openapi()["paths"]) | {"/", "/docs", "/openapi.json"}
    app.add_middleware(RequestGuard, settings=settings, metrics=service.metrics, paths=known)
    if settings.origins:  # outermost, so that web pages can read error answers too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _add_pages(app: FastAPI) -> None:
    @app.get(
        "/health",
        summary="Whether the model is loaded",
        responses={503: {"description": "It is still loading."}},
    )
    async def health(http: Request) -> Response:
        service_of(http).backend  # noqa: B018 - raises 503 until the model is loaded
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models", summary="The models of this server: one")
    async def models(http: Request) -> Response:
        service = service_of(http)
        model = describe_model(service.backend.lm, service.name, service.created)
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def metrics(http: Request) -> Response:
        return Response(service_of(http).metrics.text(), media_type=METRICS_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", GZipMiddleware(StaticFiles(directory=PAGE)), name="page")


async def _answer_error(http: Request, problem: Any) -> Response:
    status, body = body_of(problem, http.url.path)
    return JSONResponse(body, status, problem.headers)


async def _answer_invalid(http: Request, error: Any) -> Response:
    return await _answer_error(http, invalid(error.errors()))


async def _answer_http_error(http: Request, error: Any) -> Response:
    """Answer what the framework refuses: an unknown path, a wrong method, an unreadable body."""
    kind = NOT_FOUND if error.status_code == 404 else INVALID
    problem = ApiError(error.status_code, str(error.detail), kind, headers=error.headers)
    return await _answer_error(http, problem)


def describe_model(lm: LanguageModel, name: str, created: int = 0) -> dict[str, Any]:
    """Return a model as `GET /v1/models` shows it: OpenAI's fields, then what the page needs."""
    kind = TOKENIZER_KINDS.get(lm.tokenizer.kind, "bpe")
    special = lm.spelling.special
    characters = (token for i, token in enumerate(lm.tokenizer.tokens()) if i not in special)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tracformer",
        "max_length": lm.model.config.max_length,
        "modes": list(lm.model.config.modes),
        "tokenizer": kind,
        "alphabet": "".join(characters) if kind == "characters" else None,
        "parameters": lm.model.num_parameters(),
        "generation": lm.generation.to_dict(),
        "default": True,
    }


def describe_api(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the errors that this server answers."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        for path, methods in document["paths"].items():
            for operation in methods.values():
                if "requestBody" not in operation:
                    continue
                if path != mistral.MistralCompletion.path:  # only Mistral's clients expect 422
                    operation["responses"].pop("422", None)
                for status, description in ERRORS.items():
                    operation["responses"].setdefault(status, {"description": description})
        app.openapi_schema = document
    return app.openapi_schema


def docs_page(document: dict[str, Any]) -> str:
    """Return the OpenAPI document as one HTML page that loads nothing from elsewhere."""
    info, schemas = document["info"], document["components"]["schemas"]
    title = html.escape(info["title"])
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{title} API</title><link rel=stylesheet href=page/docs.css>",
        f"<h1>{title} API</h1><p>{html.escape(info['description'])}",
        "<p>For programs: <a href=openapi.json>openapi.json</a>.",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}")
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields_table(schemas[name]))
            parts.append("<ul>")
            for status, answer in operation["responses"].items():
                parts.append(f"<li><code>{status}</code> {html.escape(answer['description'])}")
            parts.append("</ul>")
    return "\n".join(parts)


def _fields_table(schema: dict[str, Any]) -> str:
    rows = ["<table><tr><th>field<th>type<th>default<th>"]
    for name, field in schema["properties"].items():
        default = json.dumps(field["default"]) if "default" in field else ""
        if name in schema.get("required", ()):
            default = "required"
        cells = (name, _type_name(field), default, field.get("description", ""))
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in cells))
    return "\n".join([*rows, "</table>"])


def _type_name(field: dict[str, Any]) -> str:
    """Return the type of a field in words."""
    if alternatives := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type_name, alternatives)))
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of ({_type_name(field.get('items', {}))})"
    return str(field.get("type", "any"))
