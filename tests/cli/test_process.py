"""The command line as a process: what it imports, and how it leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from tracformer.cli.main import VERBS, main

HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "tqdm")


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    calls = [["--help"], ["--version"], [], *([verb, "--help"] for verb in VERBS)]
    code = f"""
import contextlib, sys
from tracformer.cli.main import main
for words in {calls!r}:
    with contextlib.suppress(SystemExit):
        main(words)
sys.exit([name for name in {HEAVY!r} if name in sys.modules] or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert f"tracformer {verb}" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [(["infil"], "invalid choice: 'infil'"), (["--verbose"], "--verbose"), (["infill", "--model"], "expected one argument")],
)
def test_a_wrong_word_is_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_reader_that_leaves_early_is_no_error(model: Path) -> None:
    """`| head -1`: the pipe breaks while there is more to say."""
    texts = "\n".join(["a[[1]]b"] * 400).encode()
    words = [sys.executable, "-m", "tracformer.cli.main", "infill", "-m", str(model), "--json", "--batch", "4"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(texts)
        process.stdin.close()
        assert process.stdout.readline().startswith(b'{"line": 1')
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
