"""Ask a model that `tracformer serve` runs elsewhere, as if it were here.

    client = tracformer.Client("http://127.0.0.1:8000")
    client.infill("Once upon a time [[3-8]] lived in a wood.")[0].text

The answers are the records that `LanguageModel` gives. Needs nothing but the standard library.
"""

import dataclasses
import http.client
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from tracformer.generation.results import (
    Callback,
    Candidate,
    Infilled,
    LengthChoice,
    Record,
    Scored,
    Span,
    Token,
)

if TYPE_CHECKING:
    from tracformer.generation.orders import Order
    from tracformer.generation.samplers import Sampler

R = TypeVar("R", bound=Record)
BUSY = (429, 503)  # come back later
# of errors that come when a stream has begun
STATUS = {"invalid_request_error": 400, "timeout_error": 408, "unavailable_error": 503}
# JSON has no infinity
UNDEFINED = {
    "log_prob": -math.inf,
    "log_probs": -math.inf,
    "log_weights": -math.inf,
    "perplexity": math.inf,
}


class RemoteError(RuntimeError):
    """The server did not answer as wished: it is busy, it was too slow, it wants a
    key, it failed.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(f"{message} (status {status})")
        self.status, self.code = status, code


class Client:
    """`timeout`: seconds for one answer.

    `retries`: how often to come back when the server is full or still loading.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        timeout: float = 60.0,
        retries: int = 2,
    ) -> None:
        self.parts = urlsplit(url)
        if self.parts.scheme not in ("http", "https") or not self.parts.hostname:
            raise ValueError(
                f"url is {url!r}; it must begin with http:// or https://, for instance "
                "http://127.0.0.1:8000"
            )
        self.api_key, self.timeout, self.retries = api_key, timeout, retries

    def infill(
        self,
        text: str,
        n: int = 1,
        *,
        mode: str | None = None,
        sampler: "Sampler | None" = None,
        seed: int = 0,
        order: "Order | str | None" = None,
        best_of: int = 0,
        search: str | None = None,
        reread: bool = False,
        whole: bool = True,
        max_blank: int = 32,
        length_draws: int = 8,
        lengths: str = "sample",
        top: int = 0,
        callback: Callable[[list[Token]], None] | None = None,
    ) -> list[Infilled]:
        """What `LanguageModel.infill` gives for the same arguments.

        `callback` is told of tokens while the answer is on its way.
        """
        asked: dict[str, Any] = {
            "text": text,
            "n": n,
            "mode": mode,
            "seed": seed,
            "best_of": best_of,
            "search": search,
            "reread": reread,
            "whole": whole,
            "max_blank": max_blank,
            "length_draws": length_draws,
            "lengths": lengths,
            "top": top,
            "timeout": self.timeout,
            **({} if sampler is None else dataclasses.asdict(sampler)),
            **_turns(order),
        }
        answer = (
            self._ask("/v1/infill", asked) if callback is None else self._watched(asked, callback)
        )
        return [_infilled(each) for each in answer["results"]]

    def score(
        self, text: str, *, mode: str | None = None, whole: bool = True, top: int = 0
    ) -> Scored:
        """What `LanguageModel.score` gives; a text without [[marks]] is scored as a whole, from
        left to right if `mode` is None.
        """
        asked = {"text": text, "mode": mode, "whole": whole, "top": top, "timeout": self.timeout}
        return _scored(self._ask("/v1/score", asked))

    def tokenize(self, text: str) -> list[tuple[int, str]]:
        """Ids and texts of a text's tokens."""
        return [
            (token["id"], token["text"])
            for token in self._ask("/v1/tokenize", {"text": text})["tokens"]
        ]

    def models(self) -> list[dict[str, Any]]:
        """What the server has: one model, its modes, its longest text."""
        models: list[dict[str, Any]] = self._ask("/v1/models", None)["data"]
        return models

    def _ask(self, path: str, asked: Mapping[str, Any] | None) -> Any:
        connection, response = self._send(path, asked)
        with closing(connection):
            return json.loads(response.read())

    def _watched(self, asked: dict[str, Any], callback: Callable[[list[Token]], None]) -> Any:
        connection, response = self._send("/v1/infill", {**asked, "stream": True})
        with closing(connection):
            for name, told in _events(response):
                if name == "result":
                    return told
                if name == "error":
                    raise _failure(STATUS.get(told["error"]["type"], 500), told)
                if name == "token":
                    callback(
                        [
                            _record(
                                Token,
                                {"text": 0, **told},
                                candidates=_candidates(told["candidates"]),
                            )
                        ]
                    )
                elif name == "lengths" and isinstance(callback, Callback):
                    callback.lengths(0, told["sample"], tuple(told["lengths"]))
        raise RemoteError(response.status, "the answer broke off")

    def _send(
        self, path: str, asked: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A good answer's head; its body is still to be read."""
        for attempt in range(self.retries + 1):
            connection = self._connection()
            try:
                method, body = ("GET", None) if asked is None else ("POST", json.dumps(asked))
                connection.request(
                    method, self.parts.path.rstrip("/") + path, body, self._headers()
                )
                response = connection.getresponse()
                if response.status == 200:
                    return connection, response
                content = response.read()
            except BaseException:
                connection.close()
                raise
            connection.close()
            if response.status not in BUSY or attempt == self.retries:
                break
            time.sleep(min(float(response.headers.get("Retry-After", 1)), self.timeout))
        try:
            told = json.loads(content)
        except ValueError:
            told = {}
        raise _failure(response.status, told)

    def _connection(self) -> http.client.HTTPConnection:
        kind = (
            http.client.HTTPSConnection
            if self.parts.scheme == "https"
            else http.client.HTTPConnection
        )
        assert self.parts.hostname is not None
        # the server's own word on lateness comes first
        return kind(self.parts.hostname, self.parts.port, timeout=self.timeout + 5)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return (
            headers
            if self.api_key is None
            else {**headers, "Authorization": f"Bearer {self.api_key}"}
        )


def _failure(status: int, told: Any) -> Exception:
    error = told.get("error") if isinstance(told, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message", "the answer is not one of tracformer serve"))
    return ValueError(message) if status == 400 else RemoteError(status, message, error.get("code"))


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response:
        field, _, value = line.decode().rstrip("\r\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def _turns(order: "Order | str | None") -> dict[str, Any]:
    """The fields that name an order."""
    if order is None or isinstance(order, str):
        return {"order": order}
    from tracformer.generation.orders import Ancestral, ByConfidence, LeftToRight, RandomOrder

    if isinstance(order, LeftToRight):
        return {"order": "left-to-right", "k": order.k}
    if isinstance(order, RandomOrder):
        return {"order": "random", "k": order.k}
    if isinstance(order, ByConfidence):
        return {"order": order.by, "k": order.k, "threshold": order.threshold}
    if isinstance(order, Ancestral):
        return {"order": "ancestral", "steps": order.steps}
    raise ValueError(
        f"order is {order!r}, which cannot be sent; allowed: LeftToRight, RandomOrder, "
        "ByConfidence, Ancestral"
    )


def _infilled(told: dict[str, Any]) -> Infilled:
    choice = told["length_choice"]
    return _record(
        Infilled,
        told,
        spans=_spans(told),
        length_choice=None if choice is None else _record(LengthChoice, choice),
    )


def _scored(told: dict[str, Any]) -> Scored:
    return _record(Scored, told, spans=_spans(told))


def _spans(told: dict[str, Any]) -> tuple[Span, ...]:
    return tuple(
        _record(Span, span, candidates=tuple(map(_candidates, span["candidates"])))
        for span in told["spans"]
    )


def _candidates(told: list[dict[str, Any]]) -> tuple[Candidate, ...]:
    return tuple(_record(Candidate, each) for each in told)


def _record(kind: type[R], told: Mapping[str, Any], **made: Any) -> R:
    """What `to_dict` wrote, as the record it was; `made`: fields that are records themselves.

    A newer server's fields are ignored.
    """
    names = [field.name for field in dataclasses.fields(kind) if field.name in told]
    return kind(**{**{name: _frozen(told[name], UNDEFINED.get(name)) for name in names}, **made})


def _frozen(value: Any, undefined: float | None) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(each, undefined) for each in value)
    return undefined if value is None else value
