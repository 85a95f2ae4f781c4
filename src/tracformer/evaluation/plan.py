"""What `tracformer reproduce` would do, what it costs, and what is done already, in words."""

from collections.abc import Iterator

from tracformer.evaluation.experiment import SIZES, Experiment, TaskPlan
from tracformer.evaluation.experiment_data import data_folder, require_there
from tracformer.evaluation.pace import core_hours, tokens
from tracformer.evaluation.pilots import chosen_rate
from tracformer.evaluation.reproduce import Reproduction, Run
from tracformer.evaluation.results import Result, file_name, plain
from tracformer.evaluation.sizes import count_sizes
from tracformer.families import schema_of

Training = list[tuple[str, float]]  # models, and the tokens they are to be trained on
Paces = dict[str, float]


def summary(experiment: Experiment) -> str:
    """Return what the experiment costs from nothing: tokens, and core-hours where paces are known."""
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
        size = f"{config.steps} steps of {config.batch} x {config.length}, {tokens(run.plan.tokens)}"
        if known and work.is_trained(run):
            state = "trained"
        else:
            left.append((run.plan.name, run.plan.tokens))
            state = f"{size}{_hours(core_hours(left[-1:], paces) if run.plan.name in paces else None)}"
        yield f"  train     {run.name} ({config.model.get('family', 'tracformer')}, {config.objective}): {state}"
    for task, run in work.evaluations():
        options = ", ".join(f"{key}={value}" for key, value in task.options.items())
        done = "; done" if _is_answered(work, task, run) else ""
        yield f"  evaluate  {run.name} ({task.mode or run.plan.mode}): {task.task} {options}".rstrip() + done
    yield f"  report    {work.page}"
    total = sum(count for _, count in left)
    hours = core_hours(left, paces) if left else None
    yield f"to train: {tokens(total)}{_hours(hours)}; results that are there already are not computed again"


def _sizes(work: Reproduction) -> Iterator[str]:
    counted = {task_model for task in work.experiment.tasks if task.options.get("flops") for task_model in task.models}
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
        yield f"  sizes     the largest is {max(sizes) / min(sizes) - 1:.1%} larger than the smallest, without embeddings"


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


def _is_answered(work: Reproduction, task: TaskPlan, run: Run) -> bool:
    """Return whether there is a result of this model and question; its weights are not compared."""
    if task.task == SIZES or not (work.root / "results").is_dir():
        return False
    mode = task.mode or run.plan.mode
    stem = file_name(run.name, mode, task.task, {}, {}).rpartition("-")[0]
    made = task.make({})
    wanted = plain(made.options)
    for path in (work.root / "results").glob(f"{stem}-*.json"):
        found = Result.load(path)
        if found.manifest.get("schemas") != {"family": schema_of(found.family), "task": made.schema}:
            continue
        if (found.model, found.mode, found.task) == (run.name, mode, task.task) and plain(found.options) == wanted:
            return True
    return False


def _hours(hours: float | None) -> str:
    return "" if hours is None else f", about {hours:.1f} core-hours"
