"""Progress bars appear on a terminal only, and never on standard output."""

import io
import subprocess
import sys

import pytest

from tracformer.progress import ProgressBar, track


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


def test_a_disabled_bar_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track(iter("abc"), "reading", enabled=False)) == ["a", "b", "c"]
    assert terminal.getvalue() == ""
