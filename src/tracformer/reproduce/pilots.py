"""Learning-rate pilots, learning curves and model sizes, as results like others.

- Pilots: short runs at multiples of a system's planned learning rates choose one of them. A pilot
  is a complete run, warm-up and decay included, over a share of the run's steps; it scales the
  rates of AdamW and of Muon alike. All systems have the same multiples, share and data, so that
  none is tuned more than another. The lowest held-out loss at the end wins, in the mode that the
  system is evaluated in and under the first of `eval_contexts`, the training distribution.
- Learning curves: the validations that a run logged.
- Sizes (Tables 3 and 7): parameters counted from the configuration, without allocating them.
"""

import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tracformer.baselines import find_family
from tracformer.evaluation.bootstrap import perplexity_of
from tracformer.evaluation.flops import flops_per_token
from tracformer.evaluation.result_files import (
    Result,
    ResultRow,
    code_version,
    config_hash,
    describe_model,
    digest,
    file_name,
)
from tracformer.files import write_atomically
from tracformer.model.config import ModelConfig
from tracformer.training.log import perplexities, read_log
from tracformer.training.loop import NotFiniteError, TrainingOutcome
from tracformer.training.train_config import TrainConfig, canonical_recipe

TASK = "pilots"
FINISHED = "pilot.json"  # in a pilot's folder: its loss


@dataclass(frozen=True)
class Pilots:
    """Which rates are tried, and for how long.

    Args:
        rates: Factors of the planned learning rates.
        share: Share of the run's steps that each pilot takes.
    """

    rates: tuple[float, ...]
    share: float

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0 or not 0 < self.share <= 1:
            raise ValueError(
                f"pilots: rates are {self.rates} and share is {self.share}; rates must be positive "
                "factors, and share must be in (0, 1]"
            )

    def steps(self, config: TrainConfig) -> int:
        """Return the steps of one pilot."""
        return max(1, round(self.share * config.steps))

    def tokens(self, config: TrainConfig) -> float:
        """Return the tokens that one pilot is trained on."""
        return float(self.steps(config) * config.batch * config.length)

    def config(self, config: TrainConfig, rate: float, run: Path) -> TrainConfig:
        """Return the configuration of the pilot at this rate, validated once, at its end."""
        steps = self.steps(config)
        return dataclasses.replace(
            scaled(config, rate),
            steps=steps,
            eval_every=steps,
            eval_contexts=config.eval_contexts[:1],
            run=str(run),
        )


def scaled(config: TrainConfig, rate: float) -> TrainConfig:
    """Return the configuration with every learning rate multiplied by `rate`."""
    old = config.optimizer
    matrix_lr = old.matrix_lr if old.matrix_lr == -1.0 else old.matrix_lr * rate  # -1 follows lr
    lr, final_lr = old.lr * rate, old.final_lr * rate
    new = dataclasses.replace(old, lr=lr, final_lr=final_lr, matrix_lr=matrix_lr)
    return dataclasses.replace(config, optimizer=new)


