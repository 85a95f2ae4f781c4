"""Routes, pages, start and stop of the server.

The model as `GET /v1/models` tells of it: OpenAI's fields, then what the page needs to know.

The OpenAPI description, and a page that shows it without asking anyone else for scripts or styles.

Listen, and stop well: SIGTERM lets the requests that are there finish, then leaves.

The application: routes, the page, and the model that is loaded while the first callers are told to
wait.
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
from tracformer.server import errors, llamacpp, mistral, openai
from tracformer.server import native_protocol as native
from tracformer.server import observability as logs
from tracformer.server.errors import ApiError, body_of, invalid
from tracformer.server.middleware import Front
from tracformer.server.schema import Settings
from tracformer.server.service import Service, service_of

KINDS = {"char": "characters", "byte": "bytes"}  # all others cut text into pieces of words


def describe(lm: LanguageModel, name: str, created: int = 0) -> dict[str, Any]:
    kind = KINDS.get(lm.tokenizer.kind, "bpe")
    letters = (
        token for i, token in enumerate(lm.tokenizer.tokens()) if i not in lm.spelling.special
    )
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tracformer",
        "max_length": lm.model.config.max_length,
        "modes": list(lm.model.config.modes),
        "tokenizer": kind,
        "alphabet": "".join(letters) if kind == "characters" else None,
        "parameters": lm.model.num_parameters(),
        "default": True,
    }


REFUSALS = {
    "400": "The request is wrong: a field, a value, a text that does not fit, or a limit.",
    "401": "An API key is wanted.",
    "408": "Not done in time.",
    "413": "The body is too large.",
    "429": "The queue is full; Retry-After says when to come back.",
    "503": "The model is being loaded, or the server is stopping.",
}
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 0.9em ui-monospace, monospace }
h2 { border-top: 1px solid #8886; padding-top: 1.5rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top;
  padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #8883 }
"""


def describe_reference(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the refusals that this server gives instead of FastAPI's own."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        for path, methods in document["paths"].items():
            for operation in methods.values():
                if "requestBody" not in operation:
                    continue
                if path != "/v1/fim/completions":  # Mistral's clients know 422
                    operation["responses"].pop("422", None)
                for status, description in REFUSALS.items():
                    operation["responses"].setdefault(status, {"description": description})
        app.openapi_schema = document
    return app.openapi_schema


def page(document: dict[str, Any]) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
        "content='width=device-width'>",
        f"<title>{html.escape(document['info']['title'])} API</title><style>{STYLE}</style>",
        f"<h1>{html.escape(document['info']['title'])} "
        f"API</h1><p>{html.escape(document['info'].get('description', ''))}",
        "<p>The same for programs: <a href='openapi.json'>openapi.json</a>.",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} "
                f"{html.escape(path)}</code></h2><p>{html.escape(operation.get('summary', ''))}"
            )
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields(document["components"]["schemas"][name]))
            answers = (
                f"<li><code>{status}</code> {html.escape(told['description'])}"
                for status, told in operation["responses"].items()
            )
            parts.append(f"<ul>{''.join(answers)}</ul>")
    return "\n".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = []
    for name, field in schema["properties"].items():
        default = (
            "required"
            if name in required
            else json.dumps(field["default"])
            if "default" in field
            else ""
        )
        cells = (
            f"<code>{html.escape(name)}</code>",
            html.escape(_kind(field)),
            f"<code>{html.escape(default)}</code>",
        )
        rows.append(
            "<tr>"
            + "".join(f"<td>{cell}" for cell in cells)
            + f"<td>{html.escape(field.get('description', ''))}"
        )
    return "<table><tr><th>field<th>kind<th>default<th>" + "".join(rows) + "</table>"


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_kind, field["anyOf"])))
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of ({_kind(field.get('items', {}))})"
    return str(field.get("type", "any"))


# The engine's thread gives up the interpreter's lock at every operation of PyTorch, and waits this
# long for a thread that holds it. Python's own 5 ms are as long as a whole step.
SWITCH_SECONDS = 1e-4
LAST_WORDS = 10  # seconds for answers to go out once the work behind them was given up


class Server(uvicorn.Server):
    """uvicorn's, which on SIGTERM or SIGINT stops listening and waits for running requests, at most
    `settings.drain` seconds. What is left then, or when SIGINT comes a second time, is answered
    with 503.
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
        """A server that was asked to stop and did has not failed: uvicorn would raise the signal
        again and end with its code.
        """
        if threading.current_thread() is not threading.main_thread():  # only that one may
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


PAGE = Path(__file__).parent / "page"
METRICS = "text/plain; version=0.0.4; charset=utf-8"


def build(
    load: Callable[[], LanguageModel],
    name: str,
    settings: Settings,
    failed: Callable[[], None] | None = None,
) -> FastAPI:
    """`load` is called once, in a thread, when the server has begun to listen; should it fail,
    `failed` is called.
    """
    service = Service(settings, name)

    async def open_up() -> None:
        try:
            lm = await asyncio.to_thread(load)
            service.open(lm)
        except Exception as error:
            logs.tell("the model could not be loaded", logging.CRITICAL, error, reason=str(error))
            if failed is not None:
                failed()
            return
        logs.tell("ready", model=name, parameters=lm.model.num_parameters())

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        opening = asyncio.create_task(open_up())
        yield
        opening.cancel()
        await asyncio.to_thread(service.close)
        logs.tell("stopped")

    app = FastAPI(
        title="tracformer",
        version=__version__,
        description="Fill holes in texts, and say exactly how probable the filling is.",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    for protocol in (native, openai, llamacpp, mistral):
        app.include_router(protocol.router)
    for kind, handler in (
        (ApiError, _problem),
        (RequestValidationError, _invalid),
        (HTTPException, _http),
    ):
        app.add_exception_handler(kind, handler)
    _add_pages(app)
    app.openapi = lambda: describe_reference(app)  # type: ignore[method-assign]
    known = frozenset(describe_reference(app)["paths"]) | {"/", "/docs", "/openapi.json"}
    app.add_middleware(Front, settings=settings, metrics=service.metrics, paths=known)
    if settings.origins:  # outermost, so that a page from there can read refusals too
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
        summary="Is the model loaded?",
        responses={503: {"description": "It is being loaded."}},
    )
    async def health(http: Request) -> Response:
        service_of(http).desk  # noqa: B018 - raises 503 until the model is there
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models", summary="The models here: one")
    async def listed(http: Request) -> Response:
        service = service_of(http)
        return JSONResponse(
            {"object": "list", "data": [describe(service.desk.lm, service.name, service.created)]}
        )

    @app.get("/metrics", summary="Numbers for Prometheus")
    async def metrics(http: Request) -> Response:
        return Response(service_of(http).metrics.text(), media_type=METRICS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", GZipMiddleware(StaticFiles(directory=PAGE)), name="page")


async def _problem(http: Request, problem: Any) -> Response:
    status, body = body_of(problem, http.url.path)
    return JSONResponse(body, status, problem.headers)


async def _invalid(http: Request, error: Any) -> Response:
    return await _problem(http, invalid(error.errors()))


async def _http(http: Request, error: Any) -> Response:
    """What the framework refuses: a path that is not there, a method that is not allowed, a body
    that cannot be read.
    """
    kind = errors.NOT_FOUND if error.status_code == 404 else errors.INVALID
    return await _problem(
        http, ApiError(error.status_code, str(error.detail), kind, headers=error.headers)
    )
