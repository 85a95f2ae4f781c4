"""The hostile suite of files: every file damaged in every way, full disks, kills at any moment.

A damaged file leads to a one-line error or to the right result; what is written survives a full
disk and SIGKILL. TRACFORMER_SOAK multiplies flipped bytes, kills and failing writes (default: 1, a
few minutes).
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import save_model
from tests.helpers import soak_factor
from tests.server.helpers import WORDS
from tests.training.helpers import small, story_data
from tracformer.cli import USAGE_ERRORS, main
from tracformer.data import PreparedData, train_bpe
from tracformer.evaluation import read_results
from tracformer.training.checkpoint import Reader, newest_intact

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform == "win32", reason="permissions and signals of POSIX"),
]
FLIPS = 50
KILLS = 20
DISKS = 8
WRITES = 8  # that fail, of each command
UNPRIVILEGED = 65534  # the user whom files are made unreadable for, if the tests run as root

Record = Callable[[str, object], None]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can read, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="tracformer-hostile-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


# ---- damage


def damages(path: Path, rng: random.Random) -> Iterator[str]:
    """Damage a file in one way after another; it is whole again at the end.

    Yields:
        What was done to it.
    """
    content, mode = path.read_bytes(), path.stat().st_mode
    size = len(content)
    places = [rng.randrange(size) for _ in range(FLIPS * soak_factor() if size else 0)]
    for each in places:
        damaged = bytearray(content)
        damaged[each] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        yield f"byte {each} flipped"
    for length in sorted({size // 2, size - 1, rng.randrange(max(1, size))} - {size, -1}):
        path.write_bytes(content[:length])
        yield f"cut to {length} bytes"
    path.write_bytes(b"")
    yield "emptied"
    path.unlink()
    yield "removed"
    path.mkdir()
    yield "a folder"
    path.rmdir()
    path.write_bytes(content)
    path.chmod(0)
    root = os.geteuid() == 0
    if root:  # may read everything
        os.seteuid(UNPRIVILEGED)
    try:
        yield "unreadable"
    finally:
        if root:
            os.seteuid(0)
        path.chmod(mode)


def attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return a result, or the message of an error as users may see it."""
    try:
        return work(), None
    except (*USAGE_ERRORS, OSError) as error:
        return None, str(error)


def damage_every_file(
    folder: Path, work: Callable[[], Any], changeable: Callable[[str], bool] = lambda name: False
) -> Counter[str]:
    """Damage every file of a folder in every way; check that work fails well or is right.

    Args:
        folder: The folder.
        work: Returns a result, or raises an error as users may see it.
        changeable: Whether a file of this name may change the result: it has no checksum, because
            users edit it.
    """
    right, counts = work(), Counter[str]()
    rng = random.Random(folder.name)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert files
    for path in files:
        counts["files"] += 1
        for what in damages(path, rng):
            counts["faults"] += 1
            where = f"{path.relative_to(folder)}: {what}"
            found, error = attempt(work)
            counts["right" if error is None else "refused"] += 1
            if error is None:
                assert found == right or changeable(path.name), where
            else:
                assert len(error.strip().splitlines()) == 1, where
        assert work() == right, path
    return counts


class FailedError(ValueError):
    """A command ended with exit code 1 or 2 and one line on standard error."""


