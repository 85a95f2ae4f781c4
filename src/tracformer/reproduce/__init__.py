"""Run an experiment from nothing to its report: data, pilots, training, evaluation, the page.

All files are under OUT/SCALE. Each stage leaves files by which the next call knows what is done:

    data/NAME                    prepared data sets; data/held-out/NAME: for evaluation only
    pilots/NAME-seedN-xRATE-...  short runs that choose learning rates; removed afterwards
    models/NAME-seedN            a run of `tracformer train`, with its recipe in `recipe.json`
    results/*.json               one file per model and task, learning curve, and system's pilots
    locks/                       what some process is working on
    report/EXPERIMENT/           index.html with its tables and figures

Experiments at one scale share models and results. After an interruption the same command continues,
also in the middle of a training run. Several processes may run the same command, or other
experiments of the same scale, at once: each takes the next pilot, training run or evaluation that
no other process holds. A model is evaluated as soon as it is trained.

- `experiment.py`: what an experiment is, read from YAML.
- `steps.py`: its data sets, the work shared between processes, and `plan`, the dry run.
- `pilots.py`: learning-rate pilots, learning curves, model sizes.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tracformer import loading
from tracformer.baselines import find_family, load_model, schema_of
from tracformer.data import PreparedData, Tokenizer
from tracformer.devices import Ranks, join_ranks
from tracformer.evaluation.result_files import Result, file_name, plain, weights_hash
from tracformer.evaluation.task import Progress, Subject, evaluate
from tracformer.files import write_atomically
from tracformer.model.config import ModelConfig
from tracformer.report import write_report
from tracformer.reproduce.experiment import (
    NO_PILOTS,
    READING,
    SIZES,
    Experiment,
    Run,
    TaskPlan,
    runs_of,
)
from tracformer.reproduce.pilots import (
    SystemPilots,
    chosen_rate,
    count_sizes,
    curve_file_name,
    learning_curve,
    scaled,
)
from tracformer.reproduce.steps import (
    Step,
    data_folder,
    prepare_data,
    run_steps,
    tokenizer_of_data,
    tokenizer_of_model,
    wait_for_lock,
)
from tracformer.training.loop import exported_step
from tracformer.training.start import start
from tracformer.training.train_config import DataConfig, TrainConfig, canonical_recipe

RECIPE = "recipe.json"
RECIPE_KEYS = (
    *("model", "objective", "contexts", "optimizer", "steps", "batch", "length", "seed", "ema"),
    "precision",
)
PAPER_PRESETS = ("paper", "paper-small")


@dataclass
class Reproduction:
    """An experiment in an output folder.

    Args:
        experiment: The experiment at its scale.
        out: Folder of all scales.
        progress: Shows the progress of evaluations.
        say: Prints a line for the user.
        device: Device of training and evaluation.
        batch: Rows per forward pass in evaluations.
    """

    experiment: Experiment
    out: Path
    progress: Progress
    say: Callable[[str], None] = print
    device: str = "auto"
    batch: int = 32
    _loaded: dict[str, Any] = field(default_factory=dict)  # the model that was evaluated last
    _curves: list[Path] = field(default_factory=list)
    _files: dict[int, Path] = field(default_factory=dict)  # results by index in `evaluations`

    @property
    def root(self) -> Path:
        """Return the folder of the scale."""
        return self.out / self.experiment.scale

    @property
    def results(self) -> Path:
        """Return the folder of the results."""
        return self.root / "results"

    @property
    def page(self) -> Path:
        """Return the path of the report."""
        return self.root / "report" / self.experiment.name / "index.html"

    def run(self) -> int:
        """Do everything that is not done.

        Returns:
            0, or 128 + the signal that stopped the work; the same call then continues.
        """
        self.check()
        # One process group for all stages: a second one could not be formed.
        with join_ranks(self.device) as ranks:
            if ranks.first:
                self._prepare()
            ranks.barrier()
            signal = run_steps(self.steps(ranks), self.root / "locks", ranks, self.say)
            if signal is not None:
                return 128 + signal
            for index, (task, run) in enumerate(self.evaluations()):
                if task.task == SIZES:
                    self._files[index] = self._count(task, run, ranks)
            if ranks.first:
                files = [self._files[index] for index in sorted(self._files)]
                with self._lock("report"):
                    self.say(f"report: {self._report([*files, *self._curves])}")
            ranks.barrier()
        return 0

    def check(self, network: bool = True) -> None:
        """Find mistakes before training starts: tasks, modes, lengths, and missing weights.

        Args:
            network: Whether to look up ids on the hub.
        """
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
                f"task {task.task!r} needs mode {' or '.join(made.modes)}, but {run.plan.name} "
                f"is evaluated in mode {mode!r}"
            )
        if run.seed is None or self._planned(run).init:
            return  # the shape is that of weights, which are not read here
        shape = self.shape(run)
        if mode not in shape.modes:
            raise ValueError(
                f"{run.plan.name} is evaluated in mode {mode!r}, but it is trained for: "
                f"{', '.join(shape.modes)}"
            )
        # Windows are cut in tokens of the first model; models of its data read them as they are.
        first = self.experiment.models[task.models[0]]
        if run.plan.data == first.data and made.options.get("length", 0) > shape.max_length:
            raise ValueError(
                f"task {task.task!r}: length is {made.options['length']}; {run.plan.name} takes at "
                f"most {shape.max_length} tokens"
            )

    # ---- steps

    def steps(self, ranks: Ranks) -> list[Step]:
        """Return all work: for each run its system's pilots, its training, its evaluation."""
        steps: dict[str, Step] = {}
        for run in self.runs():
            owner = self._pilots_of(run)
            if owner is not None:
                for step in (self._pilot_step(owner, rate) for rate in owner.pilots.rates):
                    steps.setdefault(step.name, step)
            if run.seed is not None:
                steps[f"train {run.name}"] = self._train_step(run, owner, ranks)
            steps[f"evaluate {run.name}"] = self._evaluate_step(run, ranks)
        return list(steps.values())

    def _pilot_step(self, owner: SystemPilots, rate: float) -> Step:
        return Step(
            f"pilot {owner.name} x{rate:g}",
            done=lambda: owner.is_finished(rate) or (self.results / owner.outcome_file).is_file(),
            ready=lambda: True,
            do=lambda: owner.run_pilot(rate, start),
        )

    def _train_step(self, run: Run, owner: SystemPilots | None, ranks: Ranks) -> Step:
        def ready() -> bool:
            if owner is None or (self.results / owner.outcome_file).is_file():
                return True
            return all(owner.is_finished(rate) for rate in owner.pilots.rates)

        def do() -> int | None:
            if owner is not None and ranks.first:
                self._choose_rate(owner)
            ranks.barrier()
            return self._train(run, ranks)

        return Step(
            f"train {run.name}",
            done=lambda: self.is_trained(run) or self.is_finished(run),
            ready=ready,
            do=do,
        )

    def _evaluate_step(self, run: Run, ranks: Ranks) -> Step:
        tasks = [
            (index, task)
            for index, (task, each) in enumerate(self.evaluations())
            if each == run and task.task != SIZES
        ]
        finished = False  # in this process; existing results are read, not computed

        def do() -> int | None:
            nonlocal finished
            if run.seed is not None and not self.is_trained(run):
                files = [path for _, task in tasks if (path := self.find_result(task, run))]
                self._files.update(zip((index for index, _ in tasks), files, strict=True))
                self._curves.append(self._curve_file(run))
            else:
                if run.seed is not None and ranks.first:
                    self._save_curve(run)
                for index, task in tasks:
                    self._files[index] = self._evaluate(task, run, ranks)
            finished = True
            return None

        return Step(
            f"evaluate {run.name}",
            done=lambda: finished,
            ready=lambda: run.seed is None or self.is_trained(run) or self.is_finished(run),
            do=do,
        )

    # ---- what exists

    def runs(self) -> list[Run]:
        """Return every run whose weights some task needs.

        The first seed of each model comes first, then the second: all models can soon be compared.
        """
        return sorted(
            (run for plan in self.experiment.trained() for run in runs_of(plan)),
            key=lambda run: run.number,
        )

    def evaluations(self) -> Iterator[tuple[TaskPlan, Run]]:
        """Yield each task with each run that it evaluates."""
        for task in self.experiment.tasks:
            for name in task.models:
                runs = runs_of(self.experiment.models[name])
                # the seed does not change the size
                yield from ((task, run) for run in (runs[:1] if task.task == SIZES else runs))

    def run_folder(self, run: Run) -> Path:
        """Return the folder of a training run."""
        return self.root / "models" / run.folder_name

    def is_trained(self, run: Run) -> bool:
        """Return whether the run has reached its last step.

        Raises:
            ValueError: The run in the folder has another recipe.
        """
        folder = self.run_folder(run)
        if (folder / RECIPE).is_file():
            before = canonical_recipe(json.loads((folder / RECIPE).read_text()))
            now = canonical_recipe(self._recipe(run))
            if before != now:
                keys = sorted(
                    key for key in before.keys() | now.keys() if before.get(key) != now.get(key)
                )
                raise ValueError(
                    f"{folder} was trained with other settings than the experiment has now "
                    f"({', '.join(keys)} differ); use another out=FOLDER, or remove {folder}"
                )
        return exported_step(folder) >= self.config(run).steps

    def is_finished(self, run: Run) -> bool:
        """Return whether every result of a trained model is on disk, its learning curve included.

        Results can be copied to another machine without the weights: then nothing is trained
        again. The name of the curve's file has the hash of the recipe, so results of another recipe
        do not count.
        """
        if run.seed is None or not self._curve_file(run).is_file():
            return False
        tasks = (task for task, each in self.evaluations() if each == run and task.task != SIZES)
        return all(self.find_result(task, run) is not None for task in tasks)

    def find_result(self, task: TaskPlan, run: Run) -> Path | None:
        """Return the result of a model on a task if it is on disk; weights are not compared."""
        if task.task == SIZES or not self.results.is_dir():
            return None
        mode, made = task.mode or run.plan.mode, task.make({})
        stem = file_name(run.name, mode, task.task, {}, {}).rpartition("-")[0]
        wanted = (run.name, mode, task.task, plain(made.options))
        for path in self.results.glob(f"{stem}-*.json"):
            found = Result.load(path)
            schemas = {"family": schema_of(found.family), "task": made.schema}
            if found.manifest.get("schemas") == schemas and wanted == (
                found.model,
                found.mode,
                found.task,
                plain(found.options),
            ):
                return path
        return None

    # ---- stages

    def _prepare(self) -> None:
        with self._lock("data"):
            for data in self.experiment.training_sets():
                prepare_data(data, self.root, trained=True)
            for data in self.experiment.evaluation_sets():
                prepare_data(data, self.root, trained=False)

    def _choose_rate(self, owner: SystemPilots) -> None:
        """Record the learning rate that the pilots chose, and remove their folders."""
        with self._lock(f"choose {owner.name}"):
            if not (self.results / owner.outcome_file).is_file():
                outcome = owner.outcome()
                outcome.save(self.results)
                tried = ", ".join(
                    f"{row.value:.4g} at {row.setting['lr']:g}" for row in outcome.rows
                )
                self.say(f"  {owner.name}: perplexity {tried}; chosen: {outcome.details['lr']:g}")
            for rate in owner.pilots.rates:
                shutil.rmtree(owner.run_folder(rate), ignore_errors=True)

    def _train(self, run: Run, ranks: Ranks) -> int | None:
        """Train a run; return the signal that stopped it, or None if it finished."""
        folder = self.run_folder(run)
        if ranks.first and not (folder / RECIPE).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(
                folder / RECIPE, json.dumps(self._recipe(run), indent=1, sort_keys=True) + "\n"
            )
        ranks.barrier()
        return start(self.config(run)).signal

    def _save_curve(self, run: Run) -> None:
        """Write the learning curve of a finished run to the results."""
        made = learning_curve(
            run.name, run.plan.mode, self.config(run), run.plan.data, self._recipe(run)
        )
        path = self.results / made.file_name
        # the run may have been trained again
        if not path.is_file() or Result.load(path).rows != made.rows:
            made.save(path.parent)
        self._curves.append(path)

    def _curve_file(self, run: Run) -> Path:
        config, recipe = self.config(run), self._recipe(run)
        return self.results / curve_file_name(
            run.name, run.plan.mode, config, run.plan.data, recipe
        )

    def _evaluate(self, task: TaskPlan, run: Run, ranks: Ranks) -> Path:
        """Evaluate a model on one task; return the file of the result."""
        if run.name not in self._loaded:
            self._loaded.clear()
            self._loaded[run.name] = loading.read(
                self._model_folder(run), ranks.device, torch.float32
            )
        model, tokenizer = self._loaded[run.name]
        first = runs_of(self.experiment.models[task.models[0]])[0]
        subject = Subject(
            model=model,
            tokenizer=tokenizer,
            name=run.name,
            mode=task.mode or run.plan.mode,
            batch=self.batch,
            ranks=ranks,
            reference=self._reference(first),
        )
        options = {}
        if "data" in task.options:
            name = str(task.options["data"])
            trained = any(data.name == name for data in self.experiment.training_sets())
            options["data"] = str(data_folder(self.root, name, trained))
        [result] = evaluate([subject], [task.make(options)], self.results, self.progress)
        return self.results / result.file_name

    def _count(self, task: TaskPlan, run: Run, ranks: Ranks) -> Path:
        result = count_sizes(
            run.plan.name,
            run.plan.mode,
            self.shape(run),
            run.plan.tokens,
            {"scale": self.experiment.scale},
            self._planned(run) if task.options.get("flops") and run.seed is not None else None,
        )
        path = self.results / result.file_name
        if ranks.first and not path.is_file():
            result.save(path.parent)
        return path

    def _report(self, files: list[Path]) -> Path:
        owners = [self._pilots_of(run) for run in self.runs()]
        names = dict.fromkeys(owner.outcome_file for owner in owners if owner is not None)
        pilots = [path for name in names if (path := self.results / name).is_file()]
        return write_report(
            [*files, *pilots],
            self.page.parent,
            title=f"{self.experiment.title} (scale {self.experiment.scale})",
            about=[self.experiment.about, self.experiment.scale_about],
            paper=self.experiment.paper,
        )

    def _lock(self, name: str) -> AbstractContextManager[None]:
        return wait_for_lock(self.root / "locks" / name)

    # ---- configurations

    def config(self, run: Run) -> TrainConfig:
        """Return the configuration of a run, at the learning rate that its pilots chose."""
        config, outcome = self._planned(run), self.outcome(run)
        return config if outcome is None else scaled(config, chosen_rate(outcome))

    def _planned(self, run: Run) -> TrainConfig:
        """Return the configuration of a run at the planned learning rate."""
        source = data_folder(self.root, run.plan.data, trained=True)
        config = replace(
            run.plan.config(str(source), str(self.run_folder(run)), run.seed or 0),
            device=self.device,
        )
        if not config.steps or not config.length:
            raise ValueError(
                f"model {run.plan.name}: `steps` and `length` are required in an experiment"
            )
        return config

    def outcome(self, run: Run) -> Result | None:
        """Return the outcome of the pilots that choose the run's rate, if there is one yet."""
        owner = self._pilots_of(run)
        if owner is None or not (self.results / owner.outcome_file).is_file():
            return None
        return Result.load(self.results / owner.outcome_file)

    def _pilots_of(self, run: Run) -> SystemPilots | None:
        """Return the pilots that choose the run's rate: its own system's, or another's."""
        pilots, name = self.experiment.pilots, run.plan.pilots or run.plan.name
        if pilots is None or run.seed is None or name == NO_PILOTS:
            return None
        first = runs_of(self.experiment.models[name])[0]
        if not data_folder(self.root, first.plan.data, trained=True).exists():  # a dry run
            return None
        config = self._planned(first)
        recipe = self._recipe_of(config, first)
        return SystemPilots(name, first.plan.mode, config, recipe, pilots, self.root / "pilots")

    def _recipe(self, run: Run) -> dict[str, Any]:
        """Return everything that decides the weights, except the code."""
        return self._recipe_of(self.config(run), run)

    def _recipe_of(self, config: TrainConfig, run: Run) -> dict[str, Any]:
        values = config.to_dict()
        folder = data_folder(self.root, run.plan.data, trained=True)
        recipe = {key: values[key] for key in RECIPE_KEYS}
        recipe["data"] = PreparedData.open(folder).manifest.fingerprint
        if config.init:
            recipe["init"] = _weights_of(config.init)
        reading = {key: values["data"][key] for key in READING}
        # recipes of runs at the defaults never had this key
        if reading != {key: getattr(DataConfig, key) for key in READING}:
            recipe["reading"] = reading
        return recipe

    def shape(self, run: Run) -> ModelConfig:
        """Return the configuration of the run's model."""
        if run.seed is not None:
            return self._planned(run).model_config(self.experiment.vocabulary_of(run.plan))
        if not run.plan.family:  # a folder that the user named
            return load_model(loading.find_folder(run.plan.published)).config
        kind = find_family(run.plan.family).config_class
        preset = next(name for name in PAPER_PRESETS if name in kind.presets)
        return kind.preset(preset, vocab_size=self.experiment.vocab_size)

    def _model_folder(self, run: Run) -> Path:
        if run.seed is None:
            return loading.find_folder(run.plan.published)
        return self.run_folder(run) / "model"

    def _reference(self, run: Run) -> Tokenizer:
        """Return the tokenizer of a model; that of its data, as it may not be trained yet."""
        if run.seed is None:
            return tokenizer_of_model(self._model_folder(run))
        return tokenizer_of_data(data_folder(self.root, run.plan.data, trained=True))


def _is_remote(where: str) -> bool:
    """Return whether this is a hub id, which a dry run does not look up."""
    local = Path(where).exists() or Path(where).parent.is_dir()
    return not local and loading.HUB_ID.fullmatch(where) is not None


@cache
def _weights_of(init: str) -> str:
    """Return a hash of the weights that a run starts from."""
    return weights_hash(load_model(loading.find_folder(init)))
