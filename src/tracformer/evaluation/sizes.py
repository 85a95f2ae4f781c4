"""How large a model is (Tables 3 and 7): counted from its configuration, without weights or memory for them."""

import datetime
from collections.abc import Mapping
from typing import Any

import torch

from tracformer.evaluation.manifest import code_version, config_hash, describe_model
from tracformer.evaluation.results import Result, Row, digest
from tracformer.families import find_family
from tracformer.model.config import ModelConfig

TASK = "sizes"


def count_sizes(name: str, mode: str, config: ModelConfig, trained_tokens: float = 0.0, options: Mapping[str, Any] | None = None) -> Result:
    """Parameters with and without embeddings, and the tokens seen in training where they are known."""
    with torch.device("meta"):  # counted, not allocated
        sizes = describe_model(find_family(config.model_type).model_class(config))
    rows = [Row(metric, {}, float(sizes[metric])) for metric in ("parameters", "parameters_without_embeddings")]
    if trained_tokens:
        rows.append(Row("trained_tokens", {}, float(trained_tokens)))
    manifest = {
        "hashes": {"config": config_hash(config), "trained_tokens": digest(float(trained_tokens))},
        "model": sizes,
        **code_version(),
        "torch": torch.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return Result(name, config.model_type, mode, TASK, dict(options or {}), tuple(rows), {}, manifest)
