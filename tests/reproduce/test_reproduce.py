"""An experiment from data to report at a scale of a few steps: interrupted, resumed, repeated."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.cli.helpers import save_model
from tests.report.test_page import WellFormed
from tests.reproduce.conftest import stopping, work
from tracformer import reproduce as module
from tracformer.cli import main
from tracformer.data import byte_tokenizer
from tracformer.evaluation.result_files import Result, read_results
from tracformer.evaluation.task import Progress
from tracformer.reproduce import Reproduction, steps
from tracformer.reproduce.experiment import read_experiment
from tracformer.reproduce.pilots import count_sizes
from tracformer.reproduce.steps import describe_plan, prepare_data
from tracformer.training.log import read_log
from tracformer.training.loop import NotFiniteError, Trainer, TrainingOutcome
from tracformer.training.start import start
from tracformer.training.train_config import TrainConfig


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every file that must not be written again, with size and time."""
    found = [
        path
        for part in ("data", "models", "results")
        for path in (folder / part).rglob("*")
        if path.is_file()
    ]
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in found
    }


def apart(found: list[Result]) -> tuple[list[Result], list[Result]]:
    """Split results into evaluations and learning curves."""
    curves = [result for result in found if result.task == "training"]
    return [result for result in found if result not in curves], curves


def test_an_interrupted_figure_is_finished_and_not_computed_again(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tiny"
    with monkeypatch.context() as patch:  # after two of six models
        patch.setattr(module, "start", stopping(module.start, 2))
        with pytest.raises(KeyboardInterrupt):
            work(tmp_path, text).run()
    two = files_of(root)
    assert sum(name.endswith("model/model.safetensors") for name in two) == 2
    with monkeypatch.context() as patch:  # between evaluations
        patch.setattr(module, "evaluate", stopping(module.evaluate, 3))
        with pytest.raises(KeyboardInterrupt):
            work(tmp_path, text).run()
    trained = files_of(root)
    # the fourth is not evaluated
    assert sum(name.endswith("model/model.safetensors") for name in trained) == 4
    assert sum(name.startswith("results/") and "-training-" not in name for name in trained) == 3
    assert {name: facts for name, facts in trained.items() if name in two} == two
    assert not (root / "report").exists()

    monkeypatch.setattr(module, "start", stopping(module.start, 2))  # no more is left to train
    assert work(tmp_path, text).run() == 0
    done = files_of(root)
    assert {name: facts for name, facts in done.items() if name in trained} == trained
    results, curves = apart(read_results(root / "results"))
    assert sorted(result.model for result in curves) == sorted(result.model for result in results)
    for curve in curves:  # what the run's log says, at its only validation
        log = read_log(root / "models" / curve.model.replace(" #", "-seed") / "log.jsonl")
        (record,) = [record for record in log if record["kind"] == "eval"]
        contexts = "span:p=0.5,mean=4"
        assert (
            curve.find("perplexity", contexts=contexts, step=3).value
            == record[f"{curve.mode} {contexts}"]
        )
    assert sorted(result.model for result in results) == [
        "bart #0",
        "bert #0",
        "bert-bidir #0",
        "tracformer-ac #0",
        "tracformer-car #0",
        "tracformer-car #1",
    ]
    assert all(len({row.setting["ratio"] for row in result.rows}) == 9 for result in results)

    def refuse(*arguments: Any) -> Iterator[Result]:
        raise AssertionError("computed twice")

    for kind in {type(task.make({"data": "-"})) for task in work(tmp_path, text).experiment.tasks}:
        monkeypatch.setattr(kind, "run", refuse)
    page = (root / "report" / "fig7" / "index.html").read_bytes()
    assert work(tmp_path, text).run() == 0
    assert files_of(root) == done
    # the same results, the same page to the byte
    assert (root / "report" / "fig7" / "index.html").read_bytes() == page

    # results are enough: without the weights nothing is trained again, except what has no result
    shutil.rmtree(root / "models")
    monkeypatch.setattr(module, "start", stopping(module.start, 0))
    assert work(tmp_path, text).run() == 0
    assert (root / "report" / "fig7" / "index.html").read_bytes() == page
    next((root / "results").glob("bert_0-ac-ratios-*.json")).unlink()
    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, text).run()

    shown = WellFormed.read(page.decode())
    assert shown.tags["svg"] == 2  # the joint and the marginal
    assert "; 2 seeds, standard deviation" in page.decode()  # of one model
    assert sorted(path.name for path in (root / "report" / "fig7").glob("*.png")) == [
        "ratios-wikitext2-32-Geometric_1-ratio-joint.png",
        "ratios-wikitext2-32-Geometric_1-ratio-marginal.png",
    ]


