"""Cached generation answers what whole passes answer, whatever the shape."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.toys import random_batch, small_model
from tracformer import Tracformer, TracformerConfig
from tracformer.model import cache as slots
from tracformer.model.batch import Batch
from tracformer.model.cache import Cache


def open_cache(
    model: Tracformer, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor
) -> Cache:
    # targets hold nonsense: it may not matter
    cache = model.cache(Batch(tokens.masked_fill(~context, -1), context, lengths), mode)
    assert cache is not None
    return cache


def answers(cache: Cache, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return (targets, V) logits: predict each row's next target, then reveal its token."""
    turns = [row.nonzero()[:, 0].tolist() for row in targets]
    logits: dict[tuple[int, int], Tensor] = {}
    for turn in range(max(map(len, turns))):
        rows = torch.tensor([row for row, mine in enumerate(turns) if turn < len(mine)])
        positions = torch.tensor([mine[turn] for mine in turns if turn < len(mine)])
        answer = cache.logits(rows, positions)
        logits.update(zip(zip(rows.tolist(), positions.tolist(), strict=True), answer, strict=True))
        cache.reveal(rows, positions, tokens[rows, positions])
    return torch.stack([logits[key] for key in sorted(logits)])


SHAPES = {
    "length": st.integers(1, 40),
    "batch": st.integers(1, 4),
    "n_max": st.sampled_from([2, 3, 4, 6, 16]),
    "encoder": st.sampled_from(["multiscope", "full"]),
    "decoder": st.sampled_from(["strided", "dense"]),
    "key_set": st.sampled_from(["stepped", "rounded"]),
    "mode": st.sampled_from(["car", "ar"]),
    "seed": st.integers(0, 1000),
}


def every_step_equals_a_whole_pass(
    length: int,
    batch: int,
    n_max: int,
    encoder: str,
    decoder: str,
    key_set: str,
    mode: str,
    seed: int,
) -> None:
    model = small_model(
        n_layer=6,
        max_length=40,
        n_max=n_max,
        encoder=encoder,
        decoder=decoder,
        key_set=key_set,
        seed=seed,
    )
    tokens, context, lengths = random_batch(model, batch, length, seed)
    context[0, seed % length] = False  # something to answer
    targets = Batch(tokens, context, lengths).targets()
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), mode)[targets]
    cached = answers(open_cache(model, tokens, context, mode, lengths), tokens, targets)
    torch.testing.assert_close(cached, whole, rtol=0, atol=1e-10)


@settings(max_examples=10, deadline=None)
@given(**SHAPES)
def test_every_step_equals_a_whole_pass(**shape: Any) -> None:
    every_step_equals_a_whole_pass(**shape)


@pytest.mark.soak
@settings(max_examples=600, deadline=None)
@given(**SHAPES)
def test_every_step_equals_a_whole_pass_at_length(**shape: Any) -> None:
    every_step_equals_a_whole_pass(**shape)


def test_keys_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GATHERED_AT_ONCE", 50)
    every_step_equals_a_whole_pass(29, 3, 4, "multiscope", "strided", "stepped", "car", 1)


@pytest.mark.parametrize("mode", ["car", "ar"])
def test_long_sequences_in_float32(mode: str) -> None:
    """The paper's depth, length and n_max; two sequences, few holes far apart, so that long
    stretches are read at once.
    """
    config = TracformerConfig(
        vocab_size=50, max_length=1024, n_layer=10, n_head=2, d_model=16, n_max=16, init_std=0.3
    )
    torch.manual_seed(0)
    model = Tracformer(config).eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (2, 1024), generator=generator)
    context = torch.ones(2, 1024, dtype=torch.bool)
    context[0, [0, 3, 511, 512, 900, 1023]] = False
    context[1, torch.randint(1000, (4,), generator=generator)] = False
    lengths = torch.tensor([1024, 1001])
    targets = Batch(tokens, context, lengths).targets()
    with torch.no_grad():
        whole = model.logits_at(Batch(tokens, context, lengths), mode, targets)
    assert whole.std() > 0.1  # not all alike
    torch.testing.assert_close(
        answers(open_cache(model, tokens, context, mode, lengths), tokens, targets),
        whole,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("mode", ["car", "ar"])
def test_a_given_prefix_equals_the_same_tokens_one_by_one(mode: str) -> None:
    """What stands before a target is the same to it whether it was given or revealed, in one go or
    step by step.
    """
    model = small_model(n_layer=5, max_length=32, n_max=4)
    tokens, _, _ = random_batch(model, 2, 30)
    lengths, prefix = torch.tensor([30, 27]), 20
    given = (torch.arange(30) < prefix).expand(2, 30)
    rows, targets = torch.arange(2), Batch(tokens, given, lengths).targets()
    prefilled = answers(open_cache(model, tokens, given, mode, lengths), tokens, targets)

    stepwise = open_cache(model, tokens, torch.zeros_like(given), mode, lengths)
    at_once = stepwise.select(rows)
    for position in range(prefix):
        stepwise.logits(rows, torch.full((2,), position))
        stepwise.reveal(rows, torch.full((2,), position), tokens[:, position])
        at_once.reveal(rows, torch.full((2,), position), tokens[:, position])
    torch.testing.assert_close(answers(stepwise, tokens, targets), prefilled, rtol=0, atol=1e-10)
    torch.testing.assert_close(answers(at_once, tokens, targets), prefilled, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["car", "ar"])
def test_a_selection_and_its_source_are_independent(mode: str) -> None:
    model = small_model()
    tokens, context, lengths = random_batch(model, 3, 14, seed=4)
    context[:, [2, 3, 6]] = False
    lengths = lengths.clamp(min=8)
    targets = Batch(tokens, context, lengths).targets()
    expected = answers(open_cache(model, tokens, context, mode, lengths), tokens, targets)

    source = open_cache(model, tokens, context, mode, lengths)
    chosen = torch.tensor([2, 0, 2])  # any order, any number
    fork = source.select(chosen)
    others = (tokens + 1) % model.config.vocab_size
    mixed = torch.where(context, tokens, others)
    first = answers(fork, others[chosen], targets[chosen])
    with torch.no_grad():
        whole = model(Batch(mixed[chosen], context[chosen], lengths[chosen]), mode)[targets[chosen]]
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-10)
    late = source.select(chosen)
    torch.testing.assert_close(answers(source, tokens, targets), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        answers(late, others[chosen], targets[chosen]), whole, rtol=0, atol=1e-10
    )


