"""Small models and random batches for the tests."""

from typing import Any

import torch
from torch import Tensor

from tracformer import Tracformer, TracformerConfig


def small_model(attention: str = "blocked", seed: int = 0, **changes: Any) -> Tracformer:
    """Return a float64 model whose weights, biases and norms are large random numbers.

    Zeros or small numbers could hide errors.
    """
    values = {
        "vocab_size": 7,
        "max_length": 16,
        "n_layer": 4,
        "n_head": 2,
        "d_model": 8,
        "n_max": 3,
        **changes,
    }
    model = Tracformer(TracformerConfig(**values), attention).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.35
            parameter.copy_(1.0 + noise if "norm" in name and name.endswith("weight") else noise)
    return model


def random_batch(
    model: Tracformer, batch: int, length: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a context with about half given, and lengths of which the first is full."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    context = torch.rand(batch, length, generator=generator) < torch.rand(
        batch, 1, generator=generator
    )
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    lengths[0] = length
    return tokens, context, lengths
