"""An experiment from data to report, at a scale of a few steps; interrupted, resumed, repeated."""

import argparse
import importlib
import json
import math
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import save_model
from tests.evaluation.test_report import WellFormed
from tracformer.cli.main import main
from tracformer.data import HubSource, byte_tokenizer, documents
from tracformer.evaluation import reproduce as module
from tracformer.evaluation.bootstrap import perplexity_of
from tracformer.evaluation.experiment import DataSet, experiment_names, read_experiment, scale_names
from tracformer.evaluation.experiment_data import data_folder, prepare_data, split_sources
from tracformer.evaluation.pilots import Pilots, outcome_file
from tracformer.evaluation.plan import plan
from tracformer.evaluation.reproduce import Reproduction
from tracformer.evaluation.results import Result, read_results
from tracformer.evaluation.sizes import count_sizes
from tracformer.evaluation.tasks import Silent
from tracformer.training.log import read_log
from tracformer.training.loop import Trainer
from tracformer.training.start import start

PAPERS = {"fig1", "fig2", "fig5", "fig6", "fig7", "samples", "claims", *(f"table{n}" for n in (1, 2, 3, 4, 7, 8, 9, 11))}
OURS = {"fim", "zeroshot", "everything"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "house", "and", "then", "saw", "it"]
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n".join(" ".join(rng.choices(words, k=12)) + "." for _ in range(200)))
    return path


def work(out: Path, text: Path, experiment: str = "fig7", **changes: str) -> Reproduction:
    changes = {f"data.{key}": value for key, value in changes.items()} or {"data.wikitext2": str(text)}
    return Reproduction(read_experiment(experiment, "tiny", changes), out, Silent(), say=lambda text: None)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file that must not be written again, with size and time."""
    found = [path for part in ("data", "models", "results") for path in (folder / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def stopping(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The function, interrupted as by Ctrl-C once it has been called so often."""
    calls = iter(range(after))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return call


