"""Objectives draw the documented maskings; batches do not depend on how they are cut."""

from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.toys import small_model
from tracformer.devices import Ranks
from tracformer.model.batch import Batch
from tracformer.training.objectives import (
    OBJECTIVES,
    MaskSampler,
    MicroBatch,
    Stream,
    low_discrepancy,
    parse_objective,
)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_targets(name: str) -> None:
    masks = MaskSampler(parse_objective(name), seed=1)
    modes = {part.mode for part in parse_objective(name).parts}
    for number in range(50):
        question = masks.draw(number, length=20)
        assert question.mode in modes
        assert question.context.shape == (20,)
        assert not question.context.all()


def test_shares_of_a_mixture() -> None:
    masks = MaskSampler(parse_objective("all-modes"), seed=0)
    modes = Counter(masks.draw(number, 16).mode for number in range(4000))
    for part in OBJECTIVES["all-modes"]:
        assert abs(modes[part.mode] / 4000 - part.share) < 0.03


def test_a_masking_depends_on_seed_and_number_only() -> None:
    first, second = (MaskSampler(parse_objective("all-modes"), seed=5) for _ in range(2))
    forwards = [first.draw(number, 30) for number in range(40)]
    backwards = [second.draw(number, 30) for number in reversed(range(40))][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert a.mode == b.mode
        assert np.array_equal(a.context, b.context)
    other = MaskSampler(parse_objective("all-modes"), seed=6)
    assert any(
        not np.array_equal(a.context, other.draw(number, 30).context)
        for number, a in enumerate(forwards)
    )


def test_contexts_replace_those_of_car_and_ac_rows() -> None:
    objective = parse_objective("all-modes", "random:0.25")
    assert [part.contexts for part in objective.parts] == ["random:0.25", "random:0.25", "empty"]
    with pytest.raises(ValueError, match="fixes its own contexts"):
        parse_objective("ar", "random:0.25")


def test_fim_rows_have_one_blank_mostly_and_several_sometimes() -> None:
    masks = MaskSampler(parse_objective("fim"), seed=0)
    maskings = [masks.draw(number, 400) for number in range(2000)]
    holes = Counter(
        int((np.diff((~q.context).astype(int), prepend=0) == 1).sum())
        for q in maskings
        if q.mode == "car"
    )
    assert abs(sum(holes.values()) / 2000 - 0.5) < 0.04
    assert 0.75 < holes[1] / sum(holes.values()) < 0.85
    assert all(not q.context.any() for q in maskings if q.mode == "ar")


def test_diffusion_is_the_nelbo_of_the_any_order_model() -> None:
    """E over k uniform and a uniform subset of n/k * sum over targets = the bound averaged over all
    subsets, by enumeration.
    """
    n = 4
    model = small_model()
    tokens = torch.tensor([[1, 3, 0, 2]])
    exact = 0.0
    for k in range(1, n + 1):
        subsets = [mask for mask in range(2**n) if bin(mask).count("1") == k]
        for mask in subsets:
            context = torch.tensor([[not mask >> t & 1 for t in range(n)]])
            exact -= (
                float(model.log_prob(Batch(tokens, context), "ac").sum().detach())
                * n
                / k
                / len(subsets)
                / n
            )
    masks = MaskSampler(parse_objective("diffusion"), seed=3)
    maskings = [masks.draw(number, n) for number in range(3000)]
    assert all(question.count == n for question in maskings)
    contexts = torch.from_numpy(np.stack([question.context for question in maskings]))
    terms = -model.log_prob(Batch(tokens.expand(len(maskings), -1), contexts), "ac").sum(1)
    estimate = terms * torch.tensor([question.weight for question in maskings], dtype=torch.float64)
    error = float(estimate.std().detach()) / len(maskings) ** 0.5
    assert abs(float(estimate.mean().detach()) - exact) < 4 * error


def test_consecutive_low_discrepancy_points_cover_the_interval_evenly() -> None:
    for start in (0, 777):
        points = np.sort([low_discrepancy(9, number) for number in range(start, start + 64)])
        assert np.abs(points - (np.arange(64) + 0.5) / 64).max() < 3 / 64


class Uneven:
    """Rows of 5 to 40 tokens; a row's tokens are its number."""

    weights = None

    def __len__(self) -> int:
        return 64

    def get(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        lengths = 5 + (np.asarray(indices) * 29) % 36
        tokens = np.where(np.arange(40) < lengths[:, None], np.asarray(indices)[:, None], 0)
        return tokens, lengths


def stream(micro_batch: int) -> Stream:
    return Stream(
        Uneven(),
        MaskSampler(parse_objective("all-modes"), 0),
        32,
        micro_batch,
        0,
        Ranks(0, 1, torch.device("cpu")),
    )  # type: ignore[arg-type]


def maskings_of(groups: list[MicroBatch]) -> Counter[tuple[str, tuple[int, ...], tuple[bool, ...]]]:
    """Count the rows with their mode and context, in any order."""
    found: Counter[tuple[str, tuple[int, ...], tuple[bool, ...]]] = Counter()
    for group in groups:
        lengths = group.batch.lengths.tolist()
        for tokens, context, length in zip(
            group.batch.tokens.tolist(), group.batch.context.tolist(), lengths, strict=True
        ):
            found[group.mode, tuple(tokens[:length]), tuple(context[:length])] += 1
    return found


def padded(groups: list[MicroBatch]) -> int:
    return sum(group.batch.tokens.numel() for group in groups)


def test_maskings_do_not_depend_on_the_micro_batch_size() -> None:
    whole = stream(0).at(32)
    for size in (1, 5, 8):
        cut = stream(size).at(32)
        assert maskings_of(cut.micro_batches) == maskings_of(whole.micro_batches)
        assert (cut.count, cut.tokens) == (whole.count, whole.tokens)
        assert all(len(group.batch.tokens) <= size for group in cut.micro_batches)


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    whole, cut = stream(0).at(0), stream(4).at(0)
    # against a batch in which each mode is as wide as its longest row
    assert (
        0
        <= padded(cut.micro_batches) - cut.tokens
        < 0.5 * (padded(whole.micro_batches) - whole.tokens)
    )
    modes = [group.mode for group in cut.micro_batches]
    assert modes == sorted(modes)  # each mode once
