#!/usr/bin/env python3
"""Apply each recorded fault to a source tree, run the tests that must catch it, restore the file.

    check_faults.py SRC [options]

SRC is the `src` folder of a clone (use a clone of your own: its files are changed while a fault is
checked). For each fault the one file under SRC that contains `old` is found, wherever it has moved
to; `old` is replaced by `new`, the tests run, and the file is restored byte for byte.

`old` is matched exactly or, if that fails, up to white space and trailing commas, so that a
reformatted line is found too. A fault whose code was rewritten is reported as "not found": give its
new `old` and `new` in the mapping.

Tests of a fault, the first that applies:
  --map MAP.json   {"fault": ["tests/x.py::test_y", ...]} or
                   {"fault": {"tests": [...], "old": "...", "new": "..."}} (every key optional)
                   {"*": {"tests/old.py": "tests/new.py", "tests/a.py::old": "tests/b.py::new"}}
                   renames files and node ids of the recorded selections; the longest key wins
  --files F ...    these files for every fault (with -k if given)
  otherwise        the recorded node ids; with --level file, the whole files that hold them

A fault counts as caught if pytest reports failed tests (exit code 1), and the same selection passes
without the fault. Exit status: 0 if every fault is caught.
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
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    args = arguments()
    src = args.src.resolve()
    root = (args.root or src.parent).resolve()
    faults = {fault["name"]: fault for fault in json.loads(args.faults.read_text())}
    changes = json.loads(args.map.read_text()) if args.map else {}
    renames = changes.pop("*", {})
    for name, change in changes.items():
        if name not in faults:
            sys.exit(f"the mapping names {name!r}; known faults: {', '.join(faults)}")
        faults[name] = faults[name] | (
            {"tests": change, "own": True}
            if isinstance(change, list)
            else {**change, "own": "tests" in change}
        )
    if args.only:
        faults = {name: faults[name] for name in args.only.split(",")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` restores the file
    where = imported(args, root, src)
    if not where.startswith(str(src)):
        sys.exit(f"tracformer is imported from {where}, not from {src}")

    selections = {name: selection(fault, args, renames) for name, fault in faults.items()}
    if not args.no_baseline:
        tests = list(dict.fromkeys(test for tests in selections.values() for test in tests))
        code, output, seconds = pytest(tests, args, root, src)
        print(f"without faults: {summary(output)} ({seconds:.0f} s)", flush=True)
        if code != 0:
            print(output)
            return 1

    outcomes: dict[str, str] = {}
    for name, fault in faults.items():
        try:
            path, text = mutated(src, fault["old"], fault["new"])
        except LookupError as error:
            outcomes[name] = "not found"
            print(f"{'NOT FOUND':10} {name}: {error}", flush=True)
            continue
        with replaced(path, text):
            code, output, seconds = pytest(selections[name], args, root, src)
        outcomes[name] = {0: "missed", 1: "caught"}.get(
            code, "timeout" if code is None else "error"
        )
        print(
            f"{outcomes[name].upper():10} {name}: {path.relative_to(src)}; "
            f"{summary(output)} ({seconds:.0f} s)",
            flush=True,
        )
        if args.verbose or outcomes[name] == "error":
            print(output, flush=True)
    counts = {
        word: list(outcomes.values()).count(word) for word in dict.fromkeys(outcomes.values())
    }
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    if args.out:
        args.out.write_text(json.dumps(outcomes, indent=1) + "\n")
    return 0 if set(outcomes.values()) <= {"caught"} else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src", type=Path, help="the src folder of a clone")
    parser.add_argument(
        "--root", type=Path, help="folder in which pytest runs (default: the parent of SRC)"
    )
    parser.add_argument("--faults", type=Path, default=HERE / "seeded_faults.json")
    parser.add_argument("--map", type=Path, help="JSON: other tests, other code, renamed files")
    parser.add_argument("--files", nargs="+", help="run these for every fault")
    parser.add_argument("-k", dest="keyword", help="pytest's -k")
    parser.add_argument("--level", choices=("node", "file"), default="node")
    parser.add_argument("--only", help="names of faults, with commas")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without faults first"
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run")
    parser.add_argument("--seed", type=int, default=0, help="of hypothesis")
    parser.add_argument("--out", type=Path, help="write the outcomes as JSON")
    parser.add_argument("--verbose", action="store_true", help="print pytest's output")
    return parser.parse_args()


def selection(fault: dict, args: argparse.Namespace, renames: dict[str, str]) -> list[str]:
    if fault.get("own"):
        return fault["tests"]
    if args.files:
        return args.files
    tests = [renamed(test, renames) for test in fault["tests"]]
    return list(
        dict.fromkeys(test.partition("::")[0] if args.level == "file" else test for test in tests)
    )


def renamed(test: str, renames: dict[str, str]) -> str:
    """Apply the longest key that the node id begins with, up to the end of a word."""
    for old in sorted(renames, key=len, reverse=True):
        if test == old or test.startswith((f"{old}::", f"{old}[")):
            return renames[old] + test[len(old) :]
    return test


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
            raise LookupError(f"{old!r} stands {len(found)} times: {places}")
    raise LookupError(f"{old!r} is in no file under {src}")


def loose(code: str) -> re.Pattern[str]:
    """Match the same tokens, however they are broken into lines."""
    parts = re.findall(r"\w+|[^\w\s]", code)
    pattern = re.escape(parts[0])
    for before, after in itertools.pairwise(parts):
        comma = r"(?:\s*,)?" if after in ")]}" else ""
        gap = r"\s+" if before[-1].isalnum() and after[0].isalnum() else r"\s*"
        pattern += comma + gap + re.escape(after)
    return re.compile(pattern)


@contextmanager
def replaced(path: Path, text: str):
    """Give the file another text; afterwards restore it with its times."""
    before, times = path.read_bytes(), path.stat()
    try:
        path.write_text(text)
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def environment(src: Path) -> dict[str, str]:
    # No compiled files: one of a mutated source must not outlive it.
    return {
        **os.environ,
        "PYTHONPATH": str(src),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def imported(args: argparse.Namespace, root: Path, src: Path) -> str:
    command = [args.python, "-c", "import tracformer; print(tracformer.__file__)"]
    return subprocess.run(
        command, cwd=root, env=environment(src), capture_output=True, text=True, check=True
    ).stdout.strip()


def pytest(
    tests: list[str], args: argparse.Namespace, root: Path, src: Path
) -> tuple[int | None, str, float]:
    command = [
        "nice",
        "-n",
        "3",
        args.python,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        f"--hypothesis-seed={args.seed}",
    ]
    command += [*(["-k", args.keyword] if args.keyword else []), *tests]
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # examples that hypothesis finds are not kept for other runs
        env = {**environment(src), "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        try:
            done = subprocess.run(
                command, cwd=root, env=env, capture_output=True, text=True, timeout=args.timeout
            )
        except subprocess.TimeoutExpired:
            return None, f"no end within {args.timeout:g} s", time.monotonic() - started
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def summary(output: str) -> str:
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return (
        lines[-1].strip("= ")
        if lines
        else output.strip().splitlines()[-1]
        if output.strip()
        else "no output"
    )


if __name__ == "__main__":
    sys.exit(main())
