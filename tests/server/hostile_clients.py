"""Clients of the hostile suite, which run in processes of their own; only the standard library.

    python -m tests.server.hostile_clients probe PORT PID 0

- `probe` asks for `/health` until standard input ends, and measures how long it waits.
- `fuzz` sends wrong fields, mutated requests and strange paths.
- `slow` sends headers and bodies in slow pieces, or not to the end.
- `crowd` is 64 clients; a third of their requests are disconnected at random moments.

Each prints one JSON object: counts, and `wrong`, a list of what must not happen.
"""

import contextlib
import http.client
import json
import random
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CLIENTS = 64
BASES: dict[str, dict[str, Any]] = {
    "/v1/infill": {"text": "the [[1-3]] cat", "seed": 1},
    "/v1/score": {"text": "the [[cat]]"},
    "/v1/tokenize": {"text": "the cat"},
    "/v1/completions": {"prompt": "the", "max_tokens": 2, "seed": 1},
    "/infill": {"input_prefix": "the", "n_predict": 2, "seed": 1},
    "/v1/fim/completions": {"model": "tiny", "prompt": "the", "max_tokens": 2, "random_seed": 1},
}
STREAMED = [path for path in BASES if path not in ("/v1/score", "/v1/tokenize")]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30)),
    *(0.0, -0.0, 0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", " ", "1", "a", "ar", "car", "ac", "best", "beam:4", "nodes:9", "a" * 1000, "€" * 40_000),
    *("\0", "\ud800", "\udfff[[1]]", "[[1]]", "[[", "]]", "[[99999999]]", "[[3-1]]", "[[1]]" * 65),
    *("[[]]" * 3, "\\", "\\[[", "\u202e", "../../etc/passwd", "http://127.0.0.1/", "%00", "{}"),
    *([], [None], [1], ["a"], [[1]], [[]], ["a"] * 5, [1] * 2000, ["[[1]]"] * 70, [{}] * 300),
    *({}, {"a": 1}, {"blank": 5}, {"blank": {"max": 2**40}}, {"include_usage": True}, [[["a"]]]),
]
JSON = {"Content-Type": "application/json", "Host": "localhost"}


class Tally:
    """Counts of one process, from several threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def add(self, name: str, wrong: str | None = None) -> None:
        with self.lock:
            self.counts[name] += 1
            if wrong is not None:
                self.wrong.append(wrong[:500])

    def print(self, **more: Any) -> None:
        print(json.dumps({**self.counts, "wrong": self.wrong, **more}))


def problem_of(sent: Any, status: int, kind: str, body: bytes) -> str | None:
    """Return what is wrong with an answer: a status of 500 or more, or one that cannot be read."""
    if status >= 500:
        return f"{status} {body[:200]!r} for {sent!r:.200}"
    try:
        if kind.startswith("text/event-stream"):
            datas = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
            events = [json.loads(data) for data in datas if data != "[DONE]"]
            failed = [each for each in events if "error" in each and "server_error" in str(each)]
            return f"{failed[0]} for {sent!r:.200}" if failed or not events else None
        if kind.startswith("application/json"):
            json.loads(body)
    except ValueError as error:
        return f"{error}: {body[:200]!r} for {sent!r:.200}"
    return None


def post(port: int, path: str, fields: Any, timeout: float = 60) -> tuple[int, str, bytes]:
    """Send a request and return status, content type and body of its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        connection.request("POST", path, body, JSON)
        response = connection.getresponse()
        return response.status, response.headers.get("Content-Type", ""), response.read()
    finally:
        connection.close()


def run_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- probe


def run_delay(process: int) -> float:
    """Return the seconds for which threads of a process were ready and had no processor."""
    total = 0
    for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            total += int(thread.read_text().split()[1])
    return total / 1e9


