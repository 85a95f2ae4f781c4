"""Frequencies of single tokens: nothing that is given changes them, and training finds them."""

import pytest
import torch

from tracformer.baselines.frequencies import Frequencies, FrequenciesConfig
from tracformer.model.batch import Batch


def model(**changes: int) -> Frequencies:
    return Frequencies(FrequenciesConfig(**{"vocab_size": 5, "max_length": 12, **changes}))


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_what_is_given_changes_nothing(mode: str) -> None:
    frequencies = model()
    with torch.no_grad():
        frequencies.scores.normal_()
    tokens = torch.randint(5, (3, 12))
    whole = frequencies.log_prob(Batch(tokens, torch.zeros(3, 12, dtype=torch.bool)), mode)
    context = torch.rand(3, 12) < 0.5
    assert torch.equal(
        frequencies.log_prob(Batch(tokens, context), mode), whole.masked_fill(context, 0.0)
    )


def test_the_least_loss_is_at_the_frequencies() -> None:
    frequencies = model().double()
    counts = torch.tensor([1.0, 3.0, 8.0, 20.0, 400.0], dtype=torch.float64)
    tokens = torch.arange(5).repeat_interleave(counts.long()).view(-1, 12)
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    optimizer = torch.optim.LBFGS(
        frequencies.parameters(), max_iter=200, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = frequencies.loss(Batch(tokens, nothing), "ac")
        value.backward()
        return value

    optimizer.step(loss)
    found = frequencies(Batch(tokens[:1], nothing[:1]), "ac")[0, 0].softmax(0)
    torch.testing.assert_close(found, counts / counts.sum(), rtol=1e-3, atol=0.0)