def call(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints.

    Raises:
        FailedError: It failed as it should.
    """
    code = main(words)
    shown = capsys.readouterr()
    if code == 0:
        assert "Traceback" not in shown.err
        return shown.out
    assert code in (1, 2), (code, shown.err)
    assert len(shown.err.splitlines()) <= 2, shown.err  # a notice about checksums, and the error
    assert "internal error" not in shown.err, shown.err
    assert "Traceback" not in shown.err
    raise FailedError(shown.err.splitlines()[-1])


def test_damaged_models(
    place: Path, capsys: pytest.CaptureFixture[str], record_property: Record
) -> None:
    folder = save_model(place / "model", train_bpe(WORDS, 300))
    (folder / "generation_config.json").write_text('{"quality": "raw", "temperature": 0.9}')

    def work() -> list[str]:
        model = ("-m", str(folder))
        return [
            call(capsys, "score", *model, "the [[cat]] sat", "--json"),
            call(capsys, "infill", *model, "the [[3]] sat", "--seed", "1", "--json"),
        ]

    counts = damage_every_file(folder, work, lambda name: name == "generation_config.json")
    record_property("counts", dict(counts))


def test_damaged_data(place: Path, record_property: Record) -> None:
    folder = story_data(place)

    def work() -> list[Any]:
        data = PreparedData.open(folder)
        splits = [data.split(name) for name in data.splits]
        return [
            (split.tokens.read(0, len(split.tokens)).tolist(), split.index.tolist())
            for split in splits
        ]

    record_property("counts", dict(damage_every_file(folder, work)))


def test_damaged_results(
    place: Path, capsys: pytest.CaptureFixture[str], record_property: Record
) -> None:
    model, out = save_model(place / "model", train_bpe(WORDS, 300)), place / "results"
    (place / "text.txt").write_text("the cat sat on the mat " * 40)
    data = ("--data", str(place / "text.txt"), "--length", "16", "--sequences", "4")
    for task in ("ratios:ratios=0.5", "unconditional"):
        assert main(["eval", str(model), task, *data, "--out", str(out)]) == 0
    capsys.readouterr()

    def work() -> Any:
        results = read_results(out)
        return [(result.task, result.options, result.rows, result.details) for result in results]

    whole = len(work())

    def checked() -> Any:
        found = work()
        # a removed file cannot be noticed
        return right if len(found) < whole and len(list(out.glob("*.json"))) < whole else found

    right = work()
    record_property("counts", dict(damage_every_file(out, checked)))


def test_damaged_checkpoints(
    place: Path, capsys: pytest.CaptureFixture[str], record_property: Record
) -> None:
    """A damaged checkpoint is skipped for the one before, and the run ends with the same weights."""
    data, run = story_data(place), place / "run"
    words = ["train", f"data={data}", f"run={run}", "threads=1", *small("save_every=3", "ema=0.9")]
    call(capsys, *words, "steps=6")
    weights = (run / "model" / "model.safetensors").read_bytes()
    newest = run / "checkpoints" / "step-00000006"
    (run / "spare").mkdir()

    def work() -> Any:
        path, _ = newest_intact(run / "checkpoints")
        assert path is not None
        if path != newest:
            return right  # it was skipped
        reader = Reader(path)
        tensors = {
            (kind, name): reader.rows(kind, name, 0, 2**40).tolist()
            for kind in ("weights", "optimizer", "ema")
            for name in reader.names(kind)
        }
        return reader.state, tensors

    right: Any = None
    right = work()
    counts = damage_every_file(newest, work)
    # the whole way, with one fault of each file of the run
    saved, rng = place / "saved", random.Random(0)
    shutil.copytree(run, saved)
    for number, path in enumerate(sorted(path for path in saved.rglob("*") if path.is_file())):
        shutil.rmtree(run)
        shutil.copytree(saved, run)
        target = run / path.relative_to(saved)
        ways = damages(target, rng)
        skipped = FLIPS * soak_factor() + (number % 4) if target.stat().st_size else 0
        what = [next(ways) for _ in range(1 + skipped)][-1]
        counts["runs"] += 1
        _, error = attempt(lambda: call(capsys, *words, "steps=6"))
        ways.close()
        found = run / "model" / "model.safetensors"
        if error is None:
            assert found.read_bytes() == weights, (target, what)
        else:
            assert str(target) in error or "checkpoint" in error, (target, what)
    record_property("counts", dict(counts))


# ---- kills and full disks

# Imports everything, then runs each command that it reads in a child, which begins at once.
COMMANDS = """
import errno, json, os, resource, signal, sys
import torch
from tracformer.cli import main, find_command, COMMANDS
import tracformer.evaluation, tracformer.report, tracformer.reproduce, tracformer.training.start
for name in COMMANDS:
    find_command(name)

def fill_disk(folder, writes, count):
    # let the first `writes` succeed; a write opens, renames or flushes a file, or makes a folder
    done = 0
    flush = os.fsync

    def write(event, given):
        nonlocal done
        if event not in ("open", "os.mkdir", "os.rename", "flush") or done < 0:
            return
        if event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if str(given[0]).startswith(folder):
            done += 1
            if done > writes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(given[0]))

    def fsync(handle):
        write("flush", (folder,))
        flush(handle)

    def report():
        nonlocal done
        found, done = done, -1
        with open(count, "w") as file:
            file.write(str(found))

    os.fsync = fsync
    sys.addaudithook(write)
    return report

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.alarm(600)  # a command that hangs fails its test
        for name, stream in (("out", 1), ("err", 2)):
            file = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, stream)
        if order["limit"]:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"], order["limit"]))
        report = fill_disk(*order["disk"]) if order["disk"] else int
        code = main(order["words"])
        report()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Commands:
    """Commands in processes of their own, without the seconds of importing PyTorch each time."""

    def __init__(self, folder: Path) -> None:
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        self.count = folder / "count.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.child = 0
        self.run("models")  # wait for the imports

    def begin(
        self, *words: str, limit: int | None = None, disk: tuple[Path, int] | None = None
    ) -> None:
        assert self.process.stdin is not None
        order: dict[str, Any] = {"words": words, "limit": limit}
        order |= {"out": str(self.out), "err": str(self.err)}
        order["disk"] = None if disk is None else (str(disk[0]), disk[1], str(self.count))
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.child = self._number()

    def end(self) -> int:
        """Wait for the command; return its exit code, or minus the signal that killed it."""
        return self._number()

    def run(
        self, *words: str, limit: int | None = None, disk: tuple[Path, int] | None = None
    ) -> int:
        """Run a command to its end; return its exit code.

        Args:
            words: The command.
            limit: Largest size of a file, in bytes.
            disk: A folder, and how many writes to it succeed before its disk is full.
        """
        self.begin(*words, limit=limit, disk=disk)
        return self.end()

    def is_done(self, code: int) -> bool:
        """Return whether a command, or one that was stopped at its very end, did its work."""
        return code == 0 or (code == 2 and "exists already; use another" in self.err.read_text())

    def check_refusal(self, code: int) -> None:
        """Check that a command that failed says why in one line."""
        error = self.err.read_text()
        assert code in (1, 2), error
        assert "Traceback" not in error
        assert "internal error" not in error
        assert error.splitlines()[-1].startswith("tracformer "), error

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child, signal.SIGKILL)

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    found = Commands(tmp_path)
    yield found
    found.close()


