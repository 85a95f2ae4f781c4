"""Run an experiment from nothing to its report: prepare data, fly pilots, train what is missing, evaluate, write the page.

Everything lies under OUT/SCALE, and each stage leaves files by which the next call knows that it is done:

    data/NAME                    prepared data sets; data/held-out/NAME those that nothing is trained on
    models/NAME-seedN            a run of `tracformer train`, with `recipe.json`: what it was told
    results/*.json               one file a model and task, one a run's learning curve, and one a system's pilots
    report/EXPERIMENT/           index.html and its tables and pictures

Experiments at one scale share models and results. The same command goes on after an interruption, also in the middle of a training run.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tracformer.data import PreparedData, Tokenizer, load_tokenizer
from tracformer.evaluation.curves import learning_curve
from tracformer.evaluation.experiment import READING, SIZES, Experiment, ModelPlan, TaskPlan
from tracformer.evaluation.experiment_data import data_folder, prepare_data
from tracformer.evaluation.manifest import weights_hash
from tracformer.evaluation.pace import Pace, tokens
from tracformer.evaluation.pilots import adopt, chosen_rate, fly, outcome_file, with_rate
from tracformer.evaluation.report import write_report
from tracformer.evaluation.results import Result
from tracformer.evaluation.runner import evaluate
from tracformer.evaluation.sizes import count_sizes
from tracformer.evaluation.tasks import Progress, Subject
from tracformer.families import find_family, load_model
from tracformer.files import write_atomically
from tracformer.generation import loading
from tracformer.model.config import ModelConfig
from tracformer.training.config import DataConfig, TrainConfig, canonical_recipe
from tracformer.training.distributed import Ranks, join_ranks
from tracformer.training.loop import exported_step
from tracformer.training.start import start

RECIPE = "recipe.json"
PAPER_PRESETS = ("paper", "paper-small")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One model with one training seed; a published one has none."""

    plan: ModelPlan
    seed: int | None

    @property
    def name(self) -> str:
        return self.plan.name if self.seed is None else f"{self.plan.name} #{self.seed}"

    @property
    def number(self) -> int:
        """Among the model's seeds."""
        return 0 if self.seed is None else self.plan.seeds.index(self.seed)

    @property
    def folder_name(self) -> str:
        return f"{self.plan.name}-seed{self.seed}"


