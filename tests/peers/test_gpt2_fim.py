import pytest
import torch

from tests.peers.small import random_question, small_peer
from tracformer.baselines.gpt2 import GPT2Fim
from tracformer.model.batch import Batch


def test_one_hole_is_prefix_suffix_middle() -> None:
    model = small_peer("gpt2-fim")
    assert isinstance(model, GPT2Fim)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    for first, last, reading in (
        (1, 3, [6, 1, 7, 4, 5, 8, 2]),
        (0, 2, [6, 7, 3, 4, 5, 8, 1]),
        (3, 5, [6, 1, 2, 3, 7, 8, 4]),
        (0, 5, [6, 7, 8, 1, 2, 3, 4]),
    ):
        context = (torch.arange(5) < first) | (torch.arange(5) >= last)
        assert model.reorder(tokens, context[None], torch.tensor([5]))[0].tolist() == [reading]


def test_readings_of_a_batch_are_those_of_its_rows() -> None:
    model = small_peer("gpt2-fim")
    assert isinstance(model, GPT2Fim)
    tokens, context, lengths = random_question(20, 12)
    context[1] = True  # nothing is asked of this row
    made, slots = model.reorder(tokens, context, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone, own = model.reorder(
            tokens[row : row + 1, :length], context[row : row + 1, :length], torch.tensor([length])
        )
        assert made[row, : alone.shape[1]].tolist() == alone[0].tolist()
        target = ~context[row, :length]
        assert slots[row, :length][target].tolist() == own[0][target].tolist()


def test_the_length_of_a_hole_is_not_seen_before_it_ends() -> None:
    model = small_peer("gpt2-fim")
    short, long = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1, 2, 3, 6, 6, 4, 5]])
    first = model(Batch(short, torch.tensor([[True, False, False, True, True]])), "car")[0, 1:3]
    second = model(
        Batch(long, torch.tensor([[True, False, False, False, False, True, True]])), "car"
    )[0, 1:3]
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_every_pattern_has_positions_by_default_and_too_many_holes_are_told() -> None:
    tokens = torch.zeros(1, 11, dtype=torch.int64)
    context = torch.arange(11)[None] % 2 == 1
    small_peer("gpt2-fim", max_length=11).log_prob(Batch(tokens, context), "car")
    model = small_peer("gpt2-fim", max_length=11, max_holes=5)
    with pytest.raises(
        ValueError,
        match=r"11 tokens with 6 holes takes 23 positions; this model has 21 \(max_length 11 \+ 2 max_holes 5\)",
    ):
        model.log_prob(Batch(tokens, context), "car")
    # a shorter text leaves room for its markers
    model.log_prob(Batch(tokens[:, :9], context[:, :9]), "car")
