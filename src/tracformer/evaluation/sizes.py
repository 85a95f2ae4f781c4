"""How large a model is (Tables 3 and 7): counted from its configuration, without weights or memory for them."""

import datetime
from collections.abc import Mapping
from typing import Any

import torch

from tracformer.bench.flops import flops_per_token
from tracformer.evaluation.manifest import code_version, config_hash, describe_model
from tracformer.evaluation.results import Result, Row, digest
from tracformer.families import find_family
from tracformer.model.config import ModelConfig
from tracformer.training.config import TrainConfig

TASK = "sizes"


def count_sizes(
    name: str,
    mode: str,
    config: ModelConfig,
    trained_tokens: float = 0.0,
    options: Mapping[str, Any] | None = None,
    training: TrainConfig | None = None,
) -> Result:
    """Count a model from its configuration.

    Args:
        name: Name of the model.
        mode: Mode in which it is asked.
        config: Its shape.
        trained_tokens: Tokens seen in training; 0: unknown.
        options: Options of the result.
        training: Also count the operations of a trained token, as `bench.flops` does, by running a small
            batch of this training.
    """
    with torch.device("meta"):  # counted, not allocated
        sizes = describe_model(find_family(config.model_type).model_class(config))
    rows = [Row(metric, {}, float(sizes[metric])) for metric in ("parameters", "parameters_without_embeddings")]
    hashes = {"config": config_hash(config), "trained_tokens": digest(float(trained_tokens))}
    if trained_tokens:
        rows.append(Row("trained_tokens", {}, float(trained_tokens)))
    if training is not None:
        asked = (training.objective, training.contexts, training.length)
        hashes["training"] = digest(asked)
        rows.append(Row("flops_per_token", {}, flops_per_token(config, *asked)))
    manifest = {
        "hashes": hashes,
        "model": sizes,
        **code_version(),
        "torch": torch.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return Result(name, config.model_type, mode, TASK, dict(options or {}), tuple(rows), {}, manifest)
