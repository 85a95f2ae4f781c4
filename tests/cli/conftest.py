import sys
from pathlib import Path

import pytest

from tests.cli.helpers import Caller, save_model
from tracformer.cli import output as show
from tracformer.data import char_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Letters, spaces and full stops, one token each."""
    return save_model(tmp_path_factory.mktemp("models") / "letters", char_tokenizer("abcdefgh .\n"))


@pytest.fixture
def tracformer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> Caller:
    return Caller(capsys, monkeypatch, model)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is a terminal with colours."""
    monkeypatch.setattr(show, "is_terminal", lambda stream: stream is sys.stdout)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
