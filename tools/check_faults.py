"""Check that the tests catch seeded faults.

    python tools/check_faults.py SRC                 check all faults of seeded_faults.json
    python tools/check_faults.py SRC --only top-p,banned
    python tools/check_faults.py SRC --dry-run       only find the code and the tests of each fault

SRC is the `src` folder of a clone. Use a separate clone: its files are changed while a
fault is checked.

For each fault, the one file under SRC that contains `old` is found, wherever it is, and `old` is
replaced by `new`. Then the tests of the fault run, and the file is restored byte for byte. `old` is
matched exactly or, failing that, up to white space and trailing commas, so that reformatted code is
found too. A fault whose code was rewritten is reported as "not found": give it a new `old` and
`new` in seeded_faults.json.

A fault is caught if pytest reports failed tests, and the same tests pass without the fault. The
exit code is 0 if every fault is caught.
"""

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).resolve().parent / "seeded_faults.json"


def main() -> int:
    """Run the command line and return the exit code."""
    args = arguments()
    src = args.src.resolve()
    faults = {fault["name"]: fault for fault in json.loads(FAULTS.read_text())}
    if args.only:
        faults = {name: faults[name] for name in args.only.split(",")}
    if args.dry_run:
        missing = [problem for fault in faults.values() for problem in problems(fault, src)]
        print("\n".join(missing) or f"{len(faults)} faults: code and tests found")
        return 1 if missing else 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` restores the file
    where = imported(src)
    if not where.startswith(str(src)):
        sys.exit(f"tracformer is imported from {where}, not from {src}")
    if not args.no_baseline:
        tests = list(dict.fromkeys(test for fault in faults.values() for test in fault["tests"]))
        code, output, seconds = pytest(tests, src, args.timeout)
        print(f"without faults: {summary(output)} ({seconds:.0f} s)", flush=True)
        if code != 0:
            print(output)
            return 1
    outcomes = {name: check(fault, src, args) for name, fault in faults.items()}
    found = list(outcomes.values())
    print(", ".join(f"{found.count(word)} {word}" for word in dict.fromkeys(found)))
    if args.out:
        args.out.write_text(json.dumps(outcomes, indent=1) + "\n")
    return 0 if set(found) <= {"caught"} else 1


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src", type=Path, help="the src folder of a clone")
    parser.add_argument("--only", metavar="NAMES", help="names of faults, separated by commas")
    parser.add_argument("--dry-run", action="store_true", help="run no tests")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without faults first"
    )
    parser.add_argument(
        "--timeout", type=float, default=900, metavar="SECONDS", help="limit of a run of tests"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcomes as JSON")
    parser.add_argument("--verbose", action="store_true", help="print pytest's output")
    return parser.parse_args()


def check(fault: dict[str, Any], src: Path, args: argparse.Namespace) -> str:
    """Seed a fault, run its tests, and return caught, missed, timeout, error or not found."""
    try:
        path, text = mutated(src, fault["old"], fault["new"])
    except LookupError as error:
        print(f"NOT FOUND  {fault['name']}: {error}", flush=True)
        return "not found"
    with replaced(path, text):
        code, output, seconds = pytest(fault["tests"], src, args.timeout)
    outcome = {None: "timeout", 0: "missed", 1: "caught"}.get(code, "error")
    where = f"{path.relative_to(src)}; {summary(output)} ({seconds:.0f} s)"
    print(f"{outcome.upper():10} {fault['name']}: {where}", flush=True)
    if args.verbose or outcome == "error":
        print(output, flush=True)
    return outcome


def problems(fault: dict[str, Any], src: Path) -> list[str]:
    """Return what cannot be found of a fault: its code or its tests."""
    found = []
    try:
        mutated(src, fault["old"], fault["new"])
    except LookupError as error:
        found.append(f"{fault['name']}: {error}")
    for test in fault["tests"]:
        file, _, node = test.partition("::")
        path, name = src.parent / file, node.partition("[")[0].rpartition("::")[2]
        if not path.is_file() or f"def {name}(" not in path.read_text():
            found.append(f"{fault['name']}: there is no test {test}")
    return found


def mutated(src: Path, old: str, new: str) -> tuple[Path, str]:
    """Return the one file that contains `old`, and its text with `new` in its place."""
    texts = {path: path.read_text() for path in sorted(src.rglob("*.py"))}
    for pattern in (re.compile(re.escape(old)), loose(old)):
        found = [(path, match) for path, text in texts.items() for match in pattern.finditer(text)]
        if len(found) == 1:
            path, match = found[0]
            return path, texts[path][: match.start()] + new + texts[path][match.end() :]
        if found:
            places = ", ".join(sorted({str(path.relative_to(src)) for path, _ in found}))
            raise LookupError(f"{old!r} occurs {len(found)} times: {places}")
    raise LookupError(f"{old!r} occurs in no file under {src}")


def loose(code: str) -> re.Pattern[str]:
    """Return a pattern that matches the same tokens, however they are broken into lines."""
    parts = re.findall(r"\w+|[^\w\s]", code)
    pattern = re.escape(parts[0])
    for before, after in itertools.pairwise(parts):
        comma = r"(?:\s*,)?" if after in ")]}" else ""
        gap = r"\s+" if before[-1].isalnum() and after[0].isalnum() else r"\s*"
        pattern += comma + gap + re.escape(after)
    return re.compile(pattern)


@contextmanager
def replaced(path: Path, text: str) -> Iterator[None]:
    """Give a file another text, and restore the file and its times afterwards."""
    before, times = path.read_bytes(), path.stat()
    try:
        path.write_text(text)
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def environment(src: Path) -> dict[str, str]:
    """Return the environment of the tests; compiled files of faulty code are not written."""
    own = {"PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **own}


def imported(src: Path) -> str:
    """Return the file that `import tracformer` finds."""
    command = [sys.executable, "-c", "import tracformer; print(tracformer.__file__)"]
    done = subprocess.run(
        command, cwd=src.parent, env=environment(src), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def pytest(tests: list[str], src: Path, timeout: float) -> tuple[int | None, str, float]:
    """Run tests; return the exit code (None: timeout), the output and the seconds."""
    command = ["nice", "-n", "3", sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["--tb=line", "--hypothesis-seed=0", *tests]
    started = time.monotonic()
    # examples that hypothesis finds with a fault must not be kept for other runs
    with tempfile.TemporaryDirectory() as folder:
        env = {**environment(src), "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        try:
            done = subprocess.run(
                command, cwd=src.parent, env=env, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return None, f"not finished after {timeout:g} s", time.monotonic() - started
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def summary(output: str) -> str:
    """Return pytest's last line."""
    lines = output.strip().splitlines() or ["no output"]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    return (counts or lines)[-1].strip("= ")


if __name__ == "__main__":
    sys.exit(main())
