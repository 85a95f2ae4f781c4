"""What every protocol asks of the server: is the model there, what is it called, how long may this take."""

from fastapi import Request

from tracformer.generation.language import LanguageModel
from tracformer.server.errors import NOT_FOUND, UNAVAILABLE, Problem
from tracformer.server.jobs import Desk
from tracformer.server.settings import Settings


class Service:
    def __init__(self, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self._desk: Desk | None = None

    @property
    def desk(self) -> Desk:
        if self._desk is None:
            raise Problem(503, "the model is being loaded; come back in a moment", UNAVAILABLE, code="loading", headers={"Retry-After": "1"})
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
        raise Problem(
            404, f"there is no model {model!r} here; this server has {self.name!r}", NOT_FOUND, param="model", code="model_not_found"
        )

    def seconds(self, asked: float | None) -> float:
        """A client may ask for less time than the server allows, not for more."""
        return min(asked or self.settings.timeout, self.settings.timeout)


def service_of(http: Request) -> Service:
    service: Service = http.app.state.service
    return service
