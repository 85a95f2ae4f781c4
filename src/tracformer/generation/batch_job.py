"""Fill or score all rows of a large file: streamed, resumable, in several processes or on Ray.

    job = BatchJob("score", "stories", Path("texts.jsonl"), options)
    run_job(job, Path("out"), workers=4)

The input is JSONL, CSV, Parquet or text with one row per line (`job_rows`). It is cut into parts of
`PART_ROWS` rows. A part is worked on by one process, sorted by length, and becomes one file; a
finished part is never worked on again. What a row gives depends on the row, its number, the model
and the options alone, so the files are the same for any number of processes and on Ray.

    job.json            what the folder was made by; another job is refused
    part-00000.jsonl    one object per result, with the row's `id` and `line`, in order
    finished.json       counts; written last
"""

import hashlib
import json
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from tracformer import loading
from tracformer.data.input_files import packing_of
from tracformer.files import lock_folder, optional_package, sha256_of, write_atomically
from tracformer.generation.job_rows import InputPart, parts_of, rows_of
from tracformer.generation.request_options import InfillOptions, ScoreOptions
from tracformer.progress import ProgressBar
from tracformer.proteins.mutant_work import MutantOptions, MutantWork
from tracformer.rng import derived_seed
from tracformer.workers import check_workers, cores, ordered_map

if TYPE_CHECKING:
    from tracformer.generation.infill import InfillRequest
    from tracformer.generation.language_model import LanguageModel
    from tracformer.generation.scoring import ScoreRequest

PART_ROWS = 1000
JOB_FILE, FINISHED_FILE = "job.json", "finished.json"
SHOWN = 20  # messages about bad rows
# what a gRPC client sends first; how the answer of a server, perhaps one with TLS, is recognized
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HTTP2_SETTINGS, TLS_ALERT = b"\x04", b"\x15"
OBJECT_STORE = 1 << 28  # bytes for the results in flight of a Ray cluster on this machine
ENDS = 1 << 20  # bytes of the input's beginning and end that identify it


@dataclass(frozen=True)
class BatchJob:
    """What is done with each row of a file.

    Args:
        verb: "infill", "score" or "mutants".
        model: Model, as `tracformer.load` takes it.
        file: The input.
        options: Options of the verb. Row i is filled with the seed `derived_seed(seed, i)`, rows
            counted from 0.
        weights: Precision of the weights.
        device: Device of each process.
        field: JSONL, CSV and Parquet: the field that holds the text. The field `id`, if there is
            one, is copied to the output.
        verify: Check the model's files against its `checksums.json`.
    """

    verb: str
    model: str
    file: Path
    options: InfillOptions | ScoreOptions | MutantOptions
    weights: str = "float32"
    device: str = "cpu"
    field: str = "text"
    verify: bool = True

    def identity(self) -> dict[str, Any]:
        """Return what decides the content of the output, as `job.json` has it."""
        folder = loading.find_folder(self.model)
        files = sorted(
            path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")
        )
        ends = hashlib.sha256()
        size = self.file.stat().st_size
        with open(self.file, "rb") as file:
            ends.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            ends.update(file.read(ENDS))
        options = self.options.to_dict()
        seed = options.pop("seed", None)  # scores of mutants have none
        return {
            "verb": self.verb,
            "model": {path.name: sha256_of(path) for path in files},
            "weights": self.weights,
            "input": {"name": self.file.name, "bytes": size, "sha256_of_ends": ends.hexdigest()},
            "field": self.field,
            "seed": seed,
            "options": options,
            "part_rows": PART_ROWS,
        }


class PartResult(NamedTuple):
    """What a part gave.

    Args:
        number: Number of the part.
        text: Content of the output file.
        bad: A message for each row that could not be read or worked on.
    """

    number: int
    text: str
    bad: Sequence[str]


def run_job(
    job: BatchJob,
    out: Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    skip_bad: bool = False,
    quiet: bool = False,
) -> dict[str, int]:
    """Work on all rows; parts that are in the folder already are kept.

    Args:
        job: What to do.
        out: Output folder.
        workers: Number of processes, each with its own copy of the model.
        ray: Address of a Ray cluster, or "" to start one on this machine; None uses local
            processes. Every node must see the input and the model under the same path.
        skip_bad: Write an object with the key `error` for a row that cannot be worked on. False:
            stop there; finished parts are kept.
        quiet: Show no progress.

    Returns:
        Counts: `rows` and `parts` in the folder, `bad` rows among them.

    Raises:
        ValueError: A row is bad, the folder holds the results of another job, or the Ray cluster
            cannot be reached.
        FileNotFoundError: There is no such file.
        ImportError: A package is missing.
        BlockingIOError: Another process is writing to the folder.
    """
    check_workers(workers)
    if not job.file.is_file():
        raise FileNotFoundError(f"there is no file {job.file}")
    if ray is not None:
        _check_ray(ray, job.file)
    identity = job.identity()
    _check_folder(out, identity)
    try:
        with lock_folder(out):
            for rest in out.glob(".*.part"):  # of a killed process
                rest.unlink()
            write_atomically(out / JOB_FILE, json.dumps(identity, indent=2) + "\n")
            try:
                return _run(job, out, workers, ray, skip_bad, quiet)
            except Exception:
                if not any(out.glob("part-*")):  # so that the job can be put right
                    (out / JOB_FILE).unlink()
                    with suppress(OSError):
                        out.rmdir()
                raise
    except BlockingIOError:
        raise BlockingIOError(f"another process is writing to {out}; wait for it") from None


