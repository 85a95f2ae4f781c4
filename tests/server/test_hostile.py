"""Long tests of a server: hostile clients, generated requests, lm-eval's client, many clients.

The hostile suite sends wrong, slow, huge and interrupted requests, one after another. Server,
clients and the probe of `/health` are processes of their own. TRACFORMER_SOAK multiplies the number
of requests and the time (default: 1, about three minutes).
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.cli.helpers import save_model
from tests.helpers import soak_factor
from tests.server.helpers import WORDS, make, running, until
from tests.server.hostile_clients import BASES, post, problem_of, text_of
from tests.server.test_robustness import GOOD, shaped
from tracformer import load
from tracformer.data import train_bpe
from tracformer.server import Limits, Settings

# ---- hostile clients

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
DESCRIPTORS = 512
HALF = DESCRIPTORS + 200  # connections with half a header
LONGEST_WAIT = 1.0  # seconds of /health
# threads that asyncio keeps for large bodies and answers, once it has started them
POOL = min(32, (os.cpu_count() or 1) + 4)
FLAGS = ("--header-timeout", "2", "--body-timeout", "3", "--timeout", "30", "--name", "tiny")


class Victim:
    """A server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        limit = (DESCRIPTORS, DESCRIPTORS)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tracformer", "serve", str(folder), "--port", "0", *FLAGS],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
        )
        self.log: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        until(lambda: any('"ready"' in line for line in self.log), 120)
        self.port = next(json.loads(line)["port"] for line in self.log if '"listening"' in line)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def status(self, name: str) -> int:
        """Return a figure of /proc/PID/status, such as VmRSS in kB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=60).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def held(self) -> float:
        """Return the number of rows and requests that run or wait."""
        found = self.metrics()
        names = ("requests_running", "requests_waiting", "rows_running", "rows_waiting")
        return sum(found[f"tracformer_{name}"] for name in names)

    @contextmanager
    def clients(self, kind: str, amount: float, more: int, given: Any = None) -> Iterator[Any]:
        """Run clients beside the body of `with`; their figures are there after it."""
        words = [kind, str(self.port), str(amount), str(more)]
        found: dict[str, Any] = {}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.server.hostile_clients", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as process:
            yield found
            out, err = process.communicate(json.dumps(given))
            assert process.returncode == 0, err
            found.update(json.loads(out))

    def attack(self, kind: str, amount: float, more: int = 0, given: Any = None) -> Counter[str]:
        """Run clients to their end; return their counts."""
        with self.clients(kind, amount, more, given) as found:
            pass
        assert found.pop("wrong") == []
        return Counter(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("hostile") / "tiny",
        train_bpe(WORDS, 300),
        max_length=160,
        n_layer=8,
    )


def known_answers(port: int) -> list[tuple[str, dict[str, Any], Any]]:
    """Return requests with seeds and the texts they get from a server without other requests."""
    found = []
    for seed in range(4):
        for path, fields in (
            ("/v1/infill", {"text": "the [[1-6]] cat [[8]].", "n": 3, "seed": seed}),
            ("/v1/infill", {"text": f"once [[{9 + seed}]] mat", "seed": seed, "mode": "ac"}),
            ("/v1/completions", {"prompt": "the cat", "max_tokens": 24, "n": 2, "seed": seed}),
            ("/infill", {"input_prefix": "a dog", "input_suffix": " mat", "seed": seed}),
            ("/v1/fim/completions", {"model": "tiny", "prompt": "the", "random_seed": seed}),
        ):
            status, kind, body = post(port, path, fields)
            assert status == 200, body
            found.append((path, fields, text_of(path, kind, body)))
    return found


def at_limits(limits: Limits) -> Iterator[tuple[str, bytes, bool]]:
    """Yield bodies at each limit and just beyond it, and whether they are within it."""

    def fields(path: str, **more: Any) -> tuple[str, bytes]:
        return path, json.dumps({**BASES[path], **more}).encode()

    for extra in (0, 1):
        within = extra == 0
        for path in BASES:
            space = limits.body + extra - len(fields(path)[1])
            yield path, fields(path)[1] + b" " * space, within
            if path in ("/v1/completions", "/infill"):  # unknown fields are ignored there
                yield *fields(path, x=[1] * (limits.values - len(BASES[path]) - 2 + extra)), within
        nested: Any = 1
        for _ in range(limits.depth - 1 + extra):
            nested = [nested]
        yield *fields("/v1/completions", x=nested), within
        yield *fields("/v1/infill", text="[[1]]a" * (limits.blanks + extra), mode="car"), within
        yield *fields("/v1/completions", n=limits.n + extra), within
        yield *fields("/v1/completions", best_of=limits.best_of + extra), within
        yield *fields("/v1/completions", prompt=["a"] * (limits.prompts + extra)), within
        many = limits.samples // limits.n
        yield *fields("/v1/completions", prompt=["a"] * (many + extra), n=limits.n), within
        yield *fields("/v1/completions", logprobs=limits.top + extra), within
        yield *fields("/v1/completions", stop=["zz"] * (limits.stops + extra)), within
        yield *fields("/v1/infill", top=limits.top + extra), within
        yield *fields("/v1/infill", length_draws=limits.length_draws + extra), within
        yield *fields("/v1/infill", text="a [[2]]", search=f"beam:{limits.beam + extra}"), within
        yield (
            *fields("/v1/infill", text="[[3]]", search=f"best-first:{limits.nodes + extra}"),
            within,
        )


def exhaust(port: int) -> None:
    """Open more connections than the server has descriptors; each sends half a header."""
    with ExitStack() as stack:
        for _ in range(HALF):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(30)
            with suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        time.sleep(3)


def check_limits(port: int) -> int:
    bodies = list(at_limits(Limits()))
    for path, body, within in bodies:
        status, kind, answer = post(port, path, body)
        assert problem_of(body, status, kind, answer) is None
        over = b"the limit of this server" in answer
        assert (over, status == 200) == (not within, within), (
            path,
            body[:200],
            status,
            answer[:200],
        )
    return len(bodies)


class Share(NamedTuple):
    """How much of each attack."""

    fuzz: int  # requests
    crowd: int  # seconds


def attack(
    victim: Victim, known: list[tuple[str, dict[str, Any], Any]], share: Share, seed: int
) -> Counter[str]:
    """Run every attack, one after another; return counts."""
    counts = victim.attack("fuzz", share.fuzz, seed)
    counts += victim.attack("slow", max(1, share.fuzz // 1000), seed)
    counts["limits"] = check_limits(victim.port)
    counts += victim.attack("crowd", share.crowd, seed, known)
    exhaust(victim.port)
    counts["half headers"] = HALF
    until(lambda: victim.held() == 0)
    return counts


def test_hostile_clients(folder: Path, record_property: Callable[[str, object], None]) -> None:
    """No 5xx, no long wait of `/health`; rows, threads and memory are freed, texts are equal."""
    factor, victim = soak_factor(), Victim(folder)
    try:
        port = victim.port
        known = known_answers(port)
        # Warm up: all threads start, and memory takes its final size.
        attack(victim, known, Share(fuzz=1000, crowd=15), seed=99)
        memory, threads = victim.status("VmRSS"), victim.status("Threads")
        with victim.clients("probe", victim.process.pid, 0) as probe:
            counts = attack(victim, known, Share(3000 * factor, 60 * factor), seed=0)
        assert known_answers(port) == known
        after = victim.status("VmRSS"), victim.status("Threads")
        victim.process.send_signal(signal.SIGTERM)
        assert victim.process.wait(60) == 0
        victim.reader.join(10)
    finally:
        victim.process.kill()
        victim.process.wait()
    lines = [json.loads(line) for line in victim.log]
    bad = [line for line in lines if line["level"] not in ("info", "warning")]
    assert [line for line in bad if line["event"] != "out of file descriptors"] == []
    assert len(bad) <= 2
    assert probe.pop("wrong") == []
    grown = {"kB": (memory, after[0]), "threads": (threads, after[1])}
    record_property("counts", {**counts, "/health": probe, **grown})
    assert probe["longest"] <= LONGEST_WAIT
    assert after[0] <= 1.1 * memory
    assert after[1] <= threads + POOL


# ---- clients of other kinds

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_no_request_breaks_the_server(kind: str) -> None:
    """Requests inside and outside the API description get no 5xx, and errors have the right shape."""
    import schemathesis

    lm = make()
    limits = Limits(n=4, best_of=4, nodes=50)
    with running(lambda: lm, Settings(port=0, timeout=20, limits=limits)) as there:
        schema = schemathesis.openapi.from_url(f"{there.url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert {operation.path for operation in operations} >= set(GOOD)
        seen = set()

        def check(case: Any) -> None:
            response = case.call(timeout=60)
            seen.add(response.status_code)
            assert response.status_code < 500
            if response.status_code >= 400:
                assert shaped(case.operation.path, response.json())

        bounded = settings(
            max_examples=120,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        for operation in operations:
            # the others have no fields that could be wrong
            if kind == "positive" or operation.path in GOOD:
                bounded(
                    given(
                        case=operation.as_strategy(
                            generation_mode=schemathesis.GenerationMode(kind)
                        )
                    )(check)
                )()
        assert 400 in seen
        for path, fields in GOOD.items():
            there.good(path, fields)


TASK = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{before}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
EVALUATE = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
url, tokenizer, folder = sys.argv[1:]
arguments = {"model": "tiny", "base_url": url, "tokenizer": tokenizer, "tokenizer_backend": "huggingface", "max_length": 64}
found = lm_eval.simple_evaluate(
    model="local-completions", model_args=arguments, tasks=["tiny_choices"],
    task_manager=TaskManager(include_path=folder, include_defaults=False), batch_size=2, log_samples=True, bootstrap_iters=0,
)
samples = [{"doc": s["doc"], "resps": s["filtered_resps"]} for s in found["samples"]["tiny_choices"]]
print("RESULT" + json.dumps({"acc": found["results"]["tiny_choices"]["acc,none"], "samples": samples}))
"""


