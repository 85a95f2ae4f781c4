"""Ray: batch jobs and replicas on a local cluster of two workers, one of which is killed.

The tests need the extra `ray`, which is not in `dev`: `make ray` installs it and runs them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cli.helpers import save_model
from tests.helpers import ROOT
from tracformer.data import char_tokenizer
from tracformer.generation import batch_job
from tracformer.generation.batch_job import BatchJob, run_job
from tracformer.generation.request_options import InfillOptions

pytest.importorskip("ray")
pytestmark = pytest.mark.soak

PATIENCE = 300  # seconds; Ray starts slowly on a busy machine
JOB = """
import sys
from pathlib import Path
from tracformer.generation import batch_job
from tracformer.generation.request_options import InfillOptions
if __name__ == "__main__":
    batch_job.PART_ROWS = 16
    job = batch_job.BatchJob("infill", sys.argv[1], Path(sys.argv[2]), InfillOptions.make(seed=3))
    batch_job.run_job(job, Path(sys.argv[3]), workers=2, ray="", quiet=True)
"""


def workers_of(process: int, kind: str) -> list[int]:
    """Return the processes below a process that Ray calls by this name."""
    found, todo = [], [process]
    while todo:
        parent = todo.pop()
        try:
            title = Path(f"/proc/{parent}/cmdline").read_text()
            for task in Path(f"/proc/{parent}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except FileNotFoundError:  # it has ended
            continue
        if title.startswith(f"ray::{kind}"):
            found.append(parent)
    return sorted(found)


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


@contextmanager
def running(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def test_a_killed_worker_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "letters", char_tokenizer("abcdefgh ."))
    rows = tmp_path / "rows.jsonl"
    texts = [f"{'abc ' * (row % 5)}[[{1 + row % 3}]] gh." for row in range(2000)]
    rows.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    monkeypatch.setattr(batch_job, "PART_ROWS", 16)
    job = BatchJob("infill", str(model), rows, InfillOptions.make(seed=3))
    run_job(job, tmp_path / "one", quiet=True)
    (tmp_path / "job.py").write_text(JOB)
    words = [sys.executable, str(tmp_path / "job.py"), str(model), str(rows), str(tmp_path / "ray")]
    with running(words, tmp_path / "log") as process:
        wait_for(lambda: len(list((tmp_path / "ray").glob("part-*"))) > 5)
        os.kill(workers_of(process.pid, "MapWorker")[0], signal.SIGKILL)
        assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    parts = [path.name for path in (tmp_path / "one").glob("part-*")]
    assert len(parts) == 125
    for name in parts:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_a_killed_replica_is_replaced(tmp_path: Path) -> None:
    port = 18123
    script = str(ROOT / "examples" / "ray_serve.py")
    address = f"http://127.0.0.1:{port}"
    body = {"text": "Once upon a time [[3-8]] lived.", "seed": 1, "quality": "raw"}

    def answer() -> str | None:
        try:
            found = httpx.post(f"{address}/v1/infill", json=body, timeout=60)
        except httpx.TransportError:
            return None
        return str(found.json()["results"][0]["text"]) if found.status_code == 200 else None

    def replicas() -> list[int]:
        return workers_of(process.pid, "ServeReplica")

    words = [sys.executable, script, "--replicas", "2", "--port", str(port)]
    with running(words, tmp_path / "log") as process:
        wait_for(lambda: process.poll() is not None or answer() is not None)
        assert process.poll() is None, (tmp_path / "log").read_text()
        first, before = answer(), replicas()
        assert len(before) == 2
        assert {answer() for _ in range(8)} == {first}
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: len(replicas()) == 2 and before[0] not in replicas())
        wait_for(lambda: answer() == first)
        assert {answer() for _ in range(8)} == {first}
        refused = httpx.post(f"{address}/v1/infill", json={"text": "no blank"}, timeout=60)
        assert refused.status_code == 400
