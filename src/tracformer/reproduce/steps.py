"""The steps of an experiment: worked through by several processes, or listed by a dry run.

Each process takes the first step that is ready, not done and not held by another process. A step is
held by a lock that the operating system releases when the process ends for any reason; the next
process then continues what a killed process had begun.

`plan` lists the steps without doing them. Costs are training tokens, and core-hours if the scale
knows the pace of a system (tokens per second and core, as measured by `benchmarks/study_pace.py`).

`prepare_data` finds a data set of an experiment, by name on the hub or in the
user's files, and prepares it once under its folder. A set that models are trained on is prepared
completely. A set that models are only evaluated on is read as validation text; its tokenizer does
not matter then, because every model reads the text in its own tokens.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tracformer import loading
from tracformer.data import (
    DataSource,
    PreparedData,
    Tokenizer,
    is_made_from,
    load_tokenizer,
    named_sets,
    open_source,
    open_sources,
    require_tokenizer,
)
from tracformer.data.hub_sources import HUB_PREFIX
from tracformer.data.prepare import prepare
from tracformer.data.shards import MANIFEST_FILE
from tracformer.data.sources import reading_of, split_files
from tracformer.devices import Ranks
from tracformer.evaluation.exact_sources import PREFIX as EXACT
from tracformer.evaluation.exact_sources import parse_exact
from tracformer.files import lock_folder
from tracformer.reproduce.experiment import NO_PILOTS, DataSet, Experiment, Run
from tracformer.reproduce.pilots import chosen_rate, count_sizes
from tracformer.training.loop import TrainingError

if TYPE_CHECKING:
    from tracformer.reproduce import Reproduction


def data_folder(root: Path, name: str, trained: bool) -> Path:
    """Return the folder of a prepared set; its last name is the set's name in results."""
    return root / ("data" if trained else "data/held-out") / name


def prepare_data(data: DataSet, root: Path, trained: bool) -> PreparedData:
    """Return a prepared data set; it is prepared if its folder does not exist.

    Args:
        data: The data set.
        root: Folder of the scale.
        trained: Whether a model is trained on it.

    Raises:
        FileNotFoundError: The data is not there; the message says how to get it.
        ValueError: The folder was made from other data, or with another tokenizer.
    """
    folder = data_folder(root, data.name, trained)
    if data.source.startswith(EXACT):
        return _sample_source(folder, data)
    place = Path(data.source)
    tokenizer = "byte" if data.tokenizer.startswith("bpe:") and not trained else data.tokenizer
    if (place / MANIFEST_FILE).is_file():
        return _link(folder, place.resolve(), data.name)
    try:
        sources = split_sources(data, trained)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. {_how_to_get(data, folder)}") from error
    if not (folder / MANIFEST_FILE).is_file():
        try:
            return prepare(folder, sources, tokenizer)
        except (ValueError, ImportError) as error:
            if _is_named(data):
                raise type(error)(f"{error}. {_how_to_get(data, folder)}") from error
            raise
    prepared = PreparedData.open(folder)
    if not is_made_from(prepared, sources):
        raise ValueError(
            f"{folder} was prepared from other data than {data.source}; use another out=FOLDER, or "
            f"remove {folder}"
        )
    require_tokenizer(tokenizer, prepared, f"the tokenizer of {data.name}")
    return prepared


def _sample_source(folder: Path, data: DataSet) -> PreparedData:
    """Return sequences sampled from a source of the exact benchmark."""
    drawn = parse_exact(data.source)
    if not (folder / MANIFEST_FILE).is_file():
        return prepare(folder, drawn.splits(), drawn.tokenizer)
    prepared = PreparedData.open(folder)
    sizes = {name: split.documents for name, split in prepared.manifest.splits.items()}
    if prepared.tokenizer.fingerprint != drawn.tokenizer.fingerprint or sizes != drawn.sizes:
        raise ValueError(
            f"{folder} contains other sequences than {data.source}; use another out=FOLDER, or "
            f"remove {folder}"
        )
    return prepared


def require_files(data: DataSet) -> None:
    """Raise FileNotFoundError if a place that the user named does not exist.

    Sets that would be downloaded are not looked up.
    """
    if data.source.startswith(EXACT):
        return
    place = data.folder if _is_named(data) else data.source
    if place and not Path(place).exists():
        raise FileNotFoundError(f"data set {data.name!r}: {place} does not exist")


def split_sources(data: DataSet, trained: bool) -> dict[str, DataSource]:
    """Return the texts of a data set by split; only `validation` unless it is trained on."""
    if _is_named(data):
        splits = open_sources(data.source, folder=data.folder or None)
    else:
        options = reading_of(data.name, data.documents, data.detokenize)
        place = Path(data.source)
        files = split_files(place) if place.is_dir() else {}
        splits = {name: open_source(each, **options) for name, each in files.items()} or {
            "train": open_source(data.source, **options)
        }
    if trained:
        if "train" not in splits:
            raise FileNotFoundError(
                f"data set {data.name!r} is needed for training, but {data.source} has no file "
                "called train"
            )
        return splits
    first = next(name for name in ("validation", "test", "train") if name in splits)
    return {"validation": splits[first]}


