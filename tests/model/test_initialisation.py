"""The weights that training begins with."""

import pytest
import torch
from torch import nn

from tracformer import Tracformer, TracformerConfig
from tracformer.model import MODES
from tracformer.model.batch import Batch


def deep_model(seed: int = 0) -> Tracformer:
    """As deep as any preset, and narrow."""
    torch.manual_seed(seed)
    return Tracformer(
        TracformerConfig.preset("laptop-32k", vocab_size=50, d_model=16, n_head=2), "blocked"
    )


def gradient_norm(model: Tracformer, mode: str, length: int) -> float:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (8, length), generator=generator)
    gradients = torch.autograd.grad(
        model.loss(Batch(tokens, torch.zeros(8, length, dtype=torch.bool)), mode),
        list(model.parameters()),
    )
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


@pytest.mark.parametrize("mode", MODES)
def test_a_target_without_keys_learns_at_the_pace_of_others(mode: str) -> None:
    """Position 0 in mode `ar`, and the only position of a row in any mode."""
    model = deep_model()
    usual = gradient_norm(model, "ac", 16)
    assert 0.1 * usual < gradient_norm(model, mode, 16) < 10 * usual
    assert 0.1 * usual < gradient_norm(model, mode, 1) < 10 * usual


def test_matrices_are_drawn_before_the_one_bias() -> None:
    model = deep_model()
    torch.manual_seed(1)
    model.reset_parameters()
    torch.manual_seed(1)
    std = model.config.init_std
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            drawn = nn.init.normal_(
                torch.empty_like(parameter),
                std=std / 30**0.5 if name.endswith("out.weight") else std,
            )
            assert torch.equal(parameter, drawn)
    assert torch.equal(model.decoder[0].out.bias, nn.init.normal_(torch.empty(16), std=std))
    zero = [
        name
        for name, parameter in model.named_parameters()
        if name.endswith("bias") and not parameter.any()
    ]
    assert len(zero) == sum(name.endswith("bias") for name, _ in model.named_parameters()) - 1
