"""The application: routes, the page, and the model that is loaded while the first callers are told to wait."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from tracformer import __version__
from tracformer.generation.language import LanguageModel
from tracformer.server import errors, llamacpp, logs, mistral, models, native, openai, reference
from tracformer.server.errors import ApiError, body_of, invalid
from tracformer.server.front import Front
from tracformer.server.service import Service, service_of
from tracformer.server.settings import Settings

PAGE = Path(__file__).parent / "page"
METRICS = "text/plain; version=0.0.4; charset=utf-8"


def build(load: Callable[[], LanguageModel], name: str, settings: Settings, failed: Callable[[], None] | None = None) -> FastAPI:
    """`load` is called once, in a thread, when the server has begun to listen; should it fail, `failed` is called."""
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
    for kind, handler in ((ApiError, _problem), (RequestValidationError, _invalid), (HTTPException, _http)):
        app.add_exception_handler(kind, handler)
    _add_pages(app)
    app.openapi = lambda: reference.describe(app)  # type: ignore[method-assign]
    known = frozenset(reference.describe(app)["paths"]) | {"/", "/docs", "/openapi.json"}
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
    @app.get("/health", summary="Is the model loaded?", responses={503: {"description": "It is being loaded."}})
    async def health(http: Request) -> Response:
        service_of(http).desk  # noqa: B018 - raises 503 until the model is there
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models", summary="The models here: one")
    async def listed(http: Request) -> Response:
        service = service_of(http)
        return JSONResponse({"object": "list", "data": [models.describe(service.desk.lm, service.name, service.created)]})

    @app.get("/metrics", summary="Numbers for Prometheus")
    async def metrics(http: Request) -> Response:
        return Response(service_of(http).metrics.text(), media_type=METRICS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference.page(app.openapi()))

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
    """What the framework refuses: a path that is not there, a method that is not allowed, a body that cannot be read."""
    kind = errors.NOT_FOUND if error.status_code == 404 else errors.INVALID
    return await _problem(http, ApiError(error.status_code, str(error.detail), kind, headers=error.headers))
