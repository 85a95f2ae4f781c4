"""Starting, resuming and refusing runs."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toys import small_model
from tests.training.helpers import SMALL, losses, newest_state, small, weights_of
from tracformer import Batch, Tracformer
from tracformer.data import PreparedData, char_tokenizer
from tracformer.data.prepare import prepare
from tracformer.training import loop
from tracformer.training.log import RunLog, plot_runs, read_log
from tracformer.training.optimizer import Optimizer
from tracformer.training.start import default_run, grown_weights, start
from tracformer.training.train_config import TrainConfig, load_config


def test_a_grown_vocabulary_keeps_its_predictions() -> None:
    old = small_model(vocab_size=4)
    new = small_model(vocab_size=6)
    new.load_state_dict(grown_weights(old, [0, 1, -1, 2, -1, 3]))  # ids 2 and 4 are new
    tokens, context = torch.tensor([[1, 2, 3, 0]]), torch.tensor([[True, False, True, False]])
    moved = torch.tensor([0, 1, 3, 5])
    found, expected = new(Batch(moved[tokens], context)), old(Batch(tokens, context))
    torch.testing.assert_close(found[..., moved], expected, atol=1e-12, rtol=0)


def test_fine_tuning_with_a_grown_alphabet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, more = tmp_path / "run", tmp_path / "more"
    for letters, name in (("ab", "first"), ("abc", "second")):
        (tmp_path / f"{name}.txt").write_text("".join(random.Random(0).choices(letters, k=2000)))
    words = [*SMALL, "steps=2", "data.tokenizer=char"]
    start(load_config([f"data={tmp_path / 'first.txt'}", f"run={run}", *words]))
    start(
        load_config(
            [f"data={tmp_path / 'second.txt'}", f"run={more}", f"init={run / 'model'}", *words]
        )
    )
    # two letters and end of text; three
    assert "vocabulary grown from 3 to 4 tokens" in capsys.readouterr().out
    old, new = (Tracformer.from_pretrained(folder / "model") for folder in (run, more))
    distance = (old.embedding.weight[[0, 1, 2, 3]] - new.embedding.weight[[0, 1, 3, 4]]).abs().max()
    # a, b, end of text and mask found their rows; two steps moved them a little
    assert distance < 0.05


def test_fine_tuning_loads_a_run_folder_and_keeps_the_model_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.txt").write_text("some text " * 300)
    run = tmp_path / "run"
    start(load_config([f"data={tmp_path / 'my.txt'}", f"run={run}", *SMALL, "steps=1"]))
    words = [
        f"data={tmp_path / 'my.txt'}",
        f"run={tmp_path / 'more'}",
        "steps=1",
        "batch=2",
        "eval_sequences=1",
    ]
    for changes, message in (
        (["model.d_model=64"], "model.d_model is 64, but init=.* fixes it at 32; leave it out"),
        (["model.family=bart"], "model.family is 'bart', but init=.* fixes it at 'tracformer'"),
        (
            ["model.backbone=dit", "model.family=mdlm"],
            "model.family is 'mdlm', but init=.* fixes it at 'tracformer'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            start(load_config([*words, f"init={run}", *changes]))
    # a run's folder, as `tracformer.load` takes it
    assert start(load_config([*words, f"init={run}"])).finished
    assert f"starting from {run / 'best'}" in capsys.readouterr().out
    words[1] = f"run={tmp_path / 'modes'}"
    assert start(
        load_config([*words, f"init={run}", "objective=car", "model.modes=[car]"])
    ).finished


def test_fine_tuning_another_system_uses_its_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.txt").write_text("some text " * 300)
    small = [
        "model.max_length=32",
        "model.n_layer=1",
        "model.n_head=2",
        "model.d_model=16",
        "model.d_condition=8",
    ]
    words = [
        f"data={tmp_path / 'my.txt'}",
        "data.tokenizer=byte",
        "steps=1",
        "batch=2",
        "eval_sequences=1",
    ]
    start(load_config([*words, f"run={tmp_path / 'mdlm'}", "model.family=mdlm", *small]))
    capsys.readouterr()
    assert start(
        load_config([*words, f"run={tmp_path / 'more'}", f"init={tmp_path / 'mdlm'}"])
    ).finished
    assert "model: mdlm" in (message := capsys.readouterr().out)
    assert "objective denoise" in message


def test_run_folders_are_named_after_the_data(tmp_path: Path) -> None:
    (tmp_path / "my[1].txt").write_text("no glob: it is there")
    for source, run in (
        ("a/my.txt", "runs/my"),
        ("books.jsonl.gz", "runs/books"),
        ("hf:owner/name", "runs/name"),
        ("prepared/", "runs/prepared"),
        ("books/*.txt", "runs/books"),
        ("all/book?/**/[ab].txt", "runs/all"),
        ("*.txt", "runs/run"),
        (".", "runs/run"),
        (str(tmp_path / "my[1].txt"), "runs/my[1]"),
        ("caf\udce9.txt", "runs/caf"),  # a name that is not UTF-8
    ):
        assert default_run(load_config([f"data={source}"])) == run


def test_a_warm_up_longer_than_the_run_is_shortened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.txt").write_text("some text " * 300)
    words = [
        f"data={tmp_path / 'my.txt'}",
        f"run={tmp_path / 'run'}",
        *small("steps=10", "optimizer.warmup=10", "until=1"),
    ]
    start(load_config(words))
    assert (
        "optimizer.warmup is 10, but the run has 10 steps: using 1 warm-up steps"
        in capsys.readouterr().out
    )


def test_ranges_and_a_record_of_one_token(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("<|endoftext|>".join(["some text to read", "x"] * 20))
    words = [
        f"data={tmp_path / 'my.txt'}",
        f"run={tmp_path / 'run'}",
        *small("steps=3", "eval_contexts=['[0.1,0.2]&[0.6,0.7]']"),
    ]
    assert start(
        load_config(
            [*words, "data.rows=records", "contexts=[0.1,0.2]&[0.6,0.7]", "data.tokenizer=byte"]
        )
    ).finished


def test_an_aligned_tokenizer_reads_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.fasta").write_text(
        "".join(f">r{i}\nMK-V.LA{'ACDEF'[i % 5]}\n" for i in range(80))
    )
    words = [
        f"data={tmp_path / 'my.fasta'}",
        f"run={tmp_path / 'run'}",
        "data.rows=records",
        "data.tokenizer=protein-aligned",
    ]
    start(load_config([*words, *small("steps=2", "until=1")]))
    data = PreparedData.open(tmp_path / "run" / "data")
    assert data.tokenizer.decode(data.split("train").document(0)[:-1]).startswith("MK-V-LA")
    assert "tokenizer: protein-aligned, 27 tokens" in capsys.readouterr().out
    assert start(load_config([*words, *small("steps=2")])).finished


def test_defaults_are_valid() -> None:
    assert TrainConfig().steps == 0


def test_words_override_the_preset_chosen_by_the_data(tmp_path: Path) -> None:
    """A word that repeats a default overrides the preset too."""
    (tmp_path / "a.txt").write_text("some text " * 300)
    words = [
        f"data={tmp_path / 'a.txt'}",
        f"run={tmp_path / 'run'}",
        *small("steps=1", "optimizer.lr=6e-4"),
    ]
    start(load_config(words), lambda name: load_config(words, name))
    assert json.loads((tmp_path / "run" / "train.json").read_text())["optimizer"]["lr"] == 6e-4


def test_a_file_to_validate_on(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("some text " * 300)
    (tmp_path / "held.txt").write_text("other text " * 10)
    held = f"data.validation={tmp_path / 'held.txt'}"
    words = [f"data={tmp_path / 'my.txt'}", f"run={tmp_path / 'run'}", *SMALL, "steps=1"]
    start(load_config([*words, held]))
    data = PreparedData.open(tmp_path / "run" / "data")
    assert data.tokenizer.decode(data.split("validation").document(0)[:-1]) == "other text " * 10
    assert data.manifest.splits["train"].bytes == 3000
    assert any(record["kind"] == "eval" for record in read_log(tmp_path / "run" / "log.jsonl"))
    with pytest.raises(
        ValueError, match=r"was prepared from other data than .*my\.txt; use another run"
    ):
        start(load_config(words))
    with pytest.raises(
        ValueError,
        match=r"data\.validation is .*held\.txt', but the splits of .* were made when it was prepared",
    ):
        start(load_config([f"data={tmp_path / 'run' / 'data'}", *words[1:], held]))


def test_a_fraction_to_validate_on(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("some text " * 300)
    words = [f"data={tmp_path / 'my.txt'}", f"run={tmp_path / 'run'}", *SMALL, "steps=1"]
    start(load_config([*words, "data.validation=0.25"]))
    assert PreparedData.open(tmp_path / "run" / "data").manifest.splits[
        "validation"
    ].bytes == pytest.approx(750, abs=20)
    with pytest.raises(
        ValueError, match=r"holds out 0\.25 of the data, but data\.validation is now 0\.05"
    ):
        start(load_config(words))


def test_a_run_cannot_change_model_tokenizer_or_become_shorter(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("some text " * 300)
    prepare(tmp_path / "data", tmp_path / "my.txt", "byte", quiet=True)
    run = tmp_path / "run"
    words = [f"data={tmp_path / 'data'}", f"run={run}", *SMALL]
    start(load_config([*words, "objective=car", "steps=3", f"data.tokenizer={tmp_path / 'data'}"]))
    char_tokenizer("some text").save(tmp_path / "other")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for changes, message in (
        (["steps=3", "objective=ac"], r"modes was \['car'\] and is now \('ac',\)"),
        (["steps=2", "objective=car"], "steps is 2, but .* has already done 3 steps"),
        (
            ["steps=3", "data.tokenizer=char"],
            "was prepared with another tokenizer .kind byte, 257 tokens",
        ),
        (["steps=3", "data.tokenizer=dna"], "was prepared with another"),
        (["steps=3", "data.tokenizer=gpt2"], "was prepared with another"),
        (["steps=3", f"data.tokenizer={tmp_path / 'other'}"], "was prepared with another"),
    ):
        with pytest.raises(ValueError, match=message):
            start(load_config([*words, *changes]))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_curves_of_runs_of_one_name_and_of_changing_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    runs = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for run in runs:
        log = RunLog(run, 0)
        log.write("train", 1, loss=2.0, lr=0.1, gradient_norm=1.0, tokens_per_second=9.0)
        log.write("eval", 1, **{"car middle": 7.0})
        log.write("eval", 2, **{"car uniform": 6.0})
        log.close()
    drawn: list[str] = []
    plot = Axes.plot

    def noted(self: Axes, *values: object, **options: Any) -> object:
        drawn.append(options["label"])
        return plot(self, *values, **options)

    monkeypatch.setattr(Axes, "plot", noted)
    plot_runs(runs, tmp_path / "curves.png")
    assert drawn == [
        f"{run}{part}" for run in runs for part in ("", ": car middle", ": car uniform")
    ]


def test_muon_resumes_bit_identical_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.txt").write_text("".join(random.Random(0).choices("abcd ", k=3000)))
    prepare(tmp_path / "data", tmp_path / "my.txt", "byte", quiet=True)

    def config(run: str, name: str = "muon") -> TrainConfig:
        words = [
            f"data={tmp_path / 'data'}",
            f"run={tmp_path / run}",
            *SMALL,
            "steps=6",
            "save_every=2",
            f"optimizer.name={name}",
        ]
        return load_config(words)

    start(config("whole"))
    taken = 0
    step = Optimizer.step

    def failing_step(self: Optimizer) -> None:
        nonlocal taken
        taken += 1
        step(self)
        if taken == 4:
            raise MemoryError  # between checkpoints, the weights already changed

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", failing_step)
        with pytest.raises(MemoryError):
            start(config("crashed"))
    assert start(config("crashed")).finished
    assert weights_of(tmp_path / "crashed") == weights_of(tmp_path / "whole")
    assert losses(tmp_path / "crashed") == losses(tmp_path / "whole")
    with pytest.raises(
        ValueError,
        match=r"was trained with optimizer\.name=muon, and adamw cannot continue from its state",
    ):
        start(config("crashed", "adamw"))


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


def test_a_run_whose_data_has_no_hashes_resumes(tmp_path: Path) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    start(config(data, run, "steps=4", "until=2"))
    manifest = json.loads((run / "data" / "manifest.json").read_text())
    del manifest["contents"], manifest["sha256"]
    (run / "data" / "manifest.json").write_text(json.dumps(manifest))
    assert start(config(data, run, "steps=4")).finished


def test_a_data_folder_that_contains_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_run_with_only_damaged_checkpoints_is_not_restarted(tmp_path: Path) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    start(config(data, run, "steps=4", "save_every=2"))
    for path in (run / "checkpoints").glob("*/weights-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError,
        match=r"every checkpoint in .* is damaged, .* use another run=FOLDER .*, or remove .*checkpoints",
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


def test_an_interrupted_validation_is_repeated_and_logged_once(tmp_path: Path) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    words = ("steps=6", "eval_every=2", "save_every=2", "objective=car", "eval_contexts=empty")
    start(config(data, run, *words, "until=2"))
    [first] = evaluations(run)
    (run / "validation.json").unlink()
    start(config(data, run, *words, "until=4"))
    assert evaluations(run)[0] == first
    assert [step for step, _ in evaluations(run)] == [2, 4]


def test_the_best_perplexity_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_another_recipe_is_refused_unless_changes_are_taken(tmp_path: Path, word: str) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    start(config(data, run, "steps=4", "until=2"))
    message = (run / "train.json").read_text()
    key, value = word.split("=")
    with pytest.raises(
        ValueError,
        match=rf"is at step 2 with another recipe: {key} was .* and is now .*{value[:3]}.*changes=take",
    ):
        start(config(data, run, "steps=4", word))
    assert (run / "train.json").read_text() == message
    assert start(config(data, run, "steps=4", word, "changes=take")).finished
    earlier = newest_state(run)["earlier"]
    assert [(each["until"], key in each) for each in earlier] == [(2, True)]


def test_a_finished_run_is_not_reused_for_another_seed(tmp_path: Path) -> None:
    data, run = random_text(tmp_path / "my.txt"), tmp_path / "run"
    start(config(data, run, "steps=2"))
    with pytest.raises(ValueError, match="seed was 0 and is now 1"):
        start(config(data, run, "steps=2", "seed=1"))
    assert start(
        config(data, run, "steps=3", "precision=float32", "micro_batch=1", "keep=3")
    ).finished