@dataclass
class Reproduction:
    experiment: Experiment
    out: Path
    progress: Progress
    say: Say = print
    device: str = "auto"
    batch: int = 32
    pace: Pace = field(default_factory=Pace)

    @property
    def root(self) -> Path:
        return self.out / self.experiment.scale

    @property
    def page(self) -> Path:
        return self.root / "report" / self.experiment.name / "index.html"

    def run(self) -> int:
        """0, or 128 + the signal that stopped it; then the same call goes on."""
        self.check()
        with join_ranks(self.device) as ranks:  # one group for all stages: a second one could not be formed
            if ranks.first:
                self._prepare()
            ranks.barrier()
            signal = self._fly(ranks)
            if signal is not None:
                return 128 + signal
            missing = [run for run in self.runs() if run.seed is not None and not self.is_trained(run)]
            evaluations = list(self.evaluations())
            self.pace.expect(sum(run.plan.tokens for run in missing), len(evaluations))
            for number, run in enumerate(missing, start=1):
                self.say(f"[train {number}/{len(missing)}] {run.name}: {tokens(run.plan.tokens)}{self.pace.left()}")
                with self.pace.training(run.plan.tokens):
                    signal = self._train(run, ranks)
                if signal is not None:
                    return 128 + signal
            curves = self._curves() if ranks.first else []
            files = self._evaluate(evaluations, ranks)
            if ranks.first:
                self.say(f"report: {self._report([*files, *curves])}")
            ranks.barrier()
        return 0

    def check(self, network: bool = True) -> None:
        """What would be found wrong after training is found before it: tasks, modes, lengths, and weights that should be there."""
        for run in self.runs():
            where = run.plan.published if run.seed is None else self._planned(run).init
            if where and (network or not _is_remote(where)):
                loading.find_folder(where)
        for task, run in self.evaluations():
            if task.task != SIZES:
                self._check_task(task, run)

    def _check_task(self, task: TaskPlan, run: Run) -> None:
        made, mode = task.make({}), task.mode or run.plan.mode
        if made.modes is not None and mode not in made.modes:
            raise ValueError(
                f"task {task.task!r} asks in mode {' or '.join(made.modes)}, and {run.plan.name} is to answer in mode {mode!r}"
            )
        if run.seed is None or self._planned(run).init:  # its shape is that of weights that are not read here
            return
        shape = self.shape(run)
        if mode not in shape.modes:
            raise ValueError(f"{run.plan.name} is to answer in mode {mode!r}; it is trained for: {', '.join(shape.modes)}")
        cuts = self.experiment.models[task.models[0]]  # the windows; models of its tokeniser read them as they are
        if run.plan.data == cuts.data and made.options.get("length", 0) > shape.max_length:
            raise ValueError(
                f"task {task.task!r}: length is {made.options['length']}; {run.plan.name} takes at most {shape.max_length} tokens"
            )

    # ---- what there is

    def runs(self) -> list[Run]:
        """Every run whose weights some task asks for; the first seed of each model, then the second: all models can soon be compared."""
        return sorted((run for plan in self.experiment.trained() for run in runs_of(plan)), key=lambda run: run.number)

    def run_folder(self, run: Run) -> Path:
        return self.root / "models" / run.folder_name

    def is_trained(self, run: Run) -> bool:
        """Did the run come to its last step, and was it told the same? Another recipe in its folder is an error."""
        folder = self.run_folder(run)
        if (folder / RECIPE).is_file():
            told = canonical_recipe(json.loads((folder / RECIPE).read_text()))
            now = canonical_recipe(self._recipe(run))
            if told != now:
                keys = sorted(key for key in told.keys() | now.keys() if told.get(key) != now.get(key))
                raise ValueError(
                    f"{folder} was trained otherwise than the experiment says now ({', '.join(keys)} differ); "
                    f"use another out=FOLDER, or remove {folder}"
                )
        return exported_step(folder) >= self.config(run).steps

    # ---- stages

    def _prepare(self) -> None:
        for data in self.experiment.learnt_from():
            prepare_data(data, self.root, trained=True)
        for data in self.experiment.only_read():
            prepare_data(data, self.root, trained=False)

    def _fly(self, ranks: Ranks) -> int | None:
        """Pilots of every system that has none yet; the signal that stopped one, or None."""
        if self.experiment.pilots is None:
            return None
        missing = [run for run in self.runs() if run.seed is not None and run.number == 0 and self.outcome(run) is None]
        for number, run in enumerate(missing, start=1):
            config, recipe = self._planned(run), self._recipe_of(self._planned(run), run)
            pilots = self.experiment.pilots
            besides = tokens(pilots.tokens(config))
            self.say(f"[pilots {number}/{len(missing)}] {run.plan.name}: {len(pilots.rates)} rates, {besides} besides the run itself")
            outcome = fly(run.plan.name, run.plan.mode, config, recipe, pilots, self.root / "pilots", start)
            if isinstance(outcome, int):
                return outcome
            if ranks.first:
                outcome.save(self.root / "results")
            tried = ", ".join(f"{row.value:.4g} at {row.setting['lr']:g}" for row in outcome.rows)
            self.say(f"  perplexity {tried}; {chosen_rate(outcome):g} is taken")
            ranks.barrier()
        return None

    def _train(self, run: Run, ranks: Ranks) -> int | None:
        """The signal that stopped the run, or None if it was finished."""
        folder = self.run_folder(run)
        if ranks.first and run.number == 0 and self.experiment.pilots is not None and (outcome := self.outcome(run)) is not None:
            adopt(self.root / "pilots", run.plan.name, self._planned(run).seed, outcome, folder)
        if ranks.first and not (folder / RECIPE).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / RECIPE, json.dumps(self._recipe(run), indent=1, sort_keys=True) + "\n")
        ranks.barrier()
        return start(self.config(run)).signal

    def _curves(self) -> list[Path]:
        """The files of the runs' learning curves."""
        files = []
        for run in self.runs():
            if run.seed is not None:
                told = (run.name, run.plan.mode, self.config(run), run.plan.data, self._recipe(run))
                made = learning_curve(*told)
                path = self.root / "results" / made.file_name
                if not path.is_file() or Result.load(path).rows != made.rows:  # the run may have been trained again
                    made.save(path.parent)
                files.append(path)
        return files

    def _evaluate(self, evaluations: list[tuple[TaskPlan, Run]], ranks: Ranks) -> list[Path]:
        """The files of all results, in the experiment's order; done model after model, so that each is loaded once."""
        files: dict[int, Path] = {}
        loaded: dict[str, Any] = {}
        by_model = sorted(enumerate(evaluations), key=lambda each: each[1][1].name)
        for number, (place, (task, run)) in enumerate(by_model, start=1):
            if task.task == SIZES:
                files[place] = self._count(run, ranks)
                continue
            self.say(f"[evaluate {number}/{len(evaluations)}] {run.name}: {task.task}{self.pace.left()}")
            if run.name not in loaded:
                loaded = {run.name: loading.read(self._model_folder(run), ranks.device, torch.float32)}
            with self.pace.evaluation():
                files[place] = self._ask(task, run, loaded[run.name], ranks)
        return [files[place] for place in sorted(files)]

    def _ask(self, task: TaskPlan, run: Run, loaded: tuple[Any, Tokenizer], ranks: Ranks) -> Path:
        model, tokenizer = loaded
        first = runs_of(self.experiment.models[task.models[0]])[0]
        subject = Subject(
            model=model,
            tokenizer=tokenizer,
            name=run.name,
            mode=task.mode or run.plan.mode,
            batch=self.batch,
            ranks=ranks,
            reference=_tokenizer(self._model_folder(first)),
        )
        options = {} if "data" not in task.options else {"data": str(self._data(str(task.options["data"])))}
        (result,) = evaluate([subject], [task.make(options)], self.root / "results", self.progress)
        return self.root / "results" / result.file_name

    def _count(self, run: Run, ranks: Ranks) -> Path:
        result = count_sizes(run.plan.name, run.plan.mode, self.shape(run), run.plan.tokens, {"scale": self.experiment.scale})
        path = self.root / "results" / result.file_name
        if ranks.first and not path.is_file():
            result.save(path.parent)
        return path

    def _report(self, files: list[Path]) -> Path:
        return write_report(
            [*files, *self._pilot_files()],
            self.page.parent,
            title=f"{self.experiment.title} (scale {self.experiment.scale})",
            about=[self.experiment.about, self.experiment.scale_about],
            paper=self.experiment.paper,
        )

    # ---- small things

    def _pilot_files(self) -> list[Path]:
        if self.experiment.pilots is None:
            return []
        outcomes = [self.outcome(run) for run in self.runs() if run.seed is not None and run.number == 0]
        return [self.root / "results" / outcome.file_name for outcome in outcomes if outcome is not None]

    def evaluations(self) -> Iterator[tuple[TaskPlan, Run]]:
        for task in self.experiment.tasks:
            for name in task.models:
                runs = runs_of(self.experiment.models[name])
                yield from ((task, run) for run in (runs[:1] if task.task == SIZES else runs))  # seeds do not change a size

    def config(self, run: Run) -> TrainConfig:
        """What the run is told, at the learning rate that its pilots chose, where there are any."""
        config = self._planned(run)
        known = self.experiment.pilots is not None and data_folder(self.root, run.plan.data, trained=True).exists()
        outcome = self.outcome(run) if known else None
        return config if outcome is None else with_rate(config, chosen_rate(outcome))

    def _planned(self, run: Run) -> TrainConfig:
        source = data_folder(self.root, run.plan.data, trained=True)
        config = replace(run.plan.config(str(source), str(self.run_folder(run)), run.seed or 0), device=self.device)
        if not config.steps or not config.length:
            raise ValueError(f"model {run.plan.name}: an experiment must say `steps` and `length`")
        return config

    def outcome(self, run: Run) -> Result | None:
        """Of the pilots of the run's system."""
        assert self.experiment.pilots is not None
        config = self._planned(run)
        recipe = self._recipe_of(config, run)
        path = self.root / "results" / outcome_file(run.plan.name, run.plan.mode, config, recipe, self.experiment.pilots)
        return Result.load(path) if path.is_file() else None

    def _recipe(self, run: Run) -> dict[str, Any]:
        """All that decides the weights, save the code: a finished run is recognised by it."""
        return self._recipe_of(self.config(run), run)

    def _recipe_of(self, config: TrainConfig, run: Run) -> dict[str, Any]:
        values = config.to_dict()
        folder = data_folder(self.root, run.plan.data, trained=True)
        told = ("model", "objective", "contexts", "optimizer", "steps", "batch", "length", "seed", "ema", "precision")
        recipe = {**{key: values[key] for key in told}, "data": PreparedData.open(folder).manifest.fingerprint}
        if config.init:
            recipe["init"] = _weights_of(config.init)
        reading = {key: values["data"][key] for key in READING}
        if reading != {key: getattr(DataConfig, key) for key in READING}:  # recipes of runs at the defaults never had this key
            recipe["reading"] = reading
        return recipe

    def shape(self, run: Run) -> ModelConfig:
        if run.seed is not None:
            return self._planned(run).model_config(self.experiment.vocabulary_of(run.plan))
        if not run.plan.family:  # a folder that the user named
            return load_model(loading.find_folder(run.plan.published)).config
        kind = find_family(run.plan.family).config_class
        return kind.preset(next(name for name in PAPER_PRESETS if name in kind.presets), vocab_size=self.experiment.vocab_size)

    def _model_folder(self, run: Run) -> Path:
        return loading.find_folder(run.plan.published) if run.seed is None else self.run_folder(run) / "model"

    def _data(self, name: str) -> Path:
        return data_folder(self.root, name, trained=any(data.name == name for data in self.experiment.learnt_from()))


def runs_of(plan: ModelPlan) -> list[Run]:
    return [Run(plan, None)] if plan.published else [Run(plan, seed) for seed in plan.seeds]


def _is_remote(where: str) -> bool:
    """Is it an id of the hub, which a dry run does not look up?"""
    return loading.HUB_ID.fullmatch(where) is not None and not Path(where).exists() and not Path(where).parent.is_dir()


@cache
def _weights_of(init: str) -> str:
    """A hash of the weights that a run begins with."""
    return weights_hash(load_model(loading.find_folder(init)))


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return load_tokenizer(folder)
    except (FileNotFoundError, ValueError):  # published weights without one beside them
        return loading.read(folder, "cpu", torch.float32)[1]
