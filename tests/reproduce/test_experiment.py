"""Experiments and scales: complete, the paper's, changed by overrides; their data and pilots."""

import argparse
import dataclasses
import json
import math
import re
import shlex
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.conftest import stopping, work
from tracformer import reproduce as module
from tracformer.cli import find_command
from tracformer.data import HubSource, whole_documents
from tracformer.evaluation.bootstrap import perplexity_of
from tracformer.evaluation.result_files import read_results
from tracformer.evaluation.task import Progress
from tracformer.reproduce import Reproduction
from tracformer.reproduce.experiment import DataSet, experiment_names, read_experiment, scale_names
from tracformer.reproduce.pilots import Pilots, SystemPilots, count_sizes, scaled
from tracformer.reproduce.steps import data_folder, describe_plan, prepare_data, split_sources
from tracformer.training.loop import TrainingOutcome
from tracformer.training.start import start
from tracformer.training.train_config import OptimizerConfig, TrainConfig

PAPERS = {
    "fig1",
    "fig2",
    "fig5",
    "fig6",
    "fig7",
    "samples",
    "claims",
    *(f"table{n}" for n in (1, 2, 3, 4, 7, 8, 9, 11)),
}
OURS = {"fim", "zeroshot", "frequencies", "dense", "everything"}
STUDY = {"stories", "exact-sources", "scaling", "own-model"}  # at a scale of their own
COMMANDS = re.findall(
    r"^tracformer .+$", (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(), re.M
)


def test_the_bundled_experiments_are_the_papers() -> None:
    assert set(experiment_names()) == PAPERS | OURS | STUDY
    assert scale_names() == ["mini", "paper", "study", "tiny"]
    spans = {
        scale: {
            t.options["mean"] for n in ("fig5", "fig7") for t in read_experiment(n, scale).tasks
        }
        for scale in ("paper", "mini")
    }
    assert spans == {"paper": {50, 10, 3}, "mini": {12, 3, 1}}


@pytest.mark.parametrize("scale", ["paper", "mini", "tiny"])
@pytest.mark.parametrize("name", sorted(PAPERS | OURS))
def test_every_experiment_is_complete_at_every_scale(name: str, scale: str) -> None:
    experiment = read_experiment(name, scale)
    assert experiment.tasks
    for model in experiment.models.values():
        if model.train:
            config = model.config("data", "run", 0)
            assert config.steps > 0
            assert config.model_config(experiment.vocab_size).max_length >= config.length
            assert model.mode in config.model_config(experiment.vocab_size).modes
    longest = 1024 if scale == "paper" else 256 if scale == "mini" else 32
    for task in experiment.tasks:
        if task.task != "sizes":
            assert task.make({}).options.get("length", 5) <= longest


@pytest.mark.parametrize("name", sorted(STUDY))
def test_the_study_is_complete(name: str, tmp_path: Path) -> None:
    experiment = read_experiment(name)
    assert experiment.scale == "study"
    Reproduction(experiment, tmp_path, Progress()).check(network=False)
    for task in experiment.tasks:
        if task.options.get("data") in ("stories", "wikipedia"):
            assert task.options["split"] == "test"  # rates and curves are of the validation text
    for model in experiment.trained():
        config = model.config("-", "-", 0)
        assert config.optimizer.schedule == "wsd"
        assert model.name in experiment.pace


def test_story_models_have_one_size_and_the_same_data(tmp_path: Path) -> None:
    work = Reproduction(read_experiment("stories"), tmp_path, Progress())
    sizes = []
    for run in work.runs():
        config = run.plan.config("-", "-", 0)
        assert (config.steps, config.batch, config.length, config.data) == (
            1600,
            16,
            128,
            work.runs()[0].plan.config("-", "-", 0).data,
        )
        assert config.contexts == (
            "" if config.objective in ("ar", "denoise") else "span:p=0.5,mean=12"
        )
        if run.plan.name != "frequencies":
            sizes.append(
                count_sizes(run.name, "", work.shape(run))
                .find("parameters_without_embeddings")
                .value
            )
    assert max(sizes) < 1.11 * min(sizes)
    headline = {run.plan.name for run in work.runs() if run.seed == 2}
    assert headline >= {
        "tracformer-car",
        "dense+neighbours-car",
        "bart-modern+neighbours",
        "ac-gpt",
        "ac-gpt+neighbours",
    }
    assert headline >= {"tracformer-ac", "bert-modern", "bert-modern+neighbours"}


def test_mini_models_have_one_size(tmp_path: Path) -> None:
    for name in ("everything", "table4"):
        work = Reproduction(read_experiment(name, "mini"), tmp_path, Progress())
        shapes = {run.plan.name: work.shape(run) for run in work.runs()}
        assert shapes.pop("frequencies", None) is not None or name == "table4"  # it has no network
        sizes = [
            count_sizes(each, "", shape).find("parameters_without_embeddings").value
            for each, shape in shapes.items()
        ]
        assert max(sizes) < 1.1 * min(sizes)
        assert all(run.plan.tokens >= 10e6 for run in work.runs())


def test_first_seeds_come_first(tmp_path: Path) -> None:
    runs = Reproduction(read_experiment("fig5", "mini"), tmp_path, Progress()).runs()
    assert [run.seed for run in runs] == [0] * 5 + [1] * 4 + [2] * 4
    headline = {run.plan.name for run in runs if run.seed == 2}
    assert headline == {"tracformer-car", "bart", "tracformer-ac", "bert-bidir"}


def test_combined_experiments_run_each_task_once() -> None:
    whole = read_experiment("everything", "mini")
    assert {"d3pm", "plaid"}.isdisjoint(whole.models)
    for name in ("fig5", "table11", "zeroshot", "fim"):
        pairs = [
            (task, model) for task in read_experiment(name, "mini").tasks for model in task.models
        ]
        for task, model in pairs:
            (same,) = [
                each
                for each in whole.tasks
                if (each.task, each.mode, each.options) == (task.task, task.mode, task.options)
            ]
            assert same.models.count(model) == 1
    assert whole.paper[:2] == ("fig5", "fig7")


def test_training_options_apply_to_every_model() -> None:
    models = read_experiment(
        "fig5", "mini", {"train.precision": "bfloat16", "train.steps": "7"}
    ).models
    assert {
        (model.config("d", "r", 0).precision, model.config("d", "r", 0).steps)
        for model in models.values()
    } == {("bfloat16", 7)}
    longer = (
        read_experiment("fig5", "mini", {"train.optimizer.beta2": "0.99"})
        .models["bart"]
        .config("d", "r", 0)
        .optimizer
    )
    assert (longer.beta2, longer.name, longer.warmup) == (0.99, "muon", 200)
    paper = [
        read_experiment("fig5", "paper", change).models["bart"].config("d", "r", 0)
        for change in ({}, {"train.optimizer.beta2": "0.99"})
    ]
    assert (
        dataclasses.replace(paper[0], optimizer=dataclasses.replace(paper[0].optimizer, beta2=0.99))
        == paper[1]
    )
    records = (
        read_experiment("fig5", "mini", {"train.data.rows": "records", "train.init": "1e3"})
        .models["bart"]
        .config("d", "r", 0)
    )
    assert (records.data.rows, records.data.source, records.init) == ("records", "d", "1e3")
    with pytest.raises(ValueError, match="unknown option 'stps'; did you mean 'steps'"):
        read_experiment("fig5", "mini", {"train.stps": "7"}).models["bart"].config("d", "r", 0)


def test_values_of_a_scale_are_overridden_by_name() -> None:
    experiment = read_experiment("table9", "mini", {"values.shown": "0", "values.infills": "7"})
    assert {(task.options["show"], task.options["sequences"]) for task in experiment.tasks} == {
        (0, 7)
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_docs_are_accepted(command: str) -> None:
    _, verb, *words = shlex.split(command, comments=True)
    parser = argparse.ArgumentParser(exit_on_error=False)
    find_command(verb).add_arguments(parser)
    arguments = parser.parse_intermixed_args(words)
    if verb == "reproduce" and arguments.words:
        name, *changes = arguments.words
        own = dict(word.split("=", 1) for word in changes)
        scale = own.pop("scale", "")
        read_experiment(
            name,
            scale,
            {key: value for key, value in own.items() if key not in ("out", "device", "batch")},
        )


def test_a_users_experiment(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "title: Mine\ntasks:\n  - {task: prefixes, models: [gpt2], options: {data: $wikitext, "
        "length: $short, fractions: [0.5]}}\n"
    )
    experiment = read_experiment(
        str(tmp_path / "mine.yaml"), "tiny", {"models.gpt2": "folder", "seeds": "3,4"}
    )
    assert (experiment.name, experiment.models["gpt2"].published, experiment.training_sets()) == (
        "mine",
        "folder",
        [],
    )
    assert [data.name for data in experiment.evaluation_sets()] == ["wikitext2"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("title: x", "tasks is \\[\\]; list at least one"),
        ("title: x\ntasks: []\nmodels: []", "unknown option 'models'"),
        (
            "title: x\ntasks: [{task: ratios, models: [unknown]}]",
            r"models are \['unknown'\]; the scale has: tracformer-car, bart",
        ),
        (
            "title: x\ntasks: [{task: ratios, models: [bart], options: {mean: $huge}}]",
            r"uses \$huge; the scale has: \$wikitext",
        ),
        (
            "title: x\ntasks: [{task: ratios, models: [bart], options: {data: enwik8}}]",
            "data is 'enwik8'; scale tiny has: wikitext2",
        ),
        (
            "title: x\nparts: [everything]",
            "experiment everything: tasks is \\[\\]; list at least one",
        ),
        (
            "title: x\nparts: [fig5]\ntasks: [{task: ratios, models: [bart]}]",
            "give either tasks or parts",
        ),
        ("- 1", "is \\[1\\]; it must be a mapping"),
        ("title: x\ntasks:", "tasks is None; it must be a list"),
        ("title: x\ntasks: [ratios]", "a task of .* is 'ratios'; it must be a mapping"),
        (
            "title: x\ntasks: [{task: ratios, models: 3}]",
            "models is 3; it must be a list",
        ),
        (
            "title: x\ntasks: [{task: ratios, models: [bart], options: [1, 2]}]",
            r"options is \[1, 2\]; it must be a group of options",
        ),
    ],
)
def test_mistakes_in_a_users_experiment_are_reported(
    document: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(document)
    with pytest.raises(ValueError, match=message):
        read_experiment(str(tmp_path / "mine.yaml"), "tiny")


def test_paths_into_the_scale_override_one_model_or_set() -> None:
    plain = read_experiment("fig7", "tiny")
    changes = {"models.bart.train.steps": "9", "models.bart.seeds": "[5]"}
    changed = read_experiment("fig7", "tiny", {**changes, "data.wikitext2.tokenizer": "char"})
    assert (changed.models["bart"].train["steps"], changed.models["bart"].seeds) == (9, (5,))
    assert changed.data["wikitext2"].tokenizer == "char"
    for name, model in plain.models.items():
        assert name == "bart" or changed.models[name] == model


def test_one_folder_with_the_files_of_all_sets(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "train.txt").write_text("\n = A = \n\n the cat , it sat . \n")
    (tmp_path / "wikitext-2" / "valid.txt").write_text("\n = B = \n\n it @-@ sat \n")
    (tmp_path / "wikipedia-2006.txt").write_text("not read before it is needed")
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.valid.txt").write_text(" it 's \n")
    experiment = read_experiment("table4", "mini", {"data": str(tmp_path)})
    assert set(split_sources(experiment.data["wikitext"], trained=True)) == {"train", "validation"}
    held = split_sources(experiment.data["ptb"], trained=False)
    assert list(whole_documents(held["validation"])) == ["it's"]
    with pytest.raises(FileNotFoundError, match="has no data set 1bw"):
        split_sources(experiment.data["1bw"], trained=False)


def test_files_are_read_like_the_named_set(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.txt").write_text(
        "\n = A = \n\n the cat , it sat . \n\n = B = \n\n more \n"
    )
    (tmp_path / "wiki.valid.txt").write_text(" = C = \n\n a dog @-@ like cat . \n")
    data = DataSet("wikitext2", str(tmp_path), "byte")
    prepared = prepare_data(data, tmp_path / "out", trained=True)
    assert {name: split.documents for name, split in prepared.manifest.splits.items()} == {
        "train": 2,
        "validation": 1,
    }
    assert "a dog-like cat." in prepared.tokenizer.decode(prepared.split("validation").document(0))
    held = prepare_data(data, tmp_path / "out", trained=False)
    assert set(held.manifest.splits) == {"validation"}
    (tmp_path / "other.txt").write_text("something else")
    with pytest.raises(ValueError, match="was prepared from other data than"):
        prepare_data(
            DataSet("wikitext2", str(tmp_path / "other.txt"), "byte"),
            tmp_path / "out",
            trained=True,
        )


def test_a_single_file_for_evaluation_is_all_validation(text: Path) -> None:
    assert set(split_sources(DataSet("1bw", str(text), "byte"), trained=False)) == {"validation"}
    assert set(split_sources(DataSet("1bw", str(text), "byte"), trained=True)) == {"train"}


def test_a_prepared_folder_is_linked_under_the_name_of_its_data_set(
    tmp_path: Path, text: Path
) -> None:
    """Results name their data by the folder's last name."""
    prepare_data(DataSet("mine", str(text), "byte"), tmp_path, trained=True)
    place = data_folder(tmp_path, "mine", trained=True)
    prepared = prepare_data(
        DataSet("wikitext103", str(place), "byte"), tmp_path / "out", trained=True
    )
    assert prepared.folder.name == "wikitext103"


def test_the_error_for_missing_data_says_how_to_get_it(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"looked for in .*data/wikitext2 and as '/nowhere'.*tracformer prepare wikitext2 --out FOLDER",
    ):
        work(tmp_path, text, wikitext2="/nowhere").run()

    def no_network(self: HubSource) -> None:
        raise ValueError("no network")

    monkeypatch.setattr(HubSource, "_load", no_network)
    with pytest.raises(
        ValueError, match=r"no network\. Data set 'wikitext2' was looked for.*data\.wikitext2=FILE"
    ):
        work(tmp_path, text, wikitext2="wikitext2").run()
    assert not data_folder(tmp_path / "tiny", "wikitext2", trained=True).exists()


def test_another_tokenizer_than_that_of_the_folder_is_refused(tmp_path: Path, text: Path) -> None:
    data = DataSet("my", str(text), tokenizer="bpe:300")
    made = prepare_data(data, tmp_path, trained=True)
    assert (
        prepare_data(data, tmp_path, trained=True).tokenizer.fingerprint
        == made.tokenizer.fingerprint
    )
    for other in ("bpe:400", "byte"):
        with pytest.raises(
            ValueError,
            match=f"the tokenizer of my is '{other}', but .* was prepared with another tokenizer .bpe:300",
        ):
            prepare_data(dataclasses.replace(data, tokenizer=other), tmp_path, trained=True)


# ---- learning-rate pilots: short runs at several rates; the best is used


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
