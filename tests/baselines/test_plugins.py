"""Systems and tasks of other packages and of files named by --include."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.training.helpers import environment, story_data
from tracformer import baselines, plugins
from tracformer.baselines import family_names, find_family, is_known, origin_of
from tracformer.cli import main
from tracformer.evaluation import task as tasks
from tracformer.evaluation.task import task_class, task_names

PAGE = (ROOT / "docs" / "tutorials" / "extend.md").read_text()
CODE = {name: f"# {name}{rest}" for name, rest in re.findall(r"# (\w+\.py)(.*?)```", PAGE, re.S)}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(baselines, "_families", dict(baselines._families))
    monkeypatch.setattr(baselines, "_packages", {})
    monkeypatch.setattr(tasks, "_tasks", dict(tasks._tasks))
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(plugins, "_read", set())
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    for name, code in CODE.items():
        (tmp_path / name).write_text(code)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("tracformer_included", "outside")):
            del sys.modules[name]


def package(folder: Path, entries: str, code: str = "") -> None:
    """Write an installed package with these entry points and a module `outside`."""
    info = folder / "outside-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entries)
    (folder / "outside.py").write_text(code)


def test_the_tutorials_model_trains_fills_and_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 30 <= len(CODE["window.py"].splitlines()) <= 60
    data, run = story_data(tmp_path), tmp_path / "run"
    own = ["--include", "window.py"]
    words = ["length=32", "steps=20", "batch=8", "eval_sequences=4", "optimizer.lr=1e-2"]
    train = ["train", f"data={data}", f"run={run}", "model.family=window", *words]
    assert main([*train, *own]) == 0
    capsys.readouterr()
    assert main(["infill", "-m", str(run), "to the [[4]] and", "--json", *own]) == 0
    filled = json.loads(capsys.readouterr().out)
    [span] = filled["spans"]
    start, stop = span["start"], span["stop"]
    marked = f"{filled['text'][:start]}[[{span['text']}]]{filled['text'][stop:]}"
    assert main(["score", "-m", str(run), marked, "--json", *own]) == 0
    scored = json.loads(capsys.readouterr().out)
    if scored["tokens"] == 4:  # bytes of half a character may be spelled otherwise
        assert scored["log_prob"] == pytest.approx(filled["log_prob"], abs=1e-3)
    words = ["ratios:ratios=0.5", "size:unit=1e3", "--data", str(data), "--length", "32"]
    words += ["--sequences", "4", "--out", "results", *own, "--include", "size.py"]
    assert main(["eval", str(run), *words]) == 0
    assert len(list((tmp_path / "results").glob("*.json"))) == 2
    capsys.readouterr()
    assert main(["models", "--json", *own]) == 0
    origins = {
        system["name"]: system["origin"]
        for system in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert origins.pop("window") == str(tmp_path / "window.py")
    assert set(origins.values()) == {"tracformer"}


def test_processes_that_are_started_know_the_file(tmp_path: Path) -> None:
    plugins.include("window.py")
    code = "from tracformer.baselines import find_family; print(find_family('window').model_class)"
    env = {**environment(), plugins.VARIABLE: os.environ[plugins.VARIABLE]}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert b"Window" in done.stdout


def test_a_package_adds_systems_and_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    size = CODE["size.py"].replace('register_task("size", Size)', "")
    family = 'FAMILY = Family("window", __name__, "Window", "car", "a window")\nother = 1\n'
    window = CODE["window.py"].replace("tracformer.register_model(", "(") + family
    package(
        folder,
        "[tracformer.models]\nwindow = outside:FAMILY\ngpt2 = outside:FAMILY\n"
        "broken = outside_not_there:FAMILY\nwrong = outside:other\n"
        "[tracformer.tasks]\nsize = outside:Size\nratios = outside:Size\n",
        window + size,
    )
    monkeypatch.syspath_prepend(str(folder))
    with pytest.warns(UserWarning, match="left out") as seen:
        assert is_known("window")
    reasons = [str(warning.message) for warning in seen]
    for reason in ("the name is taken", "ModuleNotFoundError", "must be a tracformer.baselines"):
        assert any(reason in each and "outside 1.2" in each for each in reasons)
    assert origin_of("window") == "outside 1.2"
    assert origin_of("gpt2") == "tracformer"
    assert {"broken", "wrong"}.isdisjoint(family_names())
    with pytest.warns(UserWarning, match="'ratios' of the package outside 1.2 is left out"):
        assert "size" in task_names()
    assert task_class("size").__name__ == "Size"
    assert task_class("ratios").__module__ == "tracformer.evaluation.perplexity"


def test_known_names_need_no_look_at_packages() -> None:
    find_family("tracformer")
    task_class("ratios")
    assert plugins._read == set()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("nothere.py", None, "there is no file nothere.py to include"),
        ("bad.py", "1 / 0", "bad.py failed: ZeroDivisionError: division by zero"),
        ("text.txt", "words", "is not a Python file"),
        ("other/window.py", "", "have the same name"),
    ],
)
def test_wrong_files_are_one_line(
    name: str, code: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.include("window.py")
    Path("other").mkdir()
    if code is not None:
        Path(name).write_text(code)
    capsys.readouterr()
    assert main(["models", "--include", name]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert message in error


def test_a_model_of_a_file_that_is_not_included_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "windowed"}')
    assert main(["info", str(tmp_path)]) == 2
    assert "add --include FILE.py" in capsys.readouterr().err