EXPERIMENT = """
title: A small model
tasks:
  - {task: ratios, models: [tracformer-ac], mode: ac, options: {data: wikitext2, length: 32, sequences: 24}}
"""


def jobs(folder: Path) -> dict[str, tuple[list[str], Callable[[Path], Any]]]:
    """Return commands that write to OUT, and what their results are."""
    text, model = folder / "text.txt", folder / "model"
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "once", "upon", "dog"]
    lines = [" ".join(rng.choices(words, k=12)) + "." for _ in range(3000)]
    text.write_text("\n".join(lines))
    (folder / "mine.yaml").write_text(EXPERIMENT)
    save_model(model, train_bpe(WORDS, 300))
    data = story_data(folder)

    def files(out: Path) -> Any:
        return {path.name: path.read_bytes() for path in out.iterdir()}

    def rows(out: Path) -> Any:
        return sorted((each.model, each.task, str(each.rows)) for each in read_results(out))

    def weights(out: Path) -> Any:
        return (out / "model" / "model.safetensors").read_bytes()

    task = f"ratios:data={text},length=32,sequences=96,ratios=0.2/0.5/0.8"
    steps = small("steps=6", "save_every=2", "ema=0.9", "threads=1")
    return {
        "prepare": (["prepare", str(text), "--out", "OUT", "--tokenizer", "bpe:400"], files),
        "eval": (["eval", str(model), task, "--batch", "4", "--out", "OUT"], rows),
        "train": (["train", f"data={data}", "run=OUT", *steps], weights),
        "reproduce": (
            [
                "reproduce",
                str(folder / "mine.yaml"),
                "scale=tiny",
                "out=OUT",
                f"data.wikitext2={text}",
            ],
            lambda out: rows(out / "tiny" / "results"),
        ),
    }


