"""Batch jobs: the output of a large file, however it is worked on."""

import gzip
import json
import lzma
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tracformer
from tests.cli.helpers import Caller, save_model
from tracformer.data import build_tokenizer, char_tokenizer
from tracformer.generation import batch_job
from tracformer.generation.batch_job import BatchJob, run_job
from tracformer.generation.request_options import InfillOptions, ScoreOptions
from tracformer.proteins.mutants import Mutant, parse_mutant, score_mutants
from tracformer.proteins.wild_type import unaligned
from tracformer.rng import derived_seed

SCORE = ScoreOptions.make(mode="car")
ROWS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "letters", char_tokenizer("abcdefgh ."))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_job, "PART_ROWS", 16)


def text(row: int) -> str:
    return f"{'abc ' * (row % 5)}[[{'fed'[: 1 + row % 3]}]] gh[[b]]."


def write_rows(file: Path, rows: int = ROWS) -> Path:
    records = [{"id": f"r{row}", "text": text(row)} for row in range(rows)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def read(out: Path) -> list[dict[str, Any]]:
    lines = [line for part in sorted(out.glob("part-*")) for line in part.open()]
    return [json.loads(line) for line in lines]


def parts(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("part-*")}


def test_scores_are_those_of_the_library_with_the_ids(tmp_path: Path, model: Path) -> None:
    job = BatchJob("score", str(model), write_rows(tmp_path / "a.jsonl"), SCORE)
    assert run_job(job, tmp_path / "out", quiet=True) == {"rows": ROWS, "parts": 3, "bad": 0}
    lm = tracformer.load(model)
    found = read(tmp_path / "out")
    assert [each["id"] for each in found] == [f"r{row}" for row in range(ROWS)]
    for row in (0, 17, 39):
        assert found[row]["line"] == row + 1
        assert found[row]["log_prob"] == pytest.approx(
            lm.score(text(row), options=SCORE).log_prob, abs=1e-4
        )


def test_a_row_is_filled_by_its_seed_alone(tmp_path: Path, model: Path) -> None:
    """As the library fills it alone with that seed, also with lengths to choose."""
    (tmp_path / "a.txt").write_text("ab[[3]]c.\n" * 20 + "\nab[[1-4]]c.\n")
    options = InfillOptions.make(n=2, seed=5, length_draws=2)
    job = BatchJob("infill", str(model), tmp_path / "a.txt", options)
    run_job(job, tmp_path / "out", quiet=True)
    found = read(tmp_path / "out")
    lm = tracformer.load(model)
    assert [each["line"] for each in found] == [*(row // 2 + 1 for row in range(40)), 22, 22]
    assert len({each["text"] for each in found}) > 20
    for row, lines in ((0, found[:2]), (7, found[14:16]), (21, found[-2:])):
        alone = lm.infill(
            "ab[[3]]c." if row < 20 else "ab[[1-4]]c.",
            options=InfillOptions.make(options, seed=derived_seed(5, row)),
        )
        assert [each["text"] for each in lines] == [each.text for each in alone]
        assert [each["seed"] for each in lines] == [each.seed for each in alone]


def test_every_format_gives_the_same_results(tmp_path: Path, model: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    plain = write_rows(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(plain.read_bytes()))
    table = pyarrow.Table.from_pylist([json.loads(line) for line in plain.open()])
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=11)
    outs = []
    rows = "".join(
        f"{json.loads(line)['text']},{json.loads(line)['id']}\n" for line in plain.open()
    )
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text,id\n" + rows.encode()))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet"):
        out = tmp_path / f"{name}-out"
        run_job(BatchJob("score", str(model), tmp_path / name, SCORE), out, quiet=True)
        outs.append(parts(out))
    assert all(out == outs[0] for out in outs)
    out = tmp_path / "csv"
    run_job(BatchJob("score", str(model), tmp_path / "a.csv.gz", SCORE), out, quiet=True)
    found = [{**each, "line": each["line"] - 1} for each in read(out)]
    scores = [each.pop("log_prob") for each in found]
    expected = read(tmp_path / "a.jsonl-out")
    assert scores == pytest.approx([each.pop("log_prob") for each in expected], abs=1e-4)
    assert [each["id"] for each in found] == [each["id"] for each in expected]


def test_a_job_without_results_leaves_nothing(tmp_path: Path, model: Path) -> None:
    """So that it can be repeated with the right field."""
    (tmp_path / "a.jsonl").write_text('{"story": "ab[[c]]"}\n')
    (tmp_path / "a.csv").write_text("story\nab[[c]]\n")
    for name, message in (("a.jsonl", "no text under 'text'"), ("a.csv", "no column 'text'")):
        job, out = BatchJob("score", str(model), tmp_path / name, SCORE), tmp_path / "out"
        with pytest.raises(ValueError, match=message):
            run_job(job, out, quiet=True)
        assert not out.exists()
        run_job(replace(job, field="story"), tmp_path / name[2:], quiet=True)
        assert len(read(tmp_path / name[2:])) == 1


def test_mutants_are_scored_as_by_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "residues", build_tokenizer("protein", lambda: iter([])))
    call = Caller(capsys, monkeypatch, model)
    names = [f"A1{new}:K3{other}" for new in "CDEFG" for other in "LMNPQ"]
    table = tmp_path / "pairs.csv"
    table.write_text("id,mutant\n" + "".join(f"m{i},{name}\n" for i, name in enumerate(names)))
    words = ("--wild-type", "ACKDW", "--file", str(table), "--out", str(tmp_path / "out"))
    assert call("mutants", *words) == f"{tmp_path}/out: 25 rows, in 2 files\n"
    found = read(tmp_path / "out")
    lm, wild = tracformer.load(model), unaligned("ACKDW")
    mutants = [Mutant(name, parse_mutant(name, wild)) for name in names]
    expected = score_mutants(lm.model, lm.tokenizer, wild, mutants)
    assert [each["id"] for each in found] == [f"m{i}" for i in range(25)]
    assert [each["mutant"] for each in found] == names
    for name in ("log_ratio", "sum_of_singles"):
        wanted = [getattr(score, name) for score in expected]
        assert [each[name] for each in found] == pytest.approx(wanted, abs=1e-4)
    other = ("--wild-type", "ACKDY", *words[2:])
    assert "a job with other options" in call.refused("mutants", "-m", str(model), *other)
    table.write_text('id,mutant\n1,A1C\n2,C1A\n3,"A1C\n4,A1C,\n5,A1D\n')
    bad = (*words[:-1], str(tmp_path / "bad"))
    refused = call.refused("mutants", "-m", str(model), *bad)
    assert "pairs.csv, line 3: " in refused
    code, out, err = call.call("mutants", "-m", str(model), *bad, "--skip-bad")
    assert (code, out) == (0, f"{tmp_path}/bad: 5 rows, 3 of them bad, in 1 files\n")
    errors = [each.get("error", "") for each in read(tmp_path / "bad")]
    assert [bool(error) for error in errors] == [False, True, True, True, False]
    assert "line 4: not CSV" in errors[2]
    assert "line 5: 3 values for 2 columns" in errors[3]
    assert err.count("skipped: ") == 3
    for wrong, message in (
        (("--file", "a.csv"), "give a folder for its scores with --out"),
        (("--file", "a.csv", "--all-singles"), "leave --all-singles out"),
        (("--all-singles", "--workers", "2"), "--workers is for large tables"),
    ):
        assert message in call.refused("mutants", "--wild-type", "ACKDW", *wrong)


def test_finished_parts_are_not_worked_on_again(tmp_path: Path, model: Path) -> None:
    job = BatchJob("score", str(model), write_rows(tmp_path / "a.jsonl"), SCORE)
    out = tmp_path / "out"
    run_job(job, out, quiet=True)
    whole = parts(out)
    (out / "part-00001.jsonl").unlink()
    (out / ".part-00001.jsonl.7.part").write_text("half")
    kept = (out / "part-00000.jsonl").stat().st_mtime_ns
    assert run_job(job, out, quiet=True)["rows"] == ROWS
    assert parts(out) == whole
    assert (out / "part-00000.jsonl").stat().st_mtime_ns == kept
    assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "ab[[c]]"', "line 21: not JSON"),
        (b'{"body": "ab[[c]]"}', "line 21: no text under 'text'"),
        (b'{"text": "ab\xff[[c]]"}', "line 21 is not UTF-8: byte 0xff"),
        (b'{"text": ""}', "line 21: the text is empty"),
        (b'{"text": "[[x]]"}', "line 21: character 'x'"),
        (b'{"text": "' + b"a" * 99 + b'[[b]]"}', "line 21: the text has 101 tokens"),
    ],
)
def test_a_bad_row_stops_the_job_or_is_noted(
    tmp_path: Path, model: Path, line: bytes, message: str
) -> None:
    lines = write_rows(tmp_path / "a.jsonl").read_bytes().splitlines()
    lines[20] = line
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    job, out = BatchJob("score", str(model), tmp_path / "a.jsonl", SCORE), tmp_path / "out"
    with pytest.raises(ValueError, match=rf"a\.jsonl, {message}.*--skip-bad continues"):
        run_job(job, out, quiet=True)
    assert list(parts(out)) == ["part-00000.jsonl"]
    assert run_job(job, out, skip_bad=True, quiet=True)["bad"] == 1
    found = read(out)
    assert len(found) == ROWS
    assert [each["line"] for each in found if "error" in each] == [21]


