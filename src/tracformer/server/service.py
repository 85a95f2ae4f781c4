"""What every protocol asks of the server: is the model there, what is it called, how much may be
asked, and where is it noted.
"""

import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from tracformer.generation.language_model import LanguageModel
from tracformer.server.errors import NOT_FOUND, UNAVAILABLE, ApiError
from tracformer.server.observability import Metrics
from tracformer.server.queue import Desk, Job
from tracformer.server.schema import Settings


class Service:
    def __init__(self, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self.created = int(time.time())
        self.metrics = Metrics(lambda: self._desk)
        self._desk: Desk | None = None

    @property
    def desk(self) -> Desk:
        if self._desk is None:
            raise ApiError(
                503, "Loading model", UNAVAILABLE, code="loading", headers={"Retry-After": "1"}
            )
        return self._desk

    @property
    def ready(self) -> bool:
        return self._desk is not None

    def open(self, lm: LanguageModel) -> None:
        self._desk = Desk(lm, self.settings.rows, self.settings.queue)

    def close(self) -> None:
        if self._desk is not None:
            self._desk.close()

    def named(self, model: str | None) -> str:
        """The model's name, if this is a name of it."""
        known = (self.name, *self.settings.aliases)
        if model in (None, "", *known) or "*" in known:
            return self.name
        raise ApiError(
            404,
            f"there is no model {model!r} here; this server has {self.name!r}",
            NOT_FOUND,
            param="model",
            code="model_not_found",
        )

    def seconds(self, asked: float | None) -> float:
        """A client may ask for less time than the server allows, not for more."""
        return min(asked or self.settings.timeout, self.settings.timeout)

    def within(self, name: str, value: int, most: int) -> None:
        if value > most:
            raise ApiError(
                400,
                f"{name} asks for {value}; the most that this server allows is {most}",
                param=name,
                code="limit",
            )

    def count(self, http: Request, job: Job[Any], usage: Mapping[str, int]) -> None:
        """Note a finished job, for the metrics and the log."""
        metrics, timings = self.metrics, job.timings(usage["completion_tokens"])
        metrics.queued.observe(timings["queued_ms"] / 1000)
        if timings["first_token_ms"] is not None:
            metrics.first.observe(timings["first_token_ms"] / 1000)
        for kind in ("prompt", "completion"):
            metrics.tokens.labels(kind).inc(usage[f"{kind}_tokens"])
        http.scope["entry"].fields.update(
            queued_ms=timings["queued_ms"],
            first_token_ms=timings["first_token_ms"],
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
        )


def service_of(http: Request) -> Service:
    service: Service = http.app.state.service
    return service


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
