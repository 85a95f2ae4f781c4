"""Client of a model that `tracformer serve` runs elsewhere.

    client = tracformer.Client("http://127.0.0.1:8000")
    client.infill("Once upon a time [[3-8]] lived in a wood.")[0].text

The answers are the records that `LanguageModel` returns. The client needs the standard library
only, and does not import torch.
"""

import dataclasses
import http.client
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tracformer.generation.request_options import InfillOptions, ScoreOptions
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

R = TypeVar("R", bound=Record)
RETRIED = (429, 503)  # statuses after which a request is sent again
# statuses of errors that arrive after a stream has begun
STATUS = {"invalid_request_error": 400, "timeout_error": 408, "unavailable_error": 503}
# what null stands for in these fields: JSON has no infinity
INFINITE = {
    "log_prob": -math.inf,
    "log_probs": -math.inf,
    "log_weights": -math.inf,
    "perplexity": math.inf,
}


class RemoteError(RuntimeError):
    """The server refused or failed a request that was not itself wrong.

    Args:
        status: HTTP status.
        message: The server's message.
        code: The server's short name of the error.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(f"{message} (status {status})")
        self.status, self.code = status, code


class Client:
    """A model that `tracformer serve` runs, with the methods of `LanguageModel`.

    Args:
        url: Address of the server.
        api_key: Key of the server, if it needs one.
        timeout: Time limit of one request, in seconds.
        retries: How often a request is sent again when the server is full or still loading.

    Raises:
        ValueError: The address does not begin with http:// or https://.

    Example:
        >>> client = Client("http://127.0.0.1:8000")
        >>> client.infill("Once upon a time [[3-8]] lived.", temperature=0.8)  # doctest: +SKIP
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
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        callback: Callable[[list[Token]], None] | None = None,
        **changes: Any,
    ) -> list[Infilled]:
        """Fill the blanks of a text, as `LanguageModel.infill` does.

        Args:
            text: Text with blanks: [[]], [[5]] or [[3-8]].
            n: Number of fills.
            options: Options; the defaults if None. `batch` is chosen by the server.
            callback: Called with tokens as they arrive. A `Callback` also receives lengths.
            **changes: Options to change, by name: see `InfillOptions` and `Sampler`.

        Returns:
            The fills.

        Raises:
            ValueError: The text or an option is wrong.
            RemoteError: The server is full, too slow, needs a key, or failed.
        """
        if n is not None:
            changes["n"] = n
        body = self._body(text, InfillOptions.make(options, **changes))
        if callback is None:
            answer = self._request("/v1/infill", body)
        else:
            answer = self._stream("/v1/infill", body, callback)
        return [_infilled(each) for each in answer["results"]]

    def score(self, text: str, *, options: ScoreOptions | None = None, **changes: Any) -> Scored:
        """Return the log-probability of the marked parts of a text, as `LanguageModel.score` does.

        Args:
            text: Text with marked parts, as in "a [[cat]]". Without marks the whole text is
                scored, from left to right if no mode is given.
            options: Options; the defaults if None. `batch` is chosen by the server.
            **changes: Options to change, by name: see `ScoreOptions`.

        Returns:
            The score.

        Raises:
            ValueError: The text or an option is wrong.
            RemoteError: The server is full, too slow, needs a key, or failed.
        """
        body = self._body(text, ScoreOptions.make(options, **changes))
        scored: dict[str, Any] = self._request("/v1/score", body)
        return _record(Scored, scored, spans=_spans(scored))

    def tokenize(self, text: str) -> list[tuple[int, str]]:
        """Return ids and texts of a text's tokens."""
        tokens = self._request("/v1/tokenize", {"text": text})["tokens"]
        return [(token["id"], token["text"]) for token in tokens]

    def models(self) -> list[dict[str, Any]]:
        """Return the models of the server (one), with their modes and longest text."""
        models: list[dict[str, Any]] = self._request("/v1/models", None)["data"]
        return models

    def _body(self, text: str, options: InfillOptions | ScoreOptions) -> dict[str, Any]:
        fields = options.to_dict()
        if isinstance(options, InfillOptions):  # the server's model has settings for the others
            names = options.given | {"seed"}  # without one the server draws it
            if "order" in names:
                names |= {"k", "threshold", "steps"}
            fields = {name: value for name, value in fields.items() if name in names}
        fields.pop("batch", None)
        return {"text": text, **fields, "timeout": self.timeout}

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        connection, response = self._send(path, body)
        with closing(connection):
            return json.loads(response.read())

    def _stream(
        self, path: str, body: dict[str, Any], callback: Callable[[list[Token]], None]
    ) -> Any:
        """Call the callback for each event of a stream, and return its result."""
        connection, response = self._send(path, {**body, "stream": True})
        with closing(connection):
            for name, data in _events(response):
                if name == "result":
                    return data
                if name == "error":
                    raise _failure(STATUS.get(data["error"]["type"], 500), data)
                if name == "token":
                    candidates = _candidates(data["candidates"])
                    callback([_record(Token, data, candidates=candidates)])
                elif name == "lengths" and isinstance(callback, Callback):
                    callback.lengths(0, data["sample"], tuple(data["lengths"]))
        raise RemoteError(response.status, "the connection closed before the answer was complete")

    def _send(
        self, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Return a response of status 200; its body is still to be read."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        for attempt in range(self.retries + 1):
            connection = self._connect()
            try:
                connection.request(method, self.parts.path.rstrip("/") + path, content, headers)
                response = connection.getresponse()
                if response.status == 200:
                    return connection, response
                refusal = response.read()
            except BaseException:
                connection.close()
                raise
            connection.close()
            if response.status not in RETRIED or attempt == self.retries:
                break
            time.sleep(min(float(response.headers.get("Retry-After", 1)), self.timeout))
        try:
            data = json.loads(refusal)
        except ValueError:
            data = {}
        raise _failure(response.status, data)

    def _connect(self) -> http.client.HTTPConnection:
        secure = self.parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self.parts.hostname is not None
        # 5 seconds more, so that the server's own timeout error arrives first
        return kind(self.parts.hostname, self.parts.port, timeout=self.timeout + 5)


def _failure(status: int, answer: Any) -> Exception:
    """Return the exception of an error answer."""
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message", "the answer is not from tracformer serve; check the url"))
    return ValueError(message) if status == 400 else RemoteError(status, message, error.get("code"))


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Yield name and data of each server-sent event."""
    name = ""
    for line in response:
        field, _, value = line.decode().rstrip("\r\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def _infilled(answer: dict[str, Any]) -> Infilled:
    choice = answer["length_choice"]
    return _record(
        Infilled,
        answer,
        spans=_spans(answer),
        length_choice=None if choice is None else _record(LengthChoice, choice),
    )


def _spans(answer: dict[str, Any]) -> tuple[Span, ...]:
    return tuple(
        _record(Span, span, candidates=tuple(map(_candidates, span["candidates"])))
        for span in answer["spans"]
    )


def _candidates(answer: list[dict[str, Any]]) -> tuple[Candidate, ...]:
    return tuple(_record(Candidate, each) for each in answer)


def _record(kind: type[R], values: Mapping[str, Any], **records: Any) -> R:
    """Return a record from what its `to_dict` wrote; fields of a newer server are ignored.

    Args:
        kind: Class of the record.
        values: Its fields, as JSON has them.
        **records: Fields that are records themselves.
    """
    names = [field.name for field in dataclasses.fields(kind) if field.name in values]
    plain = {name: _tuples(values[name], INFINITE.get(name)) for name in names}
    return kind(**{**plain, **records})


def _tuples(value: Any, for_null: float | None) -> Any:
    """Return a JSON value with tuples for lists, and a number for null."""
    if isinstance(value, list):
        return tuple(_tuples(each, for_null) for each in value)
    return for_null if value is None else value
