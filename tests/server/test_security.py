"""Clients that mean harm: floods, rebound names, slow connections, keys that are none.

SECURITY.md names the tests here for each class of vulnerability.
"""

import asyncio
import contextlib
import gc
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from tests.server.helpers import Running, running, shaped, until
from tests.server.test_robustness import GOOD, PATHS
from tracformer import LanguageModel
from tracformer.cli import main
from tracformer.server import Limits, Settings

JSON = {"Content-Type": "application/json"}


# ---- bounded work


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/infill", b'{"segments": [' + b"1," * 499_999 + b"1]}"),
        ("/v1/completions", b'{"prompt": [' + b"{}," * 250_000 + b"{}]}"),
        ("/v1/tokenize", b'{"text": ' + b"[" * 1_000_000),
        ("/v1/infill", b'{"text": ' + b'{"a":' * 200_000),
        ("/v1/score", b'{"text": [' + b'"\\",[{",' * 100_000 + b"1]}"),
    ],
    ids=["segments", "prompts", "brackets", "objects", "strings"],
)
def test_floods_of_values_are_refused_before_they_are_parsed(
    server: Running, path: str, body: bytes
) -> None:
    """Parsed and validated, they would hold up all other requests for 6 to 31 seconds."""
    response = server.http.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "limit"


