"""docs/guide.md is true: its Python runs from top to bottom, its commands are ones
the command line takes.
"""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

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
        # errors name the guide's own lines
        exec(compile("\n" * line + block[1], "docs/guide.md", "exec"), namespace)
    assert "Mia carried the" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_guide_are_understood(command: str) -> None:
    _, verb, *words = shlex.split(command)
    module = importlib.import_module(f"tracformer.cli.{verb}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    assert parser.parse_intermixed_args(words)
