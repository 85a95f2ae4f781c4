"""Throughput of `prepare` and of batch jobs, and what large amounts of data cost.

    python -m benchmarks.scale prepare wikipedia-2006.txt --rounds 3
    python -m benchmarks.scale job stories.txt --rows 100000 [--verb infill] [--ray]
    python -m benchmarks.scale overhead stories.txt --rows 10000
    python -m benchmarks.scale overhead PF00595.fasta --model proteins --rows 4000
    python -m benchmarks.scale cost --tokens 0.6e6 --residues 2e4

`prepare` takes turns between the tokenizer library alone, which encodes all texts at once with 2
threads, and `tracformer prepare` with 1 and 2 workers; `job` between a batch job with 1 and with 2
workers (and on a local Ray cluster of 2). Both stop if the files differ, and print one SHA-256 of
the SHA-256 of all files. Times are wall-clock seconds and processor seconds of all processes; on a
machine with other work, compare only times of one round, and trust processor seconds. Ray's
processes are not counted in the latter.

`overhead` scores rows in one process as a batch job does, and runs only the model on the same
batches, in turns. It counts the operations of these batches too, as `tracformer.evaluation.flops`
does. `cost` turns the throughput of one core, and operations that are counted by running each
network, into core-hours and GPU-hours.
"""

import argparse
import hashlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from tracformer import Batch, LanguageModel, TracformerConfig, load
from tracformer.data import build_tokenizer, open_sources
from tracformer.evaluation.flops import (
    FORWARD_AND_BACKWARD,
    OPERATIONS,
    CountedAttention,
    flops_per_token,
)
from tracformer.generation.batch_job import PART_ROWS, BatchJob, make_work
from tracformer.generation.job_rows import parts_of, rows_of
from tracformer.generation.request_options import ScoreOptions
from tracformer.generation.scoring import batches_of
from tracformer.generation.template import to_batch
from tracformer.loading import find_folder
from tracformer.model.storage import load_config

SENTENCE = re.compile(r"[^.!?\n\[\]]+[.!?]")
VOCABULARY = 8192
LEARNED = 8_000_000  # characters from which the tokenizer is learned
A100 = 312e12  # operations per second in bfloat16, without sparsity: NVIDIA's data sheet
USE_TRAINING, USE_SCORING = 0.4, 0.01  # assumed shares of it; so small a network fills no GPU
HALF = "random:0.5"  # half of the tokens are predicted
RESIDUES = 96  # of a sequence; all of them are predicted

# these print seconds, wall-clock and of the processor, and the number of tokens
LIBRARY = """
import json, sys, time
from tokenizers import Tokenizer
from tracformer.data import open_sources
source = open_sources(sys.argv[1], documents="blank-line")["train"]
texts = [piece.text for piece in source.pieces()]
tokenizer = Tokenizer.from_file(sys.argv[2] + "/tokenizer.json")
begin, used = time.perf_counter(), time.process_time()
found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
wall, used = time.perf_counter() - begin, time.process_time() - used
print(json.dumps([wall, used, sum(len(each.ids) for each in found)]))
"""
PREPARE = """
import json, resource, sys, time
from tracformer.data import load_tokenizer, open_sources
from tracformer.data.prepare import prepare
if __name__ == "__main__":
    source = open_sources(sys.argv[1], documents="blank-line")
    tokenizer = load_tokenizer(sys.argv[2])
    begin, used = time.perf_counter(), time.process_time()
    data = prepare(sys.argv[3], source, tokenizer, quiet=True, workers=int(sys.argv[4]))
    wall, children = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = time.process_time() - used + children.ru_utime + children.ru_stime
    print(json.dumps([wall, used, sum(split.tokens for split in data.manifest.splits.values())]))
"""


class Timing(NamedTuple):
    """Seconds of one run, and what it worked on in them: tokens or rows."""

    wall: float
    processor: float
    amount: float


def run_script(name: str, code: str, *words: object, threads: int = 1) -> Timing:
    """Run Python code that prints a timing."""
    with tempfile.NamedTemporaryFile("w", suffix=f"-{name}.py") as script:
        script.write(code)
        script.flush()
        environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
        command = [sys.executable, script.name, *map(str, words)]
        return Timing(*json.loads(subprocess.check_output(command, env=environment)))


def hashes(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)
    }