def test_a_fork_in_the_middle_keeps_what_was_revealed() -> None:
    model = small_model()
    tokens, context = torch.arange(12)[None] % 7, torch.zeros(1, 12, dtype=torch.bool)
    with torch.no_grad():
        whole = model(Batch(tokens, context), "car")[0]
    cache, row = open_cache(model, tokens, context, "car", torch.tensor([12])), torch.tensor([0])
    for position in range(6):
        cache.logits(row, torch.tensor([position]))
        cache.reveal(row, torch.tensor([position]), tokens[:, position])
    fork = cache.select([0, 0])
    fork.reveal(torch.tensor([0, 1]), torch.tensor([6, 6]), torch.tensor([int(tokens[0, 6]), 5]))
    both = fork.logits(torch.tensor([0, 1]), torch.tensor([7, 7]))
    torch.testing.assert_close(both[0], whole[7], rtol=0, atol=1e-10)
    assert not torch.allclose(both[1], whole[7])


@pytest.mark.parametrize("mode", ["car", "ar"])
def test_rearranged_rows_continue_their_sources(mode: str) -> None:
    model = small_model()
    tokens, context = torch.arange(36).view(3, 12) % 7, torch.ones(3, 12, dtype=torch.bool)
    context[:, 3:9] = False
    tokens = torch.where(context, tokens[:1], tokens)
    cache = open_cache(model, tokens, context, mode, torch.tensor([12] * 3))
    rows = torch.arange(3)
    for position in range(3, 6):
        cache.reveal(rows, torch.full((3,), position), tokens[:, position])
        cache.logits(rows, torch.full((3,), position + 1))
    sources = [2, 0]
    cache.rearrange(sources, 3)
    with torch.no_grad():
        whole = model(Batch(tokens[sources], context[sources]), mode)
    for position in range(6, 9):
        found = cache.logits(rows[:2], torch.full((2,), position))
        torch.testing.assert_close(found, whole[:, position], rtol=0, atol=1e-10)
        cache.reveal(rows[:2], torch.full((2,), position), tokens[sources, position])


def test_repeated_logits_are_the_same() -> None:
    model = small_model()
    tokens, context, _ = random_batch(model, 2, 10)
    context[:, 4] = False
    cache = open_cache(
        model, tokens, context | (torch.arange(10) < 4), "car", torch.tensor([10, 9])
    )
    rows, positions = torch.arange(2), torch.full((2,), 4)
    assert torch.equal(cache.logits(rows, positions), cache.logits(rows, positions))


def test_arbitrary_context_has_no_cache() -> None:
    model = small_model()
    tokens, context, lengths = random_batch(model, 2, 10)
    assert model.cache(Batch(tokens, context, lengths), "ac") is None


# ---- rows that come and go


def one_answer(cache: Cache, row: int, tokens: Tensor, targets: Tensor) -> Tensor:
    """(targets, V) of one sequence in one row of the cache."""
    logits = []
    for position in targets.nonzero()[:, 0]:
        at = torch.tensor([row]), position[None]
        logits.append(cache.logits(*at)[0])
        cache.reveal(*at, tokens[position][None])
    return torch.stack(logits)


