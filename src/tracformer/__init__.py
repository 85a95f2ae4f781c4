"""Tracformer: fill holes in sequences, and say exactly how probable the filling is."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracformer.model import Tracformer, TracformerConfig

__version__ = "0.1.0.dev0"
__all__ = ["Tracformer", "TracformerConfig"]


def __getattr__(name: str) -> Any:
    """Names load on first use: importing the package stays quick until a model is wanted."""
    if name in __all__:
        from tracformer import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
