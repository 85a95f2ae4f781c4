"""Wrong, huge and interrupted requests get a 4xx in the protocol's shape; the server keeps running."""

import contextlib
import json
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.helpers import Running, Slow, make, running, shaped, until
from tracformer import LanguageModel
from tracformer.server import Limits, Settings

GOOD: dict[str, dict[str, Any]] = {
    "/v1/infill": {"text": "the [[1]] cat"},
    "/v1/score": {"text": "the [[cat]]"},
    "/v1/tokenize": {"text": "the cat"},
    "/v1/completions": {"prompt": "the", "max_tokens": 1},
    "/infill": {"input_prefix": "the", "n_predict": 1},
    "/v1/fim/completions": {"model": "tiny", "prompt": "the", "max_tokens": 1},
}
PATHS = list(GOOD)
LONG = {"text": "the [[60]]", "whole": False}  # more than a second with a slow model


def still_good(server: Running, path: str) -> None:
    server.good(path, GOOD[path])


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    lm = make(kind=Slow)
    with running(lambda: lm, rows=2, queue=1) as there:
        yield there


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\x00\x00",
        b"\xff\xfe{",
        b'{"text": "a\x00b", "prompt": "a\x00b"}',
        b"[" * 100_000,
        b'{"text":' * 50_000,
        b'{"text": ' + b"9" * 5000 + b', "prompt": ' + b"9" * 5000 + b', "input_prefix": 1e999}',
        b'{"text": NaN, "prompt": NaN, "input_prefix": Infinity}',
        json.dumps(
            {"text": "a\ud800", "prompt": "a\ud800", "input_prefix": "\udfff", "model": "tiny"}
        ).encode(),
        json.dumps(
            {"text": "a\0[[1]]", "prompt": "a\0", "input_prefix": "\0", "model": "tiny"}
        ).encode(),
        json.dumps(
            {"text": {"a": 1}, "prompt": {"a": 1}, "input_prefix": [], "model": "tiny"}
        ).encode(),
    ],
    ids=lambda body: repr(body[:12]),
)
def test_malformed_bodies_are_refused(server: Running, path: str, body: bytes) -> None:
    response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500
    assert shaped(path, response.json())


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_not_a_json_object_is_refused_with_a_reason(
    server: Running, path: str
) -> None:
    json_type, form_type = (
        {"Content-Type": kind} for kind in ("application/json", "application/x-www-form-urlencoded")
    )
    broken = server.http.post(path, content=b'{"text": cat}', headers=json_type).text
    assert "the body is not JSON: Expecting value at character 9" in broken
    assert "cat" not in broken
    for body, headers in (
        (b"", json_type),
        (b"[]", json_type),
        (json.dumps(GOOD[path]).encode(), form_type),
    ):
        found = server.http.post(path, content=body, headers=headers).text
        assert "the body must be a JSON object, sent with `Content-Type: application/json`" in found


@pytest.mark.parametrize("path", PATHS)
def test_large_bodies_are_refused(server: Running, path: str) -> None:
    text = "the cat " * 1_300_000  # 10 MB
    response = server.post(path, {**GOOD[path], "text": text, "prompt": text})
    assert response.status_code == 413
    assert shaped(path, response.json())
    still_good(server, path)


def test_a_body_is_not_read_beyond_the_limit(server: Running) -> None:
    sent = []

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            sent.append(1)
            yield b"a" * 2**16

    # the server answers and closes while the body is still being sent
    with contextlib.suppress(httpx.WriteError):
        assert (
            server.http.post(
                "/v1/infill", content=endless(), headers={"Content-Type": "application/json"}
            ).status_code
            == 413
        )
    assert len(sent) < 1000


@pytest.mark.parametrize(
    "path", ["/v1/infill", "/v1/completions", "/infill", "/v1/fim/completions"]
)
def test_texts_longer_than_the_model_are_refused(server: Running, path: str) -> None:
    text = "the cat " * 30_000
    fields = {
        **GOOD[path],
        **{name: text for name in ("text", "prompt", "input_prefix") if name in GOOD[path]},
    }
    response = server.post(path, fields)
    assert response.status_code == 400
    assert shaped(path, response.json())