@pytest.mark.parametrize("mode", ["car", "ar"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_reused_row_keeps_nothing_of_its_previous_sequence(mode: str, dtype: torch.dtype) -> None:
    """Exactly: the same numbers as in a fresh cache."""
    model = small_model(seed=2).to(dtype)
    tokens, context, lengths = random_batch(model, 6, 15, seed=5)
    context[torch.arange(6), lengths // 2] = False
    targets = Batch(tokens, context, lengths).targets()
    used = Cache(model, mode, 1, 16)
    for i in range(6):
        one = slice(i, i + 1)
        fresh = Cache(model, mode, 1, 16)
        for cache in (used, fresh):
            assert cache.admit(Batch(tokens[one], context[one], lengths[one])).tolist() == [0]
        assert torch.equal(
            *(one_answer(cache, 0, tokens[i], targets[i]) for cache in (used, fresh))
        )
        used.release([0])


@pytest.mark.parametrize("mode", ["car", "ar"])
def test_sequences_join_and_leave_while_others_are_halfway(mode: str) -> None:
    model = small_model(seed=3)
    tokens, context, lengths = random_batch(model, 5, 15, seed=8)
    context[torch.arange(5), lengths // 2] = False
    targets = Batch(tokens, context, lengths).targets()
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), mode)
    cache = Cache(model, mode, 3, 16)
    left = {i: targets[i].nonzero()[:, 0].tolist() for i in range(5)}
    rows: dict[int, int] = {}
    coming, steps = [0, 1, 2, 3, 4], 0
    while coming or rows:
        if coming and cache.free and (steps % 2 == 0 or not rows):
            i = coming.pop(0)
            [rows[i]] = cache.admit(
                Batch(tokens[i : i + 1], context[i : i + 1], lengths[i : i + 1])
            ).tolist()
        now = sorted(rows, key=lambda i: rows[i])
        at = torch.tensor([rows[i] for i in now]), torch.tensor([left[i][0] for i in now])
        answer = cache.logits(*at)
        torch.testing.assert_close(answer, whole[now, at[1]], rtol=0, atol=1e-10)
        cache.reveal(*at, tokens[now, at[1]])
        for i in now:
            left[i].pop(0)
            if not left[i]:
                cache.release([rows.pop(i)])
        steps += 1
    assert cache.free == [0, 1, 2]


def test_equal_sequences_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    tokens, context, _ = random_batch(model, 2, 9)
    context[:, [3, 5]] = False
    context[:, :3] = True
    # the last is shorter, so not the same
    which, lengths = [0, 1, 0, 0], torch.tensor([9, 8, 9, 7])
    read: list[int] = []
    inner = Cache._read_suffix

    def counted(self: Cache, rows: Tensor, *rest: Tensor) -> None:
        read.append(len(rows))
        inner(self, rows, *rest)

    monkeypatch.setattr(Cache, "_read_suffix", counted)
    cache = open_cache(model, tokens[which], context[which], "car", lengths)
    assert read == [3]
    targets = Batch(tokens[which], context[which], lengths).targets()
    with torch.no_grad():
        whole = model(Batch(tokens[which], context[which], lengths), "car")[targets]
    torch.testing.assert_close(answers(cache, tokens[which], targets), whole, rtol=0, atol=1e-10)


def test_sequences_that_do_not_fit_are_refused_and_no_row_is_used() -> None:
    model = small_model()
    tokens, context, lengths = random_batch(model, 3, 9)
    cache = Cache(model, "car", 2, 8)
    with pytest.raises(
        ValueError, match="3 sequences of 9 tokens do not fit: 2 rows are free, each of 8"
    ):
        cache.admit(Batch(tokens, context, lengths))
    assert cache.free == [0, 1]
    rows = cache.admit(Batch(tokens[:2, :8], context[:2, :8], torch.tensor([8, 3])))
    cache.release(rows[:1])
    with pytest.raises(ValueError, match="row 0 holds no sequence"):
        cache.release([0])


@pytest.mark.parametrize("mode", ["car", "ar"])
def test_rows_of_an_alignment(mode: str) -> None:
    """Their columns are read in whole passes and step by step, in float32 and rounded to int8."""
    model = small_model("native", n_layer=5, max_length=19, columns=True)
    tokens, context, _ = random_batch(model, 3, 19)
    context[0, :] = False
    batch = Batch(tokens, context)
    targets = batch.targets()
    for kind in ("float32", "int8"):
        with torch.no_grad():
            whole = model.lean(kind)(batch, mode)[targets]
        cached = answers(open_cache(model, tokens, context, mode, batch.lengths), tokens, targets)
        torch.testing.assert_close(cached, whole, rtol=0, atol=1e-10)
    assert model.float().cache(batch, mode).step is None  # the compiled step reads no columns
    short = Batch(tokens[:, :18], context[:, :18])
    with pytest.raises(ValueError, match="has 18 tokens; this model reads rows of an alignment"):
        model(short, mode)
