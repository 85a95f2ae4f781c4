"""Load test of the server: many clients, a fifth of which disconnect; every answer is checked.

    python -m benchmarks.load runs/stories                            # 64 clients for five minutes
    python -m benchmarks.load runs/stories --clients 8 --minutes 0.5
    python -m benchmarks.load runs/stories --against ../before/src    # another version's server

It starts `tracformer serve` in another process, on the loopback interface. Tasks are drawn from a
pool whose answers the library computes first, in this process. The model is served without its
generation settings, so that its fills are plain samples, streamed or not.

1. The gain of batching is measured in rounds, because the speed of a machine varies: one client;
   all clients with a second server that answers one request at a time (`--rows 1`); all clients
   with the first server.
2. All clients use the first server for the given time, and some disconnect.

With `--against`, only the servers of two versions are compared, in alternating runs.

Throughput, latencies, the server's memory and the number of different answers are printed. A
different answer is a tie if a change of the logits by 1e-5 leads to it. The exit code is 1 if an
answer differs and is no tie, if a client got an error, or if the server still has rows at the end.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load_tasks import Library, Task, make_pool
from tracformer.generation import generation_config
from tracformer.loading import find_folder

HANG_UP = 0.2  # of the requests
ROUNDS = 5
RUNS = 7  # of each version with --against


@dataclass
class Tally:
    """What the clients measured; protected by a lock."""

    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first token, of streams
    tokens: int = 0
    hung_up: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    # (task, sample) -> what came instead
    different: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    differences: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def serving(model: str, rows: int, source: str = "") -> Iterator[tuple[int, int]]:
    """Start a server; yield its port and process id when it is ready.

    Args:
        model: Folder of the model.
        rows: Rows of the server.
        source: Folder of another version's package; empty: this one's.
    """
    env = {**os.environ, "PYTHONPATH": source} if source else None
    command = [
        sys.executable,
        "-m",
        "tracformer",
        "serve",
        model,
        "--port",
        "0",
        "--rows",
        str(rows),
        "--queue",
        "256",
        "--timeout",
        "600",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        port, ready = 0, False
        while not ready:
            line = process.stderr.readline()
            if not line:
                raise RuntimeError("the server ended before it was ready")
            entry = json.loads(line)
            port, ready = entry.get("port", port), entry["event"] == "ready"
        # a full pipe would stop the server
        drain = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
        drain.start()
        try:
            yield port, process.pid
        finally:
            process.terminate()
            drain.join()


def memory(process: int) -> float:
    """Return the memory of a process in megabytes; 0 if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))
    return 0.0


