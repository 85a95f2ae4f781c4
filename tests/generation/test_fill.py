"""`fill`: exact probabilities, constraints, stopping and required tokens."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.toys import random_batch, small_model
from tracformer import LanguageModel, Tracformer
from tracformer.generation.decode import fill
from tracformer.generation.fill_request import Filled, FillRequest, have_places
from tracformer.generation.orders import (
    Ancestral,
    ByConfidence,
    GivenOrder,
    LeftToRight,
    Order,
    RandomOrder,
)
from tracformer.generation.results import Token
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.model.batch import Batch

ORDERS: list[Order] = [
    LeftToRight(),
    LeftToRight(3),
    RandomOrder(),
    RandomOrder(2),
    ByConfidence("probability"),
    ByConfidence("entropy", 2),
    ByConfidence("margin", threshold=0.4),
    GivenOrder((6, 2, 9)),
    Ancestral(3),
]
WAYS: list[tuple[str, Order]] = [
    ("car", LeftToRight()),
    ("ar", LeftToRight()),
    *(("ac", order) for order in ORDERS),
]
ways = pytest.mark.parametrize(("mode", "order"), WAYS, ids=str)


def shared_batch(model: Tracformer) -> tuple[Tensor, Tensor, Tensor]:
    tokens, context, lengths = random_batch(model, 5, 14, seed=3)
    context[:, [1, 2, 6]] = False
    return tokens, context, lengths.clamp(min=8)


# ---- one seed, one sample


@ways
def test_same_seed_same_sample_alone_and_in_any_batch(mode: str, order: Order) -> None:
    model = small_model(seed=1)
    tokens, context, lengths = shared_batch(model)
    seeds = [11, 5, 11, 2**40, 0]
    together = fill(model, Batch(tokens, context, lengths), mode, order=order, seed=seeds)
    targets = Batch(tokens, context, lengths).targets()
    assert torch.equal(together.tokens[context], tokens[context])
    assert torch.equal(together.steps >= 0, targets)
    for rows in ([3], [4, 1, 2, 2]):
        few = fill(
            model,
            Batch(tokens[rows], context[rows], lengths[rows]),
            mode,
            order=order,
            seed=[seeds[row] for row in rows],
        )
        assert same(few, together, rows)
    length = int(lengths[3])
    # not padded at all
    cut = fill(
        model, Batch(tokens[3:4, :length], context[3:4, :length]), mode, order=order, seed=seeds[3]
    )
    assert torch.equal(cut.tokens[0], together.tokens[3, :length])
    other = fill(
        model, Batch(tokens, context, lengths), mode, order=order, seed=[seed + 1 for seed in seeds]
    )
    assert not torch.equal(other.tokens[targets], together.tokens[targets])


def same(few: Filled, all_rows: Filled, rows: list[int]) -> bool:
    torch.testing.assert_close(few.log_probs, all_rows.log_probs[rows], rtol=0, atol=1e-10)
    return torch.equal(few.tokens, all_rows.tokens[rows]) and torch.equal(
        few.lengths, all_rows.lengths[rows]
    )


@pytest.mark.parametrize("mode", ["car", "ar"])
def test_cached_or_not(mode: str) -> None:
    model = small_model(seed=2)
    tokens, context, lengths = shared_batch(model)
    for sampler in (
        PLAIN,
        Sampler(temperature=0.7, top_p=0.9),
        Sampler(repetition_penalty=1.5, no_repeat_ngram=3),
    ):
        cached, whole = (
            fill(model, Batch(tokens, context, lengths), mode, seed=8, sampler=sampler, cached=each)
            for each in (True, False)
        )
        assert same(cached, whole, list(range(5)))
        assert torch.equal(cached.steps, whole.steps)


def test_one_number_is_each_sequences_own_seed() -> None:
    model = small_model()
    tokens, context, lengths = shared_batch(model)
    expected = fill(model, Batch(tokens, context, lengths), seed=[9] * 5)
    for seed in (9, np.int64(9), np.full(5, 9)):
        assert same(
            fill(model, Batch(tokens, context, lengths), seed=seed), expected, list(range(5))
        )  # type: ignore[arg-type]


def test_each_row_of_a_batch_may_have_its_own_order_and_sampler() -> None:
    model = small_model(seed=4)
    tokens, context, lengths = shared_batch(model)
    orders: list[Order] = [
        RandomOrder(),
        ByConfidence("margin"),
        LeftToRight(2),
        ByConfidence("entropy", 2),
        Ancestral(2),
    ]
    samplers = [
        PLAIN,
        Sampler(temperature=0.0),
        Sampler(top_k=2),
        Sampler(repetition_penalty=2.0),
        Sampler(banned=(0, 1, 2)),
    ]
    together = fill(
        model, Batch(tokens, context, lengths), "ac", order=orders, sampler=samplers, seed=range(5)
    )
    for row in range(5):
        one = slice(row, row + 1)
        alone = fill(
            model,
            Batch(tokens[one], context[one], lengths[one]),
            "ac",
            order=orders[row],
            sampler=samplers[row],
            seed=row,
        )
        assert same(alone, together, [row])


@ways
def test_tokens_at_targets_and_in_the_padding_are_ignored(mode: str, order: Order) -> None:
    model = small_model(seed=1)
    tokens, context, lengths = shared_batch(model)
    inside = torch.arange(14) < lengths[:, None]
    nonsense = tokens.masked_fill(~(context & inside), -5)
    plain, strange = (
        fill(model, Batch(each, context & inside, lengths), mode, order=order, seed=4)
        for each in (tokens, nonsense)
    )
    assert torch.equal(plain.tokens, strange.tokens)


# ---- log-probabilities


@ways
def test_log_probs_are_conditioned_on_the_tokens_revealed_before(mode: str, order: Order) -> None:
    """Also under a sampler that changes the distribution.

    Under `ac` each step's tokens are answered from all earlier steps.
    """
    model = small_model(seed=5)
    tokens, context, lengths = shared_batch(model)
    filled = fill(
        model,
        Batch(tokens, context, lengths),
        mode,
        order=order,
        seed=3,
        sampler=Sampler(temperature=2.0, top_k=4),
    )
    with torch.no_grad():
        if mode == "ac":
            expected = torch.zeros_like(filled.log_probs)
            for step in range(int(filled.steps.max()) + 1):
                now = filled.steps == step
                expected[now] = model.log_prob(
                    Batch(filled.tokens, filled.steps < step, lengths), "ac"
                )[now]
        else:
            expected = model.log_prob(Batch(filled.tokens, context, lengths), mode)
    torch.testing.assert_close(filled.log_probs, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(filled.log_prob, expected.sum(1), rtol=0, atol=1e-10)


# ---- constraints, stopping, watching


def test_greedy_is_the_likeliest_token_at_each_step() -> None:
    model = small_model(seed=6)
    tokens, context, lengths = shared_batch(model)
    filled = fill(
        model, Batch(tokens, context, lengths), "car", sampler=Sampler(temperature=0.0), seed=1
    )
    with torch.no_grad():
        likeliest = model(Batch(filled.tokens, context, lengths), "car").argmax(-1)
    targets = Batch(tokens, context, lengths).targets()
    assert torch.equal(filled.tokens[targets], likeliest[targets])
    assert torch.equal(
        filled.tokens,
        fill(
            model, Batch(tokens, context, lengths), "car", sampler=Sampler(temperature=0.0), seed=2
        ).tokens,
    )


@ways
def test_required_tokens_are_filled_however_many_are_revealed_at_once(
    mode: str, order: Order
) -> None:
    model = small_model(seed=7)
    tokens, context = torch.zeros(6, 10, dtype=torch.int64), torch.ones(6, 10, dtype=torch.bool)
    context[:, [2, 5, 6, 9]] = False
    for required in ((6,), (3, 5, 6), (2, 3, 5, 6)):
        filled = fill(
            model,
            Batch(tokens, context),
            mode,
            order=order,
            sampler=Sampler(required=required),
            seed=range(6),
        )
        for row in filled.tokens[~context].view(6, 4).tolist():
            assert set(required) <= set(row)


def test_only_restricts_a_position_of_a_row() -> None:
    model = small_model()
    tokens, context, lengths = shared_batch(model)
    allowed = {(0, 1): (3,), (1, 2): (0, 6), (4, 6): (5,)}
    free = fill(model, Batch(tokens, context, lengths), "car", seed=2)
    bound = fill(
        model,
        Batch(tokens, context, lengths),
        "car",
        seed=2,
        only=lambda row, position: allowed.get((row, position)),
    )
    for (row, position), ids in allowed.items():
        assert int(bound.tokens[row, position]) in ids
    assert same(select(bound, [2, 3]), free, [2, 3])  # rows that are not restricted


def select(filled: Filled, rows: list[int]) -> Filled:
    return Filled(
        filled.tokens[rows], filled.log_probs[rows], filled.lengths[rows], filled.steps[rows]
    )


def test_no_token_stands_twice() -> None:
    """With n = 1 every token of a run differs from all before it, the given ones included."""
    model = small_model()
    tokens, context = torch.tensor([[4, 0, 0, 0, 0, 0]]), torch.tensor([[True] + [False] * 5])
    for seed in range(5):
        assert (
            len(
                set(
                    fill(
                        model, Batch(tokens, context), sampler=Sampler(no_repeat_ngram=1), seed=seed
                    )
                    .tokens[0]
                    .tolist()
                )
            )
            == 6
        )


def test_the_stop_token_ends_its_own_sequence_and_no_other() -> None:
    model = small_model(seed=3)
    tokens, context = torch.zeros(8, 16, dtype=torch.int64), torch.zeros(8, 16, dtype=torch.bool)
    free = fill(model, Batch(tokens, context), "ar", seed=range(8))
    stopped = fill(model, Batch(tokens, context), "ar", seed=range(8), stop=2)
    ends = []
    for row in range(8):
        stops = (free.tokens[row] == 2).nonzero()[:, 0].tolist()
        end = stops[0] + 1 if stops else 16
        ends.append(end)
        assert int(stopped.lengths[row]) == end
        assert torch.equal(stopped.tokens[row, :end], free.tokens[row, :end])
        assert (stopped.steps[row, end:] == -1).all()
        assert not stopped.log_probs[row, end:].any()
    assert len(set(ends)) > 2


@ways
def test_the_callback_receives_every_token_once(mode: str, order: Order) -> None:
    model = small_model()
    tokens, context, lengths = shared_batch(model)
    received: list[list[Token]] = []
    filled = fill(
        model, Batch(tokens, context, lengths), mode, order=order, seed=6, callback=received.append
    )
    targets = Batch(tokens, context, lengths).targets()
    everything = [each for some in received for each in some]
    assert sorted((each.sample, each.position) for each in everything) == [
        tuple(pair) for pair in targets.nonzero().tolist()
    ]
    for step, some in enumerate(received):
        for each in some:
            at = each.sample, each.position
            assert int(filled.steps[at]) == step
            assert int(filled.tokens[at]) == each.token_id
            assert float(filled.log_probs[at]) == each.log_prob


def test_nothing_to_fill() -> None:
    model = small_model()
    tokens = torch.tensor([[1, 2, 3]])
    filled = fill(model, Batch(tokens, torch.ones(1, 3, dtype=torch.bool)))
    assert torch.equal(filled.tokens, tokens)
    assert float(filled.log_prob) == 0.0


def test_wrong_arguments_are_refused() -> None:
    model = small_model()
    tokens, context, lengths = shared_batch(model)
    for mode, order in (("car", RandomOrder()), ("ar", LeftToRight(2)), ("car", Ancestral(4))):
        with pytest.raises(
            ValueError, match=f"mode '{mode}' goes from left to right, one token at a time"
        ):
            fill(model, Batch(tokens, context, lengths), mode, order=order)
    with pytest.raises(ValueError, match="3 seeds were given for 5 sequences"):
        fill(model, Batch(tokens, context, lengths), "car", seed=[1, 2, 3])
    with pytest.raises(ValueError, match="1 samplers were given for 5 sequences"):
        fill(model, Batch(tokens, context, lengths), "car", sampler=[PLAIN])
    with pytest.raises(ValueError, match="2 orders were given for 5 sequences"):
        fill(model, Batch(tokens, context, lengths), "ac", order=[RandomOrder()] * 2)
    with pytest.raises(ValueError, match="mode is 'up'"):
        fill(model, Batch(tokens, context, lengths), "up")
    few = torch.ones(1, 4, dtype=torch.bool)
    few[0, 2] = False
    with pytest.raises(
        ValueError, match="2 tokens are required, but sequence 0 has only 1 to fill"
    ):
        fill(model, Batch(tokens[:1, :4], few), sampler=Sampler(required=(1, 2)))
    with pytest.raises(ValueError, match="context is bool of shape"):
        fill(model, Batch(tokens, context[:, :-1]), "car")


# ---- required


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
def test_a_required_token_is_placed_where_it_is_allowed(mode: str, order: Order) -> None:
    """Of each required set one position alone is left for some token; the others may
    come anywhere else.
    """
    model = small_model(seed=7)
    tokens, context = torch.zeros(4, 10, dtype=torch.int64), torch.ones(4, 10, dtype=torch.bool)
    context[:, [2, 5, 6, 9]] = False
    requested: list[tuple[dict[int, tuple[int, ...]], tuple[int, ...]]] = [
        ({5: (0, 1), 6: (0, 1), 9: (0, 1)}, (6,)),
        ({2: (0, 1), 5: (0, 1), 6: (0, 1)}, (6,)),
        ({2: (3,), 5: (3, 4), 9: (0, 1)}, (3, 4, 6)),
        ({2: (3, 4), 5: (3, 4)}, (3, 4)),
    ]
    for only, required in requested:
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
def test_a_sequence_ends_only_after_its_required_tokens(mode: str, order: Order) -> None:
    model = small_model(seed=3)
    tokens, context = torch.zeros(5, 12, dtype=torch.int64), torch.zeros(5, 12, dtype=torch.bool)
    context[:, 4] = True
    requested = {
        "mode": mode,
        "order": order,
        "seed": range(5),
        "sampler": Sampler(required=(5, 6)),
    }
    for stop in (2, lambda row, position, token: token == 2):
        ended = fill(model, Batch(tokens, context), stop=stop, **requested)  # type: ignore[arg-type]
        for row, length in zip(ended.tokens.tolist(), ended.lengths.tolist(), strict=True):
            assert {5, 6} <= set(row[:length])
    itself = fill(
        model, Batch(tokens, context), stop=2, **{**requested, "sampler": Sampler(required=(2, 5))}
    )  # type: ignore[arg-type]
    for row, length in zip(itself.tokens.tolist(), itself.lengths.tolist(), strict=True):
        assert {2, 5} <= set(row[:length])


def test_held_back_positions_are_those_ranked_last() -> None:
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
    """A blank after a space begins with a token that has one; the first of these does not."""
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