def digest_of(files: dict[str, str]) -> str:
    """Return one hash of the names and hashes of files."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def show(name: str, timings: Sequence[Timing], unit: str) -> None:
    """Print the medians of several runs."""
    wall, processor = (statistics.median(each[i] for each in timings) for i in (0, 1))
    amount = timings[0].amount
    print(
        f"{name:<12} {wall:8.2f} s wall, {amount / wall:11,.0f} {unit}/s; {processor:8.2f} s "
        f"processor, {amount / processor:11,.0f} {unit}/s per core"
    )


def show_ratio(name: str, above: Sequence[Timing], below: Sequence[Timing]) -> None:
    """Print the median of the ratios of the rounds, for both kinds of time."""
    for i, kind in enumerate(("wall", "processor")):
        found = sorted(a[i] / b[i] for a, b in zip(above, below, strict=True))
        print(
            f"{name}, {kind}: median {statistics.median(found):.2f}, "
            f"{found[0]:.2f} to {found[-1]:.2f}"
        )


def measure_prepare(arguments: argparse.Namespace) -> None:
    """Compare `prepare` with the tokenizer library's own threads."""
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = Path(folder, "text.txt"), Path(folder, "tokenizer")
        with open(arguments.text, "rb") as file:
            content = file.read(
                int(arguments.megabytes * 1e6) if arguments.megabytes else -1
            ).decode(errors="ignore")
        text.write_text(content, encoding="utf-8")
        tokenizer.mkdir()
        build_tokenizer(f"bpe:{VOCABULARY}", lambda: iter([content[:LEARNED]])).save(tokenizer)
        timings: dict[str, list[Timing]] = {"library": [], "1 worker": [], "2 workers": []}
        for number in range(arguments.rounds):
            timings["library"].append(run_script("library", LIBRARY, text, tokenizer, threads=2))
            made = []
            for workers, name in ((1, "1 worker"), (2, "2 workers")):
                out = Path(folder, f"out-{number}-{workers}")
                found = run_script("prepare", PREPARE, text, tokenizer, out, workers)
                timings[name].append(found)
                made.append(hashes(out))
            if made[0] != made[1]:
                raise SystemExit("the files of 1 and 2 workers differ")
    print(
        f"{len(content.encode()):,} bytes, {arguments.rounds} rounds; all {len(made[0])} files are "
        f"identical, SHA-256 of all {digest_of(made[0])}"
    )
    for name, measured in timings.items():
        show(name, measured, "tokens")
    show_ratio("speed of 2 workers over 1 worker", timings["1 worker"], timings["2 workers"])
    show_ratio("speed of 2 workers over the library", timings["library"], timings["2 workers"])


def texts_of(file: Path, blanks: bool) -> Iterator[str]:
    """Yield texts with one part marked or left out.

    Of a FASTA file, these are the records, wholly marked; of a text, sentences with one word.
    """
    if file.suffix == ".fasta":
        for piece in open_sources(file, gaps="remove")["train"].pieces():
            yield f"[[{piece.text}]]"
        return
    for number, sentence in enumerate(SENTENCE.findall(file.read_text(encoding="utf-8"))):
        words = sentence.split()
        if 3 < len(words) < 40:
            at = number % (len(words) - 2) + 1
            words[at] = "[[2]]" if blanks else f"[[{words[at]}]]"
            yield " ".join(words)


