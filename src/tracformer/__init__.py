"""Tracformer: fill holes in sequences, and say exactly how probable the filling is."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracformer.client import Client
    from tracformer.generation.language_model import LanguageModel, load
    from tracformer.model import Batch, Tracformer, TracformerConfig

__version__ = "0.1.0.dev0"
__all__ = ["Batch", "Client", "LanguageModel", "Tracformer", "TracformerConfig", "load"]

_HOMES = {
    "Batch": "tracformer.model",
    "Client": "tracformer.client",
    "LanguageModel": "tracformer.generation.language_model",
    "Tracformer": "tracformer.model",
    "TracformerConfig": "tracformer.model",
    "load": "tracformer.generation.language_model",
}


def __getattr__(name: str) -> Any:
    """Names load on first use: importing the package stays quick until a model is wanted."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
