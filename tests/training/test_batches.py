"""Micro-batches hold like modes and like lengths; what the batch asks does not
depend on how it is cut.
"""

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from tracformer.distributed import Ranks
from tracformer.training.batches import Group, Stream
from tracformer.training.objectives import Questioner, parse_objective


class Uneven:
    """Rows of 5 to 40 tokens; a row's tokens are its number."""

    def __len__(self) -> int:
        return 64

    def get(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        lengths = 5 + (np.asarray(indices) * 29) % 36
        tokens = np.where(np.arange(40) < lengths[:, None], np.asarray(indices)[:, None], 0)
        return tokens, lengths


def stream(micro_batch: int) -> Stream:
    return Stream(
        Uneven(),
        Questioner(parse_objective("all-modes"), 0),
        32,
        micro_batch,
        0,
        Ranks(0, 1, torch.device("cpu")),
    )  # type: ignore[arg-type]


def asked(groups: list[Group]) -> Counter[tuple[str, tuple[int, ...], tuple[bool, ...]]]:
    """Every sequence with its question, wherever it stands."""
    found: Counter[tuple[str, tuple[int, ...], tuple[bool, ...]]] = Counter()
    for group in groups:
        lengths = group.batch.lengths.tolist()
        for tokens, context, length in zip(
            group.batch.tokens.tolist(), group.batch.context.tolist(), lengths, strict=True
        ):
            found[group.mode, tuple(tokens[:length]), tuple(context[:length])] += 1
    return found


def padded(groups: list[Group]) -> int:
    return sum(group.batch.tokens.numel() for group in groups)


def test_the_questions_are_the_same_however_the_batch_is_cut() -> None:
    whole = stream(0).at(32)
    for size in (1, 5, 8):
        cut = stream(size).at(32)
        assert asked(cut.micro) == asked(whole.micro)
        assert (cut.count, cut.tokens) == (whole.count, whole.tokens)
        assert all(len(group.batch.tokens) <= size for group in cut.micro)


def test_like_lengths_go_together() -> None:
    whole, cut = stream(0).at(0), stream(4).at(0)
    # against a batch in which each mode is as wide as its longest row
    assert 0 <= padded(cut.micro) - cut.tokens < 0.5 * (padded(whole.micro) - whole.tokens)
    modes = [group.mode for group in cut.micro]
    assert modes == sorted(modes)  # a mode is not taken up again
