"""Tasks by name, results as files, and their manifests."""

import json
import math
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tracformer
from tests.toys import known_subject, small_model, write_lines
from tracformer.evaluation import (
    Result,
    ResultRow,
    Task,
    make_task,
    parse_task,
    read_results,
    register_task,
    result_files,
)
from tracformer.evaluation import task as tasks
from tracformer.evaluation.task import Progress, Subject


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "ratio",
            "unknown task 'ratio'; did you mean 'ratios'",
        ),
        (
            "ratios:maen=10",
            "task 'ratios' has no option 'maen'; did you mean 'mean'",
        ),
        ("ratios:mean", "'mean' is not of the form key=value"),
        ("ratios:mean=3,mean=4", "'mean' is given twice"),
        ("ratios:length=1.5", "length is '1.5'; it must be an integer"),
        ("ratios:mean=long", "mean is 'long'; it must be a number"),
        ("ratios:mean=0.5", "mean is 0.5; a mean span length must lie in"),
        ("ratios:ratios=0.1/1.5", "p is 1.5; the share of targets"),
        ("ratios:count_eos=perhaps", "count_eos is 'perhaps'; it must be true or false"),
        ("ranges:ranges=table3", "ranges is 'table3'; it must be table1 or table2"),
        ("prefixes:fractions=1", "the prefix is 1.0 of the sequence"),
    ],
)
def test_wrong_tasks_raise(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_task(text)


def test_one_task_written_three_ways() -> None:
    text = parse_task(
        "ratios: mean=15, sd=3, ratios=0.1/0.5, length=64, count_eos=true",
        {"seed": 4, "samples": 5},
    )
    listed = make_task(
        "ratios",
        {"mean": 15, "sd": 3, "ratios": [0.1, 0.5], "length": 64, "count_eos": True, "seed": 4},
    )
    assert text == listed
    assert text.options["ratios"] == (0.1, 0.5)
    assert text.options["seed"] == 4  # a default that it has; `samples` it has not
    assert parse_task("ratios:seed=1", {"seed": 4}).options["seed"] == 1
    assert parse_task("ranges:ranges=[0.1,0.4]&[0.6,0.9]/table1,length=9").options["ranges"] == (
        "[0.1,0.4]&[0.6,0.9]",
        "table1",
    )


def test_a_registered_task_is_parsed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_tasks", dict(tasks._tasks))

    @dataclass(frozen=True)
    class Size(Task):
        name = "size"
        modes = ("ac",)
        unit: float = 1.0

        def run(self, subject: Subject, progress: object) -> Result:
            return self.result(
                subject, [ResultRow("parameters", {}, subject.model.num_parameters() / self.unit)]
            )

    register_task("size", Size)
    task = parse_task("size:unit=2")
    model = small_model()
    result = task.run(Subject(model, None, "m", "ac"), Progress())
    assert result.find("parameters").value == model.num_parameters() / 2
    with pytest.raises(
        ValueError, match="task 'size' works in mode ac, but m is to answer in mode 'car'"
    ):
        task.check(Subject(model, None, "m", "car"))
    with pytest.raises(ValueError, match="trained for: ac"):
        Subject(small_model(modes=("ac",)), None, "m", "car")


def test_a_result_comes_back_from_its_file(tmp_path: Path) -> None:
    rows = (
        ResultRow("kl", {"pattern": "a b"}, math.inf, None, math.nan, "exact", 3, 4, "ñ"),
        ResultRow("kl", {"pattern": "c"}, 0.1),
    )
    result = Result(
        "a/b c",
        "tracformer",
        "car",
        "exact",
        {"n": 1},
        rows,
        {"c": [1.5]},
        {"hashes": {"weights": "x"}, "dtype": "float32"},
    )
    path = result.save(tmp_path)
    assert path.name.startswith("a_b_c-car-exact-")
    [back] = read_results(tmp_path)
    assert back.rows[0].value == math.inf
    assert math.isnan(back.rows[0].high or 0.0)
    assert (back.rows[1], back.details, back.options) == (rows[1], result.details, result.options)
    assert back.find("kl", pattern="c").value == 0.1
    with pytest.raises(ValueError, match="2 rows of task 'exact'"):
        back.find("kl")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_only_results_are_read(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"format": "another"}')
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "block-0.json").write_text("[[1.0]]")
    assert read_results(tmp_path) == []
    (tmp_path / "broken.json").write_text('{"format": ')
    with pytest.raises(ValueError, match=r"broken.json is not a readable result"):
        read_results(tmp_path)
    with pytest.raises(FileNotFoundError, match="tracformer eval --out"):
        read_results(tmp_path / "nowhere")


def test_the_manifest_names_what_can_change_a_figure(tmp_path: Path) -> None:
    write_lines(tmp_path / "lines.txt", 8, 12)
    options = {
        "data": str(tmp_path / "lines.txt"),
        "length": 12,
        "sequences": 4,
        "rows": "documents",
        "documents": "line",
    }
    subject = known_subject()

    def named(**changes: object) -> str:
        task = make_task("ranges", {**options, **changes})
        return Result(
            "m", "f", subject.mode, task.name, task.options, (), {}, task.manifest(subject)
        ).file_name

    described = make_task("ranges", options).manifest(subject)
    assert set(described["hashes"]) == {"weights", "tokenizer", "data", "contexts"}
    assert described["schemas"] == {"family": 1, "task": 1}
    assert {"dtype", "device", "time", "torch", "command", "code", "commit", "processes"} <= set(
        described
    )
    assert str(tmp_path) not in json.dumps(
        {"manifest": described, "options": make_task("ranges", options).options}
    )
    before = named()
    assert before == named()
    assert len({before, named(sequences=3), named(ranges=("table1",)), named(length=11)}) == 4
    write_lines(tmp_path / "others.txt", 8, 12, seed=1)
    assert named(data=str(tmp_path / "others.txt")) != before


def test_hashes_of_weights_and_paths_in_the_command() -> None:
    model = small_model()
    before = result_files.weights_hash(model)
    assert before == result_files.weights_hash(small_model())
    with torch.no_grad():
        model.norm.bias[0] += 1e-9
    assert result_files.weights_hash(model) != before
    words = [
        "/home/me/bin/tracformer",
        "eval",
        "a=/home/me/runs/a@car",
        "ratios:data=/home/me/text,mean=3",
        "--data=~/x/y.txt",
        "hf:owner/name",
    ]
    assert (
        result_files.command_line(["/site-packages/pytest/__main__.py", "tests"])
        == "__main__.py tests"
    )
    assert (
        result_files.command_line(words)
        == "tracformer eval a=a@car ratios:data=text,mean=3 --data=y.txt hf:owner/name"
    )


def test_the_commit_is_recorded_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded(folder: Path) -> str:
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(result_files, "PACKAGE", folder)
        result_files.code_version.cache_clear()
        assert result_files.code_version()["code"] == tracformer.__version__
        return result_files.code_version()["commit"]

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    try:
        package, other = tmp_path / "package", tmp_path / "site-packages"
        assert recorded(package) == ""
        (package / "__init__.py").write_text("")
        git("init")
        git("add", "package")
        git("commit", "-m", "first")
        commit = recorded(package)
        assert len(commit) == 40
        (package / "__init__.py").write_text("a = 1")
        assert recorded(package) == f"{commit}+changes"
        other.mkdir()
        (other / "__init__.py").write_text("")  # installed inside some other project
        assert recorded(other) == ""
        monkeypatch.setenv("PATH", "")
        assert recorded(package) == ""
    finally:
        result_files.code_version.cache_clear()