def probe(port: int, process: int, _: int) -> None:
    """Measure the waits of `/health`, each on a connection of its own.

    A wait is counted without the time for which the machine gave its processors to others: that
    is no fault of the server.
    """
    tally, own = Tally(), Path("/proc/self/schedstat")
    waits, walls = [0.0], [0.0]
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        before, began = run_delay(process) + int(own.read_text().split()[1]) / 1e9, time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(request)
                answer = connection.recv(4096)
            wrong = None if b" 200 " in answer else f"/health: {answer!r}"
        except OSError as error:
            wrong = f"/health: {error!r}"
        wall = time.monotonic() - began
        after = run_delay(process) + int(own.read_text().split()[1]) / 1e9
        walls.append(wall)
        waits.append(wall - (after - before))
        tally.add("requests", wrong)
    tally.print(longest=round(max(waits), 3), longest_wall=round(max(walls), 3))


# ---- wrong requests


def wrong_fields(rng: random.Random, fields: dict[str, list[str]]) -> tuple[str, bytes]:
    """Return a path and a body with one to three wrong fields."""
    path = rng.choice(list(BASES))
    body = dict(BASES[path])
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice([*fields[path], "", "x" * 300, "__proto__"])
        body[name] = rng.choice(VALUES)
    if rng.random() < 0.1:
        del body[rng.choice(list(body))]
    if path in STREAMED and rng.random() < 0.4:
        body["stream"] = True
    written = json.dumps(body)
    if rng.random() < 0.1:  # not JSON any more
        place = rng.randrange(len(written))
        written = written[:place] + rng.choice('{}[],:"\\x\0') + written[place + 1 :]
    return path, written.encode()


