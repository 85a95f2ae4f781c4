"""Many requests in one scheduler: each gets what it gets alone. Sessions."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.generation.engines import PATIENCE
from tests.toys import SYSTEM_MODES, random_batch, small_baseline, small_model
from tracformer.generation import scheduler
from tracformer.generation.decode import Filled, fill
from tracformer.generation.engine import Engine
from tracformer.generation.fill_request import FillRequest
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
from tracformer.generation.scheduler import Scheduler, WholePasses, open_session
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.cache import Cache

SAMPLERS = [
    PLAIN,
    Sampler(temperature=0.0),
    Sampler(temperature=0.6, top_p=0.8),
    Sampler(top_k=3),
    Sampler(min_p=0.2, banned=(1,)),
    Sampler(repetition_penalty=1.5, no_repeat_ngram=2),
    Sampler(required=(5,)),
]
ORDERS: list[Order] = [
    LeftToRight(),
    LeftToRight(2),
    RandomOrder(),
    ByConfidence("entropy"),
    ByConfidence("margin", 2),
    GivenOrder((3, 1)),
    Ancestral(3),
]


def random_question(
    model: ConditionalModel, rng: random.Random, modes: tuple[str, ...] = ("car", "ac", "ar")
) -> dict[str, Any]:
    """Return random arguments of `fill`: one to three sequences, a mode and rules."""
    B, T = rng.randint(1, 3), rng.randint(2, model.config.max_length)
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    context = torch.rand(B, T, generator=generator) < rng.random()
    lengths = torch.randint(2, T + 1, (B,), generator=generator)
    context[torch.arange(B), lengths // 2] = False
    mode = rng.choice(modes)
    return {
        "batch": Batch(
            torch.randint(model.config.vocab_size, (B, T), generator=generator), context, lengths
        ),
        "mode": mode,
        "sampler": [rng.choice(SAMPLERS) for _ in range(B)],
        "seed": [rng.randrange(1000) for _ in range(B)],
        "order": [rng.choice(ORDERS) for _ in range(B)] if mode == "ac" else None,
        "stop": rng.choice([None, 2]),
        "only": rng.choice(
            [None, lambda row, position: (0, 2, 3, 5) if position % 3 == 0 else None]
        ),
        "top": rng.choice([0, 2]),
    }


def run(
    scheduler: Scheduler, requests: list[FillRequest], when: Callable[[], bool] = lambda: True
) -> None:
    """Run requests; the next is added before a step if `when` returns True."""
    coming = list(requests)
    while not all(request.done for request in requests):
        if coming and (when() or not (scheduler.rows or scheduler.waiting)):
            scheduler.add(coming.pop(0))
        scheduler.step()


def assert_same(one: Filled, other: Filled, atol: float = 1e-10) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.lengths, other.lengths)
    assert torch.equal(one.steps, other.steps)
    torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=atol)
    torch.testing.assert_close(one.drawn, other.drawn, rtol=0, atol=atol)
    assert (one.top is None) == (other.top is None)
    if one.top is not None and other.top is not None:
        assert torch.equal(one.top.tokens, other.top.tokens)
        torch.testing.assert_close(one.top.log_probs, other.top.log_probs, rtol=0, atol=atol)


@pytest.mark.parametrize("way", ["scheduler", "engine"])
@pytest.mark.parametrize(("family", "mode"), [("cached", "any"), *SYSTEM_MODES, ("mdlm", "ac")])
def test_requests_get_together_what_they_get_alone(
    family: str, mode: str, way: str, pool: ThreadPoolExecutor
) -> None:
    """In float64: requests that arrive at any time, with more rows than there is room for."""
    rng = random.Random(5)
    if family == "cached":
        model: ConditionalModel = small_model(seed=1)
        questions = [random_question(model, rng) for _ in range(24)]
    else:
        model = small_baseline(family)
        questions = [random_question(model, rng, (mode,)) for _ in range(5)]
    if way == "scheduler":
        scheduler = Scheduler(model, 4, model.config.max_length)
        requests = [FillRequest(model.config, **question) for question in questions]
        run(scheduler, requests, lambda: rng.random() < 0.6)
        results = [request.result() for request in requests]
        assert not scheduler.rows
        assert scheduler.tokens == sum(len(row.filled) for each in requests for row in each.rows)
    else:
        engine = Engine(model, rows=4)
        futures = [
            pool.submit(lambda requested: engine.request().fill(**requested), requested)
            for requested in questions
        ]
        results = [future.result(PATIENCE) for future in futures]
        assert (engine.load.rows, engine.load.waiting, engine.load.capacity) == (0, 0, 4)
        # tokens after the end of a stopped row were drawn too
        assert engine.load.tokens >= sum(int((result.steps >= 0).sum()) for result in results)
        engine.close()
    for result, question in zip(results, questions, strict=True):
        assert_same(result, fill(model, **question))


def test_in_float32_they_differ_only_where_candidates_all_but_tie() -> None:
    model, rng = small_model(seed=3).float(), random.Random(3)
    questions = [
        random_question(model, rng) | {"order": None, "mode": rng.choice(["car", "ar"])}
        for _ in range(20)
    ]
    requests = [FillRequest(model.config, **question) for question in questions]
    run(Scheduler(model, 24, 16), requests, lambda: rng.random() < 0.6)
    rows = different = 0
    for request, question in zip(requests, questions, strict=True):
        result, alone = request.result(), fill(model, **question)
        for row in range(len(result.tokens)):
            rows += 1
            if torch.equal(result.tokens[row], alone.tokens[row]):
                torch.testing.assert_close(
                    result.log_probs[row], alone.log_probs[row], rtol=0, atol=1e-4
                )
            else:
                different += 1
    assert different <= rows // 20


def test_rows_of_several_requests_share_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = small_baseline("bert"), []
    inner = model.logits_at

    def counted(tokens: Tensor, *rest: Any, **options: Any) -> Tensor:
        widths.append(len(tokens))
        return inner(tokens, *rest, **options)

    monkeypatch.setattr(model, "logits_at", counted)
    requests = [open_request(model, 6, "ac", seed=seed) for seed in range(5)]
    scheduler = Scheduler(model, 8, 12)
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    assert widths == [5]


def open_request(
    model: ConditionalModel, length: int, mode: str = "car", batch: int = 1, **options: Any
) -> FillRequest:
    """Nothing is given."""
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    return FillRequest(
        model.config, Batch(tokens, torch.zeros(batch, length, dtype=torch.bool)), mode, **options
    )


# ---- coming and going


def test_a_later_request_does_not_wait_for_an_earlier_one() -> None:
    model = small_model()
    first, second = open_request(model, 16), open_request(model, 4, "ar")
    scheduler = Scheduler(model, 4, 16)
    scheduler.add(first)
    for _ in range(5):
        scheduler.step()
    scheduler.add(second)
    scheduler.step()
    assert len(second.rows[0].filled) == 1
    assert not first.done
    for _ in range(3):
        ended = scheduler.step()
    assert ended == [second]
    assert len(first.rows[0].filled) == 9


def test_requests_without_room_are_queued_in_order() -> None:
    model = small_model()
    requests = [open_request(model, length, batch=2) for length in (3, 5, 4)]
    scheduler = Scheduler(model, 3, 16)
    for request in requests:
        scheduler.add(request)
    ended = []
    started: list[list[int]] = []
    while scheduler.rows or scheduler.waiting:
        ended += scheduler.step()
        assert len(scheduler.rows) <= 3
        started.append([sum(bool(row.filled) for row in request.rows) for request in requests])
    assert started[0] == [2, 1, 0]
    assert started[3] == [2, 2, 1]
    assert ended == requests


def test_a_dropped_request_makes_room_at_once() -> None:
    model = small_model()
    first, second, third = (open_request(model, 9, batch=2, seed=seed) for seed in range(3))
    scheduler = Scheduler(model, 2, 16)
    for request in (first, second, third):
        scheduler.add(request)
    scheduler.step()
    scheduler.drop([first, third])
    assert not scheduler.rows
    scheduler.step()
    assert [row.request for row in scheduler.rows] == [second, second]
    while not second.done:
        scheduler.step()
    assert not scheduler.waiting
    assert not first.done
    assert_same(second.result(), fill(model, second.batch, seed=1))


# ---- what goes wrong for one


def contradiction(row: int, position: int) -> tuple[int, ...] | None:
    return () if position == 2 else None


def failing(*_: object) -> Any:
    raise LookupError("not today")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"only": contradiction}, ValueError, "no token is left"),
        ({"only": failing}, LookupError, "not today"),
        ({"stop": failing}, LookupError, "not today"),
        ({"callback": failing}, LookupError, "not today"),
        ({"sampler": Sampler(allowed=(99,))}, ValueError, "out of range"),
    ],
)
def test_an_error_of_one_request_leaves_the_others_alone(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = small_model()
    good, bad, late = (
        open_request(model, 6, batch=2),
        open_request(model, 6, batch=2, **options),
        open_request(model, 4, batch=2, seed=4),
    )
    scheduler = Scheduler(model, 5, 16)
    for request in (good, bad, late):
        scheduler.add(request)
    ended = []
    while scheduler.rows or scheduler.waiting:
        ended += scheduler.step()
    assert sorted(map(id, ended)) == sorted(map(id, (good, bad, late)))
    with pytest.raises(error, match=message):
        bad.result()
    for request in (good, late):
        assert_same(request.result(), fill(model, request.batch, seed=request.seeds))
    with pytest.raises(error, match=message):
        fill(model, bad.batch, **options)


# ---- candidates and drafts


@pytest.mark.parametrize(
    ("mode", "order"),
    [("car", None), ("ar", None), ("ac", RandomOrder(2)), ("ac", ByConfidence())],
    ids=str,
)
def test_candidates_are_the_likeliest_tokens_and_their_log_probabilities(
    mode: str, order: Order | None
) -> None:
    model = small_model(seed=6)
    request = open_request(
        model, 8, mode, 3, seed=range(3), order=order, top=7, sampler=Sampler(temperature=0.7)
    )
    run(Scheduler(model, 3, 16), [request])
    filled = request.result()
    assert filled.top is not None
    assert filled.top.tokens.shape == (3, 8, 7)
    for row in range(3):
        for position in range(8):
            ids, values = (
                filled.top.tokens[row, position].tolist(),
                filled.top.log_probs[row, position],
            )
            assert sorted(ids) == list(range(7))
            assert values.tolist() == sorted(values.tolist(), reverse=True)
            assert values.logsumexp(0).item() == pytest.approx(0.0, abs=1e-12)
            assert (
                values[ids.index(int(filled.tokens[row, position]))]
                == filled.log_probs[row, position]
            )
    few = fill(
        model,
        request.batch,
        mode,
        seed=range(3),
        order=order,
        top=2,
        sampler=Sampler(temperature=0.7),
    )
    assert few.top is not None
    assert torch.equal(few.top.tokens, filled.top.tokens[..., :2])
    if mode != "ac":
        ids, values = model.candidates(Batch(filled.tokens, request.batch.context), mode, 7)
        assert torch.equal(ids, filled.top.tokens)
        torch.testing.assert_close(values, filled.top.log_probs, rtol=0, atol=1e-10)
    greedy = fill(
        model,
        request.batch,
        mode,
        order=order,
        top=1,
        sampler=Sampler(temperature=0.0),
    )
    assert greedy.top is not None
    assert torch.equal(greedy.top.tokens[..., 0], greedy.tokens)


def test_given_positions_have_no_candidates() -> None:
    model = small_model()
    context = torch.tensor([[True, False, True]])
    filled = fill(model, Batch(torch.tensor([[1, 2, 3]]), context), top=3)
    assert filled.top is not None
    assert (filled.top.tokens[0] >= 0).all(-1).tolist() == [False, True, False]
    assert fill(model, Batch(torch.tensor([[1, 2, 3]]), context)).top is None


def test_drafts_are_the_likeliest_tokens_and_are_sent_when_they_change() -> None:
    model = small_model(seed=2)
    received: list[list[Token]] = []
    tokens, context = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.bool)
    context[:, 4] = True
    filled = fill(
        model,
        Batch(tokens, context),
        "ac",
        seed=[1, 2],
        order=ByConfidence(),
        callback=received.append,
        drafts=True,
        sampler=Sampler(banned=(3,)),
    )
    plain: list[list[Token]] = []
    fill(
        model,
        Batch(tokens, context),
        "ac",
        seed=[1, 2],
        order=ByConfidence(),
        callback=plain.append,
        sampler=Sampler(banned=(3,)),
    )
    assert [[each for each in some if not each.draft] for some in received] == plain
    drafts: dict[tuple[int, int], int] = {}
    known = context.clone()
    for some in received:
        with torch.no_grad():
            log_probs = model(Batch(filled.tokens.where(known, 0), known), "ac").log_softmax(-1)
        log_probs[..., 3] = -torch.inf
        for each in some:
            if each.draft:
                at = each.sample, each.position
                assert drafts.get(at) != each.token_id
                drafts[at] = each.token_id
                expected = float(log_probs[(*at, each.token_id)])
                assert each.log_prob == pytest.approx(expected, abs=1e-9)
        for each in some:
            if not each.draft:
                known[each.sample, each.position] = True
        for row, position in (~known).nonzero().tolist():
            assert drafts[row, position] == int(log_probs[row, position].argmax())
    assert len(drafts) == 14  # of each sequence's 8 targets, all but the one filled first


# ---- sessions


@pytest.mark.parametrize("mode", ["car", "ar", "ac"])
def test_a_selection_keeps_revealed_tokens_and_is_independent(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "AT_ONCE", 1)
    model = small_model()
    tokens, context, _ = random_batch(model, 2, 9)
    context[:, 2:5] = False
    lengths = torch.tensor([9, 7])
    session = open_session(
        model, Batch(tokens, context | (torch.arange(9) < 2), lengths), mode, cached=False
    )
    rows, positions = torch.arange(2), torch.tensor([3, 3])
    session.reveal(rows, torch.tensor([2, 2]), torch.tensor([4, 5]))
    expected = session.logits(rows, positions)
    fork = session.select([1, 0, 1])
    torch.testing.assert_close(
        fork.logits(torch.arange(3), torch.tensor([3, 3, 3])),
        expected[[1, 0, 1]],
        rtol=0,
        atol=1e-12,
    )
    fork.reveal(torch.tensor([0, 1]), torch.tensor([2, 2]), torch.tensor([0, 0]))
    assert torch.equal(session.logits(rows, positions), expected)
    changed = fork.logits(torch.arange(3), torch.tensor([3, 3, 3]))
    assert not torch.allclose(changed[0], expected[1])
    torch.testing.assert_close(changed[2], expected[1], rtol=0, atol=1e-12)


def test_whole_passes_give_the_same_at_any_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    tokens, context, lengths = random_batch(model, 5, 11, seed=2)
    wanted = (~context & (torch.arange(11) < lengths[:, None])).nonzero()
    answers = []
    for batch in (1, 2, 16):
        monkeypatch.setattr(scheduler, "AT_ONCE", batch)
        answers.append(
            open_session(model, Batch(tokens, context, lengths), "ac", cached=False).logits(
                *wanted.unbind(1)
            )
        )
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), "ac")[*wanted.unbind(1)]
    for answer in answers:
        torch.testing.assert_close(answer, whole, rtol=0, atol=1e-12)


def test_the_cache_where_there_is_one() -> None:
    model = small_model()
    tokens, context, lengths = random_batch(model, 2, 9)
    assert isinstance(open_session(model, Batch(tokens, context, lengths), "car"), Cache)
    assert isinstance(
        open_session(model, Batch(tokens, context, lengths), "car", cached=False), WholePasses
    )
    assert isinstance(open_session(model, Batch(tokens, context, lengths), "ac"), WholePasses)


def test_without_targets() -> None:
    tokens, context = torch.tensor([[5, -1, 6]]), torch.tensor([[True, False, True]])
    assert Batch(tokens, context).without_targets().tokens.tolist() == [[5, 0, 6]]