@pytest.mark.soak
def test_lm_eval_reads_the_chain_rule(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", train_bpe(WORDS, 300))
    lm = load(folder)
    docs = [
        {"before": "the cat", "choices": [" sat", " dog", " naïve"], "answer": 0},
        {"before": "once upon a", "choices": [" time", " mat"], "answer": 1},
        {"before": "a dog and", "choices": [" a cat", " the", " €"], "answer": 2},
    ]
    (tmp_path / "docs.jsonl").write_text(
        "".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8"
    )
    (tmp_path / "tiny.yaml").write_text(
        TASK.replace("FILE", str(tmp_path / "docs.jsonl")), encoding="utf-8"
    )
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "OPENAI_API_KEY": "none",
    }
    with running(lambda: lm) as there:
        command = [
            sys.executable,
            "-c",
            EVALUATE,
            f"{there.url}/v1/completions",
            str(folder),
            str(tmp_path),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, **offline},
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[6:]
    )
    right = 0
    for sample in result["samples"]:
        doc, sums = sample["doc"], []
        for choice, (found, greedy) in zip(doc["choices"], sample["resps"], strict=True):
            before, whole = (
                lm.tokenizer.encode(doc["before"]),
                lm.tokenizer.encode(doc["before"] + choice),
            )
            nothing = [False] * len(whole)
            scores = lm.score_tokens(whole, nothing, "ar")[len(before) :]
            likeliest = [top[0].token_id for top in lm.top_tokens(whole, nothing, 1, "ar")][
                len(before) :
            ]
            assert float(found) == pytest.approx(sum(scores), abs=1e-4)
            assert (greedy in (True, "True")) == (likeliest == whole[len(before) :])
            sums.append(sum(scores))
        right += sums.index(max(sums)) == doc["answer"]
    assert result["acc"] == pytest.approx(right / len(docs))


@pytest.mark.soak
def test_many_clients_get_what_the_library_gives(tmp_path: Path) -> None:
    """A short load run: it fails at an error, a wrong answer, or rows that stay taken."""
    folder = save_model(tmp_path / "tiny", train_bpe(WORDS, 300), max_length=128, n_layer=7)
    command = [
        sys.executable,
        "-m",
        "benchmarks.load",
        str(folder),
        "--minutes",
        "0.6",
        "--pool",
        "60",
        "--most",
        "200",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "errors: none; rows still held: 0" in done.stdout
    assert "64 clients" in done.stdout