def mutated(rng: random.Random) -> bytes:
    """Return the bytes of a request, damaged in a few places."""
    path = rng.choice([*BASES, "/", "/docs", "/v1/models", "/metrics", "/page/../app.py", "/%00"])
    body = json.dumps(BASES.get(path, {})).encode()
    head = (
        f"{rng.choice(('POST', 'GET', 'PUT', 'HEAD', 'OPTIONS', 'X'))} {path} HTTP/1.1\r\n"
        f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    more = (
        *("Transfer-Encoding: chunked", "Content-Length: 3", "Content-Length: -1", "Expect: x"),
        *("Content-Length: 99999999999", "Upgrade: websocket", "Authorization: \xff", ": x"),
        *("Connection: close", "Range: bytes=0-", "Origin: null", "X-Long: " + "a" * 20_000),
        *("Content-Encoding: gzip", "Accept: \0", "Cookie: " + "a=b;" * 2000, "Host: [::1"),
    )
    for line in rng.sample(more, rng.choice((0, 1, 2))):
        head += line + "\r\n"
    sent = bytearray(head.encode("latin-1") + b"\r\n" + body)
    for _ in range(rng.choice((0, 1, 2, 5))):
        place = rng.randrange(len(sent))
        sent[place : place + rng.choice((0, 1))] = bytes(
            rng.choices(range(256), k=rng.choice((0, 1)))
        )
    return bytes(sent)


def fuzz(port: int, count: int, seed: int) -> None:
    """Send wrong requests: fields, damaged bytes, and bodies at the limits."""
    tally = Tally()
    document = get_json(port, "/openapi.json")
    fields = {path: field_names(document, path) for path in BASES}

    def work(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for _ in range(count // 4):
            if rng.random() < 0.75:
                path, body = wrong_fields(rng, fields)
                tally.add("fields", problem_of((path, body), *post(port, path, body)))
            else:
                sent = mutated(rng)
                tally.add("bytes", raw_problem(port, sent))

    run_threads(4, work)
    tally.print(paths=len(fields), names=sum(map(len, fields.values())))


def raw_problem(port: int, sent: bytes) -> str | None:
    """Send bytes; return what is wrong with the answer. No answer is right too."""
    received = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection,
    ):
        connection.sendall(sent)
        received = connection.recv(2**16)
    status = received[9:12]
    if status.isdigit() and int(status) >= 500:
        return f"{received[:200]!r} for {sent!r:.300}"
    return None


def get_json(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": "localhost"})
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def field_names(document: dict[str, Any], path: str) -> list[str]:
    """Return the names of a route's fields, from the description of the API."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return list(schema["properties"])


# ---- slow clients


def slow(port: int, count: int, seed: int) -> None:
    """Send headers and bodies slowly: complete at last, cut off, or never completed."""
    tally = Tally()

    def work(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        body = json.dumps(BASES["/v1/infill"]).encode()
        head = (
            "POST /v1/infill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        for _ in range(count):
            kind = rng.choice(("headers", "body"))
            sent = head + body
            start = rng.randrange(len(head)) if kind == "headers" else len(head)
            status = b""
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
            ):
                connection.sendall(sent[:start])
                pause = rng.choice((0.0, 0.005, 0.2))
                stop = len(sent) if rng.random() < 0.5 else rng.randrange(start, len(sent))
                for place in range(start, stop):
                    connection.sendall(sent[place : place + 1])
                    time.sleep(pause)
                if rng.random() < 0.7:  # else it hangs up
                    status = connection.recv(4096)[9:12]
            tally.add(f"slow {kind}", f"{status!r}" if status.startswith(b"5") else None)

    run_threads(16, work)
    tally.print()


# ---- a crowd


def crowd(port: int, seconds: int, seed: int) -> None:
    """Run 64 clients, who check texts, disconnect, and send some wrong requests.

    The known answers come from standard input: a list of path, fields and text.
    """
    known = json.load(sys.stdin)
    tally, end = Tally(), time.monotonic() + seconds

    def work(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            path, fields, text = rng.choice(known)
            streams = rng.random() < 0.5
            if rng.random() < 1 / 3:
                with contextlib.suppress(OSError):
                    hang_up(port, path, {**fields, "stream": streams}, rng)
                tally.add("disconnected")
                continue
            try:
                status, kind, body = post(port, path, {**fields, "stream": streams})
            except OSError as error:
                tally.add("failed", f"{error!r} for {path} {fields}")
                continue
            if status == 429:
                tally.add("refused")
                time.sleep(0.05)
                continue
            found = None if status != 200 else text_of(path, kind, body)
            right = found == text
            tally.add("answers", None if right else f"{status} {found!r}, not {text!r}: {fields}")

    run_threads(CLIENTS, work)
    tally.print()


def hang_up(port: int, path: str, fields: Any, rng: random.Random) -> None:
    """Disconnect at a random moment of a request or of its answer."""
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    sent = head.encode() + body
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        if rng.random() < 0.3:
            connection.sendall(sent[: rng.randrange(len(sent))])
            return
        connection.sendall(sent)
        connection.settimeout(rng.random() * 0.5 + 1e-3)
        with contextlib.suppress(TimeoutError):
            for _ in range(rng.randrange(3)):
                connection.recv(rng.choice((1, 100, 4096)))


def text_of(path: str, kind: str, body: bytes) -> Any:
    """Return the generated texts of an answer, or of all events of a stream."""
    if not kind.startswith("text/event-stream"):
        found = json.loads(body)
        if path == "/v1/infill":
            return [each["text"] for each in found["results"]]
        if path == "/infill":
            return found["content"]
        if path == "/v1/score":
            return round(found["log_prob"], 3)
        key = "text" if path == "/v1/completions" else "message"
        texts = [choice[key] for choice in found["choices"]]
        return texts if key == "text" else [text["content"] for text in texts]
    pieces: dict[int, str] = {}
    content = ""
    for data in events(body):
        if "results" in data:
            return [each["text"] for each in data["results"]]
        content += data.get("content", "")
        for choice in data.get("choices", ()):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            pieces[choice["index"]] = pieces.get(choice["index"], "") + piece
    return content if path == "/infill" else [pieces[number] for number in sorted(pieces)]


def events(body: bytes) -> Iterator[Any]:
    for line in body.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


if __name__ == "__main__":
    name, port, number, more = sys.argv[1:]
    clients: dict[str, Callable[[int, int, int], None]]
    clients = {"probe": probe, "fuzz": fuzz, "slow": slow, "crowd": crowd}
    clients[name](int(port), int(number), int(more))