def test_a_folder_of_another_job_is_not_touched(tmp_path: Path, model: Path) -> None:
    file, out = write_rows(tmp_path / "a.jsonl"), tmp_path / "out"
    run_job(BatchJob("score", str(model), file, SCORE), out, quiet=True)
    before = parts(out)
    other = save_model(tmp_path / "other", char_tokenizer("abcdefgh ."), n_layer=7)
    options = ScoreOptions.make(mode="car", seed=1)
    for job, names in (
        (BatchJob("score", str(other), file, SCORE), "model"),
        (BatchJob("score", str(model), file, options), "seed"),
        (BatchJob("score", str(model), file, ScoreOptions.make(top=1)), "options"),
    ):
        with pytest.raises(ValueError, match=f"a job with other {names}; nothing was changed"):
            run_job(job, out, quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="holds no batch job"):
        run_job(BatchJob("score", str(model), file, SCORE), tmp_path / "mine", quiet=True)
    assert parts(out) == before


def test_the_command_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Caller(capsys, monkeypatch, model)
    file, out = str(write_rows(tmp_path / "a.jsonl", 2)), str(tmp_path / "out")
    assert call("score", "--file", file, "--out", out) == f"{out}: 2 rows, in 1 files\n"
    (tmp_path / "holes.txt").write_text("ab[[2]]\n")
    filled = str(tmp_path / "filled")
    call("infill", "--file", str(tmp_path / "holes.txt"), "--out", filled, "--ban", "a")
    assert read(Path(filled))[0]["text"].startswith("ab")
    assert "give a folder with --out too" in call.refused("score", "a[[b]]", "--skip-bad")
    assert "give it with --file FILE" in call.refused("score", "a[[b]]", "--out", out)
    missing = call.refused("score", "--file", "none.jsonl", "--out", out)
    assert "there is no file none.jsonl" in missing
    unreachable = ("--file", file, "--out", str(tmp_path / "x"), "--ray", "127.0.0.1:1")
    if find_spec("ray") is not None:
        assert "no Ray cluster at '127.0.0.1:1'" in call.refused("score", *unreachable)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'tracformer[ray]'" in call.refused("score", *unreachable)
    assert not (tmp_path / "x").exists()


