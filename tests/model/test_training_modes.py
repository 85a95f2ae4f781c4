"""What training switches on changes memory or precision, not the answer."""

import pytest
import torch

from tests.helpers import random_batch, small_model
from tracformer.model import MODES, Tracformer
from tracformer.model.batch import Batch


def gradients(model: Tracformer, mode: str) -> list[torch.Tensor]:
    tokens, context, lengths = random_batch(model, 3, 16)
    return list(
        torch.autograd.grad(
            model.loss(Batch(tokens, context, lengths), mode), list(model.parameters())
        )
    )


@pytest.mark.parametrize("n_max", [3, 6])  # 6: a key off the grid in the last layer
@pytest.mark.parametrize("mode", MODES)
def test_recomputed_activations_give_the_same_gradients(mode: str, n_max: int) -> None:
    model = small_model(n_max=n_max).train()
    expected = gradients(model, mode)
    model.checkpoint_activations = True
    for a, b in zip(gradients(model, mode), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_stays_close(mode: str) -> None:
    model = small_model(d_model=32).float()
    tokens, context, lengths = random_batch(model, 3, 16)
    exact = model.loss(Batch(tokens, context, lengths), mode)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.loss(Batch(tokens, context, lengths), mode)
    rough.backward()
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
