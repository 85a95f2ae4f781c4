"""How the given set C is drawn, and the strings that name a way to draw it."""

from tracformer.contexts.lengths import DLogistic, Geometric, LengthLaw
from tracformer.contexts.names import parse
from tracformer.contexts.strategies import (
    MIXED,
    Context,
    Empty,
    Middle,
    Mixture,
    Prefix,
    RandomRatio,
    RandomTokens,
    Ranges,
    Spans,
    Strategy,
    UniformRatio,
)
from tracformer.contexts.streams import draw_contexts, sequence_rng

__all__ = [
    "MIXED",
    "Context",
    "DLogistic",
    "Empty",
    "Geometric",
    "LengthLaw",
    "Middle",
    "Mixture",
    "Prefix",
    "RandomRatio",
    "RandomTokens",
    "Ranges",
    "Spans",
    "Strategy",
    "UniformRatio",
    "draw_contexts",
    "parse",
    "sequence_rng",
]
