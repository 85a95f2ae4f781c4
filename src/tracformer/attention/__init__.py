"""The sparse attentions: one interface, several implementations; `reference` is the definition, `native` the default."""

from tracformer.attention.layout import Layout
from tracformer.attention.registry import Attention, build_attention, implementations, register

__all__ = ["Attention", "Layout", "build_attention", "implementations", "register"]
