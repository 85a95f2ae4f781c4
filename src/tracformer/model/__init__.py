"""The model: configuration, encoders, decoder, likelihood, and its folder on disk."""

from tracformer.model.config import MODES, PRESETS, TracformerConfig
from tracformer.model.tracformer import Tracformer

__all__ = ["MODES", "PRESETS", "Tracformer", "TracformerConfig"]
