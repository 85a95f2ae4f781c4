"""Run an experiment from nothing to its report.

How long an experiment takes, from the tokens that a model trains on in a second of one core.

Run an experiment from nothing to its report: data, pilots, training, evaluation, the page.

Everything lies under OUT/SCALE, and each stage leaves files by which the next call knows that it is
done:

    data/NAME                    prepared data sets; data/held-out/NAME: only evaluated on
    pilots/NAME-seedN-xRATE-...  short runs that choose learning rates; removed once they have
    models/NAME-seedN            a run of `tracformer train`, with `recipe.json`: what it was told
    results/*.json               one file a model and task, a learning curve, a system's pilots
    locks/                       what some process is working on
    report/EXPERIMENT/           index.html and its tables and pictures

Experiments at one scale share models and results. The same command goes on after an interruption,
also in the middle of a training run. Several processes may run the same command, or other
experiments of the same scale, at once: each takes the next pilot, training run or evaluation that
no other process holds. A model is evaluated as soon as it is trained.

What `tracformer reproduce` would do, what it costs, and what is done already, in words.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tracformer import loading
from tracformer.baselines import find_family, load_model, schema_of
from tracformer.data import PreparedData, Tokenizer, load_tokenizer
from tracformer.distributed import Ranks, join_ranks
from tracformer.evaluation.provenance import weights_hash
from tracformer.evaluation.result_files import Result, file_name, plain
from tracformer.evaluation.runner import evaluate
from tracformer.evaluation.task import Progress, Subject
from tracformer.files import write_atomically
from tracformer.model.config import ModelConfig
from tracformer.report import write_report
from tracformer.reproduce.experiment import (
    NO_PILOTS,
    READING,
    SIZES,
    Experiment,
    ModelPlan,
    TaskPlan,
    data_folder,
    prepare_data,
    require_there,
)
from tracformer.reproduce.jobs import Job, held_alone, work_off
from tracformer.reproduce.pilots import (
    PilotsOf,
    chosen_rate,
    count_sizes,
    curve_file_name,
    learning_curve,
    scaled,
)
from tracformer.training.log import read_log
from tracformer.training.loop import exported_step
from tracformer.training.start import start
from tracformer.training.train_config import DataConfig, TrainConfig, canonical_recipe

HOUR = 3600.0


def measured_pace(run: Path) -> float | None:
    """Return the tokens that a run trained on per second of processor time; None
    before its first validation.
    """
    if not (run / "train.json").is_file() or not (run / "log.jsonl").is_file():
        return None
    evaluated = [record for record in read_log(run / "log.jsonl") if record.get("cpu_seconds")]
    if not evaluated:
        return None
    config, last = json.loads((run / "train.json").read_text()), evaluated[-1]
    return float(last["step"] * config["batch"] * config["length"] / last["cpu_seconds"])


def core_hours(work: Iterable[tuple[str, float]], paces: Mapping[str, float]) -> float | None:
    """Return the core-hours of training models on so many tokens; None if no pace is known.

    A model of unknown pace is counted at the mean of the known ones.

    Args:
        work: Pairs of a model and the tokens it is to be trained on.
        paces: Tokens per second and core, by model.

    >>> core_hours([("a", 3.6e6), ("b", 3.6e6)], {"a": 1000.0})
    2.0
    """
    if not paces:
        return None
    mean = len(paces) / sum(1 / pace for pace in paces.values())  # by time per token
    return sum(tokens / paces.get(model, mean) for model, tokens in work) / HOUR


def tokens(count: float) -> str:
    """
    >>> tokens(24.6e6), tokens(295e9), tokens(384)
    ('24.6M tokens', '295B tokens', '384 tokens')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter} tokens"
    return f"{count:.0f} tokens"


