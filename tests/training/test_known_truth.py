"""Trained on a source whose conditionals are known, the model finds them."""

import pytest
import torch
from benchmarks.hmm import CONTEXTS, excess, small_chain, small_model, train


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["car", "ac"])
def test_within_two_percent_of_the_true_cross_entropy(mode: str) -> None:
    torch.manual_seed(0)
    chain = small_chain()
    model = small_model(chain, mode)
    train(model, chain, mode)
    ours, true = excess(model, chain, mode, CONTEXTS)
    assert true * 0.99 < ours < true * 1.02
