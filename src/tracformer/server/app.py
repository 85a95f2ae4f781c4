"""The application: routes, the page, and the model that is loaded while the first callers are told to wait."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from tracformer import __version__
from tracformer.generation.language import LanguageModel
from tracformer.server import native
from tracformer.server.errors import NOT_FOUND, Problem, body_of, invalid
from tracformer.server.models import describe
from tracformer.server.service import Service, service_of
from tracformer.server.settings import Settings

PAGE = Path(__file__).parent / "page"


def build(load: Callable[[], LanguageModel], name: str, settings: Settings) -> FastAPI:
    """`load` is called once, in a thread, when the server has begun to listen."""
    service = Service(settings, name)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        async def open_up() -> None:
            service.open(await asyncio.to_thread(load))

        opening = asyncio.create_task(open_up())
        yield
        opening.cancel()
        service.close()

    app = FastAPI(title="tracformer", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(native.router)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"} if service.ready else {"status": "loading"}, 200 if service.ready else 503)

    @app.get("/v1/models")
    async def models(http: Request) -> Response:
        service = service_of(http)
        return JSONResponse({"object": "list", "data": [describe(service.desk.lm, service.name)]})

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    return app


async def _problem(http: Request, problem: Any) -> Response:
    status, body = body_of(problem, http.url.path)
    return JSONResponse(body, status, problem.headers)


async def _invalid(http: Request, error: Any) -> Response:
    return await _problem(http, invalid(error.errors()))


async def _http(http: Request, error: Any) -> Response:
    kind = NOT_FOUND if error.status_code == 404 else "invalid_request_error"
    return await _problem(http, Problem(error.status_code, str(error.detail), kind, headers=error.headers))
