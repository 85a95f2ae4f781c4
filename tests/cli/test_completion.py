"""The shell's completion: commands, flags and choices of the parsers, without importing torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracformer.cli import COMMANDS, main, parser_of
from tracformer.cli.completion import SHELLS


def complete(line: str, tmp_path: Path) -> list[str]:
    """Return what the shell offers after `line`."""
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    code = "import sys, tracformer.cli; sys.modules['torch'] = None; tracformer.cli.main([])"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return [word.strip() for word in (tmp_path / "out").read_text().splitlines()]


def test_commands_flags_and_choices_are_offered(tmp_path: Path) -> None:
    assert complete("tracformer in", tmp_path) == ["infill", "info"]
    assert set(COMMANDS) <= set(complete("tracformer ", tmp_path))
    flags = complete("tracformer infill --be", tmp_path)
    assert "--best-of" in flags
    assert complete("tracformer infill --quality ", tmp_path) == ["best", "fast", "raw"]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "tracformer" in capsys.readouterr().out


def test_an_unknown_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_parser_with_help(command: str) -> None:
    text = parser_of(command).format_help()
    assert text.startswith(f"usage: tracformer {command}")
    assert "--debug" in text
