"""Trained on a source whose conditionals are known, the model finds them."""

import pytest
import torch
from benchmarks.hmm import CONTEXTS, SYSTEMS, excess, measure, small_chain, small_model, train


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["car", "ac"])
def test_within_two_percent_of_the_true_cross_entropy(mode: str) -> None:
    torch.manual_seed(0)
    chain = small_chain()
    model = small_model(chain, f"tracformer-{mode}")
    train(model, chain, mode)
    ours, true = excess(model, chain, mode, CONTEXTS)
    assert true * 0.99 < ours < true * 1.02


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_can_be_measured(name: str) -> None:
    """A short run of each: figures are finite, and no answer with a suffix to see beats the truth by more than the noise of the sample."""
    result = measure(name, small_chain(), steps=2, sequences=40, strategies=(CONTEXTS,), draws=2)
    for asked in result["modes"].values():
        for figures in asked["contexts"].values():
            assert 0.97 * figures["truth"] < figures["model"] < 10.0
