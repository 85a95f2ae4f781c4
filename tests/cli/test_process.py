"""The command line as a process: help, imports, errors, exit codes, output and progress."""

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cli.helpers import save_model
from tracformer.cli import COMMANDS, info, main
from tracformer.cli.output import StreamWriter, marked, rows_of, shade, visible
from tracformer.data import byte_tokenizer, char_tokenizer
from tracformer.devices import pick_device
from tracformer.generation.results import Span, Token
from tracformer.progress import ProgressBar, track

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


# ---- streamed text, shades and marks

BYTES = byte_tokenizer()


def arrivals(blank: int, text: str) -> list[Token]:
    return [
        Token(0, index, byte, -1.0, blank=blank, index=index, token=BYTES.decode([byte]))
        for index, byte in enumerate(text.encode())
    ]


def test_each_piece_is_printed_once_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    writer = StreamWriter(["<", "|", "|", ">"], lambda fills: BYTES.decode(fills[-1]))
    seen = [capsys.readouterr().out]
    for arrival in [*arrivals(0, "é"), *arrivals(2, "b")]:  # nothing came for the second blank
        writer([arrival])
        seen.append(capsys.readouterr().out)
    writer.finish("<é||b>")
    assert [*seen, capsys.readouterr().out] == ["<", "", "é", "||b", ">\n"]


def test_incomplete_characters_are_printed_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = StreamWriter(["a", "b"], lambda fills: BYTES.decode(fills[-1]))
    writer(arrivals(0, "é")[:1])
    writer.finish("a\ufffdb")
    assert capsys.readouterr().out == "a\ufffdb\n"


def test_a_text_that_changed_is_printed_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = StreamWriter(["a", "b"], lambda fills: BYTES.decode(fills[-1]))
    writer(arrivals(0, "x"))
    writer.finish("a xb")
    assert capsys.readouterr().out == "ax\na xb\n"


def test_rows_of_a_terminal() -> None:
    assert [
        rows_of(text, 4) for text in ("", "abcd", "abcde", "a\nb", "a\n\n", "文文", "文文文")
    ] == [1, 1, 2, 2, 3, 1, 2]


def test_shades() -> None:
    assert shade("a", 0.0) != shade("a", -0.5) != shade("a", -5.0)
    assert shade("a", float("-inf")) == shade("a", -50.0)
    for line in shade("ab\n\ncd", -1.0).split("\n"):
        assert line == "" or (line.startswith("\033[") and line.endswith("\033[0m"))
    assert visible("a\x1b[31m\x07\t\n\x7f") == "a␛[31m␇\t\n␡"


def test_marks() -> None:
    spans = [Span(0, 1, "a", (0,), ("a",), (0.0,)), Span(3, 3, "", (), (), ())]
    assert marked("abc", spans) == "[[a]]bc[[]]"


# ---- progress bars appear on a terminal only, and never on standard output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_written_and_rich_is_not_imported_without_a_terminal() -> None:
    program = (
        "import sys; from tracformer.progress import track\n"
        "print(sum(track([1, 2, 3], 'adding')), 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert (done.stdout.split(), done.stderr) == ([b"6", b"False"], b"")


def test_a_terminal_shows_description_count_and_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with ProgressBar("[1/2] scoring", total=4) as bar:
        bar.update(3, note="loss 1.5")
        print("a result")
    assert "[1/2] scoring" in terminal.getvalue()
    assert "3/4" in terminal.getvalue()
    assert "loss 1.5" in terminal.getvalue()
    assert capsys.readouterr().out == "a result\n"
    bar.update()  # a closed bar ignores updates


def test_a_delayed_bar_appears_only_if_the_work_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar("filling", unit="seconds", delay=600):
        pass
    assert terminal.getvalue() == ""
    with ProgressBar("filling", unit="seconds", delay=0.01):
        deadline = time.monotonic() + 60
        while "filling" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "filling" in terminal.getvalue()
    assert "0:00:0" in terminal.getvalue()  # the time so far


def test_a_disabled_bar_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track(iter("abc"), "reading", enabled=False)) == ["a", "b", "c"]
    assert terminal.getvalue() == ""