def test_another_recipe_in_the_folder_of_a_run_is_refused(tmp_path: Path, text: Path) -> None:
    reproduction = work(tmp_path, text)
    prepare_data(reproduction.experiment.data["wikitext2"], reproduction.root, trained=True)
    run = reproduction.runs()[0]
    folder = reproduction.run_folder(run)
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text('{"steps": 99}')
    with pytest.raises(
        ValueError,
        match=r"tracformer-car-seed0 was trained with other settings .*steps.* differ.*; use another out=FOLDER",
    ):
        reproduction.is_trained(run)


def test_everything_that_decides_the_weights_is_in_the_recipe(tmp_path: Path, text: Path) -> None:
    origin = save_model(tmp_path / "origin", byte_tokenizer(), max_length=32, n_layer=5)

    def recipe(**changes: str) -> dict[str, Any]:
        message = {
            "data.wikitext2": str(text),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        reproduction = Reproduction(
            read_experiment("fig7", "tiny", message), tmp_path, Progress(), say=lambda text: None
        )
        prepare_data(reproduction.experiment.data["wikitext2"], reproduction.root, trained=True)
        return reproduction._recipe(reproduction.runs()[0])

    plain = recipe()
    # as in recipes of runs that know nothing of these keys
    assert {"init", "reading"}.isdisjoint(plain)
    assert recipe(train__data__rows="records") == {
        **plain,
        "reading": {"rows": "records", "cross_documents": True},
    }
    assert recipe(train__data__cross_documents="false") == {
        **plain,
        "reading": {"rows": "packed", "cross_documents": False},
    }
    begun = recipe(train__init=str(origin))
    assert len(begun.pop("init")) == 64  # a hash, not a place
    assert begun == plain


def test_sizes_with_other_training_have_another_file(tmp_path: Path, text: Path) -> None:
    shape = work(tmp_path, text).shape(work(tmp_path, text).runs()[0])
    assert (
        len({count_sizes("a", "car", shape, tokens).file_name for tokens in (1e6, 1e6, 5e6)}) == 2
    )


def test_a_signal_ends_the_reproduction_with_its_code(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped:
        signal = 15

    monkeypatch.setattr(module, "start", lambda config: Stopped())
    assert work(tmp_path, text).run() == 128 + 15


def test_weights_of_an_earlier_step_do_not_count_as_trained(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the last checkpoint, before the weights of an earlier stop are replaced."""
    again = work(tmp_path, text)
    run = again.runs()[0]
    prepare_data(again.experiment.data["wikitext2"], again.root, trained=True)
    module.start(replace(again.config(run), until=2))
    export, last = Trainer._export, again.config(run).steps

    def killed(self: Trainer, name: str, averaged: bool = True) -> None:
        if name == "model" and self.state.step == last:
            raise KeyboardInterrupt
        export(self, name, averaged)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_export", killed)
        with pytest.raises(KeyboardInterrupt):
            again.run()
    assert (again.run_folder(run) / "checkpoints" / f"step-{last:08d}").is_dir()
    assert (again.run_folder(run) / "model" / "config.json").is_file()
    assert not again.is_trained(run)
    assert work(tmp_path, text).run() == 0
    assert again.is_trained(run)


def test_processes_divide_the_work(tmp_path: Path, text: Path) -> None:
    """Each run is trained once, and both processes write a complete report."""
    trained: list[str] = []

    def noted(config: TrainConfig) -> TrainingOutcome:
        trained.append(Path(config.run).name)
        return start(config)

    def process() -> None:
        codes.append(work(tmp_path, text).run())

    codes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "start", noted)
        patch.setattr(steps, "WAIT", 0.01)
        threads = [Thread(target=process) for _ in range(2)]  # each opens locks of its own
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert codes == [0, 0]
    assert sorted(trained) == sorted(run.folder_name for run in work(tmp_path, text).runs())
    assert not list((tmp_path / "tiny" / "results").glob(".partial/*"))


def test_a_model_is_evaluated_as_soon_as_it_is_trained(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "start", stopping(module.start, 1))
    with pytest.raises(KeyboardInterrupt):
        work(tmp_path, text).run()
    results, curves = apart(read_results(tmp_path / "tiny" / "results"))
    assert (
        [result.model for result in results]
        == [result.model for result in curves]
        == ["tracformer-car #0"]
    )
    (curve,) = curves
    assert curve.details["tokens"] == {"3": 3 * 4 * 32}
    assert curve.details["cpu_seconds"]["3"] > 0


def test_a_run_that_fails_does_not_stop_the_others(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(config: TrainConfig) -> TrainingOutcome:
        if "bart" in config.run:
            raise NotFiniteError("the loss of step 1 is not finite")
        return start(config)

    monkeypatch.setattr(module, "start", fails)
    with pytest.raises(NotFiniteError):
        work(tmp_path, text).run()
    results, _ = apart(read_results(tmp_path / "tiny" / "results"))
    assert len(results) == 5
    assert "bart #0" not in {result.model for result in results}


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "reproduce",
        "fig5",
        "scale=paper",
        f"out={tmp_path / 'out'}",
        f"data.wikitext103={text}",
        "--dry-run",
    ]
    assert main(words) == 0
    message = capsys.readouterr().out
    assert (
        "train     tracformer-car #0 (tracformer, car): 30000 steps of 256 x 1024, 7.86B tokens"
        in message
    )
    assert (
        "evaluate  bert-bidir #0 (ac): ratios data=wikitext103, length=1024, sequences=0, mean=50"
        in message
    )
    assert "to train: 39.3B tokens" in message  # five models
    assert not (tmp_path / "out").exists()
    assert main([*words, "--json"]) == 0
    assert "\n".join(json.loads(capsys.readouterr().out)["plan"]) + "\n" == message


def test_a_dry_run_reports_missing_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "fig5", "scale=mini", f"out={tmp_path / 'out'}", "--dry-run"]
    for word in ("data=nowhere", "data.wikitext=nowhere"):
        assert main([*words, word]) == 2
        assert "data set 'wikitext': nowhere does not exist" in capsys.readouterr().err
    assert main(words) == 0  # what would be fetched is not looked for
    (tmp_path / "bad.yaml").write_text("title: [")
    assert main(["reproduce", str(tmp_path / "bad.yaml"), "--dry-run"]) == 2
    assert "bad.yaml is not YAML at line 1" in capsys.readouterr().err


def test_sizes_at_the_paper_scale_need_no_weights(tmp_path: Path) -> None:
    """Table 7, to the report: counted parameters beside the paper's."""
    experiment = read_experiment("table7", "paper")
    assert Reproduction(experiment, tmp_path, Progress(), say=lambda text: None).run() == 0
    counted = {
        r.family: r.find("parameters").value for r in read_results(tmp_path / "paper" / "results")
    }
    for family, millions in {"tracformer": 109, "bert": 149, "bert-bidir": 170}.items():
        assert counted[family] / 1e6 == pytest.approx(millions, abs=0.7)
    page = (tmp_path / "paper" / "report" / "table7" / "index.html").read_text()
    assert "<td class='paper'>138,000,000<small>Table 7</small></td>" in page


def test_sizes_count_the_chosen_vocabulary(tmp_path: Path) -> None:
    for vocabulary in (4096, 8192):
        experiment = read_experiment(
            "table7", "mini", {"tokenizer": f"bpe:{vocabulary}", "only": "tracformer-car"}
        )
        out = tmp_path / str(vocabulary)
        assert Reproduction(experiment, out, Progress(), say=lambda text: None).run() == 0
        (result,) = read_results(out / "mini" / "results")
        width = result.manifest["model"]["config"]["d_model"]
        assert (
            result.find("parameters").value - result.find("parameters_without_embeddings").value
            == (vocabulary + 1) * width
        )


def test_a_users_weights_instead_of_training(tmp_path: Path, text: Path) -> None:
    folder = save_model(tmp_path / "mine", byte_tokenizer(), max_length=32, n_layer=5)
    changes = {"models.tracformer-web": str(folder), "data.wikitext2": str(text)}
    assert (
        Reproduction(
            read_experiment("samples", "tiny", changes), tmp_path, Progress(), say=lambda text: None
        ).run()
        == 0
    )
    assert not (tmp_path / "tiny" / "models").exists()
    page = (tmp_path / "tiny" / "report" / "samples" / "index.html").read_text()
    shown = WellFormed.read(page)
    assert shown.tags["h3"] == 3  # unconditional, and two kinds of holes
    assert shown.tags["mark"] >= 2 * 2 * 3  # of two sequences the original and the fill


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "{task: ratioz, models: [bart]}",
            "ratioz.*did you mean 'ratios'\\?",
        ),
        (
            "{task: ratios, models: [bart], options: {meen: 3}}",
            "meen.*did you mean '.*mean'\\?",
        ),
        (
            "{task: orders, models: [bart], options: {data: wikitext2}}",
            "needs mode ac, but bart is evaluated in mode 'car'",
        ),
        (
            "{task: ratios, models: [bart], mode: ac, options: {data: wikitext2, length: 8}}",
            "in mode 'ac', but it is trained for: car",
        ),
    ],
)
def test_a_wrong_task_is_reported_before_any_training(
    task: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(f"title: x\ntasks: [{task}]")
    monkeypatch.setattr(module, "start", stopping(module.start, 0))
    reproduction = Reproduction(
        read_experiment(str(tmp_path / "mine.yaml"), "tiny"), tmp_path, Progress()
    )
    with pytest.raises(ValueError, match=message):
        reproduction.run()
    with pytest.raises(ValueError, match=message):
        list(describe_plan(reproduction))


@pytest.mark.soak
def test_two_processes(tmp_path: Path, text: Path) -> None:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tracformer",
    ]
    words = [
        "reproduce",
        "fig7",
        "scale=tiny",
        f"out={tmp_path}",
        f"data.wikitext2={text}",
        "device=cpu",
    ]
    done = subprocess.run(
        [*launcher, *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    evaluated, curves = apart(read_results(tmp_path / "tiny" / "results"))
    assert {result.manifest["processes"] for result in evaluated} == {2}
    assert len(curves) == 6  # one per run
    assert done.stdout.count("report: ") == 1


@pytest.mark.soak
def test_everything_at_once(tmp_path: Path, text: Path) -> None:
    """All experiments combined: each task runs once per model, and the report has one page."""
    changes = {f"data.{name}": str(text) for name in read_experiment("everything", "tiny").data}
    reproduction = Reproduction(
        read_experiment("everything", "tiny", changes), tmp_path, Progress(), say=lambda text: None
    )
    assert reproduction.run() == 0
    results, curves = apart(read_results(tmp_path / "tiny" / "results"))
    assert len(results) == len(list(reproduction.evaluations()))
    assert len(curves) == len(reproduction.runs())
    report = tmp_path / "tiny" / "report" / "everything"
    # one page, not one of each
    assert {"fig5", "table4", "fim"} & {path.name for path in report.parent.iterdir()} == set()
    assert {f"ratios-wikitext2-32-Geometric_{mean}-perplexity.csv" for mean in (1, 2)} <= {
        path.name for path in report.iterdir()
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig55"], "experiment is 'fig55'; available: claims, "),
        (["fig5", "scale=huge"], "scale is 'huge'; available: mini, paper, study, tiny"),
        (
            ["fig5", "data.wikitxt=x"],
            "unknown option 'data.wikitxt'; did you mean 'data.wikitext'?",
        ),
        (
            ["fig5", "only=bart,gpt2"],
            "only has 'gpt2'; the experiment's models are: tracformer-car, bart",
        ),
        (["fig5", "seeds=a"], "model tracformer-car: seeds is 'a'; it must be an integer"),
        (
            ["fig5", "values.windows=3"],
            "unknown option 'values.windows'; did you mean 'values.windows_",
        ),
        (["fig5", "batch=0"], "batch is '0'"),
        (["fig5", "fig6"], "several experiments given: fig5, fig6"),
        ([], "no experiment given"),
        (["fig5", "only="], "only has ''; the experiment's models are: tracformer-car"),
        (
            ["fig5", "train.seed=7"],
            "an experiment does not take train.seed; use seeds=",
        ),
        (["fig5", "train.run=x"], "an experiment does not take train.run; use out="),
        (["fig5", "train.until=1"], "an experiment does not take train.until"),
        (
            ["fig5", "train.data.source=x"],
            "takes train.data.rows and train.data.cross_documents; use data.NAME= to choose the "
            "data",
        ),
        (
            ["fig5", "values.windows_long=-5", "--dry-run"],
            "sequences is -5; it must be at least 0",
        ),
        (
            ["fig5", "values.long=abc", "--dry-run"],
            "task 'ratios': length is 'abc'; it must be an integer",
        ),
        (
            ["fig5", "values.long=512", "--dry-run"],
            "length is 512; tracformer-car takes at most 256 tokens",
        ),
        (
            ["fig5", "models.bart=/nonexistent", "--dry-run"],
            "/nonexistent does not exist; give a model's folder",
        ),
    ],
)
def test_mistakes_are_reported(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words]) == 2
    assert message in capsys.readouterr().err
