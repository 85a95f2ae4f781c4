"""docs/guide.md is right: its Python runs from top to bottom, and its commands parse."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from tracformer.cli import find_command

GUIDE = (Path(__file__).parent.parent / "docs" / "guide.md").read_text()
COMMANDS = re.findall(
    r"^tracformer .+$", "\n".join(re.findall(r"^```sh\n(.*?)^```", GUIDE, re.M | re.S)), re.M
)


def test_the_python_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", GUIDE, re.M | re.S))
    assert len(blocks) > 8
    for block in blocks:
        line = GUIDE.count("\n", 0, block.start(1))
        # so that errors name lines of the guide
        exec(compile("\n" * line + block[1], "docs/guide.md", "exec"), namespace)
    assert "Mia carried the" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_guide_parse(command: str) -> None:
    _, name, *words = shlex.split(command)
    parser = argparse.ArgumentParser(exit_on_error=False)
    find_command(name).add_arguments(parser)
    assert parser.parse_intermixed_args(words)
