"""Learning rates by pilot: every system's first run is begun at each of a few rates, and the one of lowest validation loss is gone on with.

All systems have the same rates, steps and data to choose by, so that none is tuned harder than another. A pilot is the beginning of the run
itself, warm-up and schedule included: a shorter schedule would choose rates for itself. Still the best rate of a long run is often lower
than that of its beginning. What is judged is the perplexity in the mode that the system is asked in. Outcomes are results like others,
`pilots` in the results' folder.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracformer.evaluation.bootstrap import perplexity_of
from tracformer.evaluation.curves import family_of, kind_of, recipe_hash, training_manifest, validations
from tracformer.evaluation.results import Result, Row, file_name
from tracformer.training.config import TrainConfig
from tracformer.training.loop import NotFiniteError, Outcome

TASK = "pilots"


@dataclass(frozen=True)
class Pilots:
    rates: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0 or self.steps < 1:
            raise ValueError(f"pilots are rates {self.rates} for {self.steps} steps; give positive rates and at least one step")

    def tokens(self, config: TrainConfig) -> float:
        """What they cost: all but the chosen one, which is the beginning of the run."""
        return float((len(self.rates) - 1) * self.steps * config.batch * config.length)

    def config(self, config: TrainConfig, rate: float, run: Path) -> TrainConfig:
        """The run at this rate, left off and validated after a few steps."""
        return dataclasses.replace(with_rate(config, rate), until=self.steps, run=str(run))


def with_rate(config: TrainConfig, rate: float) -> TrainConfig:
    """The configuration at another learning rate, its final one in proportion. Muon's own, if it is named, stays as it is."""
    old = config.optimizer
    return dataclasses.replace(config, optimizer=dataclasses.replace(old, lr=rate, final_lr=rate * old.final_lr / old.lr))


def outcome_file(name: str, mode: str, config: TrainConfig, recipe: Mapping[str, Any], pilots: Pilots) -> str:
    """What the file of an outcome is called: another recipe, or other contexts to judge by, another file."""
    hashes = {"recipe": recipe_hash(_judged(config, recipe))}
    return file_name(name, mode, TASK, _options(pilots), {"hashes": hashes})


def chosen_rate(outcome: Result) -> float:
    return float(outcome.details["chosen"])


def fly(
    name: str,
    mode: str,
    config: TrainConfig,
    recipe: Mapping[str, Any],
    pilots: Pilots,
    folder: Path,
    train: Callable[[TrainConfig], Outcome],
) -> Result | int:
    """The outcome; or the signal that stopped a pilot, after which the same call goes on. The runs stay where they are."""
    losses: dict[float, float] = {}
    for rate in pilots.rates:
        run = pilot_folder(folder, name, config.seed, rate, recipe_hash(_judged(config, recipe)))
        try:
            signal = train(pilots.config(config, rate, run)).signal
        except NotFiniteError:  # too high a rate
            losses[rate] = math.inf
            continue
        if signal is not None:
            return signal
        losses[rate] = _loss(run, mode)
    if min(losses.values()) == math.inf:
        raise ValueError(
            f"{name} diverged at every learning rate of its pilots ({', '.join(f'{rate:g}' for rate in losses)}); give lower ones"
        )
    chosen = min(losses, key=lambda rate: losses[rate])
    rows = [Row("perplexity", {"lr": rate}, perplexity_of(loss), kind=kind_of(config, mode)) for rate, loss in losses.items()]
    details = {"chosen": chosen, "nll": losses, "seed": config.seed}
    manifest = training_manifest(_judged(config, recipe))
    return Result(name, family_of(config), mode, TASK, _options(pilots), tuple(rows), details, manifest)


def adopt(folder: Path, name: str, seed: int, outcome: Result, run: Path) -> None:
    """The seed's pilot of the chosen rate, if it is still there, becomes the run; those of other rates are thrown away."""
    chosen = pilot_folder(folder, name, seed, chosen_rate(outcome), outcome.manifest["hashes"]["recipe"])
    if chosen.exists() and not run.exists():
        run.parent.mkdir(parents=True, exist_ok=True)
        chosen.rename(run)
    for other in folder.glob(f"{name}-seed{seed}-lr*"):
        shutil.rmtree(other, ignore_errors=True)


def pilot_folder(folder: Path, name: str, seed: int, rate: float, recipe: str) -> Path:
    """Another recipe or seed, another folder: none goes on from the pilots of another."""
    return folder / f"{name}-seed{seed}-lr{rate:g}-{recipe[:12]}"


def _loss(run: Path, mode: str) -> float:
    """Mean of log perplexity over all contexts of the last validation, asked in this mode; infinite where one is."""
    validated = [each for each in validations(run) if each[1] == mode]
    if not validated:
        raise ValueError(
            f"{run} was never validated in mode {mode}, so that its learning rate cannot be judged; "
            "give the data a validation split, and the model a mode that it is trained for"
        )
    values = [value for step, _, _, value in validated if step == validated[-1][0]]
    return sum(math.log(value) if math.isfinite(value) else math.inf for value in values) / len(values)


def _options(pilots: Pilots) -> dict[str, Any]:
    return {"rates": list(pilots.rates), "steps": pilots.steps}


def _judged(config: TrainConfig, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """All that an outcome depends on but the rates."""
    return {**_rateless(recipe), "eval_contexts": list(config.eval_contexts), "eval_sequences": config.eval_sequences}


def _rateless(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What all rates and seeds have in common. Another number of steps is another schedule, from the first step on."""
    optimizer = {key: value for key, value in recipe["optimizer"].items() if key not in ("lr", "final_lr")}
    optimizer["falls_to"] = recipe["optimizer"]["final_lr"] / recipe["optimizer"]["lr"]
    return {**{key: value for key, value in recipe.items() if key != "seed"}, "optimizer": optimizer}