def duration(seconds: float) -> str:
    """
    >>> duration(40), duration(600), duration(9000)
    ('40 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


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
    _loaded: dict[str, Any] = field(default_factory=dict)  # the model that was evaluated last
    _curves: list[Path] = field(default_factory=list)
    # results by their place among `evaluations`
    _files: dict[int, Path] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.out / self.experiment.scale

    @property
    def page(self) -> Path:
        return self.root / "report" / self.experiment.name / "index.html"

    def run(self) -> int:
        """Return 0, or 128 + the signal that stopped it; then the same call goes on."""
        self.check()
        # one group for all stages: a second one could not be formed
        with join_ranks(self.device) as ranks:
            if ranks.first:
                self._prepare()
            ranks.barrier()
            signal = work_off(self.jobs(ranks), self.root / "locks", ranks, self._begin)
            if signal is not None:
                return 128 + signal
            for place, (task, run) in enumerate(self.evaluations()):
                if task.task == SIZES:
                    self._files[place] = self._count(task, run, ranks)
            if ranks.first:
                files = [self._files[place] for place in sorted(self._files)]
                with self._alone("report"):
                    self.say(f"report: {self._report([*files, *self._curves])}")
            ranks.barrier()
        return 0

    def _begin(self, job: Job, left: Sequence[Job]) -> None:
        """Say what is done next and how much training is left, for all processes together."""
        training = [(each.model, each.tokens) for each in left if each.tokens]
        hours = core_hours(training, self.paces()) if training else None
        about = f"; about {hours:.1f} core-hours of training left" if hours is not None else ""
        trains = f": {tokens(job.tokens)}" if job.tokens else ""
        self.say(f"[{len(left)} left] {job.name}{trains}{about}")

    def jobs(self, ranks: Ranks) -> list[Job]:
        """Return all work: of each run the pilots of its system, its training, its evaluation."""
        jobs: dict[str, Job] = {}
        for run in self.runs():
            if (owner := self._pilots_of(run)) is not None:
                for job in (self._pilot_job(owner, rate) for rate in owner.pilots.rates):
                    jobs.setdefault(job.name, job)
            if run.seed is not None:
                jobs[f"train {run.name}"] = self._train_job(run, ranks)
            jobs[f"evaluate {run.name}"] = self._evaluate_job(run, ranks)
        return list(jobs.values())

    def _pilot_job(self, owner: PilotsOf, rate: float) -> Job:
        def done() -> bool:
            return owner.is_flown(rate) or (self.root / "results" / owner.outcome_file).is_file()

        return Job(
            name=f"pilot {owner.name} x{rate:g}",
            done=done,
            ready=lambda: True,
            do=lambda: owner.fly(rate, start),
            model=owner.name,
            tokens=owner.pilots.tokens(owner.config),
        )

    def _train_job(self, run: Run, ranks: Ranks) -> Job:
        owner = self._pilots_of(run)

        def ready() -> bool:
            if owner is None or (self.root / "results" / owner.outcome_file).is_file():
                return True
            return all(owner.is_flown(rate) for rate in owner.pilots.rates)

        def do() -> int | None:
            if owner is not None and ranks.first:
                self._choose(owner)
            ranks.barrier()
            return self._train(run, ranks)

        return Job(
            f"train {run.name}",
            lambda: self.is_trained(run) or self.is_finished(run),
            ready,
            do,
            run.plan.name,
            run.plan.tokens,
        )

    def _evaluate_job(self, run: Run, ranks: Ranks) -> Job:
        asked = [
            (place, task)
            for place, (task, one) in enumerate(self.evaluations())
            if one == run and task.task != SIZES
        ]
        # whether this process has gone through the tasks; results that are there are read
        finished: list[bool] = []

        def do() -> int | None:
            if run.seed is not None and not self.is_trained(run):
                files = [path for _, task in asked if (path := find_answer(self, task, run))]
                self._files.update(zip((place for place, _ in asked), files, strict=True))
                self._curves.append(self._curve_file(run))
            else:
                if run.seed is not None and ranks.first:
                    self._save_curve(run)
                for place, task in asked:
                    self._files[place] = self._ask(task, run, ranks)
            finished.append(True)
            return None

        return Job(
            f"evaluate {run.name}",
            lambda: bool(finished),
            lambda: run.seed is None or self.is_trained(run) or self.is_finished(run),
            do,
        )

    def check(self, network: bool = True) -> None:
        """What would be found wrong after training is found before it: tasks, modes, lengths, and
        weights that should be there.
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
                f"task {task.task!r} asks in mode {' or '.join(made.modes)}, and {run.plan.name} "
                f"is to answer in mode {mode!r}"
            )
        # its shape is that of weights that are not read here
        if run.seed is None or self._planned(run).init:
            return
        shape = self.shape(run)
        if mode not in shape.modes:
            raise ValueError(
                f"{run.plan.name} is to answer in mode {mode!r}; it is trained for: "
                f"{', '.join(shape.modes)}"
            )
        # the windows; models of its tokeniser read them as they are
        cuts = self.experiment.models[task.models[0]]
        if run.plan.data == cuts.data and made.options.get("length", 0) > shape.max_length:
            raise ValueError(
                f"task {task.task!r}: length is {made.options['length']}; {run.plan.name} takes at "
                f"most {shape.max_length} tokens"
            )

    # ---- what there is

    def runs(self) -> list[Run]:
        """Every run whose weights some task asks for; the first seed of each model, then the
        second: all models can soon be compared.
        """
        return sorted(
            (run for plan in self.experiment.trained() for run in runs_of(plan)),
            key=lambda run: run.number,
        )

    def run_folder(self, run: Run) -> Path:
        return self.root / "models" / run.folder_name

    def is_trained(self, run: Run) -> bool:
        """Did the run come to its last step, and was it told the same?

        Another recipe in its folder is an error.
        """
        folder = self.run_folder(run)
        if (folder / RECIPE).is_file():
            told = canonical_recipe(json.loads((folder / RECIPE).read_text()))
            now = canonical_recipe(self._recipe(run))
            if told != now:
                keys = sorted(
                    key for key in told.keys() | now.keys() if told.get(key) != now.get(key)
                )
                raise ValueError(
                    f"{folder} was trained otherwise than the experiment says now "
                    f"({', '.join(keys)} differ); "
                    f"use another out=FOLDER, or remove {folder}"
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
        asked = (task for task, one in self.evaluations() if one == run and task.task != SIZES)
        return all(find_answer(self, task, run) is not None for task in asked)

    # ---- stages

    def _prepare(self) -> None:
        with self._alone("data"):
            for data in self.experiment.learnt_from():
                prepare_data(data, self.root, trained=True)
            for data in self.experiment.only_read():
                prepare_data(data, self.root, trained=False)

    def _choose(self, owner: PilotsOf) -> None:
        """Record the rate that the pilots of a system chose, and remove their folders."""
        with self._alone(f"choose {owner.name}"):
            if not (self.root / "results" / owner.outcome_file).is_file():
                outcome = owner.outcome()
                outcome.save(self.root / "results")
                tried = ", ".join(
                    f"{row.value:.4g} at {row.setting['lr']:g}" for row in outcome.rows
                )
                self.say(f"  {owner.name}: perplexity {tried}; {outcome.details['lr']:g} is taken")
            for rate in owner.pilots.rates:
                shutil.rmtree(owner.run_folder(rate), ignore_errors=True)

    def _train(self, run: Run, ranks: Ranks) -> int | None:
        """Train a run; return the signal that stopped it, or None if it was finished."""
        folder = self.run_folder(run)
        if ranks.first and not (folder / RECIPE).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(
                folder / RECIPE, json.dumps(self._recipe(run), indent=1, sort_keys=True) + "\n"
            )
        ranks.barrier()
        return start(self.config(run)).signal

    def _save_curve(self, run: Run) -> None:
        """Write the learning curve of a finished run to the results, where it is not there."""
        made = learning_curve(
            run.name, run.plan.mode, self.config(run), run.plan.data, self._recipe(run)
        )
        path = self.root / "results" / made.file_name
        # the run may have been trained again
        if not path.is_file() or Result.load(path).rows != made.rows:
            made.save(path.parent)
        self._curves.append(path)

    def _curve_file(self, run: Run) -> Path:
        recipe = self._recipe(run)
        name = curve_file_name(run.name, run.plan.mode, self.config(run), run.plan.data, recipe)
        return self.root / "results" / name

    def _ask(self, task: TaskPlan, run: Run, ranks: Ranks) -> Path:
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
        options = (
            {}
            if "data" not in task.options
            else {"data": str(self._data(str(task.options["data"])))}
        )
        (result,) = evaluate([subject], [task.make(options)], self.root / "results", self.progress)
        return self.root / "results" / result.file_name

    def _count(self, task: TaskPlan, run: Run, ranks: Ranks) -> Path:
        result = count_sizes(
            run.plan.name,
            run.plan.mode,
            self.shape(run),
            run.plan.tokens,
            {"scale": self.experiment.scale},
            self._planned(run) if task.options.get("flops") and run.seed is not None else None,
        )
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

    def _alone(self, name: str) -> AbstractContextManager[None]:
        """Hold a lock of the experiment's folder, once no other process does."""
        return held_alone(self.root / "locks" / name)

    def _pilot_files(self) -> list[Path]:
        owners = [self._pilots_of(run) for run in self.runs()]
        names = dict.fromkeys(owner.outcome_file for owner in owners if owner is not None)
        return [path for name in names if (path := self.root / "results" / name).is_file()]

    def paces(self) -> dict[str, float]:
        """Return the tokens that each model trains on in a second of one core, where that is known.

        It is measured by runs and pilots under this folder, else it is what the scale says.
        """
        found = dict(self.experiment.pace)
        for run in self.runs():
            folders = [self.run_folder(run)]
            if run.seed is not None and (self.root / "pilots").is_dir():
                folders += sorted((self.root / "pilots").glob(f"{run.plan.name}-seed*"))
            measured = [pace for folder in folders if (pace := measured_pace(folder))]
            if measured:
                found[run.plan.name] = measured[0]
        return found

    def evaluations(self) -> Iterator[tuple[TaskPlan, Run]]:
        for task in self.experiment.tasks:
            for name in task.models:
                runs = runs_of(self.experiment.models[name])
                # seeds do not change a size
                yield from ((task, run) for run in (runs[:1] if task.task == SIZES else runs))

    def config(self, run: Run) -> TrainConfig:
        """Return what the run is told, at the learning rate that pilots chose, where
        there are any.
        """
        config, outcome = self._planned(run), self.outcome(run)
        return config if outcome is None else scaled(config, chosen_rate(outcome))

    def _planned(self, run: Run) -> TrainConfig:
        source = data_folder(self.root, run.plan.data, trained=True)
        config = replace(
            run.plan.config(str(source), str(self.run_folder(run)), run.seed or 0),
            device=self.device,
        )
        if not config.steps or not config.length:
            raise ValueError(f"model {run.plan.name}: an experiment must say `steps` and `length`")
        return config

    def outcome(self, run: Run) -> Result | None:
        """Return the outcome of the pilots that choose the run's rate; None where
        there is none yet.
        """
        owner = self._pilots_of(run)
        if owner is None:
            return None
        path = self.root / "results" / owner.outcome_file
        return Result.load(path) if path.is_file() else None

    def _pilots_of(self, run: Run) -> PilotsOf | None:
        """Return the pilots that choose the run's rate: its own system's, or those
        of another that it names.
        """
        pilots, name = self.experiment.pilots, run.plan.pilots or run.plan.name
        if pilots is None or run.seed is None or name == NO_PILOTS:
            return None
        first = runs_of(self.experiment.models[name])[0]
        if not data_folder(self.root, first.plan.data, trained=True).exists():  # a dry run
            return None
        config = self._planned(first)
        recipe = self._recipe_of(config, first)
        return PilotsOf(name, first.plan.mode, config, recipe, pilots, self.root / "pilots")

    def _recipe(self, run: Run) -> dict[str, Any]:
        """All that decides the weights, save the code: a finished run is recognised by it."""
        return self._recipe_of(self.config(run), run)

    def _recipe_of(self, config: TrainConfig, run: Run) -> dict[str, Any]:
        values = config.to_dict()
        folder = data_folder(self.root, run.plan.data, trained=True)
        told = (
            "model",
            "objective",
            "contexts",
            "optimizer",
            "steps",
            "batch",
            "length",
            "seed",
            "ema",
            "precision",
        )
        recipe = {
            **{key: values[key] for key in told},
            "data": PreparedData.open(folder).manifest.fingerprint,
        }
        if config.init:
            recipe["init"] = _weights_of(config.init)
        reading = {key: values["data"][key] for key in READING}
        # recipes of runs at the defaults never had this key
        if reading != {key: getattr(DataConfig, key) for key in READING}:
            recipe["reading"] = reading
        return recipe

    def shape(self, run: Run) -> ModelConfig:
        if run.seed is not None:
            return self._planned(run).model_config(self.experiment.vocabulary_of(run.plan))
        if not run.plan.family:  # a folder that the user named
            return load_model(loading.find_folder(run.plan.published)).config
        kind = find_family(run.plan.family).config_class
        return kind.preset(
            next(name for name in PAPER_PRESETS if name in kind.presets),
            vocab_size=self.experiment.vocab_size,
        )

    def _model_folder(self, run: Run) -> Path:
        return (
            loading.find_folder(run.plan.published)
            if run.seed is None
            else self.run_folder(run) / "model"
        )

    def _reference(self, run: Run) -> Tokenizer:
        """Return the tokeniser of a model that may not be trained yet: then that of its data."""
        if run.seed is None:
            return _tokenizer(self._model_folder(run))
        return _prepared_tokenizer(data_folder(self.root, run.plan.data, trained=True))

    def _data(self, name: str) -> Path:
        return data_folder(
            self.root,
            name,
            trained=any(data.name == name for data in self.experiment.learnt_from()),
        )


def runs_of(plan: ModelPlan) -> list[Run]:
    return [Run(plan, None)] if plan.published else [Run(plan, seed) for seed in plan.seeds]


def _is_remote(where: str) -> bool:
    """Is it an id of the hub, which a dry run does not look up?"""
    return (
        loading.HUB_ID.fullmatch(where) is not None
        and not Path(where).exists()
        and not Path(where).parent.is_dir()
    )


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


@cache
def _prepared_tokenizer(folder: Path) -> Tokenizer:
    return PreparedData.open(folder).tokenizer


Training = list[tuple[str, float]]  # models, and the tokens they are to be trained on
Paces = dict[str, float]


def summary(experiment: Experiment) -> str:
    """Return what the experiment costs from nothing: tokens, and core-hours where
    paces are known.
    """
    work = experiment.training()
    if not work:
        return "nothing is trained"
    hours = core_hours(work, experiment.pace)
    return tokens(sum(count for _, count in work)) + _hours(hours)


def plan(work: Reproduction) -> Iterator[str]:
    """The plan in words, for a dry run: nothing is read from the network and nothing is written."""
    experiment = work.experiment
    work.check(network=False)
    yield f"{experiment.name} at scale {experiment.scale}, in {work.root}: {experiment.title}"
    for name in dict.fromkeys(name for task in experiment.tasks for name in task.left_out):
        yield f"  left out  {name}: scale {experiment.scale} has none"
    for trained, sets in ((True, experiment.learnt_from()), (False, experiment.only_read())):
        for data in sets:
            ready = data_folder(work.root, data.name, trained).exists()
            if not ready:
                require_there(data)
            state = "ready" if ready else f"from {data.source!r}"
            yield f"  data      {data.name}: {state}" + ("" if trained else ", to evaluate on")
    yield from _sizes(work)
    paces = work.paces()
    left: Training = []
    piloted: set[str] = set()
    for run in work.runs():
        if run.seed is None:
            yield f"  model     {run.name}: published, {run.plan.published}"
            continue
        owner = experiment.piloted_by(run.plan)
        if experiment.pilots is not None and run.plan.pilots != "none" and owner not in piloted:
            piloted.add(owner)
            yield _pilots(work, run, owner, left, paces)
        known = data_folder(work.root, run.plan.data, trained=True).exists()
        config = work.config(run)
        size = (
            f"{config.steps} steps of {config.batch} x {config.length}, {tokens(run.plan.tokens)}"
        )
        if known and (work.is_trained(run) or work.is_finished(run)):
            state = "trained"
        else:
            left.append((run.plan.name, run.plan.tokens))
            state = (
                f"{size}{_hours(core_hours(left[-1:], paces) if run.plan.name in paces else None)}"
            )
        yield (
            f"  train     {run.name} ({config.model.get('family', 'tracformer')}, "
            f"{config.objective}): {state}"
        )
    for task, run in work.evaluations():
        options = ", ".join(f"{key}={value}" for key, value in task.options.items())
        done = "" if find_answer(work, task, run) is None else "; done"
        yield (
            f"  evaluate  {run.name} ({task.mode or run.plan.mode}): {task.task} {options}".rstrip()
            + done
        )
    yield f"  report    {work.page}"
    total = sum(count for _, count in left)
    hours = core_hours(left, paces) if left else None
    yield (
        f"to train: {tokens(total)}{_hours(hours)}; results that are there already are not "
        "computed again"
    )


def _sizes(work: Reproduction) -> Iterator[str]:
    counted = {
        task_model
        for task in work.experiment.tasks
        if task.options.get("flops")
        for task_model in task.models
    }
    sizes = []
    for run in work.runs():
        if run.seed is None or run.number:
            continue
        training = work.config(run) if run.plan.name in counted else None
        result = count_sizes(run.plan.name, run.plan.mode, work.shape(run), training=training)
        sizes.append(result.find("parameters_without_embeddings").value)
        told = f"{sizes[-1] / 1e6:.2f}M parameters without embeddings"
        if training is not None:
            told += f", {result.find('flops_per_token').value / 1e6:.2f} MFLOP per trained token"
        yield f"  size      {run.plan.name}: {told}"
    sizes = [size for size in sizes if size]  # frequencies have no network
    if len(sizes) > 1:
        yield (
            f"  sizes     the largest is {max(sizes) / min(sizes) - 1:.1%} larger than the "
            "smallest, without embeddings"
        )


def _pilots(work: Reproduction, run: Run, owner: str, left: Training, paces: Paces) -> str:
    """Return the line of a system's pilots; what they are to train on joins `left`."""
    pilots = work.experiment.pilots
    assert pilots is not None
    if (outcome := work.outcome(run)) is not None:
        lr, factor = outcome.details["lr"], chosen_rate(outcome)
        return f"  pilots    {owner}: {factor:g} times the planned rates is taken, lr {lr:g}"
    config = work.experiment.models[owner].config("-", "-", 0)
    cost = [(owner, pilots.tokens(config)) for _ in pilots.rates]
    left += cost
    rates = ", ".join(f"{rate:g}" for rate in pilots.rates)
    each = f"{pilots.steps(config)} steps each, {tokens(sum(count for _, count in cost))}"
    hours = _hours(core_hours(cost, paces) if owner in paces else None)
    return f"  pilots    {owner}: {rates} times the planned rates, {each}{hours}"


def find_answer(work: Reproduction, task: TaskPlan, run: Run) -> Path | None:
    """Return the result of this model and question; its weights are not compared."""
    if task.task == SIZES or not (work.root / "results").is_dir():
        return None
    mode = task.mode or run.plan.mode
    stem = file_name(run.name, mode, task.task, {}, {}).rpartition("-")[0]
    made = task.make({})
    wanted = plain(made.options)
    for path in (work.root / "results").glob(f"{stem}-*.json"):
        found = Result.load(path)
        if found.manifest.get("schemas") != {
            "family": schema_of(found.family),
            "task": made.schema,
        }:
            continue
        if (found.model, found.mode, found.task) == (run.name, mode, task.task) and plain(
            found.options
        ) == wanted:
            return path
    return None


def _hours(hours: float | None) -> str:
    return "" if hours is None else f", about {hours:.1f} core-hours"
