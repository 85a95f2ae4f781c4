"""Learning curves: what a run's validations said on its way, as a result like others."""

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import tracformer
from tracformer.evaluation.results import Result, Row, digest
from tracformer.families import find_family
from tracformer.training.config import TrainConfig
from tracformer.training.log import read_log

TASK = "training"


def learning_curve(name: str, mode: str, config: TrainConfig, data: str, recipe: Mapping[str, Any]) -> Result:
    """Held-out perplexity at each validation of a finished run, asked in one mode."""
    rows = [
        Row("perplexity", {"contexts": contexts, "step": step}, value, kind=kind_of(config, mode))
        for step, asked, contexts, value in validations(Path(config.run))
        if asked == mode
    ]
    return Result(name, family_of(config), mode, TASK, _options(config, data), tuple(rows), {}, training_manifest(recipe))


def validations(run: Path) -> Iterator[tuple[int, str, str, float]]:
    """(step, mode, contexts, perplexity), as the run's log has them."""
    for record in read_log(run / "log.jsonl"):
        if record["kind"] == "eval":
            for asked, value in record.items():
                if asked not in ("kind", "step", "time"):
                    mode, contexts = asked.split(" ", 1)
                    yield int(record["step"]), mode, contexts, float(value)


def training_manifest(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Where a figure comes from that training itself gave."""
    return {
        "hashes": {"recipe": digest(recipe)},
        "recipe": dict(recipe),
        "code": tracformer.__version__,
        "torch": torch.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def family_of(config: TrainConfig) -> str:
    return str(config.model.get("family", "tracformer"))


def kind_of(config: TrainConfig, mode: str) -> str:
    """Of the model's answers in this mode."""
    return find_family(family_of(config)).model_class.answers[mode]


def _options(config: TrainConfig, data: str) -> dict[str, Any]:
    return {"data": data, "length": config.length, "sequences": config.eval_sequences}