def processor(process: int) -> float:
    """Return the processor seconds of a process; 0 if they cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def samples_of(path: str, answer: Any) -> list[tuple[Any, ...]]:
    """Return the tokens of each sample of an answer."""
    if path == "/v1/infill":
        return [tuple(result["spans"][0]["token_ids"]) for result in answer["results"]]
    return [tuple(choice["logprobs"]["tokens"]) for choice in answer["choices"]]


class Client:
    """Sends one task after the other."""

    def __init__(self, port: int, pool: list[Task]) -> None:
        self.port, self.pool, self.tally = port, pool, Tally()

    def run(self, seed: int, until: float, most: int, hang_up: float = HANG_UP) -> None:
        """Send tasks until a time or a number of requests."""
        dice = random.Random(seed)
        for _ in range(most):
            if time.monotonic() >= until:
                return
            number = dice.randrange(len(self.pool))
            try:
                if dice.random() < hang_up:
                    self._hang_up(self.pool[number], dice.randint(1, 6))
                else:
                    self._ask(number, stream=dice.random() < 0.3)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                with self.tally.lock:
                    self.tally.errors[type(error).__name__] += 1

    def _send(
        self, task: Task, stream: bool
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(
            "POST",
            task.path,
            json.dumps({**task.fields, "stream": stream}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            connection.close()
            raise ValueError(f"status {response.status}")
        return connection, response

    def _hang_up(self, task: Task, after: int) -> None:
        connection, response = self._send(task, stream=True)
        with contextlib.closing(connection):
            for _ in range(2 * after):  # lines: each event has two or three
                response.readline()
        with self.tally.lock:
            self.tally.hung_up += 1

    def _ask(self, number: int, stream: bool) -> None:
        task, begun = self.pool[number], time.perf_counter()
        first = 0.0
        stream = stream and task.path == "/v1/infill"
        connection, response = self._send(task, stream)
        with contextlib.closing(connection):
            if stream:
                name, answer = "", None
                for line in response:
                    kind, _, value = line.decode().strip().partition(": ")
                    name = value if kind == "event" else name
                    if name == "token" and not first:
                        first = time.perf_counter() - begun
                    if kind == "data" and name in ("result", "error"):
                        answer = json.loads(value)
            else:
                answer = json.loads(response.read())
        seconds = time.perf_counter() - begun
        got = samples_of(task.path, answer)
        with self.tally.lock:
            self.tally.seconds.append(seconds)
            self.tally.tokens += sum(map(len, got))
            if first:
                self.tally.first.append(first)
            for sample, (came, right) in enumerate(zip(got, task.expected, strict=True)):
                if came != right:
                    self.tally.differences += 1
                    self.tally.different[number, sample] = came


@dataclass
class Spent:
    """Seconds of a run, processor seconds of the server, and its memory (MB) every few seconds."""

    seconds: float = 0.0
    processor: float = 0.0
    memory: list[float] = field(default_factory=list)

    def add(self, other: "Spent") -> None:
        """Add another run."""
        self.seconds += other.seconds
        self.processor += other.processor
        self.memory += other.memory


def run_clients(
    count: int, minutes: float, most: int, client: Client, seed: int, process: int, hang_up: float
) -> Spent:
    """Run clients in threads until all have finished."""
    begun, before = time.monotonic(), processor(process)
    until = begun + minutes * 60
    threads = [
        threading.Thread(target=client.run, args=(seed + i, until, most, hang_up))
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    sizes = [memory(process)]
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(2.0, minutes * 3))
        sizes.append(memory(process))
    return Spent(time.monotonic() - begun, processor(process) - before, sizes)


def rows_held(port: int) -> float:
    """Return the number of rows and requests that the server still has after all clients."""
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        gauges = ("tracformer_rows_running ", "tracformer_requests_running ")
        held = sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(gauges))
        if held == 0:
            return 0.0
        time.sleep(0.1)
    return held


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of the values, for instance 0.99."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else float("nan")


def report(name: str, tally: Tally, spent: Spent) -> None:
    """Print one line about a run."""
    rate, pace = tally.tokens / spent.seconds, tally.tokens / (spent.processor or math.nan)
    print(
        f"{name:<14} {len(tally.seconds):>6} answers, {tally.hung_up} hung up, {rate:8.1f} "
        f"tokens/s ({pace:.1f} a CPU second), latency p50 "
        f"{percentile(tally.seconds, 0.5) * 1000:.0f} ms, p99 "
        f"{percentile(tally.seconds, 0.99) * 1000:.0f} ms, first token p50 "
        f"{percentile(tally.first, 0.5) * 1000:.0f} ms",
        flush=True,
    )


@dataclass
class Way:
    """A way to use a server, which is compared with others."""

    name: str
    clients: int
    process: int
    client: Client
    spent: Spent = field(default_factory=Spent)
    rates: list[float] = field(default_factory=list)  # tokens a second, of each round

    def ask(self, minutes: float, most: int, seed: int) -> None:
        """Run one round."""
        before = self.client.tally.tokens
        spent = run_clients(self.clients, minutes, most, self.client, seed, self.process, 0.0)
        self.spent.add(spent)
        self.rates.append((self.client.tally.tokens - before) / spent.seconds)


def compare(ways: Sequence[Way], minutes: float, most: int, seed: int) -> None:
    """Compare the last way with each of the others, in rounds."""
    for number in range(ROUNDS):
        for way in ways:
            way.ask(minutes, most, seed + 1000 * number)
    for way in ways:
        report(way.name, way.client.tally, way.spent)
    *others, together = ways
    for way in others:
        times = sorted(
            mine / theirs for mine, theirs in zip(together.rates, way.rates, strict=True) if theirs
        )
        if times:
            print(
                f"together {statistics.median(times):.2f} times {way.name} ({times[0]:.2f} to "
                f"{times[-1]:.2f} in {len(times)} rounds)",
                flush=True,
            )


def compare_versions(
    model: str, source: str, pool: list[Task], clients: int, minutes: float, seed: int
) -> int:
    """Compare the server of another version with this one's; return the exit code."""
    with serving(model, clients, source) as before, serving(model, clients) as after:
        figures: dict[str, list[tuple[float, float, float]]] = {"before": [], "after": []}
        errors: Counter[str] = Counter()
        for run in range(-1, RUNS):  # the first run of each warms up
            for name, (port, process) in (("before", before), ("after", after)):
                client = Client(port, pool)
                spent = run_clients(
                    clients, minutes, 100_000, client, seed + 1000 * run, process, 0.0
                )
                seconds = client.tally.seconds
                errors += client.tally.errors
                if run >= 0:
                    tail, cost = percentile(seconds, 0.99), spent.processor / len(seconds)
                    figures[name].append((len(seconds) / spent.seconds, tail, cost))
    for name, runs in figures.items():
        rates, tails, costs = (statistics.median(column) for column in zip(*runs, strict=True))
        print(
            f"{name:<7} {rates:.1f} requests/s, p99 {1000 * tails:.0f} ms, "
            f"{1000 * costs:.1f} ms of processor time a request (medians of {RUNS} runs)"
        )
    for what, column in (("requests/s", 0), ("p99", 1), ("processor time", 2)):
        pairs = zip(figures["after"], figures["before"], strict=True)
        ratios = sorted(mine[column] / theirs[column] for mine, theirs in pairs)
        print(
            f"{what}, after / before: {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
    print(f"errors: {dict(errors) or 'none'}")
    return int(bool(errors))


def main(words: Sequence[str] | None = None) -> int:
    """Run the load test; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--most", type=int, default=100_000, help="requests per client (default: 100000)"
    )
    parser.add_argument("--pool", type=int, default=200, help="different tasks (default: 200)")
    parser.add_argument("--rows", type=int, default=64, help="rows of the server (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--against", metavar="SRC", help="compare with another version's server; its source folder"
    )
    arguments = parser.parse_args(words)
    found = find_folder(arguments.model)
    with tempfile.TemporaryDirectory() as place:
        arguments.model = str(Path(place) / found.name)
        shutil.copytree(found, arguments.model, ignore=lambda *_: [generation_config.FILE])
        return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Run the load test as the arguments say; return the exit code."""
    library = Library(arguments.model)
    pool, seconds = make_pool(library, arguments.pool, arguments.seed)
    print(
        f"library alone   {len(pool):>6} answers, "
        f"{sum(task.tokens for task in pool) / seconds:8.1f} tokens/s, one by one",
        flush=True,
    )
    if arguments.against:
        return compare_versions(
            arguments.model,
            arguments.against,
            pool,
            arguments.clients,
            arguments.minutes,
            arguments.seed,
        )
    with serving(arguments.model, arguments.rows) as (port, process):
        with serving(arguments.model, 1) as (single_port, single_process):
            for each in (port, single_port):
                # warm up
                Client(each, pool).run(arguments.seed, time.monotonic() + 10, 3, hang_up=0.0)
            ways = [
                Way("one client", 1, process, Client(port, pool)),
                Way("one by one", arguments.clients, single_process, Client(single_port, pool)),
                Way("together", arguments.clients, process, Client(port, pool)),
            ]
            compare(ways, min(0.2, arguments.minutes / 10), arguments.most, arguments.seed)
        many = Client(port, pool)
        spent = run_clients(
            arguments.clients,
            arguments.minutes,
            arguments.most,
            many,
            arguments.seed + 99,
            process,
            HANG_UP,
        )
        report(f"{arguments.clients} clients", many.tally, spent)
        sizes = spent.memory
        settled = sizes[len(sizes) // 5 :]  # the first fifth: caches and arenas grow
        print(
            f"server's memory {settled[0]:.0f} MB early on, {statistics.fmean(settled[-3:]):.0f} "
            f"MB at the end, {max(sizes):.0f} MB at most"
        )
        held = rows_held(port)
    tallies = [client.tally for client in (*(way.client for way in ways), many)]
    different = {place: came for tally in tallies for place, came in tally.different.items()}
    wrong = sum(
        not library.ties(pool[number], sample, came) for (number, sample), came in different.items()
    )
    checked, count = (
        sum(len(tally.seconds) for tally in tallies),
        sum(tally.differences for tally in tallies),
    )
    print(
        f"{checked} answers compared: {count} differ, in {len(different)} samples of the pool: "
        f"{len(different) - wrong} ties, {wrong} not"
    )
    errors = dict(sum((tally.errors for tally in tallies), Counter()))
    print(f"errors: {errors or 'none'}; rows still held: {held:.0f}")
    return int(bool(wrong or errors or held or not checked))


if __name__ == "__main__":
    sys.exit(main())
