import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracformer.contexts import (
    Empty,
    UniformRatio,
    draw_contexts,
    parse,
    sequence_rng,
)

STRATEGY = parse("0.3*uniform+0.7*span:p=0.5,mean=4")
LENGTHS = [30, 17, 30, 1, 24, 8, 30, 29]


@given(st.permutations(range(len(LENGTHS))), st.integers(1, len(LENGTHS)))
def test_a_stream_does_not_depend_on_batches(order: list[int], size: int) -> None:
    whole = draw_contexts(STRATEGY, LENGTHS, seed=5, indices=range(len(LENGTHS)))
    for at in range(0, len(order), size):
        batch = order[at : at + size]
        part = draw_contexts(STRATEGY, [LENGTHS[i] for i in batch], seed=5, indices=batch, width=30)
        assert np.array_equal(part, whole[batch])


def test_seeds_and_indices_differ() -> None:
    rows = {
        draw_contexts(UniformRatio(), [64], seed, [index]).tobytes()
        for seed in range(10)
        for index in range(10)
    }
    assert len(rows) == 100


def test_extreme_keys() -> None:
    top = 2**64 - 1
    rows = {sequence_rng(seed, index).random() for seed in (0, 1, top) for index in (0, 1, top)}
    assert len(rows) == 9


def test_padding_is_given() -> None:
    contexts = draw_contexts(Empty(), np.array([2, 4]), 0, np.array([0, 1]), width=5)
    assert contexts.dtype == np.bool_
    assert contexts.tolist() == [
        [False, False, True, True, True],
        [False, False, False, False, True],
    ]
    assert draw_contexts(Empty(), [2, 4], 0, [0, 1]).shape == (2, 4)


def test_drawing_a_row_is_drawing_from_its_generator() -> None:
    row = draw_contexts(STRATEGY, [30], 7, [3])[0]
    assert np.array_equal(row, STRATEGY.draw(30, sequence_rng(7, 3)))


@pytest.mark.parametrize(
    ("lengths", "seed", "indices", "width", "message"),
    [
        ([], 0, [], None, "0 lengths and 0 indices"),
        ([3, 4], 0, [0], None, "2 lengths and 1 indices"),
        ([3], -1, [0], None, r"seed is -1; .*0\.\.2\^64-1"),
        ([3], 0, [2**64], None, f"index is {2**64}"),
        ([3], 0, [0], 2, "width is 2, less than the longest sequence of 3 tokens"),
        ([0], 0, [0], None, "length is 0"),
    ],
)
def test_bad_input(
    lengths: list[int], seed: int, indices: list[int], width: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw_contexts(Empty(), lengths, seed, indices, width)
