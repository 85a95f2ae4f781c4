"""How a server stops: it finishes what it has, and what it cannot finish in time is told so."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.helpers import save_model
from tests.server.helpers import WORDS, Slow, events, make, running, shaped, until
from tracformer.data import train_bpe

LONG: dict[str, dict[str, Any]] = {  # of a slow model: more than a second
    "/v1/infill": {"text": "the [[60]]", "whole": False},
    "/v1/completions": {"prompt": "the", "max_tokens": 60},
    "/infill": {"input_prefix": "the", "n_predict": 60},
    "/v1/fim/completions": {"model": "tiny", "prompt": "the", "max_tokens": 60},
}


def test_sigterm_lets_requests_finish(tmp_path: Path) -> None:
    """The whole command, in a process of its own."""
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
        heard = threading.Event()
        answer: list[str] = []

        def ask() -> None:
            asked = {"text": "the [[100]] cat", "stream": True}
            headers = {"Authorization": "Bearer sesame"}
            with httpx.stream(
                "POST",
                f"http://127.0.0.1:{port}/v1/infill",
                json=asked,
                headers=headers,
                timeout=60,
            ) as response:
                for part in response.iter_text():
                    answer.append(part)
                    heard.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert heard.wait(30)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert "event: result" in "".join(answer)
        rest = [json.loads(line)["event"] for line in process.stderr]
        assert process.wait(30) == 0
        assert rest[-1] == "stopped"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


@pytest.mark.parametrize("hurried", [False, True], ids=["the time is over", "a second SIGINT"])
def test_what_is_left_is_told_that_the_server_stops(
    hurried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lm = make(kind=Slow)
    with (
        running(lambda: lm, rows=3, drain=60 if hurried else 0.2) as there,
        ThreadPoolExecutor(8) as threads,
    ):
        answers = {
            path: threads.submit(httpx.post, there.url + path, json=asked, timeout=60)
            for path, asked in LONG.items()
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


def test_a_stream_that_is_not_finished_ends_with_an_error() -> None:
    lm = make(kind=Slow)
    told: list[str] = []
    asked = {**LONG["/v1/infill"], "stream": True}
    with (
        running(lambda: lm, drain=0.2) as there,
        httpx.stream("POST", f"{there.url}/v1/infill", json=asked, timeout=60) as response,
    ):
        for part in response.iter_text():
            told.append(part)
            there.server.should_exit = True
    name, data = events("".join(told))[-1]
    assert (name, data["error"]["code"]) == ("error", "stopping")
