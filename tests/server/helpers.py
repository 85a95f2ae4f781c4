"""A server in this process: a small random model, a real socket, and requests to it."""

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import torch
from torch import Tensor

from tracformer import LanguageModel, Tracformer, TracformerConfig
from tracformer.data import Tokenizer, train_bpe
from tracformer.server import Settings
from tracformer.server.app import Server

WORDS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "once upon a time there was a cat",
    "the dog sat",
    "naïve café, 10 €",
] * 5
NAME = "tiny"


class Slow(Tracformer):
    """Sleeps in each step."""

    seconds = 0.04

    def empty_cache(self, *arguments: Any, **options: Any) -> None:
        return None

    def hidden(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return super().hidden(*arguments, **options)


def make(
    tokenizer: Tokenizer | None = None, kind: type[Tracformer] = Tracformer, **changes: Any
) -> LanguageModel:
    tokenizer = tokenizer or train_bpe(WORDS, 300)
    torch.manual_seed(0)
    values = {
        "max_length": 64,
        "n_layer": 6,
        "n_head": 2,
        "d_model": 16,
        "n_max": 4,
        "init_std": 0.3,
        **changes,
    }
    return LanguageModel(
        kind(TracformerConfig(vocab_size=tokenizer.vocab_size, **values), "blocked"),
        tokenizer,
        NAME,
    )


class Running:
    """A running server, and requests to it."""

    def __init__(self, server: Server) -> None:
        self.server, self.port = server, server.port
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    @property
    def backend(self) -> Any:
        return self.server.config.app.state.service.backend  # type: ignore[union-attr]

    def post(self, path: str, fields: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=fields, **options)

    def good(self, path: str, fields: Any) -> Any:
        response = self.post(path, fields)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, fields: Any, status: int = 400) -> Any:
        response = self.post(path, fields)
        assert response.status_code == status, response.text
        return response.json()

    def stream(self, path: str, fields: Any) -> list[tuple[str, Any]]:
        """Return names and data of the events of a stream; the end mark is None."""
        response = self.post(path, {**fields, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.text)

    def hang_up(self, path: str, fields: Any, after: bytes = b"data:") -> None:
        """Disconnect in the middle of a stream, as soon as `after` has arrived."""
        with self.raw(path, fields) as connection:
            received = b""
            while after not in received:
                received += connection.recv(4096)

    @contextlib.contextmanager
    def raw(self, path: str, fields: Any) -> Iterator[socket.socket]:
        body = json.dumps(fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(head.encode() + body)
            yield connection


@contextlib.contextmanager
def running(
    load: Callable[[], LanguageModel],
    settings: Settings | None = None,
    wait: bool = True,
    **changes: Any,
) -> Iterator[Running]:
    server = Server(load, NAME, settings or Settings(port=0, **changes))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    there = Running(server)
    if wait:
        until(lambda: there.http.get("/health").status_code == 200)
    try:
        yield there
    finally:
        there.http.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise AssertionError("the condition did not become true in time")
        time.sleep(0.01)


def same(answer: Any, expected: Any) -> bool:
    """Return whether two answers are equal up to rounding, which depends on the batch."""
    if isinstance(expected, dict):
        return set(answer) == set(expected) and all(
            same(answer[name], expected[name]) for name in expected
        )
    if isinstance(expected, list | tuple):
        return len(answer) == len(expected) and all(map(same, answer, expected))
    if isinstance(expected, float):
        return math.isclose(answer, expected, rel_tol=1e-4, abs_tol=1e-5)
    return bool(answer == expected)


def shaped(path: str, body: Any) -> bool:
    """Return whether a body is an error in the shape of the protocol at this path."""
    if path == "/infill":
        return set(body) == {"error"} and set(body["error"]) == {"code", "message", "type"}
    if path == "/v1/fim/completions":
        return set(body) == {"detail"} or body.get("object") == "error"
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in fields:
            found.append(
                (
                    fields.get("event", ""),
                    None if fields["data"] == "[DONE]" else json.loads(fields["data"]),
                )
            )
    return found
