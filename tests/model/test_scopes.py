"""Scopes proved by gradients: which inputs does a feature of encoder layer l really depend on?"""

import pytest
import torch

from tests.helpers import small_model
from tracformer.attention import Layout, implementations
from tracformer.geometry import scope_size
from tracformer.model.blocks import rotary_angles


@pytest.mark.parametrize("attention", implementations())
# 4, 6 and 7 have steps that do not divide some reach
@pytest.mark.parametrize("n_max", [2, 3, 4, 6, 7, 16])
def test_layer_l_depends_on_exactly_2_to_the_l_inputs(n_max: int, attention: str) -> None:
    T = 40
    model = small_model(attention, max_length=64, n_layer=6, n_max=n_max)
    layout = Layout(torch.tensor([T]), T, readings=2, rows=torch.arange(T))
    angles = rotary_angles(
        layout.positions, model.config.head_size, model.config.rotary_base, torch.float64
    )
    inputs = model.embedding(torch.arange(T).remainder(7).expand(2, T)).detach().requires_grad_()
    x = inputs
    for layer_number, layer in enumerate(model.encoder, start=1):
        x = layer(x, angles, layout, model.attention)
        for t in (0, 1, 7, 20, T - 1):
            # in its own reading order each row looks back; the mirrored row's back is the text's
            # future
            for reading in (0, 1):
                (gradient,) = torch.autograd.grad(
                    x[reading, t].square().sum(), inputs, retain_graph=True
                )
                touched = {(r, i) for r, i in gradient.abs().sum(-1).nonzero().tolist()}
                assert touched == {
                    (reading, i) for i in range(max(0, t - scope_size(layer_number) + 1), t + 1)
                }