def _check_folder(out: Path, identity: Mapping[str, Any]) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / JOB_FILE).is_file():
        raise ValueError(f"{out} exists and holds no batch job ({JOB_FILE}); give another folder")
    found = json.loads((out / JOB_FILE).read_text(encoding="utf-8"))
    now = json.loads(json.dumps(identity))
    if different := [name for name in now if now[name] != found.get(name)]:
        raise ValueError(
            f"{out} holds the results of a job with other {', '.join(different)}; nothing was "
            "changed: give another folder, or repeat the job as it was to finish it"
        )


def _run(
    job: BatchJob, out: Path, workers: int, ray: str | None, skip_bad: bool, quiet: bool
) -> dict[str, int]:
    counts = {"rows": 0, "parts": 0, "bad": 0}
    sizes: dict[int, tuple[int, int]] = {}

    with ProgressBar(
        f"{job.verb} {job.file.name}", job.file.stat().st_size, unit="bytes", enabled=not quiet
    ) as bar:

        def missing() -> Iterator[InputPart]:
            for part in parts_of(job.file, PART_ROWS):
                counts["rows"] += part.rows
                counts["parts"] += 1
                path = out / part_file(part.number)
                if path.exists():
                    counts["bad"] += path.read_text(encoding="utf-8").count('"error": ')
                    bar.update(part.size)
                else:
                    sizes[part.number] = part.rows, part.size
                    yield part

        threads = min(torch.get_num_threads(), max(1, cores() // workers))
        results = (
            ordered_map(make_work, (job, threads), missing(), workers)
            if ray is None
            else _on_ray(ray, job, missing(), workers)
        )
        done = 0
        for result in results:
            if result.bad and not skip_bad:
                raise ValueError(f"{result.bad[0]} (--skip-bad continues after such rows)")
            for message in result.bad:
                counts["bad"] += 1
                if counts["bad"] <= SHOWN and not quiet:
                    print(f"skipped: {message}", file=sys.stderr)
            write_atomically(out / part_file(result.number), result.text)
            rows, size = sizes.pop(result.number)
            done += rows
            bar.update(size, note=f"{done:,} rows")
    write_atomically(out / FINISHED_FILE, json.dumps(counts) + "\n")
    return counts


def part_file(number: int) -> str:
    """Return the name of a part's output."""
    return f"part-{number:05d}.jsonl"


# ---- working


def make_work(job: BatchJob, threads: int) -> Callable[[InputPart], PartResult]:
    """Load the model in this process; return the function that works on a part."""
    from tracformer.devices import keep_freed_memory
    from tracformer.generation.language_model import load

    keep_freed_memory()
    torch.set_num_threads(threads)
    lm = load(job.model, weights=job.weights, device=job.device, verify=job.verify)
    return lambda part: work_on(lm, job, part)


def work_on(lm: "LanguageModel", job: BatchJob, part: InputPart) -> PartResult:
    """Return the output of a part."""
    names: dict[int, Any] = {}
    requests: dict[int, Any] = {}
    records: dict[int, list[dict[str, Any]]] = {}
    bad: dict[int, str] = {}
    work: RowWork
    if isinstance(job.options, MutantOptions):
        work = MutantWork(lm.model, lm.tokenizer, job.options)
    else:
        work = TextWork(lm, job.options)
    for row, name, text in rows_of(job.file, job.field, part):
        names[row] = name
        try:
            if isinstance(text, ValueError):
                raise text
            requests[row] = work.request(row, text, f"{job.file}, line {row + 1}: ")
        except ValueError as error:
            bad[row] = str(error)
    for row, found in _results(work, requests):
        if isinstance(found, ValueError):
            where = f"{job.file}, line {row + 1}: "
            bad[row] = where + str(found).removeprefix(where)
        else:
            records[row] = found
    lines = [
        json.dumps({"id": name, "line": row + 1, **record}, ensure_ascii=False)
        for row, name in names.items()
        for record in ([{"error": bad[row]}] if row in bad else records[row])
    ]
    messages = [bad[row] for row in sorted(bad)]
    return PartResult(part.number, "".join(f"{line}\n" for line in lines), messages)


class RowWork(Protocol):
    """What a verb does with rows."""

    def request(self, row: int, text: str, where: str) -> Any:
        """Check a row; `where` stands before what is wrong in the ValueError."""

    def results(self, requests: Sequence[Any]) -> list[list[dict[str, Any]]]:
        """Return the output objects of each request."""


class TextWork:
    """Fills or scores texts."""

    def __init__(self, lm: "LanguageModel", options: InfillOptions | ScoreOptions) -> None:
        self.lm, self.options = lm, options

    def request(self, row: int, text: str, where: str) -> "InfillRequest | ScoreRequest":
        """Return the checked request of a row."""
        if isinstance(self.options, ScoreOptions):
            return self.lm.score_requests([text], options=self.options, where=[where])[0]
        options = replace(self.options, seed=derived_seed(self.options.seed, row))
        return self.lm.infill_requests([text], options=options, where=[where])[0]

    def results(self, requests: Sequence[Any]) -> list[list[dict[str, Any]]]:
        """Return one score, or all fills, of each request."""
        if isinstance(self.options, ScoreOptions):
            return [[scored.to_dict()] for scored in self.lm.score(requests)]
        return [[fill.to_dict() for fill in fills] for fills in self.lm.infill(requests)]


def _results(
    work: RowWork, requests: Mapping[int, Any]
) -> Iterator[tuple[int, list[dict[str, Any]] | ValueError]]:
    """Yield the results of each row; if one fails, all are worked on one by one."""
    if not requests:
        return
    try:
        yield from zip(requests, work.results(list(requests.values())), strict=True)
    except ValueError as error:
        if len(requests) == 1:
            yield from ((row, error) for row in requests)
        else:
            for row, request in requests.items():
                yield from _results(work, {row: request})


# ---- Ray


def _check_ray(address: str, file: Path) -> None:
    """Raise unless Ray is installed and something listens at the address."""
    optional_package("ray", "--ray", "ray")
    if packing_of(file.name):
        raise ValueError(
            f"{file} is compressed; with --ray, workers read from its middle: unpack it"
        )
    if address in ("", "auto"):
        return
    check_address(address)


def check_address(address: str) -> None:
    """Raise ValueError unless a gRPC server, as Ray's is, answers at an address.

    Ray itself tries for minutes.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(HTTP2_HELLO)
            answer = connection.recv(9)
        if answer[3:4] != HTTP2_SETTINGS and answer[:1] != TLS_ALERT:
            raise ValueError("another kind of server answers there")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster at {address!r} ({error}); give HOST:PORT of a running cluster, or "
            "--ray alone to start one on this machine"
        ) from error


class RayWorker:
    """A model in a process of Ray Data.

    Args:
        job: What to do with each part.
    """

    def __init__(self, job: BatchJob) -> None:
        self._work = make_work(job, 1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Work on the parts of a batch; parts and results are JSON."""
        results = [self._work(InputPart(*json.loads(part))) for part in batch["part"]]
        return {"result": [json.dumps(result) for result in results]}


def _on_ray(
    address: str, job: BatchJob, parts: Iterator[InputPart], workers: int
) -> Iterator[PartResult]:
    """Yield the results of the parts, in the order in which they are ready."""
    waiting = [{"part": json.dumps(part)} for part in parts]
    if not waiting:
        return
    ray = optional_package("ray", "--ray", "ray")
    data = optional_package("ray.data", "--ray", "ray")
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    here = {"num_cpus": workers + 1, "object_store_memory": OBJECT_STORE}
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(**quiet, **({"address": address} if address else here))
        except ConnectionError as error:
            raise ValueError(f"no Ray cluster at {address!r}: {error}") from error
        except Exception as error:  # Ray raises bare Exception if its processes start too slowly
            raise RuntimeError(f"Ray did not start: {error}") from error
    try:
        data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        job = replace(job, file=job.file.resolve())
        found = data.from_items(waiting, override_num_blocks=len(waiting)).map_batches(
            RayWorker,
            fn_constructor_kwargs={"job": job},
            batch_size=1,
            compute=data.ActorPoolStrategy(size=min(workers, len(waiting))),
            num_cpus=1,
            num_gpus=1 if job.device.startswith("cuda") else 0,
        )
        for row in found.iter_rows():
            yield PartResult(*json.loads(row["result"]))
    finally:
        if started:
            ray.shutdown()
