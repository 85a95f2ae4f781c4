"""Time to a fill at the defaults of the bundled model `stories`.

    fills/cold    a whole run of the command line, against `python -c "import torch"`
    fills/warm    a loaded model: from Python, and over HTTP

Seconds are medians of a few rounds in turns. Seconds of processor time stand beside them: they
depend less on what else the machine does.
"""

import json
import resource
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tracformer.bench import BenchRow, Figures, Measured, Measurement, Scale

MODEL = "stories"
TEXTS = {
    "5 tokens": "Mia carried the [[5]] to the market.",
    "12 tokens": "Tom saw a big red ball in the park. [[12]] Then they played together all day.",
    "[[]]": "The dog was hungry. It looked for [[]] and then it fell asleep.",
    "two [[]]": "The scientist put the [[]] in the fridge and forgot [[]] until Monday.",
    "four [[]]": "Once [[]] a girl named [[]]. She liked [[]] and was [[]] all day.",
}
COLD = ("5 tokens", "[[]]")  # of the texts; on the command line most of the rest is the same


# ---- measured


def cold(text: str, rounds: int) -> Figures:
    """Measure seconds of importing torch, and of a run of the command line that fills a text."""
    return in_turns(
        rounds,
        torch=lambda: run_process("-c", "import torch"),
        infill=lambda: run_process("-m", "tracformer", "infill", "--model", MODEL, text),
    )


def warm(text: str, rounds: int) -> Figures:
    """Measure seconds of a fill from Python and over HTTP, after one that is not counted."""
    import tracformer
    from tracformer.devices import keep_freed_memory

    keep_freed_memory()
    lm = tracformer.load(MODEL)
    with server() as port:
        body = json.dumps({"text": text, "seed": 0, "timeout": 600}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/infill", body, headers)

        def over_http() -> None:
            with urllib.request.urlopen(request, timeout=600) as answer:
                answer.read()

        lm.infill(text)
        over_http()
        return in_turns(rounds, python=lambda: lm.infill(text), http=over_http)


def run_process(*words: str) -> None:
    """Run a fresh Python and wait for it."""
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def server() -> Iterator[int]:
    """Run `tracformer serve` with the bundled model; yield its port when it is ready."""
    command = [sys.executable, "-m", "tracformer", "serve", MODEL, "--port", "0"]
    with subprocess.Popen(
        [*command, "--timeout", "600"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        port, event = 0, ""
        for line in process.stderr:
            entry = json.loads(line)
            port, event = entry.get("port", port), entry["event"]
            if event == "ready":
                break
        # a full pipe would stop the server
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        try:
            if event != "ready":
                raise RuntimeError("`tracformer serve` ended before it was ready")
            yield port
        finally:
            process.terminate()
            reader.join()


def in_turns(rounds: int, **runs: Callable[[], object]) -> Figures:
    """Return the median seconds of each run, and of processor time in this and in ended processes.

    The runs take turns, so a busy moment affects all.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            before, start = processor_seconds(), time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(processor_seconds() - before)
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "processor": {name: statistics.median(each) for name, each in processor.items()},
    }


def processor_seconds() -> float:
    """Return the processor time of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# ---- cases


def _cases(names: tuple[str, ...]) -> Callable[[Scale], dict[str, dict[str, Any]]]:
    """Return the cases of those of the named texts that a scale has."""
    return lambda scale: {
        name: {"text": TEXTS[name], "rounds": scale.generation_rounds}
        for name in names
        if name in scale.fills
    }


# ---- rows


def _cold_rows(found: Measured) -> list[BenchRow]:
    rows = []
    for case, figures in found.cases("fills/cold").items():
        seconds, processor = figures["seconds"], figures["processor"]
        note = (
            f"{processor['infill']:.2f} s of processor time, "
            f"{processor['infill'] / processor['torch']:.2f} times `import torch`"
        )
        ratio = seconds["infill"] / seconds["torch"]
        rows.append(
            BenchRow(
                "first fill, cold command line",
                f"one blank, {case}",
                seconds["infill"],
                "s",
                ratio,
                "times `import torch`",
                note,
            )
        )
    return rows


def _warm_rows(found: Measured) -> list[BenchRow]:
    rows = []
    for case, figures in found.cases("fills/warm").items():
        seconds, processor = figures["seconds"], figures["processor"]
        note = f"{processor['python']:.2f} s of processor time"
        rows.append(BenchRow("fill, Python", case, seconds["python"], "s", note=note))
        ratio = seconds["http"] / seconds["python"]
        rows.append(BenchRow("fill, HTTP", case, seconds["http"], "s", ratio, "times Python"))
    return rows


MEASUREMENTS = (
    Measurement("fills/cold", cold, _cases(COLD), _cold_rows),
    Measurement("fills/warm", warm, _cases(tuple(TEXTS)), _warm_rows),
)