def test_an_interrupted_figure_is_finished_and_then_left_alone(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert sum(name.endswith("model/model.safetensors") for name in trained) == 6
    assert sum(name.startswith("results") for name in trained) == 3
    assert {name: facts for name, facts in trained.items() if name in two} == two
    assert not (root / "report").exists()

    monkeypatch.setattr(module, "start", stopping(module.start, 0))  # nothing is left to train
    assert work(tmp_path, text).run() == 0
    done = files_of(root)
    assert {name: facts for name, facts in done.items() if name in trained} == trained
    results = read_results(root / "results")
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
    assert (root / "report" / "fig7" / "index.html").read_bytes() == page  # the same results, the same page to the byte

    shown = WellFormed.read(page.decode())
    assert shown.tags["svg"] == 2  # the joint and the marginal
    assert "±" in page.decode()  # over the two seeds of one model
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
    with pytest.raises(ValueError, match=r"tracformer-car-seed0 was trained otherwise .*steps.* differ.*; use another out=FOLDER"):
        reproduction.is_trained(run)


def test_a_signal_ends_the_reproduction_with_its_code(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        signal = 15

    monkeypatch.setattr(module, "start", lambda config: Stopped())
    assert work(tmp_path, text).run() == 128 + 15


def test_a_dry_run_tells_the_plan_and_writes_nothing(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "fig5", "scale=paper", f"out={tmp_path / 'out'}", f"data.wikitext103={text}", "--dry-run"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "train     tracformer-car #0 (tracformer, car): 30000 steps of 256 x 1024, 7.86B tokens" in told
    assert "evaluate  bert-bidir #0 (ac): ratios data=wikitext103, length=1024, sequences=0, mean=50" in told
    assert "to train: 39.3B tokens" in told  # five models
    assert not (tmp_path / "out").exists()


def test_a_dry_run_tells_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "fig5", "scale=mini", f"out={tmp_path / 'out'}", "--dry-run"]
    for word in ("data=nowhere", "data.wikitext=nowhere"):
        assert main([*words, word]) == 2
        assert "data set 'wikitext': there is no nowhere" in capsys.readouterr().err
    assert main(words) == 0  # what would be fetched is not looked for
    (tmp_path / "bad.yaml").write_text("title: [")
    assert main(["reproduce", str(tmp_path / "bad.yaml"), "--dry-run"]) == 2
    assert "bad.yaml is not YAML at line 1" in capsys.readouterr().err


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


def test_pilots_of_another_schedule_are_others() -> None:
    recipe = {"seed": 0, "steps": 1000, "optimizer": {"lr": 1.0, "final_lr": 0.1, "warmup": 5}}
    files = [outcome_file("m", "car", {**recipe, **change}, Pilots((1.0,), 3)) for change in ({}, {"seed": 1}, {"steps": 5000})]
    assert files[0] == files[1] != files[2]


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


def test_training_keys_for_every_model() -> None:
    models = read_experiment("fig5", "mini", {"train.precision": "bfloat16", "train.steps": "7"}).models
    assert {(model.config("d", "r", 0).precision, model.config("d", "r", 0).steps) for model in models.values()} == {("bfloat16", 7)}
    with pytest.raises(ValueError, match="there is no configuration key 'stps'; did you mean 'steps'"):
        read_experiment("fig5", "mini", {"train.stps": "7"}).models["bart"].config("d", "r", 0)


def test_values_of_a_scale_are_changed_by_name() -> None:
    experiment = read_experiment("table9", "mini", {"values.shown": "0", "values.infills": "7"})
    assert {(task.options["show"], task.options["sequences"]) for task in experiment.tasks} == {(0, 7)}


def test_first_seeds_come_first(tmp_path: Path) -> None:
    runs = Reproduction(read_experiment("fig5", "mini"), tmp_path, Silent()).runs()
    assert [run.seed for run in runs] == [0] * 5 + [1] * 4 + [2] * 4
    headline = {run.plan.name for run in runs if run.seed == 2}
    assert headline == {"tracformer-car", "bart", "tracformer-ac", "bert-bidir"}


def test_mini_models_are_of_one_size(tmp_path: Path) -> None:
    for name in ("everything", "table4"):
        work = Reproduction(read_experiment(name, "mini"), tmp_path, Silent())
        shapes = {run.plan.name: work.shape(run) for run in work.runs()}
        sizes = [count_sizes(each, "", shape).find("parameters_without_embeddings").value for each, shape in shapes.items()]
        assert max(sizes) < 1.1 * min(sizes)
        assert all(run.plan.tokens >= 10e6 for run in work.runs())


def test_files_of_all_sets_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "train.txt").write_text("\n = A = \n\n the cat , it sat . \n")
    (tmp_path / "wikitext-2" / "valid.txt").write_text("\n = B = \n\n it @-@ sat \n")
    (tmp_path / "wikipedia-2006.txt").write_text("not read before it is needed")
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.valid.txt").write_text(" it 's \n")
    experiment = read_experiment("table4", "mini", {"data": str(tmp_path)})
    assert set(split_sources(experiment.data["wikitext"], trained=True)) == {"train", "validation"}
    held = split_sources(experiment.data["ptb"], trained=False)
    assert list(documents(held["validation"])) == ["it's"]
    with pytest.raises(FileNotFoundError, match="holds no 1bw"):
        split_sources(experiment.data["1bw"], trained=False)


def test_sizes_at_the_paper_scale_need_no_weights(tmp_path: Path) -> None:
    """Table 7, to the report: counted parameters beside the paper's."""
    experiment = read_experiment("table7", "paper")
    assert Reproduction(experiment, tmp_path, Silent(), say=lambda text: None).run() == 0
    counted = {r.family: r.find("parameters").value for r in read_results(tmp_path / "paper" / "results")}
    for family, millions in {"tracformer": 109, "bert": 149, "bert-bidir": 170}.items():
        assert counted[family] / 1e6 == pytest.approx(millions, abs=0.7)
    page = (tmp_path / "paper" / "report" / "table7" / "index.html").read_text()
    assert "<td class='paper'>138,000,000<small>Table 7</small></td>" in page


def test_weights_of_ones_own_instead_of_training(tmp_path: Path, text: Path) -> None:
    folder = save_model(tmp_path / "mine", byte_tokenizer(), max_length=32, n_layer=5)
    changes = {"models.tracformer-web": str(folder), "data.wikitext2": str(text)}
    assert Reproduction(read_experiment("samples", "tiny", changes), tmp_path, Silent(), say=lambda text: None).run() == 0
    assert not (tmp_path / "tiny" / "models").exists()
    page = (tmp_path / "tiny" / "report" / "samples" / "index.html").read_text()
    shown = WellFormed.read(page)
    assert shown.tags["h3"] == 3  # unconditional, and two kinds of holes
    assert shown.tags["mark"] >= 2 * 2 * 3  # of two sequences the original and the fill


@pytest.mark.soak
def test_two_processes(tmp_path: Path, text: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tracformer.cli.main"]
    words = ["reproduce", "fig7", "scale=tiny", f"out={tmp_path}", f"data.wikitext2={text}", "device=cpu"]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {r.manifest["processes"] for r in read_results(tmp_path / "tiny" / "results")} == {2}
    assert done.stdout.count("report: ") == 1


@pytest.mark.soak
def test_everything_at_once(tmp_path: Path, text: Path) -> None:
    """All experiments as one: each question is answered once by each model, and the report names its files by the questions."""
    changes = {f"data.{name}": str(text) for name in read_experiment("everything", "tiny").data}
    reproduction = Reproduction(read_experiment("everything", "tiny", changes), tmp_path, Silent(), say=lambda text: None)
    assert reproduction.run() == 0
    results = read_results(tmp_path / "tiny" / "results")
    assert len(results) == len(list(reproduction.evaluations()))
    report = tmp_path / "tiny" / "report" / "everything"
    assert {"fig5", "table4", "fim"} & {path.name for path in report.parent.iterdir()} == set()  # one page, not one of each
    assert {f"ratios-wikitext2-32-Geometric_{mean}-perplexity.csv" for mean in (1, 2)} <= {path.name for path in report.iterdir()}


COMMANDS = re.findall(r"^tracformer .+$", (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(), re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_docs_are_understood(command: str) -> None:
    _, verb, *words = shlex.split(command, comments=True)
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"tracformer.cli.{verb}").add_arguments(parser)
    arguments = parser.parse_intermixed_args(words)
    if verb == "reproduce" and arguments.words:
        name, *changes = arguments.words
        own = dict(word.split("=", 1) for word in changes)
        scale = own.pop("scale", "mini")
        read_experiment(name, scale, {key: value for key, value in own.items() if key not in ("out", "device", "batch")})


@pytest.mark.parametrize("scale", ["paper", "mini", "tiny"])
@pytest.mark.parametrize("name", sorted(PAPERS | OURS))
def test_every_experiment_is_whole_at_every_scale(name: str, scale: str) -> None:
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


def test_the_bundled_experiments_are_the_papers() -> None:
    assert set(experiment_names()) == PAPERS | OURS
    assert scale_names() == ["mini", "paper", "tiny"]
    spans = {scale: {t.options["mean"] for n in ("fig5", "fig7") for t in read_experiment(n, scale).tasks} for scale in ("paper", "mini")}
    assert spans == {"paper": {50, 10, 3}, "mini": {12, 3, 1}}


def test_experiments_put_together_ask_each_question_once() -> None:
    whole = read_experiment("everything", "mini")
    assert {"d3pm", "plaid"}.isdisjoint(whole.models)
    for name in ("fig5", "table11", "zeroshot", "fim"):
        asked = [(task, model) for task in read_experiment(name, "mini").tasks for model in task.models]
        for task, model in asked:
            (same,) = [each for each in whole.tasks if (each.task, each.mode, each.options) == (task.task, task.mode, task.options)]
            assert same.models.count(model) == 1
    assert whole.paper[:2] == ("fig5", "fig7")


def test_an_experiment_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "title: Mine\ntasks:\n  - {task: prefixes, models: [gpt2], options: {data: $wikitext, length: $short, fractions: [0.5]}}\n"
    )
    experiment = read_experiment(str(tmp_path / "mine.yaml"), "tiny", {"models.gpt2": "folder", "seeds": "3,4"})
    assert (experiment.name, experiment.models["gpt2"].published, experiment.learnt_from()) == ("mine", "folder", [])
    assert [data.name for data in experiment.only_read()] == ["wikitext2"]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("title: x", "has no 'tasks'"),
        ("title: x\ntasks: []\nmodels: []", "has 'models'; allowed: title, tasks, about, paper"),
        ("title: x\ntasks: [{task: ratios, models: [nobody]}]", r"models are \['nobody'\]; the scale has: tracformer-car, bart"),
        ("title: x\ntasks: [{task: ratios, models: [bart], options: {mean: $huge}}]", r"uses \$huge; the scale has: \$wikitext"),
        ("title: x\ntasks: [{task: ratios, models: [bart], options: {data: enwik8}}]", "data is 'enwik8'; scale tiny has: wikitext2"),
        ("title: x\nparts: [everything]", "experiment everything has no 'tasks'"),
        ("title: x\nparts: [fig5]\ntasks: []", "has 'tasks'; allowed: title, parts, about, without"),
        ("- 1", "does not hold keys and values"),
    ],
)
def test_slips_in_an_experiment_of_ones_own_are_told(document: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(document)
    with pytest.raises(ValueError, match=told):
        read_experiment(str(tmp_path / "mine.yaml"), "tiny")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fig55"], "experiment is 'fig55'; available: claims, everything, fig1"),
        (["fig5", "scale=huge"], "scale is 'huge'; available: mini, paper, tiny"),
        (["fig5", "data.wikitxt=x"], "there is nothing called 'data.wikitxt' to change; did you mean 'data.wikitext'?"),
        (["fig5", "only=bart,gpt2"], "only has 'gpt2'; the experiment's models are: tracformer-car, bart"),
        (["fig5", "seeds=a"], "seeds has 'a'"),
        (["fig5", "values.windows=3"], "the scale has no value 'windows'; it has: wikitext"),
        (["fig5", "batch=0"], "batch is '0'"),
        (["fig5", "fig6"], "fig5, fig6 are named; one at a time"),
        ([], "no experiment named"),
    ],
)
def test_mistakes_are_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_missing_data_set_says_where_it_was_looked_for_and_how_to_get_it(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"looked for in .*data/wikitext2 and as '/nowhere'.*tracformer prepare wikitext2 --out FOLDER"
    ):
        work(tmp_path, text, wikitext2="/nowhere").run()

    def no_network(self: HubSource) -> None:
        raise ValueError("no network")

    monkeypatch.setattr(HubSource, "_load", no_network)
    with pytest.raises(ValueError, match=r"no network\. Data set 'wikitext2' was looked for.*data\.wikitext2=FILE"):
        work(tmp_path, text, wikitext2="wikitext2").run()
    assert not data_folder(tmp_path / "tiny", "wikitext2", trained=True).exists()


