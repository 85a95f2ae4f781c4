"""The examples run; with more training, in `make soak`, they also do what they say."""

import random
from pathlib import Path

import pytest

from tests.helpers import example


def test_infill_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("infill_text").main(["--steps", "2", "--run", str(tmp_path / "stories")])
    out = capsys.readouterr().out
    assert out.count("log-probability") == 3 + 2
    assert "(exact)" in out
    assert out.count(" tokens: 0.") + out.count(" tokens: 1.") == 4
    assert "Tom carried" in out
    assert (tmp_path / "stories" / "run" / "model" / "model.safetensors").is_file()


def test_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("any_order")
    module.main(["--steps", "2", "--stories", "1"])
    out = capsys.readouterr().out
    for name in module.ORDERS:
        assert name in out


def test_own_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("own_data")
    check = module.check
    monkeypatch.setattr(module, "check", lambda lm, records: check(lm, 4))
    module.main(["--steps", "2"])
    assert "of the removed bases came back" in capsys.readouterr().out


@pytest.mark.soak
def test_hidden_bases_come_back(tmp_path: Path) -> None:
    module = example("own_data")
    module.write_fasta(tmp_path / "m.fasta", 2000, random.Random(0))
    assert module.check(module.train(tmp_path / "m.fasta", tmp_path, 150), 100) > 0.8
