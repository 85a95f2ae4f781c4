"""Learning-rate pilots: short runs at several rates, for each system alike; the best is used."""

import json
import math
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.helpers import stopping
from tracformer import reproduce as module
from tracformer.evaluation.bootstrap import perplexity_of
from tracformer.evaluation.result_files import read_results
from tracformer.evaluation.task import Progress
from tracformer.reproduce import Reproduction
from tracformer.reproduce.experiment import read_experiment
from tracformer.reproduce.pilots import Pilots, SystemPilots, scaled
from tracformer.reproduce.steps import describe_plan
from tracformer.training.loop import TrainingOutcome
from tracformer.training.start import start
from tracformer.training.train_config import OptimizerConfig, TrainConfig


def scale_with_pilots(
    folder: Path, pilots: str = "{rates: [1.0e-6, 3.0], share: 0.7}", also: str = ""
) -> str:
    tiny = (
        resources.files("tracformer.reproduce") / "experiments" / "scales" / "tiny.yaml"
    ).read_text()
    path = folder / "piloted.yaml"
    path.write_text(f"{tiny}{also}\npilots: {pilots}\n")
    return str(path)


def test_learning_rates_come_from_pilots(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between pilots and resumed; the best rate is used, recorded and reported."""
    changes = {"data.wikitext2": str(text), "only": "tracformer-ac"}
    experiment = read_experiment("fig7", scale_with_pilots(tmp_path), changes)
    lines_said: list[str] = []

    def again() -> Reproduction:
        return Reproduction(experiment, tmp_path, Progress(), say=lines_said.append)

    assert any(
        "1e-06, 3 times the planned rates, 2 steps each" in line for line in describe_plan(again())
    )
    with monkeypatch.context() as patch:
        patch.setattr(module, "start", stopping(module.start, 1))
        with pytest.raises(KeyboardInterrupt):
            again().run()
    root = tmp_path / "piloted"
    assert not (root / "results").exists()
    assert again().run() == 0
    outcome = next(result for result in read_results(root / "results") if result.task == "pilots")
    lr = 3.0e-3  # of the plan
    assert (outcome.model, outcome.details["chosen"], outcome.details["lr"]) == (
        "tracformer-ac",
        3.0,
        3 * lr,
    )
    assert (
        outcome.find("perplexity", lr=3 * lr).value < outcome.find("perplexity", lr=1e-6 * lr).value
    )
    assert not list((root / "pilots").iterdir())  # removed once the rate is chosen
    (run,) = again().runs()
    start(replace(again().config(run), run=str(tmp_path / "straight")))
    folders = (again().run_folder(run), tmp_path / "straight")
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]  # the run starts from the beginning at the chosen rate
    recipe = json.loads((root / "models" / "tracformer-ac-seed0" / "recipe.json").read_text())
    rates = recipe["optimizer"]["lr"], recipe["optimizer"]["final_lr"]
    assert rates == (pytest.approx(3 * lr), pytest.approx(0.3 * lr))
    assert any("at 0.009; chosen: 0.009" in line for line in lines_said)
    lines = list(describe_plan(again()))
    assert any(
        "tracformer-ac: 3 times the planned rates was chosen, lr 0.009" in line for line in lines
    )
    assert any(
        line.startswith("  evaluate  tracformer-ac #0") and line.endswith("; done")
        for line in lines
    )
    assert "Learning rates tried" in (root / "report" / "fig7" / "index.html").read_text()
    monkeypatch.setattr(module, "start", stopping(module.start, 0))
    assert again().run() == 0


def test_a_rate_that_diverges_is_not_chosen(tmp_path: Path, text: Path) -> None:
    changes = {"data.wikitext2": str(text), "only": "tracformer-ac"}
    experiment = read_experiment("fig7", scale_with_pilots(tmp_path), changes)
    high = 1e32
    again = Reproduction(
        replace(experiment, pilots=Pilots((high, 3.0), 1.0)),
        tmp_path,
        Progress(),
        say=lambda line: None,
    )
    assert again.run() == 0
    outcome = next(
        result for result in read_results(again.root / "results") if result.task == "pilots"
    )
    diverged = outcome.find("perplexity", lr=3.0e-3 * high).value
    assert (outcome.details["chosen"], diverged) == (3.0, perplexity_of(math.inf))
    hopeless = replace(experiment, pilots=Pilots((high, 2 * high), 1.0))
    with pytest.raises(ValueError, match="diverged at every learning rate"):
        Reproduction(hopeless, tmp_path / "hopeless", Progress(), say=lambda line: None).run()


def test_a_rate_scales_every_optimizer() -> None:
    config = TrainConfig(optimizer=OptimizerConfig(name="muon", lr=1e-3, final_lr=1e-4))
    fast = scaled(config, 4).optimizer
    assert (fast.lr, fast.final_lr, fast.rate_of_matrices) == (4e-3, pytest.approx(4e-4), 4e-3)
    named = replace(config, optimizer=replace(config.optimizer, matrix_lr=2e-3))
    assert scaled(named, 0.5).optimizer.rate_of_matrices == pytest.approx(1e-3)


def test_a_pilot_is_a_complete_run() -> None:
    config = TrainConfig(
        steps=1000,
        eval_contexts=("uniform", "empty"),
        optimizer=OptimizerConfig(schedule="wsd", warmup=10),
    )
    short = Pilots((1.0,), 0.2).config(config, 1.0, Path("p"))
    assert (short.steps, short.eval_every, short.eval_contexts) == (200, 200, ("uniform",))
    assert short.optimizer == config.optimizer  # the same warm-up, and half of the steps to decay


def test_pilots_of_another_recipe_have_another_file() -> None:
    optimizer = {"lr": 1.0, "final_lr": 0.1, "warmup": 5}
    recipe = {"seed": 0, "steps": 1000, "optimizer": optimizer}

    def file(change: dict[str, Any], contexts: str = "uniform") -> str:
        config = TrainConfig(eval_contexts=(contexts, "empty"))
        return SystemPilots(
            "m", "car", config, {**recipe, **change}, Pilots((1.0,), 0.5), Path()
        ).outcome_file

    assert file({}) == file({"seed": 1}) != file({"steps": 5000})
    assert file({}) != file({}, "middle")
    assert file({}) != file({"optimizer": {**optimizer, "lr": 2.0}})


def test_a_model_may_use_the_rate_of_another(tmp_path: Path, text: Path) -> None:
    """The pilots of the other model run although no task needs it."""
    also = """
  longer: {data: wikitext2, mode: ac, pilots: tracformer-ac, train: {<<: *ac, steps: 4}}
  plain: {data: wikitext2, mode: ac, pilots: none, train: *ac}
"""
    scale = scale_with_pilots(tmp_path, also=also)
    (tmp_path / "mine.yaml").write_text(
        "title: x\ntasks: [{task: ratios, models: [longer, plain], options: {data: wikitext2, "
        "length: 8, sequences: 2, mean: 1}}]"
    )
    experiment = read_experiment(str(tmp_path / "mine.yaml"), scale, {"data.wikitext2": str(text)})
    work = Reproduction(experiment, tmp_path, Progress(), say=lambda line: None)
    assert work.run() == 0
    found = read_results(work.root / "results")
    assert {result.model for result in found if result.task == "pilots"} == {"tracformer-ac"}
    rates = {run.name: work.config(run).optimizer.lr for run in work.runs()}
    assert rates == {"longer #0": pytest.approx(9e-3), "plain #0": pytest.approx(3e-3)}
    assert not (work.root / "models" / "tracformer-ac-seed0").exists()
    (tmp_path / "bad").mkdir()
    bad = scale_with_pilots(
        tmp_path / "bad", also="\n  odd: {data: wikitext2, mode: ac, pilots: nothing, train: *ac}\n"
    )
    with pytest.raises(ValueError, match="model odd: pilots is 'nothing'"):
        read_experiment("fig7", bad)


def test_pilots_serve_every_seed(tmp_path: Path, text: Path) -> None:
    """Pilots run with seed 0; a later run with seed 1 uses their rate."""

    def piloted(seed: str) -> Reproduction:
        changes = {"data.wikitext2": str(text), "only": "tracformer-ac", "seeds": seed}
        experiment = read_experiment("fig7", scale_with_pilots(tmp_path), changes)
        return Reproduction(experiment, tmp_path, Progress(), say=lambda line: None)

    assert piloted("0").run() == 0
    second = piloted("1")
    assert second.run() == 0
    (run,) = second.runs()
    trained = json.loads((second.run_folder(run) / "train.json").read_text())
    assert (trained["seed"], trained["optimizer"]["lr"]) == (1, pytest.approx(9e-3))
    assert sum(result.task == "pilots" for result in read_results(second.root / "results")) == 1


def test_rates_are_compared_in_the_mode_of_evaluation(tmp_path: Path) -> None:
    """A run is validated in all its modes; only the mode of evaluation counts."""
    losses = {
        1e-3: {"diffusion uniform": 100.0, "ac uniform": 1.0},
        1e-2: {"diffusion uniform": 50.0, "ac uniform": 9.0},
    }

    def train(config: TrainConfig) -> TrainingOutcome:
        Path(config.run).mkdir(parents=True)
        record = {
            "kind": "eval",
            "step": 3,
            "time": 0.0,
            "cpu_seconds": 1.0,
            **losses[config.optimizer.lr],
        }
        (Path(config.run) / "log.jsonl").write_text(json.dumps(record) + "\n")
        return TrainingOutcome(config.run, 3, finished=True)

    config = TrainConfig(
        model={"family": "mdlm", "preset": "tiny"},
        optimizer=OptimizerConfig(lr=1e-3),
        eval_contexts=("uniform", "empty"),
    )
    recipe = {"seed": 0, "optimizer": {"lr": 1e-3, "final_lr": 1e-4}}
    pilots = SystemPilots("m", "diffusion", config, recipe, Pilots((1.0, 10.0), 0.5), tmp_path)
    assert [pilots.run_pilot(rate, train) for rate in (1.0, 10.0)] == [None, None]
    outcome = pilots.outcome()
    assert [(row.kind, row.value) for row in outcome.rows] == [
        ("bound", pytest.approx(100.0)),
        ("bound", pytest.approx(50.0)),
    ]
    assert (outcome.details["chosen"], outcome.details["seed"]) == (10.0, 0)
    with pytest.raises(ValueError, match="was never validated in mode car"):
        SystemPilots("n", "car", config, recipe, Pilots((1.0,), 0.5), tmp_path).run_pilot(
            1.0, train
        )
