"""The neighbours layer reads the neighbours and nothing else.

Models of a single layer are tested: every dependence is a direct one.
"""

import pytest
import torch

from tests.peers.small import random_question, small_peer
from tracformer.model.batch import Batch

LENGTH = 9
CONTEXT = [True, False, False, True, True, False, True, False, True]


def reads(family: str, mode: str, t: int) -> set[int]:
    """Positions whose tokens move the logits at target t."""
    model = small_peer(f"{family} n_layer=1")
    tokens, context = random_question(1, LENGTH)[0], torch.tensor([CONTEXT])
    before = model(Batch(tokens, context), mode)[0, t]
    moved = set()
    for changed in range(LENGTH):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 3) % 7
        if bool((model(Batch(other, context), mode)[0, t] != before).any()):
            moved.add(changed)
    return moved


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("ac-gpt neighbours=1", "car"),
        ("compact neighbours=1", "car"),
        ("as-arm neighbours=1", "car"),
        ("bert-modern neighbours=1", "ac"),
        ("as-arm neighbours=1", "ac"),
        ("compact neighbours=1", "ac"),
    ],
)
def test_one_layer_reads_what_is_known_at_its_neighbours(family: str, mode: str) -> None:
    for t in (t for t, given in enumerate(CONTEXT) if not given):
        left = {t - 1} if t and (CONTEXT[t - 1] or mode == "car") else set()
        right = {t + 1} if t + 1 < LENGTH and CONTEXT[t + 1] else set()
        assert reads(family, mode, t) == left | right, t


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_wider_window(window: int) -> None:
    for t in (t for t, given in enumerate(CONTEXT) if not given):
        near = range(max(0, t - window), min(LENGTH, t + window + 1))
        known = {
            position for position in near if position < t or (position > t and CONTEXT[position])
        }
        assert reads(f"compact neighbours=1 window={window}", "car", t) == known, t


def test_bart_reads_features_of_neighbours_made_of_neighbours() -> None:
    """The decoder's row holds x_{t-1} and reads the encoder at t-1 and t+1, whose one layer reads
    one position further.
    """
    for t in (t for t, given in enumerate(CONTEXT) if not given):
        near = range(max(0, t - 2), min(LENGTH, t + 3))
        known = {position for position in near if CONTEXT[position] and position != t}
        assert reads("bart-modern neighbours=1", "car", t) == known | ({t - 1} if t else set()), t


@pytest.mark.parametrize(
    "family", ["ac-gpt neighbours=0", "as-arm neighbours=0", "bert-modern neighbours=0"]
)
def test_without_it_one_layer_reads_everything_known(family: str) -> None:
    mode = "ac" if family.startswith("bert") else "car"
    known = {
        position
        for position in range(LENGTH)
        if CONTEXT[position] or (mode == "car" and position < 5)
    }
    assert reads(family, mode, 5) == known
