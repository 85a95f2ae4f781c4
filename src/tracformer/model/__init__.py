"""The Tracformer network, the interface of every model, and batches."""

from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.config import MODES, PRESETS, ModelConfig, TracformerConfig
from tracformer.model.tracformer import Tracformer

__all__ = [
    "MODES",
    "PRESETS",
    "Batch",
    "ConditionalModel",
    "ModelConfig",
    "Tracformer",
    "TracformerConfig",
]
