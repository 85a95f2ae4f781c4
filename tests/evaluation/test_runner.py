"""Running models on tasks: finished results are reused, interrupted tasks continue, ranks agree."""

import dataclasses
import statistics
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tracformer.evaluation import Result, Subject, Task, make_task
from tracformer.evaluation.runner import PARTIAL, choose_mode, evaluate, parse_model
from tracformer.evaluation.speed import Speed, watch_memory
from tracformer.evaluation.task import Progress, parse_task
from tracformer.report import differences

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
