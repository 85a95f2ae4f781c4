"""Tasks, the runner, result files and their provenance."""

import dataclasses
import json
import math
import statistics
import subprocess
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

import tracformer
from tests.toys import (
    Known,
    chain_tokenizer,
    known_subject,
    on_ranks,
    random_mdlm,
    small_model,
    small_tokenizer,
    write_lines,
)
from tracformer import baselines as families
from tracformer.evaluation import (
    Result,
    ResultRow,
    Subject,
    Task,
    make_task,
    parse_task,
    read_results,
    register_task,
    result_files,
)
from tracformer.evaluation import task as tasks
from tracformer.evaluation.speed import Speed, watch_memory
from tracformer.evaluation.task import PARTIAL, Progress, choose_mode, evaluate, parse_model
from tracformer.report import differences


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


def test_a_result_is_read_back_from_its_file(tmp_path: Path) -> None:
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


# ---- the runner

COUNT, LENGTH = 150, 10  # three blocks


class Interrupted(Progress):
    """Stops the work after some blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.left = blocks

    def step(self, done: int = 1) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.fixture
def task(tmp_path: Path) -> Task:
    write_lines(tmp_path / "lines.txt", COUNT, LENGTH)
    where = {
        "data": str(tmp_path / "lines.txt"),
        "length": LENGTH,
        "sequences": COUNT,
        "rows": "documents",
        "documents": "line",
    }
    return make_task("ratios", {**where, "mean": 3, "ratios": (0.3, 0.8)})


def sequences_read(subject: Subject) -> int:
    assert isinstance(subject.model, Known)
    return sum(subject.model.batches)


def test_a_finished_result_is_read_and_not_computed(task: Task, tmp_path: Path) -> None:
    first, again = known_subject(), known_subject(batch=3)
    [done] = evaluate([first], [task], tmp_path / "out")
    [found] = evaluate([again], [task], tmp_path / "out")
    assert (sequences_read(first), sequences_read(again)) == (2 * COUNT, 0)
    assert found.rows == done.rows
    other = make_task("ratios", {**dataclasses.asdict(task), "seed": 1})
    [new] = evaluate([again], [other], tmp_path / "out")
    assert sequences_read(again) == 2 * COUNT
    assert new.rows != done.rows
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_speed_is_measured_again(tmp_path: Path) -> None:
    subject = Subject(small_model(), None, "m", "car")
    speed = make_task("speed", {"length": 8, "sequences": 1, "rounds": 1})
    first, again = (next(evaluate([subject], [speed], tmp_path)) for _ in range(2))
    assert first.details["seconds"] != again.details["seconds"]
    assert Result.load(tmp_path / again.file_name).details["seconds"] == again.details["seconds"]


def test_a_raised_schema_invalidates_results(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = known_subject(), known_subject()
    list(evaluate([first], [task], tmp_path / "out"))
    monkeypatch.setattr(type(task), "schema", 2)
    list(evaluate([again], [task], tmp_path / "out"))
    assert sequences_read(again) == 2 * COUNT
    monkeypatch.setattr(families, "_families", dict(families._families))
    families.register(families.Family("known", __name__, "Known", "ac", "the truth", schema=2))
    list(evaluate([again], [task], tmp_path / "out"))
    assert sequences_read(again) == 4 * COUNT
    schemas = [Result.load(path).manifest["schemas"] for path in (tmp_path / "out").glob("*.json")]
    assert sorted((each["family"], each["task"]) for each in schemas) == [(1, 1), (1, 2), (2, 2)]


def test_a_new_option_leaves_results_valid(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if older versions had only spans of 3
    monkeypatch.setattr(type(task), "later_options", {"mean": 3.0})
    assert "mean" not in task.options
    assert dataclasses.replace(task, mean=4.0).options["mean"] == 4.0  # type: ignore[call-arg]


def test_an_exact_result_does_not_depend_on_draws(task: Task, tmp_path: Path) -> None:
    first, again, bound = known_subject(), known_subject(), known_subject()
    bound.model.answers = {"car": "bound"}  # type: ignore[misc]
    few = make_task("ratios", {**dataclasses.asdict(task), "draws": 4})
    [done] = evaluate([first], [task], tmp_path / "out")
    [found] = evaluate([again], [few], tmp_path / "out")
    assert (sequences_read(again), found.rows) == (0, done.rows)
    [estimated] = evaluate([dataclasses.replace(bound, name="bound")], [few], tmp_path / "out")
    assert sequences_read(bound) > 0
    assert estimated.options["draws"] == 4


def test_an_interrupted_task_continues_from_its_last_block(task: Task, tmp_path: Path) -> None:
    subject = known_subject()
    [whole] = evaluate([known_subject()], [task])
    with pytest.raises(KeyboardInterrupt):
        list(evaluate([subject], [task], tmp_path / "out", Interrupted(2)))
    assert sequences_read(subject) == 2 * 128
    assert (tmp_path / "out" / PARTIAL).is_dir()
    [result] = evaluate([subject], [task], tmp_path / "out")
    assert sequences_read(subject) == 2 * COUNT
    assert result.rows == whole.rows
    assert not (tmp_path / "out" / PARTIAL).exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b'{"sha256": 1, "values": 2}', None])
def test_a_damaged_block_is_computed_again(
    task: Task, tmp_path: Path, damage: bytes | None
) -> None:
    subject = known_subject()
    [whole] = evaluate([known_subject()], [task])
    with pytest.raises(KeyboardInterrupt):
        list(evaluate([subject], [task], tmp_path / "out", Interrupted(2)))
    block = sorted((tmp_path / "out" / PARTIAL).rglob("*.json"))[0]
    content = block.read_bytes()
    number = max(range(len(content)), key=lambda i: content[i : i + 1].isdigit())
    changed = (
        content[:number] + b"%d" % (9 - int(content[number : number + 1])) + content[number + 1 :]
    )
    block.write_bytes(changed if damage is None else damage)
    [result] = evaluate([subject], [task], tmp_path / "out")
    assert sequences_read(subject) == 2 * COUNT + 128
    assert result.rows == whole.rows


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_work_and_agree(task: Task, world: int) -> None:
    model = small_model(vocab_size=6)
    alone = task.run(Subject(model, chain_tokenizer(), "m", "car", batch=16), Progress())
    shared = on_ranks(
        world,
        lambda ranks: task.run(
            Subject(model, chain_tokenizer(), "m", "car", batch=24, ranks=ranks), Progress()
        ),
    )
    for result in shared:
        assert [row.value for row in result.rows] == pytest.approx(
            [row.value for row in alone.rows], rel=1e-10
        )
    truth = [known_subject() for _ in range(world)]
    on_ranks(
        world,
        lambda ranks: task.run(dataclasses.replace(truth[ranks.rank], ranks=ranks), Progress()),
    )
    assert sum(map(sequences_read, truth)) == 2 * COUNT
    assert all(map(sequences_read, truth))


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("calibration:mean=2,bins=4", "ac"),
        ("orders:text=ABBA", "ac"),
        *(("exact:source=hmm-4,patterns=one/spans-50%-long", mode) for mode in ("car", "ac", "ar")),
    ],
)
def test_neither_batch_nor_ranks_change_a_figure(data: Path, text: str, mode: str) -> None:
    options = {"data": str(data), "rows": "documents", "length": 5, "sequences": 70}
    task = parse_task(text, options)
    exact = task.name == "exact"
    model = small_model(vocab_size=8 if exact else 6, max_length=64, n_layer=6)

    def figures(batch: int, **changes: Any) -> list[float]:
        subject = Subject(model, small_tokenizer(), "m", mode, batch, **changes)
        return [row.value for row in task.run(subject, Progress()).rows]

    alone = figures(70)
    assert figures(9) == pytest.approx(alone, rel=1e-10)
    for shared in on_ranks(2, lambda ranks: figures(16, ranks=ranks)):
        assert shared == pytest.approx(alone, rel=1e-10)


def test_modes_are_checked_before_any_work(task: Task) -> None:
    @dataclasses.dataclass(frozen=True)
    class Other(Task):
        name = "other"
        modes = ("ac",)

        def run(self, subject: Subject, progress: object) -> Result:
            raise AssertionError

    subject = known_subject("car")
    with pytest.raises(ValueError, match="task 'other' works in mode ac"):
        list(evaluate([subject], [task, Other()]))
    assert sequences_read(subject) == 0


def test_models_are_named_by_folder_or_explicitly(tmp_path: Path) -> None:
    assert parse_model("ours=runs/a@ac") == ("ours", "runs/a", "ac")
    assert parse_model("runs/a/best") == ("a", "runs/a/best", None)
    assert parse_model("owner/name") == ("name", "owner/name", None)
    odd = tmp_path / "a=b@c"
    odd.mkdir()
    assert parse_model(str(odd)) == ("a=b@c", str(odd), None)
    assert parse_model(f"{odd}@car") == ("a=b@c", str(odd), "car")
    assert parse_model(f"x={odd}@car") == ("x", str(odd), "car")
    with pytest.raises(ValueError, match="'x=' names no model"):
        parse_model("x=")


def test_the_first_mode_that_a_model_has() -> None:
    model = small_model(modes=("ac", "ar"))
    assert choose_mode(model, [], "m") == "ac"
    assert choose_mode(model, ["car", "ar"], "m") == "ar"
    with pytest.raises(
        ValueError, match=r"^m: mode is 'car', but these weights were trained for: ac, ar$"
    ):
        choose_mode(model, ["car"], "m")
    with pytest.raises(ValueError, match="m: mode is 'cra'; allowed for tracformer: car, ac, ar"):
        choose_mode(model, ["cra"], "m")


def test_differences_are_paired(task: Task) -> None:
    truth, other = (
        known_subject(),
        Subject(small_model(vocab_size=6), chain_tokenizer(), "random", "car"),
    )
    first, second = (task.run(subject, Progress()) for subject in (truth, other))
    for row in differences(first, second):
        ours, theirs = (
            result.find("perplexity", contexts=row.setting["contexts"])
            for result in (first, second)
        )
        assert row.value == pytest.approx(theirs.value - ours.value)
        assert row.low is not None
        assert 0 < row.low < row.value < row.high  # nothing beats the truth
        assert row.note == ""
    marginal = task.run(dataclasses.replace(truth, mode="ac"), Progress())
    assert {row.note for row in differences(first, marginal)} == {
        "marginal less exact: not the same kind of number"
    }
    elsewhere = make_task("ratios", {**dataclasses.asdict(task), "seed": 1}).run(truth, Progress())
    with pytest.raises(ValueError, match="were not evaluated on the same data"):
        differences(first, elsewhere)


# ---- the task `speed`


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_speed_is_that_of_the_median_round(mode: str) -> None:
    task = parse_task("speed:length=16,sequences=2,holes=[0.25,0.75],rounds=3")
    result = task.run(Subject(small_model(), None, "model", mode), Progress())
    row = result.find("tokens_per_second")
    assert row.targets == 16
    assert len(result.details["seconds"]) == 3
    assert row.value == pytest.approx(16 / statistics.median(result.details["seconds"]))
    assert "machine" in row.note
    assert result.find("peak_memory_mib").value > 1.0


def test_one_rank_measures_speed_for_all() -> None:
    model = random_mdlm()
    task = Speed(length=8, sequences=1, rounds=1, steps=3)
    first, second = on_ranks(
        2,
        lambda ranks: task.run(Subject(model, None, "model", "diffusion", ranks=ranks), Progress()),
    )
    assert first.rows == second.rows


def test_the_peak_of_memory_is_measured() -> None:
    peak = watch_memory(torch.device("cpu"))
    before = peak()
    with mmap(-1, 2**26) as pages:  # fresh ones, gone at once
        pages.write(bytes(2**26))
    assert peak() >= before + 2**25


def test_wrong_options_of_speed_raise() -> None:
    with pytest.raises(ValueError, match="rounds is 0; it must be at least 1"):
        parse_task("speed:rounds=0")
    with pytest.raises(ValueError, match="unknown strategy 'hole'"):
        parse_task("speed:holes=hole")
    with pytest.raises(ValueError, match="takes at most 16 tokens"):
        Speed().run(Subject(small_model(), None, "model", "car"), Progress())