@pytest.mark.parametrize("name", ["prepare", "eval", "reproduce"])  # train: test_survival.py
def test_kills_at_random_moments(
    tmp_path: Path, commands: Commands, record_property: Record, name: str
) -> None:
    """The repeated command gives what it gives without kills."""
    words, result = jobs(tmp_path)[name]

    def written(out: Path) -> list[str]:
        return [word.replace("OUT", str(out)) for word in words]

    began = time.monotonic()
    assert commands.run(*written(tmp_path / "whole")) == 0, commands.err.read_text()
    seconds = time.monotonic() - began
    right, rng = result(tmp_path / "whole"), random.Random(name)
    killed, finished = 0, 0
    for number in range(10 * KILLS * soak_factor()):
        out = tmp_path / f"out{finished}"
        commands.begin(*written(out))
        time.sleep(rng.uniform(0, 0.6) * seconds if number % 2 else rng.uniform(0, seconds))
        commands.kill()
        code = commands.end()
        killed += code == -signal.SIGKILL
        if commands.is_done(code):
            assert result(out) == right
            finished += 1
        else:
            assert code == -signal.SIGKILL, commands.err.read_text()
        if killed == KILLS * soak_factor():
            break
    assert commands.is_done(commands.run(*written(out))), commands.err.read_text()
    assert result(out) == right
    assert killed == KILLS * soak_factor()
    record_property("counts", {"kills": killed, "runs to the end": finished + 1})


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Callable[[int], int | None]]:
    """Mount a small disk, where that is allowed.

    Yields:
        A function that sets its size in bytes. It returns None, or, where no disk can be mounted,
        the limit for the size of each file that a command must be run with instead.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    words = [*mount, "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, check=False).returncode:
        yield lambda size: size
        return

    def resize(size: int) -> None:
        subprocess.run([*mount, f"remount,size={size}", "tmpfs", str(folder)], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("name", ["prepare", "eval", "train", "reproduce"])
def test_full_disks(tmp_path: Path, commands: Commands, record_property: Record, name: str) -> None:
    """A command whose disk is full ends with one line; with more space it continues."""
    words, result = jobs(tmp_path)[name]
    whole, rng = tmp_path / "whole", random.Random(name)
    assert commands.run(*[word.replace("OUT", str(whole)) for word in words]) == 0
    right = result(whole)
    sizes = [path.stat().st_size for path in whole.rglob("*") if path.is_file()]
    full = 0
    with disk(tmp_path / "disk") as resize:
        for part in range(DISKS * soak_factor()):
            out = tmp_path / "disk" / f"out{part}"
            written = [word.replace("OUT", str(out)) for word in words]
            share = (part + rng.random()) / (DISKS * soak_factor())
            # a limit for each file stands for the disk if there is none
            most = max(sizes) if (limit := resize(4096)) else sum(sizes)
            limit = resize(max(4096, round(share * most)))
            code = commands.run(*written, limit=limit)
            if code:
                full += 1
                commands.check_refusal(code)
            resize(2**30)
            assert commands.run(*written) == 0, commands.err.read_text()
            assert result(out) == right
            shutil.rmtree(out)
    assert full > DISKS // 2
    record_property("counts", {"full disks": full})


@pytest.mark.parametrize("name", ["prepare", "eval", "train", "reproduce"])
def test_each_write_may_fail(
    tmp_path: Path, commands: Commands, record_property: Record, name: str
) -> None:
    """From one write on there is no space; afterwards the command continues."""
    words, result = jobs(tmp_path)[name]

    def run(out: Path, writes: int | None = None) -> int:
        disk = None if writes is None else (out, writes)
        return commands.run(*[word.replace("OUT", str(out)) for word in words], disk=disk)

    assert run(tmp_path / "whole", 10**9) == 0, commands.err.read_text()
    right, count = result(tmp_path / "whole"), int(commands.count.read_text())
    most = min(count, WRITES * soak_factor())
    refused = 0
    for number in sorted(random.Random(name).sample(range(count), most)):
        out = tmp_path / f"out{number}"
        if code := run(out, number):
            refused += 1
            commands.check_refusal(code)
            assert "No space left on device" in commands.err.read_text()
        assert commands.is_done(run(out)), commands.err.read_text()
        assert result(out) == right
        shutil.rmtree(out)
    assert refused > most // 2
    record_property("counts", {"writes": count, "failed from": most, "refused": refused})
