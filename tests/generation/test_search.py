"""Search against brute force: every filling of small random models, enumerated."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.toys import small_model
from tracformer import Tracformer
from tracformer.generation import decode
from tracformer.generation.decode import Found, search
from tracformer.model.batch import Batch


def holes(
    model: Tracformer, length: int, targets: list[int], seed: int = 0
) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed)
    )
    context = torch.ones(1, length, dtype=torch.bool)
    context[0, targets] = False
    return tokens, context


def brute_force(
    model: Tracformer, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor | None = None
) -> list[tuple[float, tuple[int, ...]]]:
    """Every filling, the most probable first."""
    inside = torch.arange(tokens.shape[1]) < (
        tokens.shape[1] if lengths is None else int(lengths[0])
    )
    targets = (~context[0] & inside).nonzero()[:, 0]
    fillings = list(itertools.product(range(model.config.vocab_size), repeat=len(targets)))
    many = tokens.repeat(len(fillings), 1)
    many[:, targets] = torch.tensor(fillings)
    each = None if lengths is None else lengths.expand(len(many))
    with torch.no_grad():
        values = model.log_prob(Batch(many, context.expand_as(many), each), mode).sum(1)
    return sorted(
        ((float(value), filling) for value, filling in zip(values, fillings, strict=True)),
        reverse=True,
    )


def fillings(found: list[Found], context: Tensor) -> list[tuple[int, ...]]:
    return [tuple(each.tokens[~context[0]].tolist()) for each in found]


@settings(max_examples=15, deadline=None)
@given(
    vocab_size=st.integers(3, 7),
    targets=st.lists(st.integers(0, 11), min_size=1, max_size=3, unique=True),
    mode=st.sampled_from(["car", "ar"]),
    n=st.sampled_from([1, 3, 12]),
    width=st.sampled_from([1, 4, 16]),
    cached=st.booleans(),
    seed=st.integers(0, 5),
)
def test_best_first_finds_the_n_best(
    vocab_size: int, targets: list[int], mode: str, n: int, width: int, cached: bool, seed: int
) -> None:
    model = small_model(vocab_size=vocab_size, seed=seed)
    tokens, context = holes(model, 12, targets, seed)
    truth = brute_force(model, tokens, context, mode)[:n]
    found = search(
        model, Batch(tokens, context), mode, n=n, width=width, budget=10_000, cached=cached
    )
    assert fillings(found, context) == [filling for _, filling in truth]
    torch.testing.assert_close(
        [each.log_prob for each in found], [value for value, _ in truth], rtol=0, atol=1e-10
    )
    assert all(each.proven for each in found)
    assert all(torch.equal(each.tokens[context[0]], tokens[0, context[0]]) for each in found)


def test_log_probs_are_the_models_own_shares() -> None:
    model = small_model()
    tokens, context = holes(model, 10, [2, 3, 7])
    for method in ("best-first", "beam"):
        for each in search(model, Batch(tokens, context), method=method, n=4, width=2, banned=[1]):
            shares = model.log_prob(Batch(each.tokens[None], context))[0].detach()
            torch.testing.assert_close(each.log_probs, shares, rtol=0, atol=1e-10)
            assert each.log_prob == pytest.approx(float(shares.sum()), abs=1e-10)


def test_a_node_with_more_children_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SIBLINGS", 1)
    model = small_model(vocab_size=5)
    tokens, context = holes(model, 8, [1, 2, 6])
    truth = brute_force(model, tokens, context, "car")
    few = search(model, Batch(tokens, context), n=1, budget=10_000, width=1)
    assert fillings(few, context) == [truth[0][1]]
    every = search(model, Batch(tokens, context), n=200, budget=10_000)
    # all 125, and not one more
    assert fillings(every, context) == [filling for _, filling in truth]


def test_every_sibling_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """One remembered child at a time; with n = 3 the search has to come back to
    nodes again and again.
    """
    model = small_model(vocab_size=7, seed=3)
    tokens, context = holes(model, 9, [0, 4, 5])
    truth = brute_force(model, tokens, context, "car")
    plain = search(model, Batch(tokens, context), n=3, width=1, budget=10_000)
    monkeypatch.setattr(decode, "SIBLINGS", 0)  # then n children
    found = search(model, Batch(tokens, context), n=3, width=1, budget=10_000)
    assert (
        fillings(found, context)
        == fillings(plain, context)
        == [filling for _, filling in truth[:3]]
    )
    assert found[0].expanded >= plain[0].expanded


# 22 prove all three
@pytest.mark.parametrize(("budget", "sure"), [(1, 0), (3, 0), (10, 0), (15, 1), (20, 1)])
def test_giving_up_returns_different_fillings_and_claims_nothing_false(
    budget: int, sure: int
) -> None:
    model = small_model(vocab_size=4, seed=2)
    tokens, context = holes(model, 12, [1, 3, 4, 8, 9])
    truth = brute_force(model, tokens, context, "car")
    found = search(model, Batch(tokens, context), budget=budget, n=3, width=4)
    assert 1 <= len(found) <= 3
    assert len(set(fillings(found, context))) == len(found)
    assert [each.log_prob for each in found] == sorted(
        (each.log_prob for each in found), reverse=True
    )
    values = {filling: value for value, filling in truth}
    for each, filling in zip(found, fillings(found, context), strict=True):
        assert each.log_prob == pytest.approx(values[filling], abs=1e-10)
    proven = [
        filling
        for each, filling in zip(found, fillings(found, context), strict=True)
        if each.proven
    ]
    assert proven == [filling for _, filling in truth[: len(proven)]]
    assert len(proven) == sure


def test_giving_up_at_once_is_greedy() -> None:
    model = small_model(seed=1)
    tokens, context = holes(model, 10, [2, 5, 6])
    (found,) = search(model, Batch(tokens, context), budget=1)
    greedy = tokens.clone()
    for target in (2, 5, 6):
        greedy[0, target] = model(Batch(greedy, context))[0, target].argmax()
    assert torch.equal(found.tokens, greedy[0])
    assert not found.proven


def test_the_budget_bounds_what_is_opened() -> None:
    model = small_model(seed=4)
    tokens, context = holes(model, 12, [0, 1, 2, 3, 4, 5])
    for budget in (1, 7, 30):
        (found,) = search(model, Batch(tokens, context), budget=budget, width=4)
        # completing greedily opens at most one node a target beyond the first
        assert found.expanded <= budget + 5


@pytest.mark.parametrize("mode", ["car", "ar"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_beam_that_drops_nothing_is_exact(mode: str, cached: bool) -> None:
    model = small_model(vocab_size=4)
    tokens, context = holes(model, 11, [0, 4, 5, 9])
    truth = brute_force(model, tokens, context, mode)[:6]
    found = search(model, Batch(tokens, context), mode, method="beam", width=64, n=6, cached=cached)
    assert fillings(found, context) == [filling for _, filling in truth]
    assert all(each.proven for each in found)
    narrow = search(
        model, Batch(tokens, context), mode, method="beam", width=63, n=6, cached=cached
    )
    assert not any(each.proven for each in narrow)


def test_a_beam_of_one_is_greedy() -> None:
    model = small_model(seed=1)
    tokens, context = holes(model, 10, [2, 5, 6])
    (found,) = search(model, Batch(tokens, context), method="beam", width=1)
    (greedy,) = search(model, Batch(tokens, context), budget=1)
    assert torch.equal(found.tokens, greedy.tokens)


@pytest.mark.parametrize("method", ["best-first", "beam"])
def test_cached_and_whole_passes_agree(method: str) -> None:
    model = small_model(seed=6)
    tokens, context = holes(model, 16, [3, 4, 10, 15], seed=1)
    with_cache, without = (
        search(model, Batch(tokens, context), method=method, n=5, width=8, cached=cached)
        for cached in (True, False)
    )
    assert fillings(with_cache, context) == fillings(without, context)
    for a, b in zip(with_cache, without, strict=True):
        torch.testing.assert_close(a.log_probs, b.log_probs, rtol=0, atol=1e-10)
        assert a.proven == b.proven


@pytest.mark.parametrize("cached", [True, False])
def test_padding_is_neither_read_nor_filled(cached: bool) -> None:
    model = small_model(vocab_size=5)
    tokens, context = holes(model, 12, [1, 2, 6, 9, 10, 11])
    lengths = torch.tensor([8])
    padded = search(model, Batch(tokens, context, lengths), n=3, cached=cached)
    alone = search(model, Batch(tokens[:, :8], context[:, :8]), n=3, cached=cached)
    truth = brute_force(model, tokens, context, "car", lengths)[:3]
    for a, b, (value, _) in zip(padded, alone, truth, strict=True):
        assert torch.equal(a.tokens[:8], b.tokens)
        assert a.log_prob == pytest.approx(value, abs=1e-10)
        assert not a.log_probs[8:].any()


@pytest.mark.parametrize("method", ["best-first", "beam"])
def test_banned_and_only_restrict_without_renormalising(method: str) -> None:
    model = small_model(vocab_size=6)
    tokens, context = holes(model, 9, [1, 4, 7])
    allowed = {4: (0, 2, 5)}
    found = search(
        model,
        Batch(tokens, context),
        method=method,
        width=36,
        n=5,
        banned=[2],
        only=lambda row, position: allowed.get(position),
    )
    truth = [
        each
        for each in brute_force(model, tokens, context, "car")
        if 2 not in each[1] and each[1][1] in (0, 5)
    ]
    assert fillings(found, context) == [filling for _, filling in truth[:5]]
    torch.testing.assert_close(
        [each.log_prob for each in found], [value for value, _ in truth[:5]], rtol=0, atol=1e-10
    )
    assert all(each.proven for each in found)


def test_fewer_fills_than_requested() -> None:
    model = small_model()
    tokens, context = holes(model, 6, [1, 4])
    for method in ("best-first", "beam"):
        found = search(
            model, Batch(tokens, context), method=method, n=50, only=lambda row, position: (3, 5)
        )
        assert sorted(fillings(found, context)) == [(3, 3), (3, 5), (5, 3), (5, 5)]
        assert all(each.proven for each in found)


def test_nothing_to_search() -> None:
    model = small_model()
    tokens, context = holes(model, 6, [])
    (found,) = search(model, Batch(tokens, context), n=4)
    assert torch.equal(found.tokens, tokens[0])
    assert (found.log_prob, found.proven, found.expanded) == (0.0, True, 0)


def test_tokens_at_targets_are_ignored() -> None:
    model = small_model()
    tokens, context = holes(model, 8, [2, 3])
    other = tokens.masked_fill(~context, -1)
    assert torch.equal(
        search(model, Batch(tokens, context))[0].tokens,
        search(model, Batch(other, context))[0].tokens,
    )


def test_searches_that_are_refused() -> None:
    model = small_model()
    tokens, context = holes(model, 6, [1, 4])
    with pytest.raises(
        ValueError,
        match=(
            "mode is 'ac'; search needs an exact joint probability, which this model has in: car, "
            "ar"
        ),
    ):
        search(model, Batch(tokens, context), "ac")
    with pytest.raises(ValueError, match="which this model has in: no mode"):
        search(small_model(modes=("ac",)), Batch(tokens, context), "ac")
    with pytest.raises(ValueError, match="method is 'dfs'; allowed: best-first, beam"):
        search(model, Batch(tokens, context), method="dfs")
    with pytest.raises(ValueError, match="one sequence at a time"):
        search(model, Batch(tokens.repeat(2, 1), context.repeat(2, 1)))
    with pytest.raises(ValueError, match="width is 0"):
        search(model, Batch(tokens, context), width=0)
    with pytest.raises(ValueError, match="banned token 7 is out of range"):
        search(model, Batch(tokens, context), banned=[7])
    with pytest.raises(ValueError, match="no token is left to choose from at position 1"):
        search(model, Batch(tokens, context), banned=[3], only=lambda row, position: [3])