def test_strings_do_not_count_as_structure(server: Running) -> None:
    text = "[{,\\" * 20_000 + '"'
    assert server.good("/v1/tokenize", {"text": text})["tokens"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/infill", {"segments": [1] * 30_000}),
        ("/v1/infill", {"text": "the [[1]]", "banned": ["a"] * 30_000}),
        ("/v1/infill", {"text": "the [[1]]", **{f"x{i}": 1 for i in range(10_000)}}),
        ("/v1/completions", {"prompt": [{}] * 30_000}),
        ("/v1/completions", {"prompt": [["a"]] * 10_000}),
        ("/v1/completions", {"prompt": [1] * 30_000 + ["a"]}),
        ("/v1/completions", {"prompt": "a", "stop": [1] * 30_000}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): "x" for i in range(10_000)}}),
        ("/infill", {"input_prefix": "a", "input_extra": [1] * 30_000}),
        ("/infill", {"input_prefix": "a", "response_fields": [1] * 30_000}),
    ],
    ids=str,
)
def test_validation_stops_at_the_first_wrong_elements(
    server: Running, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tracformer.server import app

    counts: list[int] = []
    invalid = app.invalid
    monkeypatch.setattr(
        app, "invalid", lambda errors: counts.append(len(errors)) or invalid(errors)
    )
    assert shaped(path, server.refused(path, fields))
    assert all(count <= 4 for count in counts)


def test_limits_of_structure_can_be_set(lm: LanguageModel) -> None:
    limits = Limits(values=8, depth=3)
    with running(lambda: lm, Settings(port=0, limits=limits)) as there:
        there.good("/v1/tokenize", {"text": "a, b, c, d, e, f, g, h, i"})
        error = there.refused("/v1/completions", {"prompt": [1] * 8})["error"]
        assert error["message"].startswith("the body's JSON has more than 8 values")
        error = there.refused("/v1/completions", {"prompt": [[[1]]]})["error"]
        assert error["message"].startswith("the body's JSON has more than 3 levels")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/infill", {"text": "the [[62]]", "n": 16, "top": 20}),
        ("/v1/infill", {"segments": ["a", {"blank": 1}] * 2040}),
        ("/v1/completions", {"prompt": [[5] * 63] * 24, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": "a", "x": [[1, 2]] * 10_000}),
        ("/v1/completions", {"prompt": "a", **{f"x{i}": "y" for i in range(32_000)}}),
        ("/infill", {"input_prefix": "a", "response_fields": ["a/" * 99] * 4096}),
        ("/v1/score", {"text": "[[a]]b" * 100_000}),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_nothing_holds_up_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    """No step of the loop works for 50 ms, for bodies and answers at the limits.

    Processor time is measured, which other work on the machine does not change.
    """
    steps: list[float] = []
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        run(handle)
        steps.append(time.thread_time() - start)

    for stream in (False, True) if path != "/v1/score" else (False,):
        longest = []
        for _ in range(3):  # a collection of garbage may meet a step once
            gc.collect()
            steps.clear()
            with monkeypatch.context() as patch:
                patch.setattr(asyncio.Handle, "_run", measured)
                given = {**fields, "max_tokens": 0} if "echo" in fields else fields
                assert server.post(path, {**given, "stream": stream}).status_code < 500
            longest.append(max(steps))
            if longest[-1] < 0.05:
                break
        assert min(longest) < 0.05


def test_samples_of_all_prompts_are_bounded(server: Running) -> None:
    server.good("/v1/completions", {"prompt": ["a"] * 64, "n": 4, "max_tokens": 1})
    error = server.refused("/v1/completions", {"prompt": ["a"] * 64, "n": 5})["error"]
    assert "320; the limit of this server is 256" in error["message"]


def test_a_large_body_gets_its_answer_not_a_reset(server: Running) -> None:
    """`http.client` sends the whole body before it reads."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = b'{"text": "' + b"a" * 10_000_000 + b'"}'
    connection.request("POST", "/v1/infill", body, JSON)
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "too_large"
    connection.close()
    wrong = {"Origin": "http://evil.example", **JSON}
    connection.request("POST", "/v1/infill", body, wrong)
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize("path", PATHS)
def test_empty_prompts_do_no_harm(server: Running, path: str) -> None:
    empty = {name: "" for name in GOOD[path] if name in ("text", "prompt", "input_prefix")}
    for extra in ({}, {"suffix": "", "input_suffix": ""} if path != "/v1/infill" else {}):
        assert server.post(path, {**GOOD[path], **empty, **extra}).status_code in (200, 400, 422)
    assert server.post("/v1/completions", {"prompt": []}).status_code == 400
    assert server.post("/v1/completions", {"prompt": [[]]}).status_code in (200, 400)
    server.good(path, GOOD[path])


@pytest.mark.parametrize("number", [33, 10**6, 2**31 - 1, 2**63])
def test_numbers_of_samples_are_bounded(server: Running, number: int) -> None:
    for name in ("n", "best_of"):
        server.refused("/v1/completions", {"prompt": "the", name: number})
        server.refused("/v1/infill", {"text": "the [[1]]", name: number})


@pytest.mark.parametrize("path", PATHS)
def test_negative_numbers_do_no_harm(server: Running, path: str) -> None:
    """Also in fields that this server ignores and others read."""
    document = server.http.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    fields = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    for name in (*fields["properties"], "n_discard", "n_keep", "id_slot"):
        for number in (-1, -(2**31)):
            response = server.post(path, {**GOOD[path], name: number})
            assert response.status_code in (200, 400, 422), (name, number)
    server.good(path, GOOD[path])


# ---- host names


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", ""]
)
def test_other_host_names_are_refused(server: Running, host: str, method: str) -> None:
    headers = {"Host": host, "Origin": f"http://{host}"}
    for path in (*PATHS, "/", "/page/index.html", "/docs", "/openapi.json", "/v1/models"):
        response = server.http.request(method, path, headers=headers, json=GOOD.get(path))
        assert response.status_code == 403
        assert "--allowed-host" in response.text
    for path in ("/health", "/metrics"):  # probes may call by any name
        assert server.http.get(path, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000"])
def test_names_of_this_machine_are_allowed(server: Running, host: str) -> None:
    assert server.http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_more_host_names_can_be_allowed(lm: LanguageModel) -> None:
    def status(there: Running, host: str) -> int:
        return there.http.get("/v1/models", headers={"Host": host}).status_code

    with running(lambda: lm, hosts=("models.example",)) as there:
        assert status(there, "Models.Example:443") == 200
        assert status(there, "evil.example") == 403
    with running(lambda: lm, hosts=("*",)) as there:
        assert status(there, "evil.example") == 200
    with running(lambda: lm, host="0.0.0.0", no_key=True) as there:
        assert status(there, "192.168.1.7:8000") == 200  # a number cannot be rebound
        assert status(there, "evil.example") == 403


# ---- keys


@pytest.mark.parametrize("host", ["localhost", "localhost/health?", "localhost/page/#", "a@b:c/"])
def test_no_header_or_path_goes_around_the_key(lm: LanguageModel, host: str) -> None:
    """What is open without a key is decided by the path that is routed, not by a URL."""
    with running(lambda: lm, api_key="key", hosts=("*",)) as there:
        for target in (
            *("/v1/models", "//v1/models", "/health/../v1/models", "/page/../v1/models"),
            *("/page/%2e%2e/v1/models", "/v1/models?/health", "/%2fhealth", "/health%00"),
            *("http://localhost/health", f"http://localhost:{there.port}/v1/models", "/HEALTH"),
        ):
            with socket.create_connection(("127.0.0.1", there.port), timeout=10) as connection:
                connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                status = connection.recv(4096)[9:12]
            assert status in (b"400", b"401", b"404"), target


def test_keys_are_compared_in_constant_time(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tracformer.server import middleware

    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(
        middleware.hmac, "compare_digest", lambda *given: bool(compared.append(given))
    )
    with running(lambda: lm, api_key="key") as there:
        headers = {"Authorization": "Bearer key"}
        assert there.http.get("/v1/models", headers=headers).status_code == 401
    assert compared == [(b"key", b"key")]


def test_an_empty_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACFORMER_API_KEY", "")
    assert main(["serve", "stories"]) == 2
    assert "the API key is empty" in capsys.readouterr().err
    monkeypatch.setenv("TRACFORMER_API_KEY", "key\n")
    assert main(["serve", "stories"]) == 2
    assert "white space" in capsys.readouterr().err


def test_other_machines_need_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.com"):
        assert main(["serve", "stories", "--host", host]) == 2
        assert "--no-key" in capsys.readouterr().err
        assert Settings(host=host, api_key="key").host == host
        assert Settings(host=host, no_key=True).host == host
    assert main(["serve", "stories", "--host", ""]) == 2
    assert "host is empty" in capsys.readouterr().err
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert Settings(host=host).host == host


# ---- connections


def test_slow_headers_time_out(lm: LanguageModel) -> None:
    with running(lambda: lm, header_timeout=0.3) as there:
        for start in (b"", b"GET /health HTTP/1.1\r\nHost:"):
            with socket.create_connection(("127.0.0.1", there.port), timeout=10) as connection:
                connection.sendall(start)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(100) == b""
        # also the headers of a second request, byte by byte
        with socket.create_connection(("127.0.0.1", there.port), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)
            with contextlib.suppress(OSError):
                for _ in range(100):
                    connection.sendall(b"G")
                    time.sleep(0.05)
                pytest.fail("the connection stayed open")
        there.good("/v1/infill", GOOD["/v1/infill"])


def test_answers_that_are_not_read_free_their_connection(lm: LanguageModel) -> None:
    get = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(lambda: lm, body_timeout=0.3) as there, contextlib.ExitStack() as stack:
        connections = there.server.server_state.connections
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", there.port))
            connection.sendall(get * 200)  # the answers are larger than all buffers
        until(lambda: len(connections) >= 3)
        until(lambda: len(connections) <= 1)  # the client of `there`
        # one that reads slowly gets all of its answer
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", there.port))
        connection.settimeout(10)
        connection.sendall(get[:-2] + b"Connection: close\r\n\r\n")
        received = b""
        while part := connection.recv(4096):
            received += part
            time.sleep(0.02)
        head, _, body = received.partition(b"\r\n\r\n")
        assert len(body) == int(re.findall(rb"content-length: (\d+)", head)[0])


def test_a_long_request_is_no_slow_header(lm: LanguageModel) -> None:
    from tests.server.helpers import Slow, make

    slow = make(kind=Slow)
    with running(lambda: slow, header_timeout=0.2) as there:
        assert there.good("/v1/infill", {"text": "the [[20]]"})["results"]


def test_idle_connections_make_room(lm: LanguageModel) -> None:
    with running(lambda: lm, connections=4) as there, contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = socket.create_connection(("127.0.0.1", there.port), timeout=10)
            stack.enter_context(connection)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: local")
        until(lambda: len(there.server.server_state.connections) <= 4)
        with httpx.Client(base_url=there.url) as client:
            assert client.get("/health").status_code == 200


def test_headers_are_bounded(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with contextlib.suppress(OSError):
            for _ in range(1000):
                connection.sendall(b"X-Long: " + b"a" * 1000 + b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"400" in connection.recv(100)
    server.good("/v1/infill", GOOD["/v1/infill"])


@pytest.mark.skipif(sys.platform == "win32", reason="limits of descriptors are POSIX")
@pytest.mark.parametrize("most", ["512", "100000"])
def test_exhausted_descriptors_are_survived(most: str) -> None:
    """With 128 descriptors and 300 half requests `/health` answers, and the log stays short.

    The limit of connections keeps descriptors free. Without it (the second case) accepting fails.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SERVE.replace("MOST", most)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "ready":
                break
        port = next(line["port"] for line in lines if line["event"] == "listening")
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                connection = stack.enter_context(socket.socket())
                connection.settimeout(20)
                connection.connect(("127.0.0.1", port))
                with contextlib.suppress(OSError):
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: local")
            if most == "512":
                assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
            else:
                time.sleep(1)
        response = httpx.get(f"http://127.0.0.1:{port}/health", timeout=10)  # it recovered
        assert response.status_code == 200
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line)["event"] for line in process.stderr]
        assert process.wait(30) == 0
    # with a limit, accepting may fail at most once, before the oldest connection is closed
    found = events.count("out of file descriptors")
    assert found <= 1 if most == "512" else found == 1
    assert len(events) < 20


SERVE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from tests.server.helpers import make
from tracformer.server import Settings, connections
from tracformer.server.app import Server
from tracformer.server.middleware import configure_logging
if MOST > 512:
    connections._free_descriptors = lambda: 2**31
configure_logging("info")
Server(make, "tiny", Settings(port=0, connections=MOST, header_timeout=2)).run()
"""
