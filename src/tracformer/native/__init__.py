"""C++ for the CPU, compiled at first use: the attentions, and products with few rows. `torch.ops.tracformer.*` once it is loaded."""

from tracformer.native.build import available, ready

__all__ = ["available", "ready"]
