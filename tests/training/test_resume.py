"""What a run goes on with, and what it refuses to go on with."""

import json
import os
import random
from pathlib import Path

import pytest

from tests.training.helpers import newest_state, small, weights_of
from tracformer.training import loop
from tracformer.training.log import read_log
from tracformer.training.start import start
from tracformer.training.train_config import TrainConfig, load_config


def config(data: Path | str, run: Path, *words: str) -> TrainConfig:
    return load_config([f"data={data}", f"run={run}", "data.tokenizer=byte", *small(*words)])


def random_text(path: Path, seed: int = 0, size: int = 3000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(random.Random(seed).choices("abcd ", k=size)))
    return path


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [
        (record["step"], record["car empty"])
        for record in read_log(run / "log.jsonl")
        if record["kind"] == "eval"
    ]


def test_other_data_of_the_same_name_and_size_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = (random_text(tmp_path / f"fold{i}" / "train.txt", seed=i) for i in (1, 2))
    start(config(first, run, "steps=2"))
    with pytest.raises(
        ValueError, match=r"was prepared from other data than .*fold2/train\.txt; use another run"
    ):
        start(config(second, run, "steps=4"))
    assert start(config(first, run, "steps=4")).finished


def test_a_run_whose_data_were_prepared_without_hashes_goes_on(tmp_path: Path) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    start(config(data, run, "steps=4", "until=2"))
    manifest = json.loads((run / "data" / "manifest.json").read_text())
    del manifest["contents"]
    (run / "data" / "manifest.json").write_text(json.dumps(manifest))
    assert start(config(data, run, "steps=4")).finished


def test_a_folder_that_holds_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_text(tmp_path / "my.txt")
    monkeypatch.chdir(tmp_path)
    for data, run in ((".", "runs/run"), ("**/*.[tj]*", "runs/glob")):
        start(config(data, Path(run), "steps=4", "until=2"))
        assert start(config(data, Path(run), "steps=4")).finished


def test_a_name_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = random_text(tmp_path / os.fsdecode(b"caf\xe9.txt"))
    for words in (["until=1"], []):
        start(config(data, tmp_path / "run", "steps=2", *words))
    assert "caf\\udce9.txt" in capsys.readouterr().out


def test_damaged_checkpoints_alone_are_no_new_start(tmp_path: Path) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    start(config(data, run, "steps=4", "save_every=2"))
    for path in (run / "checkpoints").glob("*/weights-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError,
        match=r"no checkpoint in .* is whole, .* use another run=FOLDER .*, or remove .*checkpoints",
    ):
        start(config(data, run, "steps=6", "save_every=2"))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_failing_validation_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, words = (
        random_text(tmp_path / "my.txt"),
        ("steps=6", "eval_every=2", "save_every=2", "objective=car", "eval_contexts=empty"),
    )
    start(config(data, tmp_path / "whole", *words))

    def failing(*_: object) -> float:
        raise MemoryError

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "conditional_perplexity", failing)
        with pytest.raises(MemoryError):
            start(config(data, run, *words))
    assert newest_state(run)["step"] == 2
    assert start(config(data, run, *words)).finished  # validates step 2 first
    assert weights_of(run) == weights_of(tmp_path / "whole")
    assert evaluations(run) == evaluations(tmp_path / "whole")


def test_a_validation_cut_short_is_repeated_and_told_once(tmp_path: Path) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    words = ("steps=6", "eval_every=2", "save_every=2", "objective=car", "eval_contexts=empty")
    start(config(data, run, *words, "until=2"))
    [first] = evaluations(run)
    (run / "validation.json").unlink()
    start(config(data, run, *words, "until=4"))
    assert evaluations(run)[0] == first
    assert [step for step, _ in evaluations(run)] == [2, 4]


def test_the_best_is_remembered_and_validated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    words = ("steps=6", "eval_every=2", "save_every=2", "objective=car", "eval_contexts=empty")
    perplexities = iter([5.0, 3.0, 4.0, 2.0])
    monkeypatch.setattr(loop, "conditional_perplexity", lambda *_: next(perplexities))
    start(config(data, run, *words, "until=3"))  # steps 2 and 3
    best = (run / "best" / "model.safetensors").read_bytes()
    start(config(data, run, *words, "until=4"))
    assert (run / "best" / "model.safetensors").read_bytes() == best
    start(config(data, run, *words, "until=4"))  # nothing to do
    start(config(data, run, *words))
    assert evaluations(run) == [(2, 5.0), (3, 3.0), (4, 4.0), (6, 2.0)]
    assert (run / "best" / "model.safetensors").read_bytes() == weights_of(run)


@pytest.mark.parametrize(
    "word",
    ["seed=7", "batch=2", "contexts=empty", "optimizer.lr=0.02", "ema=0.9", "data.rows=records"],
)
def test_another_recipe_is_refused_unless_asked_for(tmp_path: Path, word: str) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    start(config(data, run, "steps=4", "until=2"))
    told = (run / "train.json").read_text()
    key, value = word.split("=")
    with pytest.raises(
        ValueError,
        match=rf"is at step 2 with another recipe: {key} was .* and is now .*{value[:3]}.*changes=take",
    ):
        start(config(data, run, "steps=4", word))
    assert (run / "train.json").read_text() == told
    assert start(config(data, run, "steps=4", word, "changes=take")).finished
    earlier = newest_state(run)["earlier"]
    assert [(each["until"], key in each) for each in earlier] == [(2, True)]


def test_a_finished_run_is_not_that_of_another_seed(tmp_path: Path) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    start(config(data, run, "steps=2"))
    with pytest.raises(ValueError, match="seed was 0 and is now 1"):
        start(config(data, run, "steps=2", "seed=1"))
    assert start(
        config(data, run, "steps=3", "precision=float32", "micro_batch=1", "keep=3")
    ).finished
