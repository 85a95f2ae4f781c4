"""What whoever runs a server sees: metrics, logs, the API's description, starting."""

import json
import logging
import threading
from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.helpers import Running, until
from tracformer.server.observability import LOGGER, JsonFormatter

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


def test_metrics_count(server: Running) -> None:
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


def test_logs_are_json_without_texts(server: Running, caplog: pytest.LogCaptureFixture) -> None:
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
    told: list[dict[str, Any]] = [json.loads(line) for line in lines]
    expected = ["/v1/infill", "/v1/infill", "/v1/score", "/v1/completions", "/infill", "other"]
    # a client that hung up in an earlier test may be told of late
    assert Counter(expected) <= Counter(line["path"] for line in told)
    answered = next(line for line in told if line["path"] == "/v1/infill" and line["status"] == 200)
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


def test_a_mistake_of_ours_is_a_500_and_the_server_goes_on(
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


def test_a_slip_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
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
        told = capsys.readouterr().err
        assert f"{option} is {value}; it must be in (0, 1e+09]" in told
        assert len(told.splitlines()) == 1


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    from tracformer.server import Settings
    from tracformer.server.app import Server

    def load() -> Any:
        raise ValueError("no such weights")

    server = Server(load, "none", Settings(port=0))
    # a browser's tests leave an event loop running in this thread
    runner = threading.Thread(target=server.run, daemon=True)
    runner.start()
    runner.join(60)
    assert not runner.is_alive()
    assert server.failed