def write_rows(texts: Iterator[str], rows: int, file: Path) -> int:
    """Write texts as JSON lines; return their number, which is smaller if there are too few."""
    lines = [
        json.dumps({"id": f"s{number}", "text": text}) + "\n"
        for number, text in enumerate(islice(texts, rows))
    ]
    file.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def measure_job(arguments: argparse.Namespace) -> None:
    """Compare a batch job in one process, in two and on Ray."""
    ways = {"1 process": ["--workers", "1"], "2 processes": ["--workers", "2"]}
    if arguments.ray:
        ways["Ray"] = ["--workers", "2", "--ray"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        texts = texts_of(arguments.text, arguments.verb == "infill")
        rows = write_rows(texts, arguments.rows, file)
        timings: dict[str, list[Timing]] = {name: [] for name in ways}
        for number in range(arguments.rounds):
            made = []
            for name, words in ways.items():
                out = Path(folder, f"{name}-{number}".replace(" ", "-"))
                command = [sys.executable, "-m", "tracformer", arguments.verb, "--file", str(file)]
                command += ["--out", str(out), "--model", arguments.model, *words]
                if arguments.verb == "infill":
                    command += ["--quality", arguments.quality]
                timings[name].append(timed(command, rows))
                made.append(hashes(out, "part-*"))
            if any(each != made[0] for each in made):
                raise SystemExit("the files differ")
    print(
        f"{arguments.verb}, {rows:,} rows, {arguments.rounds} rounds; all {len(made[0])} files are "
        f"identical, SHA-256 of all {digest_of(made[0])}"
    )
    for name, found in timings.items():
        show(name, found, "rows")
    for name in list(ways)[1:]:
        show_ratio(f"speed of {name} over 1 process", timings["1 process"], timings[name])


def timed(command: Sequence[str], amount: float) -> Timing:
    """Run a command and return its times."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timing(wall, used, amount)


def measure_overhead(arguments: argparse.Namespace) -> None:
    """Compare scoring as in a batch job with the model alone on the same batches."""
    torch.set_num_threads(1)
    timings: dict[str, list[Timing]] = {"job": [], "model": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        rows = write_rows(texts_of(arguments.text, blanks=False), arguments.rows, file)
        job = BatchJob("score", arguments.model, file, ScoreOptions())
        work = make_work(job, threads=1)
        lm = load(arguments.model)
        batches = list(batches_like(lm, job))
        work(next(parts_of(file, 32)))  # the first batch compiles and fills caches
        for _ in range(arguments.rounds):
            begin = time.perf_counter(), time.process_time()
            for part in parts_of(file, PART_ROWS):
                work(part)
            timings["job"].append(since(begin, rows))
            begin = time.perf_counter(), time.process_time()
            with torch.no_grad():
                for batch, mode in batches:
                    lm.model.estimate(batch, mode)
            timings["model"].append(since(begin, rows))
    for name, found in timings.items():
        show(name, found, "rows")
    show_ratio("speed of the job over the model alone", timings["model"], timings["job"])
    tokens = sum(int(batch.lengths.sum()) for batch, _ in batches)
    products, seconds = operations(lm, batches), timings["job"][0].processor
    print(
        f"{tokens:,} tokens, {tokens / rows:.1f} of a row; {tokens / seconds:,.0f} tokens/s per "
        f"core; {products / tokens / 1e6:.2f} MFLOP per token, {products / seconds / 1e9:.1f} "
        "GFLOP/s per core"
    )


def batches_like(lm: LanguageModel, job: BatchJob) -> Iterator[tuple[Batch, str]]:
    """Yield the batches that a batch job runs the model on, with their modes."""
    for part in parts_of(job.file, PART_ROWS):
        texts = [str(text) for _, _, text in rows_of(job.file, job.field, part)]
        requests = lm.score_requests(texts)
        for some in batches_of(requests):
            layouts = [requests[i].layout for i in some]
            yield to_batch(layouts, torch.device("cpu")), str(requests[some[0]].options.mode)


def since(begin: tuple[float, float], amount: float) -> Timing:
    """Return the timing of what began at these times, of the wall clock and of the processor."""
    return Timing(time.perf_counter() - begin[0], time.process_time() - begin[1], amount)


def operations(lm: LanguageModel, batches: Sequence[tuple[Batch, str]]) -> float:
    """Return the operations of forward passes on batches."""
    attention = CountedAttention()
    lm.model.attention = attention  # type: ignore[assignment]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for batch, mode in batches:
            lm.model.estimate(batch, mode)
    return counter.get_total_flops() + OPERATIONS * attention.multiplies


# ---- cost


def show_cost(arguments: argparse.Namespace) -> None:
    """Print the cost of large amounts of data, as rows of a Markdown table."""
    small, web = (
        flops_per_token(TracformerConfig.preset(name, modes=("car",)), "car", HALF, rows=1)
        for name in ("paper-small", "paper-owt")
    )
    config = load_config(find_folder("proteins"), TracformerConfig)
    residue = flops_per_token(config, "car", "empty", RESIDUES, rows=1) / FORWARD_AND_BACKWARD
    corpus, sequences = 10e9, 10e6
    work: list[tuple[str, float, float, float | None, float | None]] = [
        ("prepare 10 billion tokens", corpus, 0, corpus / arguments.tokens / 3600, None),
        ("train `paper-small` on them once", corpus, small, None, USE_TRAINING),
        (
            f"score 10 million sequences of {RESIDUES} residues with `proteins`",
            sequences * RESIDUES,
            residue,
            sequences * RESIDUES / arguments.residues / 3600,
            USE_SCORING,
        ),
        *(
            (f"the paper's run on {name}", tokens, each, None, USE_TRAINING)
            for name, tokens, each in (
                ("WikiText-103, LAMBADA or 1BW", 30_000 * 256 * 1024, small),
                ("OpenWebText", 600_000 * 480 * 1024, web),
            )
        ),
    ]
    print("| work | billion tokens | operations per token | core-hours | GPU-hours |")
    print("|---|---:|---:|---:|---:|")
    for name, tokens, each, cores, use in work:
        cells = [name, f"{tokens / 1e9:.3g}", f"{each:.3g}" if each else ""]
        cells.append("" if cores is None else f"{cores:.3g}")
        cells.append("" if use is None else f"{each * tokens / (A100 * use) / 3600:.3g}")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    prepare = verbs.add_parser("prepare")
    prepare.add_argument("text", type=Path)
    prepare.add_argument("--megabytes", type=float, help="of its beginning (default: all of it)")
    prepare.add_argument("--rounds", type=int, default=3)
    prepare.set_defaults(run=measure_prepare)
    job = verbs.add_parser("job")
    job.add_argument("text", type=Path)
    job.add_argument("--verb", choices=("score", "infill"), default="score")
    job.add_argument("--model", default="stories")
    job.add_argument("--quality", default="raw")
    job.add_argument("--rows", type=int, default=100_000)
    job.add_argument("--rounds", type=int, default=1)
    job.add_argument("--ray", action="store_true")
    job.set_defaults(run=measure_job)
    overhead = verbs.add_parser("overhead")
    overhead.add_argument("text", type=Path)
    overhead.add_argument("--model", default="stories")
    overhead.add_argument("--rows", type=int, default=10_000)
    overhead.add_argument("--rounds", type=int, default=1)
    overhead.set_defaults(run=measure_overhead)
    cost = verbs.add_parser("cost")
    cost.add_argument("--tokens", type=float, required=True, help="that a core prepares per second")
    cost.add_argument("--residues", type=float, required=True, help="that a core scores per second")
    cost.set_defaults(run=show_cost)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
