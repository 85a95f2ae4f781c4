"""Tracformer: fill blanks in sequences and compute the exact probability of each fill.

    import tracformer

    lm = tracformer.load("stories")
    lm.infill("Once upon a time [[3-8]] lived in a wood.")[0].text
    lm.score("Once upon a time [[a fox]] lived in a wood.").log_prob

These names are the public API: other modules may change without notice. Each name is imported on
first use, so `import tracformer` is fast and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracformer.baselines import register as register_model
    from tracformer.client import Client
    from tracformer.data.prepare import prepare
    from tracformer.data.tokenizer import Tokenizer
    from tracformer.evaluation.result_files import Result
    from tracformer.evaluation.task import Task, evaluate, register_task
    from tracformer.generation.decode import fill
    from tracformer.generation.engine import Engine
    from tracformer.generation.language_model import LanguageModel, load
    from tracformer.generation.orders import (
        Ancestral,
        ByConfidence,
        GivenOrder,
        LeftToRight,
        RandomOrder,
    )
    from tracformer.generation.request_options import InfillOptions, Sampler
    from tracformer.generation.results import Infilled, Marginal, Sampled, Scored, Token
    from tracformer.model.batch import Batch
    from tracformer.model.config import TracformerConfig
    from tracformer.model.tracformer import Tracformer
    from tracformer.training.start import start as train
    from tracformer.training.train_config import TrainConfig

__version__ = "0.1.0.dev0"
__all__ = [
    "Ancestral",
    "Batch",
    "ByConfidence",
    "Client",
    "Engine",
    "GivenOrder",
    "InfillOptions",
    "Infilled",
    "LanguageModel",
    "LeftToRight",
    "Marginal",
    "RandomOrder",
    "Result",
    "Sampled",
    "Sampler",
    "Scored",
    "Task",
    "Token",
    "Tokenizer",
    "Tracformer",
    "TracformerConfig",
    "TrainConfig",
    "evaluate",
    "fill",
    "load",
    "prepare",
    "register_model",
    "register_task",
    "train",
]

_HOMES = {
    "Batch": "model.batch",
    "Client": "client",
    "Engine": "generation.engine",
    "InfillOptions": "generation.request_options",
    "LanguageModel": "generation.language_model",
    "Result": "evaluation.result_files",
    "Sampler": "generation.request_options",
    "Task": "evaluation.task",
    "Tokenizer": "data.tokenizer",
    "Tracformer": "model.tracformer",
    "TracformerConfig": "model.config",
    "TrainConfig": "training.train_config",
    "evaluate": "evaluation.task",
    "fill": "generation.decode",
    "load": "generation.language_model",
    "prepare": "data.prepare",
    "register_model": "baselines:register",
    "register_task": "evaluation.task",
    "train": "training.start:start",
    **dict.fromkeys(
        ("Ancestral", "ByConfidence", "GivenOrder", "LeftToRight", "RandomOrder"),
        "generation.orders",
    ),
    **dict.fromkeys(("Infilled", "Marginal", "Sampled", "Scored", "Token"), "generation.results"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    found = getattr(importlib.import_module(f"tracformer.{module}"), attribute or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names and the module's own."""
    return sorted({*globals(), *__all__})
