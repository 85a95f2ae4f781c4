"""Learning rates: tried for every system alike, the best one taken, and the trial goes on as the run."""

import json
import math
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.reproductions import stopping
from tracformer.evaluation import reproduce as module
from tracformer.evaluation.bootstrap import perplexity_of
from tracformer.evaluation.experiment import read_experiment
from tracformer.evaluation.pilots import Pilots, fly, outcome_file, with_rate
from tracformer.evaluation.plan import plan
from tracformer.evaluation.reproduce import Reproduction
from tracformer.evaluation.results import Result, read_results
from tracformer.evaluation.tasks import Silent
from tracformer.training.config import OptimizerConfig, TrainConfig
from tracformer.training.distributed import join_ranks
from tracformer.training.log import read_log
from tracformer.training.loop import Outcome, Trainer
from tracformer.training.start import start


def scale_with_pilots(folder: Path) -> str:
    tiny = (resources.files("tracformer.evaluation") / "experiments" / "scales" / "tiny.yaml").read_text()
    path = folder / "piloted.yaml"
    path.write_text(tiny + "\npilots: {rates: [1.0e-9, 1.0e-2], steps: 3}\n")
    return str(path)


def test_learning_rates_come_from_pilots(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted between pilots, gone on with; the rate that learns is taken, recorded and told."""
    changes = {"data.wikitext2": str(text), "only": "tracformer-ac"}
    experiment = read_experiment("fig7", scale_with_pilots(tmp_path), changes)
    told: list[str] = []

    def again() -> Reproduction:
        return Reproduction(experiment, tmp_path, Silent(), say=told.append)

    assert any("rates 1e-09, 0.01, 3 steps each" in line for line in plan(again()))
    with monkeypatch.context() as patch:
        patch.setattr(module, "start", stopping(module.start, 1))
        with pytest.raises(KeyboardInterrupt):
            again().run()
    root = tmp_path / "piloted"
    assert not (root / "results").exists()
    assert again().run() == 0
    outcome = next(result for result in read_results(root / "results") if result.task == "pilots")
    assert (outcome.model, outcome.details["chosen"]) == ("tracformer-ac", 1e-2)
    assert outcome.find("perplexity", lr=1e-2).value < outcome.find("perplexity", lr=1e-9).value
    assert not list((root / "pilots").iterdir())  # one has become the run, the others are of no use
    log = read_log(root / "models" / "tracformer-ac-seed0" / "log.jsonl")
    assert next(record["step"] for record in log if record["kind"] == "eval") == 3  # where the pilot was left off
    (run,) = again().runs()
    start(replace(again().config(run), run=str(tmp_path / "straight")))
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (again().run_folder(run), tmp_path / "straight")]
    assert weights[0] == weights[1]  # as if it had never been left off
    recipe = json.loads((root / "models" / "tracformer-ac-seed0" / "recipe.json").read_text())
    assert (recipe["optimizer"]["lr"], recipe["optimizer"]["final_lr"]) == (1e-2, pytest.approx(1e-3))
    assert any("at 0.01; 0.01 is taken" in line for line in told)
    assert any("tracformer-ac: rate 0.01" in line for line in plan(again()))
    assert "Learning rates tried" in (root / "report" / "fig7" / "index.html").read_text()
    monkeypatch.setattr(module, "start", stopping(module.start, 0))
    assert again().run() == 0


def test_a_rate_that_diverges_loses_and_nothing_more(tmp_path: Path, text: Path) -> None:
    changes = {"data.wikitext2": str(text), "only": "tracformer-ac"}
    experiment = read_experiment("fig7", scale_with_pilots(tmp_path), changes)
    again = Reproduction(replace(experiment, pilots=Pilots((1e30, 1e-2), 3)), tmp_path, Silent(), say=lambda line: None)
    assert again.run() == 0
    outcome = next(result for result in read_results(again.root / "results") if result.task == "pilots")
    assert (outcome.details["chosen"], outcome.find("perplexity", lr=1e30).value) == (1e-2, perplexity_of(math.inf))
    hopeless = replace(experiment, pilots=Pilots((1e30, 1e29), 3))
    with pytest.raises(ValueError, match="diverged at every learning rate"):
        Reproduction(hopeless, tmp_path, Silent(), say=lambda line: None).run()


def test_a_pilots_rate_is_muons_too_unless_it_has_its_own() -> None:
    config = TrainConfig(optimizer=OptimizerConfig(name="muon", lr=1e-3, final_lr=1e-4))
    fast = with_rate(config, 4e-3).optimizer
    assert (fast.lr, fast.final_lr, fast.rate_of_matrices) == (4e-3, pytest.approx(4e-4), 4e-3)
    named = replace(config, optimizer=replace(config.optimizer, matrix_lr=2e-3))
    assert with_rate(named, 4e-3).optimizer.rate_of_matrices == 2e-3


def test_pilots_of_another_schedule_are_others() -> None:
    recipe = {"seed": 0, "steps": 1000, "optimizer": {"lr": 1.0, "final_lr": 0.1, "warmup": 5}}
    config = TrainConfig()

    def file(change: dict[str, Any], config: TrainConfig = config) -> str:
        return outcome_file("m", "car", config, {**recipe, **change}, Pilots((1.0,), 3))

    assert file({}) == file({"seed": 1}) != file({"steps": 5000})
    assert file({}) != file({}, replace(config, eval_contexts=("empty",)))
    twice, lower = ({"lr": lr, "final_lr": final, "warmup": 5} for lr, final in ((2.0, 0.2), (1.0, 0.01)))
    assert file({}) == file({"optimizer": twice}) != file({"optimizer": lower})


def test_a_pilot_of_another_seed_does_not_become_the_run(tmp_path: Path, text: Path) -> None:
    """Stopped between the pilots of seed 0 and its run; then seed 1 is asked for."""

    def piloted(seed: str) -> Reproduction:
        changes = {"data.wikitext2": str(text), "only": "tracformer-ac", "seeds": seed}
        return Reproduction(read_experiment("fig7", scale_with_pilots(tmp_path), changes), tmp_path, Silent(), say=lambda line: None)

    first, second = piloted("0"), piloted("1")
    with join_ranks("cpu") as ranks:
        first._prepare()
        assert first._fly(ranks) is None
    assert second.run() == 0
    (run,) = second.runs()
    trained = json.loads((second.run_folder(run) / "train.json").read_text())
    assert (trained["seed"], trained["optimizer"]["lr"]) == (1, 1e-2)  # the rate is that of the system
    start(replace(second.config(run), run=str(tmp_path / "straight")))
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (second.run_folder(run), tmp_path / "straight")]
    assert weights[0] == weights[1]
    assert first.run() == 0
    assert not list((first.root / "pilots").iterdir())


def test_rates_are_judged_in_the_mode_that_is_asked(tmp_path: Path) -> None:
    """A run is validated in all its modes; a bound and a marginal have no mean."""
    losses = {1e-3: {"diffusion span": 100.0, "ac span": 1.0}, 1e-2: {"diffusion span": 50.0, "ac span": 9.0}}

    def train(config: TrainConfig) -> Outcome:
        Path(config.run).mkdir(parents=True)
        record = {"kind": "eval", "step": 3, "time": 0.0, **losses[config.optimizer.lr]}
        (Path(config.run) / "log.jsonl").write_text(json.dumps(record) + "\n")
        return Outcome(config.run, 3, finished=True)

    config = TrainConfig(model={"family": "mdlm", "preset": "tiny"})
    recipe = {"seed": 0, "optimizer": {"lr": 1e-3, "final_lr": 1e-4}}
    outcome = fly("m", "diffusion", config, recipe, Pilots((1e-3, 1e-2), 3), tmp_path, train)
    assert isinstance(outcome, Result)
    assert [(row.kind, row.value) for row in outcome.rows] == [("bound", pytest.approx(100.0)), ("bound", pytest.approx(50.0))]
    assert (outcome.details["chosen"], outcome.details["seed"]) == (1e-2, 0)
    with pytest.raises(ValueError, match="was never validated in mode car"):
        fly("n", "car", config, recipe, Pilots((1e-3,), 3), tmp_path, train)


def test_weights_of_an_earlier_step_are_not_those_of_the_run(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the last checkpoint and the model's folder, in which a pilot's weights lie."""
    changes = {"data.wikitext2": str(text), "only": "tracformer-ac"}
    experiment = replace(read_experiment("fig7", scale_with_pilots(tmp_path), changes), pilots=Pilots((1e-2,), 2))
    again = Reproduction(experiment, tmp_path, Silent(), say=lambda line: None)
    (run,) = again.runs()
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
    assert again.run() == 0
    assert again.is_trained(run)