def answering(answer: bytes) -> Iterator[str]:
    """Yield the address of a server that sends these bytes to one client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as client:
                client.recv(100)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_the_address_of_a_ray_cluster() -> None:
    for address in answering(bytes([0, 0, 18, 4, 0, 0, 0, 0, 0])):
        batch_job.check_address(address)
    for address in answering(b"HTTP/1.1 400 Bad Request"):
        with pytest.raises(ValueError, match="another kind of server answers there"):
            batch_job.check_address(address)
    for address in ("127.0.0.1:1", "127.0.0.1", "ray://:x"):
        with pytest.raises(ValueError, match=f"no Ray cluster at '{address}' "):
            batch_job.check_address(address)


COMMAND = """
import sys
from pathlib import Path
from tracformer.generation import batch_job
from tracformer.generation.request_options import ScoreOptions
if __name__ == "__main__":
    batch_job.PART_ROWS = 16
    job = batch_job.BatchJob("score", sys.argv[1], Path(sys.argv[2]), ScoreOptions.make(mode="car"))
    batch_job.run_job(job, Path(sys.argv[3]), workers=int(sys.argv[4]), quiet=True)
"""


def children_of(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [
        int(child)
        for child in found
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@pytest.mark.soak
def test_ten_kills_at_random_moments_change_nothing(tmp_path: Path, model: Path) -> None:
    """Finished parts are kept as they are, and no process survives its job."""
    file, out, moments = write_rows(tmp_path / "a.jsonl", 3000), tmp_path / "out", random.Random(0)
    run_job(BatchJob("score", str(model), file, SCORE), tmp_path / "whole", quiet=True)
    (tmp_path / "job.py").write_text(COMMAND)
    words = [sys.executable, str(tmp_path / "job.py"), str(model), str(file), str(out), "2"]
    kills, children = 0, set[int]()
    while kills < 10:
        kept = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        wanted = len(kept) + moments.randrange(15)
        while process.poll() is None and len(list(out.glob("part-*"))) < wanted:
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.1))
        if process.poll() is None:
            children |= set(children_of(process.pid))
            process.kill()
            kills += 1
        process.wait()
        assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
        if (out / "finished.json").exists():  # before ten kills: begin again
            assert parts(out) == parts(tmp_path / "whole")
            shutil.rmtree(out)
    subprocess.run(words, check=True)
    assert parts(out) == parts(tmp_path / "whole")
    for child in children:
        while Path(f"/proc/{child}").exists():
            time.sleep(0.1)


@pytest.mark.soak
def test_a_killed_worker_is_replaced(tmp_path: Path, model: Path) -> None:
    """Three times, in the middle of the job; no row is lost or repeated."""
    file, out = write_rows(tmp_path / "a.jsonl", 3000), tmp_path / "out"
    run_job(BatchJob("score", str(model), file, SCORE), tmp_path / "whole", quiet=True)
    (tmp_path / "job.py").write_text(COMMAND)
    words = [sys.executable, str(tmp_path / "job.py"), str(model), str(file), str(out), "2"]
    process, killed = subprocess.Popen(words, stderr=subprocess.DEVNULL), set[int]()
    for finished in (10, 60, 110):
        while len(list(out.glob("part-*"))) < finished:
            assert process.poll() is None
            time.sleep(0.002)
        worker = next(child for child in children_of(process.pid) if child not in killed)
        os.kill(worker, signal.SIGKILL)
        killed.add(worker)
    assert process.wait() == 0
    assert parts(out) == parts(tmp_path / "whole")
    assert [each["line"] for each in read(out)] == [*range(1, 3001)]


@pytest.mark.soak
def test_two_workers_give_the_same_files(tmp_path: Path, model: Path) -> None:
    job = BatchJob("score", str(model), write_rows(tmp_path / "a.jsonl"), SCORE)
    run_job(job, tmp_path / "one", quiet=True)
    run_job(job, tmp_path / "two", workers=2, quiet=True)
    assert parts(tmp_path / "two") == parts(tmp_path / "one")
