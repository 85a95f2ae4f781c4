"""Operating a server: metrics, logs, API description, start and stop, and the guide docs/serve.md."""

import argparse
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.helpers import save_model
from tests.server.helpers import WORDS, Running, Slow, events, make, running, shaped, until
from tracformer import LanguageModel
from tracformer.cli import main, serve
from tracformer.data import train_bpe
from tracformer.server import Limits, Settings
from tracformer.server.middleware import LOGGER, JsonFormatter

SECRET = "the cat sat secretly"


def metrics(server: Running) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(
                f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "le"
            )
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_metrics_count_requests_and_tokens(server: Running) -> None:
    before = metrics(server)
    server.good("/v1/infill", {"text": "the [[3]] cat", "n": 2})
    server.refused("/v1/infill", {"text": "none"})
    server.http.get("/made/up/by/a/client")
    after = metrics(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("tracformer_requests_total{path=/v1/infill,status=200}") == 1
    assert grown("tracformer_requests_total{path=/v1/infill,status=400}") == 1
    assert grown("tracformer_requests_total{path=other,status=404}") == 1
    assert grown("tracformer_tokens_total{kind=completion}") == 6
    assert grown("tracformer_engine_tokens_total{}") == 6
    assert grown("tracformer_request_seconds_count{path=/v1/infill}") == 2
    assert grown("tracformer_first_token_seconds_count{}") == 1
    assert after["tracformer_rows_capacity{}"] == 64
    assert after["tracformer_rows_running{}"] == 0
    assert not any("made" in name for name in after)


def test_logs_are_json_without_texts_of_requests(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        server.good("/v1/infill", {"text": f"{SECRET} [[2]]"})
        server.refused("/v1/infill", {"text": SECRET, SECRET: 1})
        server.refused("/v1/score", {"text": f"[[{SECRET}"})
        server.good("/v1/completions", {"prompt": SECRET, "suffix": SECRET, "max_tokens": 2})
        server.stream("/infill", {"input_prefix": SECRET, "n_predict": 2})
        server.http.get(f"/{SECRET}?q={SECRET}")
        until(lambda: any("other" in JsonFormatter().format(record) for record in caplog.records))
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert not any("secretly" in line for line in lines)
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    expected = ["/v1/infill", "/v1/infill", "/v1/score", "/v1/completions", "/infill", "other"]
    # a disconnection in an earlier test may be logged late
    assert Counter(expected) <= Counter(line["path"] for line in found)
    answered = next(
        line for line in found if line["path"] == "/v1/infill" and line["status"] == 200
    )
    assert {
        "time",
        "level",
        "event",
        "id",
        "method",
        "status",
        "ms",
        "queued_ms",
        "completion_tokens",
    } <= set(answered)


def test_an_exception_is_logged_without_its_message() -> None:
    try:
        raise RuntimeError(SECRET)
    except RuntimeError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "", 0, "failed", (), (type(error), error, error.__traceback__)
        )
    line = JsonFormatter().format(record)
    assert "secretly" not in line
    assert json.loads(line)["error"] == "RuntimeError"
    assert __file__ in line


def test_an_internal_error_is_a_500_and_the_server_keeps_running(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(SECRET)

    with monkeypatch.context() as patch:
        patch.setattr("tracformer.server.native_protocol.usage_of", broken)
        error = server.refused("/v1/infill", {"text": "the [[1]]"}, 500)["error"]
        assert error["type"] == "server_error"
        assert "secretly" not in error["message"]
    server.good("/v1/infill", {"text": "the [[1]]"})


def test_the_api_is_described(server: Running) -> None:
    document = server.http.get("/openapi.json").json()
    paths = {
        "/v1/infill",
        "/v1/score",
        "/v1/tokenize",
        "/v1/completions",
        "/infill",
        "/v1/fim/completions",
        "/v1/models",
        "/health",
    }
    assert paths <= set(document["paths"])
    page = server.http.get("/docs")
    assert all(path in page.text for path in paths)
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]


def test_every_answer_has_an_id(server: Running) -> None:
    ids = {
        server.http.get(path).headers["x-request-id"]
        for path in ("/health", "/nothing", "/v1/models")
    }
    assert len(ids) == 3


def test_wrong_usage_is_reported_before_the_server_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tracformer.cli import main

    assert main(["serve", "no/such/folder/here"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["serve", "stories", "--weights", "int4"]) == 2
    assert "weights is 'int4'; allowed: float32, bfloat16, int8" in capsys.readouterr().err
    for option, value in (
        ("drain", "inf"),
        ("drain", "nan"),
        ("timeout", "inf"),
        ("timeout", "nan"),
    ):
        assert main(["serve", "stories", f"--{option}", value]) == 2
        found = capsys.readouterr().err
        assert f"{option} is {value}; it must be in (0, 1e+09]" in found
        assert len(found.splitlines()) == 1


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    from tracformer.server.app import Server

    def load() -> Any:
        raise ValueError("no such weights")

    server = Server(load, "none", Settings(port=0))
    # browser tests leave an event loop running in this thread
    runner = threading.Thread(target=server.run, daemon=True)
    runner.start()
    runner.join(60)
    assert not runner.is_alive()
    assert server.failed


# Stop

LONG: dict[str, dict[str, Any]] = {  # more than a second with a slow model
    "/v1/infill": {"text": "the [[60]]", "whole": False},
    "/v1/completions": {"prompt": "the", "max_tokens": 60},
    "/infill": {"input_prefix": "the", "n_predict": 60},
    "/v1/fim/completions": {"model": "tiny", "prompt": "the", "max_tokens": 60},
}


def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    """The whole command, in a separate process."""
    folder = save_model(tmp_path / "letters", train_bpe(WORDS, 300), max_length=128, n_layer=7)
    command = [
        sys.executable,
        "-m",
        "tracformer",
        "serve",
        str(folder),
        "--port",
        "0",
        "--drain",
        "30",
        "--weights",
        "int8",
    ]
    environment = {**os.environ, "TRACFORMER_API_KEY": "sesame", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines: list[dict[str, Any]] = []
        for line in process.stderr:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "ready":
                break
        port = next(line["port"] for line in lines if line["event"] == "listening")
        received = threading.Event()
        answer: list[str] = []

        def ask() -> None:
            fields = {"text": "the [[100]] cat", "stream": True}
            headers = {"Authorization": "Bearer sesame"}
            with httpx.stream(
                "POST",
                f"http://127.0.0.1:{port}/v1/infill",
                json=fields,
                headers=headers,
                timeout=60,
            ) as response:
                for part in response.iter_text():
                    answer.append(part)
                    received.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert received.wait(30)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert "event: result" in "".join(answer)
        rest = [json.loads(line)["event"] for line in process.stderr]
        assert process.wait(30) == 0
        assert rest[-1] == "stopped"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


@pytest.mark.parametrize("hurried", [False, True], ids=["drain time over", "a second SIGINT"])
def test_requests_left_at_shutdown_get_503(hurried: bool, caplog: pytest.LogCaptureFixture) -> None:
    lm = make(kind=Slow)
    with (
        running(lambda: lm, rows=3, drain=60 if hurried else 0.2) as there,
        ThreadPoolExecutor(8) as threads,
    ):
        answers = {
            path: threads.submit(httpx.post, there.url + path, json=fields, timeout=60)
            for path, fields in LONG.items()
        }
        until(lambda: (there.backend.gate.running, there.backend.gate.waiting) == (3, 1))
        there.server.should_exit = True
        if hurried:
            there.server.force_exit = True
        for path, answer in answers.items():
            response = answer.result()
            assert response.status_code == 503
            assert shaped(path, response.json())
            assert "stopping" in response.text
    assert not [record for record in caplog.records if record.exc_info]


def test_an_unfinished_stream_ends_with_an_error() -> None:
    lm = make(kind=Slow)
    found: list[str] = []
    fields = {**LONG["/v1/infill"], "stream": True}
    with (
        running(lambda: lm, drain=0.2) as there,
        httpx.stream("POST", f"{there.url}/v1/infill", json=fields, timeout=60) as response,
    ):
        for part in response.iter_text():
            found.append(part)
            there.server.should_exit = True
    name, data = events("".join(found))[-1]
    assert (name, data["error"]["code"]) == ("error", "stopping")


# docs/serve.md

PAGES = Path(__file__).parents[2] / "docs"
GUIDE = (PAGES / "serve.md").read_text() + (PAGES / "tutorials" / "serve.md").read_text()
EXAMPLE_URL = "http://127.0.0.1:8000"
BLOCKS = list(re.finditer(r"^```python\n(.*?)^```", GUIDE, re.M | re.S))
LINES = (
    "\n".join(re.findall(r"^```sh\n(.*?)^```", GUIDE, re.M | re.S)).replace("\\\n", "").splitlines()
)
CALLS = [line for line in LINES if line.startswith("curl ")]
COMMANDS = [line for line in LINES if line.startswith("tracformer ")] + re.findall(
    r"`(tracformer serve [^`]+)`", GUIDE
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[1].split()[1])
def test_python_in_the_guide_runs(
    lm: LanguageModel, block: re.Match[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(lambda: lm, aliases=("stories",)) as there:
        code = "\n" * GUIDE.count("\n", 0, block.start(1)) + block[1].replace(
            EXAMPLE_URL, there.url
        )
        exec(compile(code, "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("call", CALLS)
def test_requests_in_the_guide_are_answered(server: Running, call: str) -> None:
    _, url, *words = shlex.split(call)
    assert url.startswith(EXAMPLE_URL)
    if not words:
        assert server.http.get(url.removeprefix(EXAMPLE_URL)).status_code == 200
        return
    assert words[:2] == ["-H", "Content-Type: application/json"]
    response = server.http.post(
        url.removeprefix(EXAMPLE_URL),
        content=words[3],
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 200, response.text


def test_commands_in_the_guide_parse() -> None:
    assert CALLS
    assert COMMANDS
    for command in COMMANDS:
        parser = argparse.ArgumentParser(exit_on_error=False)
        serve.add_arguments(parser)
        assert parser.parse_args(shlex.split(command.partition("#")[0])[2:])


def test_limits_are_read_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.read_limits(["n=32", "values=9"]) == Limits(n=32, values=9)
    for word, message in (
        ("value=9", "unknown limit 'value'; did you mean 'values'?"),
        ("n", "--limit is 'n'; write n=N with a number of at least 1"),
        ("n=0", "--limit is 'n=0'; write n=N"),
        ("n=-1", "--limit is 'n=-1'"),
    ):
        assert main(["serve", "stories", "--limit", word]) == 2
        assert message in capsys.readouterr().err


def test_the_guides_table_of_options_has_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    rows = dict(re.findall(r"^\| `(--[a-z-]+)`(?:, or `[A-Z_]+`)? \| ([^|]+) \|", GUIDE, re.M))
    defaults = vars(Settings())
    for option in ("--rows", "--queue", "--timeout", "--body-timeout", "--drain"):
        assert float(rows[option]) == defaults[option[2:].replace("-", "_")]
    [limits] = re.findall(r"^Limits of one request, .*?\n\n", GUIDE, re.M | re.S)
    found = {name: int(number) for name, number in re.findall(r"`(\w+)`\s(\d+)", limits)}
    assert found == vars(Limits())
    assert {name for action in parser._actions for name in action.option_strings} - set(
        re.findall("--[a-z-]+", GUIDE)
    ) == {"-h", "--help"}
