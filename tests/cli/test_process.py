"""The command line as a process: help, imports, errors, exit codes, outputs."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.helpers import save_model
from tracformer.cli import COMMANDS, info, main
from tracformer.data import char_tokenizer
from tracformer.devices import pick_device

HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "rich", "pydantic")


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    calls = [["--help"], ["--version"], [], *([command, "--help"] for command in COMMANDS)]
    code = f"""
import contextlib, sys
from tracformer.cli import main
for words in {calls!r}:
    with contextlib.suppress(SystemExit):
        main(words)
sys.exit([name for name in {HEAVY!r} if name in sys.modules] or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"tracformer {command}" in done.stdout


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "prepare" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("0.")


def test_unexpected_errors_are_one_line_unless_debug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: object) -> int:
        raise KeyError("lost")

    monkeypatch.setattr(info, "run", fail)
    assert main(["info"]) == 1
    error = capsys.readouterr().err
    assert "internal error: KeyError: 'lost'; --debug shows the traceback" in error
    assert error.count("\n") == 1
    for words in (["info", "--debug"], ["--debug", "info"]):
        assert main(words) == 1
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["infil"], "unknown command 'infil'; did you mean 'infill'?"),
        (["--verbose"], "--verbose"),
        (["infill", "--model"], "expected one argument"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [["infill", "a[[1]]b"], ["score", "a[[b]]"], ["sample"], ["serve"]],
    ids=lambda words: words[0],
)
def test_an_unknown_device_is_an_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--device", "abacus"]) == 2
    assert "device is 'abacus'; it must be auto, cpu, cuda" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_a_device_that_cannot_compute_here_is_an_error(name: str) -> None:
    if getattr(torch, name, None) is not None and getattr(torch, name).is_available():
        pytest.skip(f"this machine has {name}")
    with pytest.raises(
        ValueError,
        match=f"device is '{name}', but this machine or its PyTorch cannot compute on it",
    ):
        pick_device(name)


def test_numbered_cpus_are_the_cpu() -> None:
    assert (pick_device("cpu:0"), pick_device("cpu")) == ("cpu", "cpu")


def test_the_package_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    error = subprocess.check_output([sys.executable, "-m", "tracformer", "--version"], text=True)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == error != ""


def test_a_reader_may_close_the_pipe(model: Path) -> None:
    """As with `| head -1`."""
    texts = "\n".join(["a[[1]]b"] * 400).encode()
    words = [
        sys.executable,
        "-m",
        "tracformer",
        "infill",
        "-m",
        str(model),
        "--json",
        "--batch",
        "4",
    ]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(texts)
        process.stdin.close()
        assert process.stdout.readline().startswith(b'{"line": 1')
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_the_output_may_be_closed(model: Path) -> None:
    words = f"{sys.executable} -m tracformer infill -m {model} 'a[[1]]b'"
    done = subprocess.run(["sh", "-c", f"{words} >&-"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_output_that_cannot_hold_the_text_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, char_tokenizer("é"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(["infill", "-m", str(folder), "é[[1]]"]) == 2
    assert r"'\xe9' cannot be written as ascii" in capsys.readouterr().err