@dataclass(frozen=True)
class SystemPilots:
    """The pilots of one system.

    Args:
        name: Name of the system.
        mode: Mode whose validation loss decides.
        config: Configuration of its first run, at the planned rates.
        recipe: What decides the weights of that run.
        pilots: Rates and share.
        folder: Folder of all pilots.
    """

    name: str
    mode: str
    config: TrainConfig
    recipe: Mapping[str, Any]
    pilots: Pilots
    folder: Path

    @property
    def judged(self) -> dict[str, Any]:
        """Return everything that an outcome depends on; seeds share it."""
        recipe = {key: value for key, value in self.recipe.items() if key != "seed"}
        validation = {"eval_contexts": self._contexts, "eval_sequences": self.config.eval_sequences}
        return {**recipe, **validation}

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the result."""
        return {"rates": list(self.pilots.rates), "share": self.pilots.share}

    @property
    def outcome_file(self) -> str:
        """Return the file name of the outcome; it has the hash of the recipe."""
        hashes = {"recipe": recipe_hash(self.judged)}
        return file_name(self.name, self.mode, TASK, self.options, {"hashes": hashes})

    def run_folder(self, rate: float) -> Path:
        """Return the folder of one pilot; it has the hash of the recipe."""
        recipe = recipe_hash({**self.judged, "share": self.pilots.share})
        return self.folder / f"{self.name}-seed{self.config.seed}-x{rate:g}-{recipe[:12]}"

    def is_finished(self, rate: float) -> bool:
        """Return whether the pilot at this rate has recorded its loss."""
        return (self.run_folder(rate) / FINISHED).is_file()

    def run_pilot(self, rate: float, train: Callable[[TrainConfig], TrainingOutcome]) -> int | None:
        """Train one pilot and record its loss; return the signal that stopped it, if one did."""
        run = self.run_folder(rate)
        try:
            signal = train(self.pilots.config(self.config, rate, run)).signal
            if signal is not None:
                return signal
            loss = self._loss(run)
        except NotFiniteError:  # the rate is too high
            loss = math.inf
        write_atomically(
            run / FINISHED, json.dumps({"nll": None if math.isinf(loss) else loss}) + "\n"
        )
        return None

    def outcome(self) -> Result:
        """Return the result of all pilots once they are finished.

        Raises:
            ValueError: Every pilot diverged.
        """
        losses: dict[float, float] = {}
        for rate in self.pilots.rates:
            loss = json.loads((self.run_folder(rate) / FINISHED).read_text())["nll"]
            losses[rate] = math.inf if loss is None else float(loss)
        if min(losses.values()) == math.inf:
            factors = ", ".join(f"{rate:g}" for rate in losses)
            raise ValueError(
                f"{self.name} diverged at every learning rate of its pilots ({factors} times the "
                "planned one); plan lower rates"
            )
        chosen = min(losses, key=lambda rate: losses[rate])
        kind = kind_of(self.config, self.mode)
        tried = {
            self.config.optimizer.lr * rate: perplexity_of(nll) for rate, nll in losses.items()
        }
        rows = [
            ResultRow("perplexity", {"lr": lr}, value, kind=kind) for lr, value in tried.items()
        ]
        best = scaled(self.config, chosen).optimizer
        details = {
            "chosen": chosen,
            "lr": best.lr,
            "matrix_lr": best.rate_of_matrices,
            "nll": losses,
            "seed": self.config.seed,
        }
        manifest = training_manifest(self.judged)
        family = family_of(self.config)
        return Result(
            self.name, family, self.mode, TASK, self.options, tuple(rows), details, manifest
        )

    @property
    def _contexts(self) -> str:
        return "empty" if self.mode == "ar" else self.config.eval_contexts[0]

    def _loss(self, run: Path) -> float:
        """Return the held-out loss of the last validation; infinite where the perplexity is."""
        wanted = (self.mode, self._contexts)
        values = [
            value for _, mode, contexts, value in validations(run) if (mode, contexts) == wanted
        ]
        if not values:
            raise ValueError(
                f"{run} was never validated in mode {self.mode}, so its learning rates cannot be "
                "compared; the data needs a validation split, and the mode must be one that the "
                "model is trained for"
            )
        return math.log(values[-1]) if math.isfinite(values[-1]) else math.inf


def chosen_rate(outcome: Result) -> float:
    """Return the factor of the planned learning rates that won."""
    return float(outcome.details["chosen"])


CURVE = "training"


def learning_curve(
    name: str, mode: str, config: TrainConfig, data: str, recipe: Mapping[str, Any]
) -> Result:
    """Return the held-out perplexity of a finished run at each of its validations, in one mode.

    `details` has the training tokens and the processor time of training at these steps.
    """
    run = Path(config.run)
    rows = [
        ResultRow(
            "perplexity", {"contexts": contexts, "step": step}, value, kind=kind_of(config, mode)
        )
        for step, validated, contexts, value in validations(run)
        if validated == mode
    ]
    records = [record for record in read_log(run / "log.jsonl") if record["kind"] == "eval"]
    details = {
        "tokens": {
            record["step"]: record["step"] * config.batch * config.length for record in records
        },
        "cpu_seconds": {
            record["step"]: record["cpu_seconds"] for record in records if "cpu_seconds" in record
        },
    }
    options = _options(config, data)
    return Result(
        name,
        family_of(config),
        mode,
        CURVE,
        options,
        tuple(rows),
        details,
        training_manifest(recipe),
    )


def curve_file_name(
    name: str, mode: str, config: TrainConfig, data: str, recipe: Mapping[str, Any]
) -> str:
    """Return the file name of a `learning_curve`; the run need not exist."""
    hashes = {"recipe": recipe_hash(recipe)}
    return file_name(name, mode, CURVE, _options(config, data), {"hashes": hashes})


def validations(run: Path) -> Iterator[tuple[int, str, str, float]]:
    """Yield (step, mode, contexts, perplexity) of each validation in a run's log."""
    for record in read_log(run / "log.jsonl"):
        if record["kind"] == "eval":
            for key, value in perplexities(record).items():
                mode, contexts = key.split(" ", 1)
                yield int(record["step"]), mode, contexts, float(value)


def training_manifest(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of a result that comes from training itself."""
    return {
        "hashes": {"recipe": recipe_hash(recipe)},
        "recipe": dict(recipe),
        **code_version(),
        "torch": torch.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def recipe_hash(recipe: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a recipe; it does not change when a key is renamed or added."""
    return digest(canonical_recipe(recipe))


def family_of(config: TrainConfig) -> str:
    """Return the name of the family that a configuration trains."""
    return str(config.model.get("family", "tracformer"))


def kind_of(config: TrainConfig, mode: str) -> str:
    """Return what the model computes in a mode: an exact likelihood, a marginal or a bound."""
    return find_family(family_of(config)).model_class.answers[mode]


def _options(config: TrainConfig, data: str) -> dict[str, Any]:
    return {"data": data, "length": config.length, "sequences": config.eval_sequences}


SIZE_COUNT = "sizes"


def count_sizes(
    name: str,
    mode: str,
    config: ModelConfig,
    trained_tokens: float = 0.0,
    options: Mapping[str, Any] | None = None,
    training: TrainConfig | None = None,
) -> Result:
    """Return the sizes of a model, counted from its configuration.

    Args:
        name: Name of the model.
        mode: Mode in which it is evaluated.
        config: Its configuration.
        trained_tokens: Training tokens; 0: unknown.
        options: Options of the result.
        training: If given, also count the operations per trained token by running a small batch of
            this training.
    """
    with torch.device("meta"):  # counted, not allocated
        sizes = describe_model(find_family(config.model_type).model_class(config))
    rows = [
        ResultRow(metric, {}, float(sizes[metric]))
        for metric in ("parameters", "parameters_without_embeddings")
    ]
    hashes = {"config": config_hash(config), "trained_tokens": digest(float(trained_tokens))}
    if trained_tokens:
        rows.append(ResultRow("trained_tokens", {}, float(trained_tokens)))
    if training is not None:
        setting = (training.objective, training.contexts, training.length)
        hashes["training"] = digest(setting)
        rows.append(ResultRow("flops_per_token", {}, flops_per_token(config, *setting)))
    manifest = {
        "hashes": hashes,
        "model": sizes,
        **code_version(),
        "torch": torch.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return Result(
        name, config.model_type, mode, SIZE_COUNT, dict(options or {}), tuple(rows), {}, manifest
    )