def _is_named(data: DataSet) -> bool:
    return bool(named_sets(data.source)) or data.source.startswith(HUB_PREFIX)


def _link(folder: Path, place: Path, name: str) -> PreparedData:
    """Link a folder that was prepared elsewhere to the data set's own name."""
    if folder.is_symlink() or folder.exists():
        if folder.resolve() != place:
            raise ValueError(
                f"{folder} already holds other data for {name} than {place}; use another "
                f"out=FOLDER, or remove {folder}"
            )
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(place, target_is_directory=True)
    return PreparedData.open(folder)


def _how_to_get(data: DataSet, folder: Path) -> str:
    fetched = data.source if _is_named(data) else data.name
    return (
        f"Data set {data.name!r} was looked for in {folder} and as {data.source!r}. Prepare it on "
        f"a machine with a network, `tracformer prepare {fetched} --out FOLDER`, and pass "
        f"data.{data.name}=FOLDER; or pass text files: data.{data.name}=FILE, or a folder with "
        "files called train, valid and test; or data=FOLDER with the files of all sets"
    )


@cache
def tokenizer_of_model(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model folder."""
    try:
        return load_tokenizer(folder)
    except (FileNotFoundError, ValueError):  # published weights without one in their folder
        return loading.read(folder, "cpu", torch.float32)[1]


@cache
def tokenizer_of_data(folder: Path) -> Tokenizer:
    """Return the tokenizer of a prepared folder."""
    return PreparedData.open(folder).tokenizer


WAIT = 2.0  # seconds between attempts to take a lock
ENDED, BUSY = -1, -2


@dataclass(frozen=True)
class Step:
    """A piece of work.

    Args:
        name: Unique name, also of its lock.
        done: Whether nothing is left to do, on disk or in this process.
        ready: Whether everything that it needs exists.
        do: Does the work; returns the signal that stopped it, or None.
    """

    name: str
    done: Callable[[], bool]
    ready: Callable[[], bool]
    do: Callable[[], int | None]


def run_steps(
    steps: Sequence[Step],
    locks: Path,
    ranks: Ranks,
    say: Callable[[str], None] = lambda text: None,
) -> int | None:
    """Do all steps, in order as far as they are ready, sharing them with other processes.

    A step that fails is reported and skipped; once the others are done, the first failure is
    raised. The ranks of one process group do every step together.

    Args:
        steps: The steps, the same in every process.
        locks: Folder of the locks.
        ranks: Ranks of this process group.
        say: Prints a line before each step, with the number of steps that are not done.

    Returns:
        The signal that stopped a step, or None if all are done.
    """
    left = list(steps)
    failures: list[Exception] = []
    while True:
        with ExitStack() as lock:
            number = _take(left, steps, locks, lock) if ranks.first else 0
            number = int(ranks.total([float(number)])[0])  # other ranks add 0
            if number == ENDED:
                break
            if number == BUSY:
                time.sleep(WAIT)
                continue
            step = steps[number]
            say(f"[{len(left)} left] {step.name}")
            try:
                signal = step.do()
            except Exception as error:
                if ranks.world > 1:  # the other ranks would wait for this one
                    raise
                if isinstance(error, (OSError, ValueError, ImportError, TrainingError)):
                    print(f"{step.name} failed: {error}", file=sys.stderr)
                else:  # a bug of ours; --debug would show the first one only
                    traceback.print_exc(file=sys.stderr)
                failures.append(error)
                signal = None
            if step in left:
                left.remove(step)
            if signal is not None:
                return signal
    if failures:
        raise failures[0]
    return None


@contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """Hold a lock; wait while another process holds it."""
    while True:
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(folder))
            except BlockingIOError:
                time.sleep(WAIT)
                continue
            yield
            return


def _take(left: list[Step], steps: Sequence[Step], locks: Path, lock: ExitStack) -> int:
    """Return the number of the next step, held in `lock`; remove done steps from `left`."""
    busy = False
    for step in list(left):
        if step.done():
            left.remove(step)
            continue
        if not step.ready():
            continue
        with ExitStack() as trial:
            try:
                trial.enter_context(lock_folder(locks / step.name))
            except BlockingIOError:
                busy = True
                continue
            if step.done():  # another process finished it meanwhile
                left.remove(step)
                continue
            lock.enter_context(trial.pop_all())
            return steps.index(step)
    return BUSY if busy else ENDED


HOUR = 3600.0

Training = list[tuple[str, float]]  # models, and the tokens they are to be trained on


def core_hours(work: Iterable[tuple[str, float]], paces: Mapping[str, float]) -> float | None:
    """Return the core-hours of training; None if no pace is known.

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


def cost(work: Training, paces: Mapping[str, float]) -> str:
    """Return the cost of training models.

    >>> cost([("a", 24.6e6), ("a", 295e9)], {}), cost([("a", 7.2e6)], {"a": 1000.0})
    ('295B tokens', '7.2M tokens, about 2.0 core-hours')
    """
    tokens = sum(count for _, count in work)
    text = f"{tokens:.0f} tokens"
    for size, letter in ((1e3, "k"), (1e6, "M"), (1e9, "B")):
        if tokens >= size:
            text = f"{tokens / size:.3g}{letter} tokens"
    hours = core_hours(work, paces)
    return text if hours is None else f"{text}, about {hours:.1f} core-hours"


def summary(experiment: Experiment) -> str:
    """Return what the experiment costs from the beginning."""
    work = experiment.training()
    return cost(work, experiment.pace) if work else "nothing is trained"


def describe_plan(work: "Reproduction") -> Iterator[str]:
    """Yield the lines of a dry run; nothing is downloaded or written."""
    experiment = work.experiment
    work.check(network=False)
    yield f"{experiment.name} at scale {experiment.scale}, in {work.root}: {experiment.title}"
    for name in dict.fromkeys(name for task in experiment.tasks for name in task.left_out):
        yield f"  left out  {name}: scale {experiment.scale} does not have it"
    for trained, sets in (
        (True, experiment.training_sets()),
        (False, experiment.evaluation_sets()),
    ):
        for data in sets:
            ready = data_folder(work.root, data.name, trained).exists()
            if not ready:
                require_files(data)
            state = "ready" if ready else f"from {data.source!r}"
            yield f"  data      {data.name}: {state}" + ("" if trained else ", evaluation only")
    yield from _sizes(work)
    left: Training = []
    piloted: set[str] = set()
    for run in work.runs():
        if run.seed is None:
            yield f"  model     {run.name}: published, {run.plan.published}"
            continue
        owner = experiment.pilots_owner(run.plan)
        if experiment.pilots is not None and run.plan.pilots != NO_PILOTS and owner not in piloted:
            piloted.add(owner)
            yield _pilots(work, run, owner, left)
        known = data_folder(work.root, run.plan.data, trained=True).exists()
        config = work.config(run)
        state = "trained"
        if not (known and (work.is_trained(run) or work.is_finished(run))):
            left.append((run.plan.name, run.plan.tokens))
            state = (
                f"{config.steps} steps of {config.batch} x {config.length}, "
                f"{cost(left[-1:], _pace(experiment, run.plan.name))}"
            )
        yield (
            f"  train     {run.name} ({config.model.get('family', 'tracformer')}, "
            f"{config.objective}): {state}"
        )
    for task, run in work.evaluations():
        options = ", ".join(f"{key}={value}" for key, value in task.options.items())
        done = "" if work.find_result(task, run) is None else "; done"
        yield (
            f"  evaluate  {run.name} ({task.mode or run.plan.mode}): {task.task} {options}".rstrip()
            + done
        )
    yield f"  report    {work.page}"
    yield (
        f"to train: {cost(left, experiment.pace if left else {})}; existing results are not "
        "computed again"
    )


def _pace(experiment: Experiment, model: str) -> dict[str, float]:
    return {model: experiment.pace[model]} if model in experiment.pace else {}


def _sizes(work: "Reproduction") -> Iterator[str]:
    """Yield the parameters of each model, and its operations per token if a task counts them."""
    counted = {
        model
        for task in work.experiment.tasks
        if task.options.get("flops")
        for model in task.models
    }
    sizes = []
    for run in work.runs():
        if run.seed is None or run.number:
            continue
        training = work.config(run) if run.plan.name in counted else None
        result = count_sizes(run.plan.name, run.plan.mode, work.shape(run), training=training)
        sizes.append(result.find("parameters_without_embeddings").value)
        text = f"{sizes[-1] / 1e6:.2f}M parameters without embeddings"
        if training is not None:
            text += f", {result.find('flops_per_token').value / 1e6:.2f} MFLOP per trained token"
        yield f"  size      {run.plan.name}: {text}"
    sizes = [size for size in sizes if size]  # `frequencies` has no network
    if len(sizes) > 1:
        yield (
            f"  sizes     the largest is {max(sizes) / min(sizes) - 1:.1%} larger than the "
            "smallest, without embeddings"
        )


def _pilots(work: "Reproduction", run: Run, owner: str, left: Training) -> str:
    """Return the line of a system's pilots; add their training to `left`."""
    pilots = work.experiment.pilots
    assert pilots is not None
    if (outcome := work.outcome(run)) is not None:
        lr, factor = outcome.details["lr"], chosen_rate(outcome)
        return f"  pilots    {owner}: {factor:g} times the planned rates was chosen, lr {lr:g}"
    config = work.experiment.models[owner].config("-", "-", 0)
    training = [(owner, pilots.tokens(config)) for _ in pilots.rates]
    left += training
    rates = ", ".join(f"{rate:g}" for rate in pilots.rates)
    each = f"{pilots.steps(config)} steps each, {cost(training, _pace(work.experiment, owner))}"
    return f"  pilots    {owner}: {rates} times the planned rates, {each}"