def test_files_are_read_as_the_named_set_is(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.txt").write_text("\n = A = \n\n the cat , it sat . \n\n = B = \n\n more \n")
    (tmp_path / "wiki.valid.txt").write_text(" = C = \n\n a dog @-@ like cat . \n")
    data = DataSet("wikitext2", str(tmp_path), "byte")
    prepared = prepare_data(data, tmp_path / "out", trained=True)
    assert {name: split.documents for name, split in prepared.manifest.splits.items()} == {"train": 2, "validation": 1}
    assert "a dog-like cat." in prepared.tokenizer.decode(prepared.split("validation").document(0))
    held = prepare_data(data, tmp_path / "out", trained=False)
    assert set(held.manifest.splits) == {"validation"}
    (tmp_path / "other.txt").write_text("something else")
    with pytest.raises(ValueError, match="was prepared from other data than"):
        prepare_data(DataSet("wikitext2", str(tmp_path / "other.txt"), "byte"), tmp_path / "out", trained=True)


def test_a_single_file_that_nothing_is_trained_on_is_all_validation(text: Path) -> None:
    assert set(split_sources(DataSet("1bw", str(text), "byte"), trained=False)) == {"validation"}
    assert set(split_sources(DataSet("1bw", str(text), "byte"), trained=True)) == {"train"}


def test_a_prepared_folder_goes_under_the_name_of_its_data_set(tmp_path: Path, text: Path) -> None:
    """Results name their data by the folder's last name."""
    prepare_data(DataSet("mine", str(text), "byte"), tmp_path, trained=True)
    place = data_folder(tmp_path, "mine", trained=True)
    prepared = prepare_data(DataSet("wikitext103", str(place), "byte"), tmp_path / "out", trained=True)
    assert prepared.folder.name == "wikitext103"
