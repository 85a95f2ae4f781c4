"""Learning curves: what a run's validations said on its way, as a result like others."""

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tracformer.evaluation.manifest import code_version
from tracformer.evaluation.results import Result, Row, digest
from tracformer.families import find_family
from tracformer.training.config import TrainConfig, canonical_recipe
from tracformer.training.log import perplexities, read_log

TASK = "training"


def learning_curve(name: str, mode: str, config: TrainConfig, data: str, recipe: Mapping[str, Any]) -> Result:
    """Held-out perplexity at each validation of a finished run, asked in one mode.

    `details` hold the trained tokens and the processor time of training at each of these steps.
    """
    run = Path(config.run)
    rows = [
        Row("perplexity", {"contexts": contexts, "step": step}, value, kind=kind_of(config, mode))
        for step, asked, contexts, value in validations(run)
        if asked == mode
    ]
    records = [record for record in read_log(run / "log.jsonl") if record["kind"] == "eval"]
    details = {
        "tokens": {record["step"]: record["step"] * config.batch * config.length for record in records},
        "cpu_seconds": {record["step"]: record["cpu_seconds"] for record in records if "cpu_seconds" in record},
    }
    options = _options(config, data)
    return Result(name, family_of(config), mode, TASK, options, tuple(rows), details, training_manifest(recipe))


def validations(run: Path) -> Iterator[tuple[int, str, str, float]]:
    """(step, mode, contexts, perplexity), as the run's log has them."""
    for record in read_log(run / "log.jsonl"):
        if record["kind"] == "eval":
            for asked, value in perplexities(record).items():
                mode, contexts = asked.split(" ", 1)
                yield int(record["step"]), mode, contexts, float(value)


def training_manifest(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Where a figure comes from that training itself gave."""
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
    return str(config.model.get("family", "tracformer"))


def kind_of(config: TrainConfig, mode: str) -> str:
    """Of the model's answers in this mode."""
    return find_family(family_of(config)).model_class.answers[mode]


def _options(config: TrainConfig, data: str) -> dict[str, Any]:
    return {"data": data, "length": config.length, "sequences": config.eval_sequences}