@pytest.mark.parametrize("unit", ["[", "]", "\\", "[[1]]", "\\[[", "[[", "€", "\n"])
def test_texts_that_are_hard_to_parse_are_answered(server: Running, unit: str) -> None:
    text = unit * (500_000 // len(unit.encode()))
    assert server.post("/v1/infill", {"text": text}).status_code == 400
    assert server.post("/v1/score", {"text": text + "[[a]]"}).status_code == 400
    assert server.post(
        "/v1/completions", {"prompt": text, "suffix": text, "max_tokens": 1}
    ).status_code in (400, 413)


@pytest.mark.parametrize("path", PATHS)
def test_interrupted_bodies_do_no_harm(server: Running, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n".encode()
    for sent in (head + b'{"text": "the', head, head[:30], b"\x16\x03\x01", b"GET\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(sent)
    still_good(server, path)


def test_a_slow_body_times_out(lm: LanguageModel) -> None:
    with (
        running(lambda: lm, body_timeout=0.2) as there,
        socket.create_connection(("127.0.0.1", there.port), timeout=10) as connection,
    ):
        connection.sendall(
            b'POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"input'
        )
        assert b"408" in connection.recv(4096)


def test_unknown_paths_and_wrong_methods(server: Running) -> None:
    assert server.http.get("/nothing").status_code == 404
    assert server.http.get("/page/../app.py").status_code == 404
    assert server.http.get("/page/%2e%2e/app.py").status_code == 404
    assert server.http.get("/v1/infill").status_code == 405
    assert (
        server.http.post(
            "/v1/infill", content="text=the", headers={"Content-Type": "text/plain"}
        ).status_code
        == 400
    )


def test_a_full_queue_answers_when_to_retry(slow: Running) -> None:
    with (
        slow.raw("/v1/infill", LONG),
        slow.raw("/v1/infill", LONG),
        ThreadPoolExecutor(1) as threads,
    ):
        until(lambda: slow.backend.gate.running == 2)
        waiting = threads.submit(slow.good, "/v1/infill", GOOD["/v1/infill"])
        until(lambda: slow.backend.gate.waiting == 1)
        for path in PATHS:
            response = slow.post(path, GOOD[path])
            assert response.status_code == 429
            assert shaped(path, response.json())
            assert int(response.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            openai.OpenAI(
                base_url=f"{slow.url}/v1", api_key="none", max_retries=0
            ).completions.create(model="tiny", prompt="the")
        assert slow.http.get("/health").status_code == 200
        assert waiting.result()["results"]  # it ran after all
    until(lambda: slow.backend.gate.running == 0)


@pytest.mark.parametrize(
    "path", ["/v1/infill", "/v1/completions", "/infill", "/v1/fim/completions"]
)
def test_a_disconnected_client_frees_its_slot(slow: Running, path: str) -> None:
    long: dict[str, Any] = {
        "/v1/infill": LONG,
        "/v1/completions": {"prompt": "the", "max_tokens": 60, "logprobs": 0},
        "/infill": {"input_prefix": "the", "n_predict": 60},
        "/v1/fim/completions": {"model": "tiny", "prompt": "the", "max_tokens": 60},
    }[path]
    gate, engine = slow.backend.gate, slow.backend.engine
    slow.hang_up(path, {**long, "stream": True})
    steps = engine.load.steps
    until(lambda: gate.running == 0 and engine.load.rows == 0)
    assert engine.load.steps - steps < 55  # of 60: it did not run to the end
    with slow.raw(path, long):  # without a stream
        until(lambda: engine.load.rows == 1)
    until(lambda: gate.running == 0 and engine.load.rows == 0)
    assert "tracformer_gone_total" in slow.http.get("/metrics").text


def test_a_disconnected_client_leaves_the_queue(slow: Running) -> None:
    gate = slow.backend.gate
    with slow.raw("/v1/infill", LONG), slow.raw("/v1/infill", LONG):
        until(lambda: gate.running == 2)
        with slow.raw("/v1/infill", LONG):
            until(lambda: gate.waiting == 1)
        until(lambda: gate.waiting == 0)
        assert gate.running == 2
    until(lambda: gate.running == 0)


def test_a_disconnection_does_not_change_other_answers(slow: Running) -> None:
    fields = {"text": "the [[20]]", "seed": 3}
    alone = slow.good("/v1/infill", fields)["results"]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(slow.good, "/v1/infill", fields)
        slow.hang_up("/v1/infill", {**LONG, "stream": True}, b"event: token")
        assert answer.result()["results"][0]["token_ids"] == alone[0]["token_ids"]


def test_the_time_limit_of_a_request_is_kept(slow: Running) -> None:
    error = slow.refused("/v1/infill", {**LONG, "timeout": 0.15}, 408)["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    assert "0.15 seconds" in error["message"]
    until(lambda: slow.backend.gate.running == 0)
    found = slow.stream("/v1/infill", {**LONG, "timeout": 1.5})
    assert found[-1][0] == "error"
    assert found[-1][1]["error"]["code"] == "timeout"
    until(lambda: slow.backend.gate.running == 0)
    with slow.raw("/v1/infill", LONG), slow.raw("/v1/infill", LONG):
        until(lambda: slow.backend.gate.running == 2)
        slow.refused("/v1/infill", {**LONG, "timeout": 0.05}, 408)  # while it waits


def test_the_servers_time_limit_is_answered_in_each_protocols_shape() -> None:
    lm = make(kind=Slow)
    with running(lambda: lm, timeout=0.2) as there:
        bodies = {
            "/v1/completions": {"prompt": "the", "max_tokens": 60, "temperature": 0},
            "/infill": {"input_prefix": "the", "n_predict": 60, "temperature": 0},
            "/v1/fim/completions": {
                "model": "tiny",
                "prompt": "the",
                "max_tokens": 60,
                "temperature": 0,
            },
        }
        for path, body in bodies.items():
            assert shaped(path, there.refused(path, body, 408))
        with pytest.raises(openai.APIError, match="not done within"):
            list(
                openai.OpenAI(
                    base_url=f"{there.url}/v1", api_key="none", max_retries=0
                ).completions.create(
                    model="tiny",
                    prompt="the",
                    max_tokens=60,
                    temperature=0,
                    stream=True,
                    timeout=10,
                )
            )


def test_the_api_key_is_required(lm: LanguageModel) -> None:
    with running(lambda: lm, api_key="sésame") as there:
        for path in PATHS:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic x"},
                {"Authorization": "Bearer sésam"},
            ):
                response = there.post(
                    path,
                    GOOD[path],
                    headers={name: value.encode() for name, value in headers.items()},
                )
                assert response.status_code == 401
                assert shaped(path, response.json())
            for name, value in (("Authorization", "Bearer sésame"), ("X-Api-Key", "sésame")):
                raw = [(name.encode(), value.encode("utf-8"))]
                assert there.post(path, GOOD[path], headers=raw).status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert there.http.get(path).status_code == 401
        for path in ("/health", "/docs", "/openapi.json"):
            assert there.http.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{there.url}/v1", api_key="no").completions.create(
                model="tiny", prompt="the"
            )


def test_only_allowed_origins_may_call(lm: LanguageModel, server: Running) -> None:
    other, friend = "https://elsewhere.example", "https://friend.example"
    # the page itself
    assert (
        server.post("/v1/infill", GOOD["/v1/infill"], headers={"Origin": server.url}).status_code
        == 200
    )
    refused = server.post("/v1/infill", GOOD["/v1/infill"], headers={"Origin": other})
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    with running(lambda: lm, origins=(friend,)) as there:
        fields = {
            "Origin": friend,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert (
            there.http.options("/v1/infill", headers=fields).headers["access-control-allow-origin"]
            == friend
        )
        response = there.post("/v1/infill", GOOD["/v1/infill"], headers={"Origin": friend})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == friend
        assert (
            there.post("/v1/infill", GOOD["/v1/infill"], headers={"Origin": other}).status_code
            == 403
        )
        refused = there.post("/v1/infill", {"text": "a" * 2**21}, headers={"Origin": friend})
        assert refused.status_code == 413
        assert refused.headers["access-control-allow-origin"] == friend


def test_requests_get_503_while_the_model_is_loading(lm: LanguageModel) -> None:
    release = threading.Event()

    def load() -> LanguageModel:
        release.wait(20)
        return lm

    with running(load, wait=False) as there:
        for path in ("/health", "/v1/models"):
            response = there.http.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "Loading model"
        for path in PATHS:
            assert shaped(path, there.refused(path, GOOD[path], 503))
        assert "tracformer_ready 0.0" in there.http.get("/metrics").text
        release.set()
        until(lambda: there.http.get("/health").status_code == 200)
        assert there.http.get("/health").json() == {"status": "ok"}


def test_limits_can_be_set(lm: LanguageModel) -> None:
    with running(lambda: lm, Settings(port=0, limits=Limits(body=300, n=2, prompts=1))) as there:
        assert there.post("/v1/infill", {"text": "the [[1]]" + "a" * 300}).status_code == 413
        there.refused("/v1/infill", {"text": "the [[1]]", "n": 3})
        there.refused("/v1/completions", {"prompt": ["a", "a"]})


def test_aliases_of_the_model(lm: LanguageModel) -> None:
    with running(lambda: lm, aliases=("codestral",)) as there:
        assert (
            there.good(
                "/v1/fim/completions", {**GOOD["/v1/fim/completions"], "model": "codestral"}
            )["model"]
            == "tiny"
        )
        there.refused("/v1/fim/completions", {**GOOD["/v1/fim/completions"], "model": "other"}, 404)
    with running(lambda: lm, aliases=("*",)) as there:
        there.good("/v1/fim/completions", {**GOOD["/v1/fim/completions"], "model": "whatever"})


@pytest.mark.parametrize(
    "changes",
    [
        *({"rows": 0}, {"queue": -1}, {"timeout": 0}, {"port": 70000}, {"api_key": ""}),
        *(
            {name: value}
            for name in ("timeout", "body_timeout", "drain")
            for value in (math.inf, -math.inf, math.nan, 1e300, -1.0)
        ),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(changes)).replace('api_key', 'API key')} is "
    ):
        Settings(**changes)
