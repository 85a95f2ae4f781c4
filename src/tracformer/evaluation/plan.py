"""What `tracformer reproduce` would do, in words."""

from collections.abc import Iterator

from tracformer.evaluation.experiment_data import data_folder, require_there
from tracformer.evaluation.pace import tokens
from tracformer.evaluation.pilots import chosen_rate
from tracformer.evaluation.reproduce import Reproduction
from tracformer.evaluation.sizes import count_sizes


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
    left = 0.0
    sizes: list[float] = []
    for run in work.runs():
        if run.seed is None:
            yield f"  model     {run.name}: published, {run.plan.published}"
            continue
        known = data_folder(work.root, run.plan.data, trained=True).exists()
        config = work.config(run)
        if run.number == 0:
            sizes.append(count_sizes(run.plan.name, run.plan.mode, work.shape(run)).find("parameters_without_embeddings").value)
            rate = work.outcome(run) if known and experiment.pilots else None
            yield f"  size      {run.plan.name}: {sizes[-1] / 1e6:.2f}M parameters without embeddings"
            if experiment.pilots is not None and rate is None:
                pilots = experiment.pilots
                left += pilots.tokens(config)
                yield f"  pilots    {run.plan.name}: rates {', '.join(f'{each:g}' for each in pilots.rates)}, {pilots.steps} steps each"
            elif rate is not None:
                yield f"  pilots    {run.plan.name}: rate {chosen_rate(rate):g}"
        done = known and work.is_trained(run)
        left += 0.0 if done else run.plan.tokens
        state = "trained" if done else f"{config.steps} steps of {config.batch} x {config.length}, {tokens(run.plan.tokens)}"
        yield f"  train     {run.name} ({config.model.get('family', 'tracformer')}, {config.objective}): {state}"
    sizes = [size for size in sizes if size]  # frequencies have no network
    if len(sizes) > 1:
        yield f"  sizes     the largest is {max(sizes) / min(sizes) - 1:.1%} larger than the smallest, without embeddings"
    for task, run in work.evaluations():
        options = ", ".join(f"{key}={value}" for key, value in task.options.items())
        yield f"  evaluate  {run.name} ({task.mode or run.plan.mode}): {task.task} {options}".rstrip()
    yield f"  report    {work.page}"
    yield f"to train: {tokens(left)}; results that are there already are not computed again"
