"""docs/serve.md is true: its Python runs, its requests are answered, its commands
are understood.
"""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from tests.server.helpers import Running, running
from tracformer import LanguageModel
from tracformer.cli import serve
from tracformer.server import Limits, Settings

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
HERE = "http://127.0.0.1:8000"
BLOCKS = list(re.finditer(r"^```python\n(.*?)^```", PAGE, re.M | re.S))
LINES = (
    "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)).replace("\\\n", "").splitlines()
)
CALLS = [line for line in LINES if line.startswith("curl ")]
COMMANDS = [line for line in LINES if line.startswith("tracformer ")] + re.findall(
    r"`(tracformer serve [^`]+)`", PAGE
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[1].split()[1])
def test_the_python_runs(
    lm: LanguageModel, block: re.Match[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(lambda: lm, aliases=("stories",)) as there:
        code = "\n" * PAGE.count("\n", 0, block.start(1)) + block[1].replace(HERE, there.url)
        exec(compile(code, "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("call", CALLS)
def test_requests_are_answered(server: Running, call: str) -> None:
    _, url, *words = shlex.split(call)
    assert url.startswith(HERE)
    if not words:
        assert server.http.get(url.removeprefix(HERE)).status_code == 200
        return
    assert words[:2] == ["-H", "Content-Type: application/json"]
    response = server.http.post(
        url.removeprefix(HERE), content=words[3], headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 200, response.text


def test_the_commands_are_understood() -> None:
    assert len(CALLS) == 5
    assert len(COMMANDS) >= 2
    for command in COMMANDS:
        parser = argparse.ArgumentParser(exit_on_error=False)
        serve.add_arguments(parser)
        assert parser.parse_args(shlex.split(command.partition("#")[0])[2:])


def test_the_table_of_options_has_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    rows = dict(re.findall(r"^\| `(--[a-z-]+)`(?:, or `[A-Z_]+`)? \| ([^|]+) \|", PAGE, re.M))
    defaults = {**vars(Settings()), "max_body": Limits.body}
    for option in ("--rows", "--queue", "--timeout", "--body-timeout", "--drain", "--max-body"):
        assert float(rows[option]) == defaults[option[2:].replace("-", "_")]
    assert {name for action in parser._actions for name in action.option_strings} - set(
        re.findall("--[a-z-]+", PAGE)
    ) == {"-h", "--help"}
