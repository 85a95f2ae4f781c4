"""Required tokens: each comes, wherever it can, whatever else is asked."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation.test_fill import ways
from tests.helpers import small_model
from tracformer import LanguageModel
from tracformer.generation.decode import fill
from tracformer.generation.fill_request import FillRequest, have_places
from tracformer.generation.orders import ByConfidence, LeftToRight, Order, RandomOrder
from tracformer.generation.samplers import Sampler
from tracformer.model.batch import Batch


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.sets(st.integers(0, 4), max_size=4),
    free=st.integers(0, 3),
    allowed=st.sets(st.integers(0, 4)),
    limited=st.integers(0, 4),
)
def test_a_place_for_each_token(
    tokens: set[int], free: int, allowed: set[int], limited: int
) -> None:
    """Positions that do not allow all tokens allow the same ones, as word starts do."""
    places = [set(range(5))] * free + [allowed] * limited
    found = any(
        all(token in places[i] for token, i in zip(tokens, chosen, strict=True))
        for chosen in permutations(range(len(places)), len(tokens))
    )
    assert have_places(tokens, free, [allowed] * limited) == found


@ways
def test_a_required_token_comes_where_it_can_stand(mode: str, order: Order) -> None:
    """Of each required set one position alone is left for some token; the others may
    come anywhere else.
    """
    model = small_model(seed=7)
    tokens, context = torch.zeros(4, 10, dtype=torch.int64), torch.ones(4, 10, dtype=torch.bool)
    context[:, [2, 5, 6, 9]] = False
    asked: list[tuple[dict[int, tuple[int, ...]], tuple[int, ...]]] = [
        ({5: (0, 1), 6: (0, 1), 9: (0, 1)}, (6,)),
        ({2: (0, 1), 5: (0, 1), 6: (0, 1)}, (6,)),
        ({2: (3,), 5: (3, 4), 9: (0, 1)}, (3, 4, 6)),
        ({2: (3, 4), 5: (3, 4)}, (3, 4)),
    ]
    for only, required in asked:
        filled = fill(
            model,
            Batch(tokens, context),
            mode,
            order=order,
            sampler=Sampler(required=required),
            only=lambda _, position, only=only: only.get(position),
            seed=range(4),
        )
        for row in filled.tokens.tolist():
            assert set(required) <= {row[position] for position in (2, 5, 6, 9)}
            assert all(row[position] in allowed for position, allowed in only.items())


@ways
def test_a_sequence_ends_only_behind_what_is_required(mode: str, order: Order) -> None:
    model = small_model(seed=3)
    tokens, context = torch.zeros(5, 12, dtype=torch.int64), torch.zeros(5, 12, dtype=torch.bool)
    context[:, 4] = True
    asked = {"mode": mode, "order": order, "seed": range(5), "sampler": Sampler(required=(5, 6))}
    for stop in (2, lambda row, position, token: token == 2):
        ended = fill(model, Batch(tokens, context), stop=stop, **asked)  # type: ignore[arg-type]
        for row, length in zip(ended.tokens.tolist(), ended.lengths.tolist(), strict=True):
            assert {5, 6} <= set(row[:length])
    itself = fill(
        model, Batch(tokens, context), stop=2, **{**asked, "sampler": Sampler(required=(2, 5))}
    )  # type: ignore[arg-type]
    for row, length in zip(itself.tokens.tolist(), itself.lengths.tolist(), strict=True):
        assert {2, 5} <= set(row[:length])


def test_what_must_wait_is_what_the_order_ranks_last() -> None:
    """Five open positions, three tokens required: two may come at once, and these
    are the surest.
    """
    tokens, context = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.bool)
    logits = torch.zeros(5, 7)
    logits[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])

    def turn(order: Order) -> list[int]:
        [row] = FillRequest(
            small_model().config,
            Batch(tokens, context),
            "ac",
            order=order,
            sampler=Sampler(required=(3, 4, 5)),
        ).rows
        return row.turn(logits)

    assert turn(ByConfidence("probability", k=3)) == [3, 4]
    assert turn(ByConfidence("probability", threshold=0.0)) == [3, 4]
    assert turn(LeftToRight(3)) == [0, 1]
    assert turn(RandomOrder(5)) == turn(RandomOrder(2))


def test_a_blank_that_cannot_hold_a_required_token_leaves_it_to_another(lm: LanguageModel) -> None:
    """A blank behind a space begins with a token that has one; the first of these does not."""
    [letter] = lm.tokenizer.encode("z")
    sampler = Sampler(required=(letter,))
    for result in lm.infill("c[[1]] the [[1]] mat", 6, sampler=sampler):
        assert result.spans[0].text == "z"
    for result in lm.infill("the [[1-2]] mat", 6, sampler=sampler, length_draws=2):
        assert result.spans[0].token_ids[1] == letter
    with pytest.raises(
        ValueError,
        match=r"1 tokens are required, and the blanks have no place for all of them \(after a space",
    ):
        lm.infill("the [[1]] mat", sampler=sampler)
    with pytest.raises(
        ValueError,
        match=(
            "2 tokens are required, and the blanks have no place for all of them: make them larger"
        ),
    ):
        lm.infill("the[[1]] mat", sampler=Sampler(required=(letter, 1)))
