"""The command `tracformer bench`."""

import json
from pathlib import Path

import pytest

from tests.bench.test_suite import SCALE, here
from tracformer import bench
from tracformer.bench import suite
from tracformer.cli import main


def test_files_are_written_and_nothing_is_measured_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUICK", SCALE)
    monkeypatch.setattr(suite.run, "__defaults__", (here,))
    words = ["bench", "--quick", "--only", "attention", "--out", str(tmp_path / "out")]
    extra = [
        "--json",
        str(tmp_path / "a.json"),
        "--markdown",
        str(tmp_path / "b.md"),
        "--plot",
        str(tmp_path / "c.svg"),
    ]
    assert main([*words, *extra]) == 0
    shown = capsys.readouterr()
    assert "encoder attention, native" in shown.out
    assert "[1/" in shown.err
    assert {row["part"] for row in json.loads((tmp_path / "a.json").read_text())["table"]} == {
        "machine",
        "attention",
    }
    assert "### Attention" in (tmp_path / "b.md").read_text()
    assert "<svg" in (tmp_path / "c.svg").read_text()
    assert (tmp_path / "out/results.json").exists()
    assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == shown.out
    assert "[1/" not in again.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "speed"], "--only is 'speed'; allowed: machine, attention"),
        (["--device", "tpu"], "--device is 'tpu'; it must be cpu or cuda"),
        (["--device", "cuda"], "finds no GPU"),
        (["--plot", "x.gif"], "'x.gif'; it must end in one of"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_wrong_options_are_errors(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
