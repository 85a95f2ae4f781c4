"""Several contexts of one sequence, side by side in a batch, are encoded once and answered as if
each were alone.
"""

import pytest
import torch

from tests.helpers import random_batch, small_model
from tracformer import Tracformer
from tracformer.model.batch import Batch


@pytest.mark.parametrize("attention", ["reference", "blocked"])
@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_neighbours_with_the_same_text_change_nothing(attention: str, mode: str) -> None:
    model = small_model(attention)
    tokens, _, lengths = random_batch(model, 4, 13)
    number = torch.tensor([0, 0, 0, 1, 2, 2, 3, 0])
    context = torch.rand(len(number), 13, generator=torch.Generator().manual_seed(3)) < 0.5
    together = model.log_prob(Batch(tokens[number], context, lengths[number]), mode)
    alone = torch.cat(
        [
            model.log_prob(Batch(tokens[[i]], context[[row]], lengths[[i]]), mode)
            for row, i in enumerate(number.tolist())
        ]
    )
    assert torch.allclose(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["reference", "blocked"])
def test_the_same_beginning_of_a_longer_text_is_another_text(attention: str) -> None:
    model = small_model(attention)
    tokens, context = (
        torch.zeros(2, 5, dtype=torch.long),
        torch.tensor([[True, True, False, False, False]] * 2),
    )
    # what lies behind the first and what is masked in the second read alike
    lengths = torch.tensor([3, 5])
    together = model.log_prob(Batch(tokens, context, lengths), "ac")
    alone = [
        model.log_prob(Batch(tokens[[i], :length], context[[i], :length]), "ac")[0]
        for i, length in enumerate((3, 5))
    ]
    for row, own in zip(together, alone, strict=True):
        assert torch.allclose(row[: len(own)], own, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mode", "rows"), [("car", 2 + 6), ("ac", 12), ("ar", 2)])
def test_the_shared_text_is_encoded_once(
    mode: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    encoded: list[int] = []
    encode = Tracformer._encode

    def counted(self: Tracformer, readings: torch.Tensor, *rest: object) -> list[torch.Tensor]:
        encoded.append(len(readings))
        return encode(self, readings, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Tracformer, "_encode", counted)
    tokens, context, _ = random_batch(model, 6, 9)
    context[:, 0] = torch.arange(6) % 2 == 0  # no two neighbours are given the same
    model.log_prob(Batch(tokens[torch.tensor([0, 0, 0, 1, 1, 1])], context), mode)
    assert encoded == [rows]
