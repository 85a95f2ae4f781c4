"""Time a few training steps of each system of an experiment, and project what all of it costs.

    OMP_NUM_THREADS=1 python benchmarks/study_pace.py stories
    OMP_NUM_THREADS=1 python benchmarks/study_pace.py own-model only=compact-car-512 --steps 200

Tokens are random, contexts and steps are those of training. Time is that of the processor, so that
a busy machine changes little. `--yaml` prints the paces as a scale's `pace:` takes them, from which
`tracformer reproduce --list` and `--dry-run` compute core-hours.
"""

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tracformer.baselines import find_family
from tracformer.devices import keep_freed_memory
from tracformer.model import ConditionalModel
from tracformer.reproduce.experiment import Experiment, ModelPlan, read_experiment
from tracformer.reproduce.steps import HOUR, core_hours
from tracformer.training.objectives import MaskSampler, group_by_mode, parse_objective
from tracformer.training.optimizer import Optimizer, build_optimizer, hidden_matrices
from tracformer.training.train_config import TrainConfig

WARM_UP = 2  # steps that are not timed


@dataclass(frozen=True)
class Timed:
    """What one system trains on in a second of one core, and the step it was timed on."""

    pace: float
    seconds: float


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", metavar="EXPERIMENT | KEY=VALUE")
    parser.add_argument("--steps", type=int, default=20, help="steps to time (default: 20)")
    parser.add_argument("--yaml", action="store_true", help="print the paces for a scale file")
    arguments = parser.parse_intermixed_args(words)
    names = [word for word in arguments.words if "=" not in word]
    changes = dict(word.split("=", 1) for word in arguments.words if "=" in word)
    scale = changes.pop("scale", "")
    keep_freed_memory()
    timed: dict[str, Timed] = {}
    for name in names:
        experiment = read_experiment(name, scale, changes)
        for model in experiment.trained():
            if model.train and model.name not in timed:
                timed[model.name] = time_steps(experiment, model, arguments.steps)
                timing = timed[model.name]
                hours = model.tokens * len(model.seeds) / timing.pace / HOUR
                cost = (
                    f"{1e3 * timing.seconds:7.0f} ms a step  {hours:5.2f} core-hours, "
                    f"{len(model.seeds)} seeds"
                )
                print(f"{model.name:<34} {timing.pace:8,.0f} tokens/s {cost}", flush=True)
        paces = {model: each.pace for model, each in timed.items()}
        total = core_hours(experiment.training(), paces)
        print(f"{name}: about {total:.1f} core-hours, pilots and all seeds included", flush=True)
    if arguments.yaml:
        print("pace:\n" + "\n".join(f"  {name}: {each.pace:.0f}" for name, each in timed.items()))


def time_steps(experiment: Experiment, plan: ModelPlan, steps: int) -> Timed:
    """Time optimizer steps of a model of the experiment."""
    config = plan.config("-", "-", 0)
    torch.manual_seed(0)
    shape = config.model_config(experiment.vocabulary_of(plan))
    model = find_family(shape.model_type).model_class(shape).train()
    matrices = hidden_matrices(model) if config.optimizer.name == "muon" else []
    optimizer = build_optimizer(model.parameters(), config.optimizer, fused=True, matrices=matrices)
    masks = MaskSampler(parse_objective(config.objective, config.contexts), config.seed)
    rng = np.random.default_rng(0)
    began = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            began = time.process_time()
        tokens = rng.integers(shape.vocab_size, size=(config.batch, config.length))
        take_step(model, optimizer, masks, config, tokens, step * config.batch)
    seconds = (time.process_time() - began) / steps
    return Timed(config.batch * config.length / seconds, seconds)


def take_step(
    model: ConditionalModel,
    optimizer: Optimizer,
    masks: MaskSampler,
    config: TrainConfig,
    tokens: NDArray[np.int64],
    number: int,
) -> None:
    """Take one step as `training.loop` does."""
    lengths = np.full(len(tokens), tokens.shape[1])
    maskings = masks.draw_all(range(number, number + len(tokens)), lengths.tolist())
    optimizer.zero_grad()
    count = sum(question.count for question in maskings)
    for group in group_by_mode(tokens, lengths, maskings, []):
        nll = model.nll(group.batch, group.mode, weights=group.weights)[0]
        (nll / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
    optimizer.step()


if __name__ == "__main__":
    main()
