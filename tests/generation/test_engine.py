"""The engine: requests of many threads share one model, and each result equals that of `fill`."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.generation.engines import PATIENCE, Slow, endless, eventually, held, question
from tests.generation.test_scheduler import assert_same, random_question
from tests.server.helpers import running
from tests.toys import small_baseline, small_model
from tracformer import Client, LanguageModel
from tracformer.data import char_tokenizer
from tracformer.generation.decode import fill
from tracformer.generation.engine import Cancelled, Closed, DeadlineExceeded, Engine
from tracformer.generation.orders import ByConfidence, RandomOrder
from tracformer.generation.results import Callback, Token
from tracformer.generation.samplers import Sampler
from tracformer.model.base import ConditionalModel

TEXTS = ["the cat [[3]] the [[2]] mat", "a [[1-3]]", "[[4]] dog sat and [[2]]", "the[[1-2]]"]
OPTIONS: list[dict[str, Any]] = [
    {
        "n": 3,
        "seed": 5,
        "sampler": Sampler(temperature=0.8, top_p=0.9),
        "length_draws": 2,
        "top": 2,
    },
    {"n": 2, "order": ByConfidence("entropy"), "length_draws": 2},
    {"n": 2, "mode": "ac", "order": RandomOrder(2), "length_draws": 2},
    {"n": 2, "best_of": 4, "length_draws": 2},
    {"n": 2, "best_of": 4, "length_draws": 2, "reread": True},
    {"n": 2, "search": "beam:4", "length_draws": 2, "top": 2},
    {"search": "best-first:30", "length_draws": 2},
]


@pytest.fixture(scope="module")
def address(lm: LanguageModel) -> Iterator[str]:
    """Return the address of a server that runs the same model."""
    with running(lambda: lm) as server:
        yield server.url


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
def test_texts_get_together_what_they_get_alone(
    lm: LanguageModel, pool: ThreadPoolExecutor, address: str, options: dict[str, Any]
) -> None:
    """In one batch, as requests of an engine, and as requests of a server."""
    alone = [lm.infill(text, **options) for text in TEXTS]
    engine, client = Engine(lm.model, rows=6), Client(address)
    requests = [
        [pool.submit(infill, text, **options) for text in TEXTS]
        for infill in (lm.on(engine.request()).infill, client.infill)
    ]
    # the number of nodes that are searched at once decides where a search gives up
    rows = {} if "search" in options else {"batch": 5}
    assert alike(lm.infill(TEXTS, **options, **rows), alone)
    for together in requests:
        assert alike([request.result(PATIENCE) for request in together], alone)
    engine.close()


def test_a_request_samples_scores_and_lists_as_the_model_does(
    lm: LanguageModel, pool: ThreadPoolExecutor
) -> None:
    engine = Engine(lm.model, rows=6)
    through = lm.on(engine.request())
    calls: list[Callable[[LanguageModel], Any]] = [
        lambda on: on.sample(3, prompt="the cat ", max_tokens=9, top=1),
        lambda on: on.sample(
            2, prompt=lm.tokenizer.encode("the cat"), max_tokens=6, stop=["a", "o"]
        ),
        lambda on: on.score("the [[cat]] sat on [[a mat]]", top=3),
        lambda on: on.score(["the [[cat]] sat", "[[a]] dog"], mode="ac"),
        lambda on: on.marginals("the [[2]] sat", top=4),
        lambda on: on.score_tokens([1, 2, 3], [False, True, False], "ar"),
        lambda on: on.top_tokens([1, 2, 3], [False, True, False], 2, "ar"),
    ]
    futures = [pool.submit(call, through) for call in calls]
    for call, future in zip(calls, futures, strict=True):
        assert alike(future.result(PATIENCE), call(lm))
    engine.close()


def alike(one: Any, other: Any) -> bool:
    """Equal but for the last bits of numbers."""
    if isinstance(one, float):
        return bool(one == pytest.approx(other, abs=1e-9))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return (
        all(map(alike, vars(one).values(), vars(other).values()))
        if hasattr(one, "to_dict")
        else bool(one == other)
    )


@pytest.mark.parametrize("family", ["bart", "bert", "gpt2", "mdlm", "sedd"])
def test_other_systems(family: str, pool: ThreadPoolExecutor) -> None:
    model: ConditionalModel = small_baseline(family, vocab_size=5)
    lm = LanguageModel(model, char_tokenizer("abcd"))
    engine = Engine(model, rows=3)
    requests = [
        pool.submit(
            lambda seed: lm.on(engine.request()).infill("ab[[2]]c[[1]]", 2, seed=seed), seed
        )
        for seed in range(4)
    ]
    for seed, future in enumerate(requests):
        assert alike(future.result(PATIENCE), lm.infill("ab[[2]]c[[1]]", 2, seed=seed))
    engine.close()


def test_a_runner_of_another_model_is_refused(lm: LanguageModel, engine: Engine) -> None:
    with pytest.raises(ValueError, match="another model"):
        lm.on(engine.request())


def test_a_request_joins_while_another_is_halfway(engine: Engine, pool: ThreadPoolExecutor) -> None:
    _, first, slow = endless(engine, pool)
    second = pool.submit(lambda: engine.request().fill(**question(3)))
    for _ in range(6):  # far fewer than the first needs
        slow.go.release()
    assert_same(second.result(PATIENCE), fill(engine.model, **question(3)))
    assert not first.done()
    slow.free()
    assert_same(first.result(PATIENCE), fill(engine.model, **question()))


def test_rows_beyond_the_limit_are_queued(engine: Engine, pool: ThreadPoolExecutor) -> None:
    with held(engine):
        futures = [
            pool.submit(lambda seed: engine.request().fill(**question(5, batch=3, seed=seed)), seed)
            for seed in range(3)
        ]
        assert eventually(lambda: engine.load.waiting == 9)
    for seed, future in enumerate(futures):
        assert_same(future.result(PATIENCE), fill(engine.model, **question(5, batch=3, seed=seed)))


def test_callbacks_run_in_the_callers_thread(engine: Engine) -> None:
    received: list[Token] = []
    threads = set()

    def callback(revealed: list[Token]) -> None:
        threads.add(threading.current_thread())
        received.extend(revealed)

    filled = engine.request().fill(**question(6, batch=2, callback=callback, top=1))
    assert threads == {threading.current_thread()}
    assert sorted((each.sample, each.position, each.token_id) for each in received) == [
        (row, position, int(filled.tokens[row, position]))
        for row in range(2)
        for position in range(6)
    ]


def test_a_callback_that_returns_false_is_detached(engine: Engine) -> None:
    requested = question(6, batch=2)
    received: dict[str, int] = {"here": 0, "engine": 0}

    def first(name: str) -> Callable[[list[Token]], bool]:
        def callback(_: list[Token]) -> bool:
            received[name] += 1
            return False

        return callback

    expected = fill(engine.model, **requested, callback=first("here"))
    assert_same(engine.request().fill(**requested, callback=first("engine")), expected)
    assert int(expected.steps.max()) > 1
    assert received == {"here": 1, "engine": 1}


def test_a_callback_that_fails_ends_its_own_fill(engine: Engine) -> None:
    def callback(_: list[Token]) -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        engine.request().fill(**question(callback=callback))
    assert eventually(lambda: engine.load.rows == 0)


def test_a_callback_receives_lengths_tokens_and_drafts(lm: LanguageModel) -> None:
    class Recorder(Callback):
        def __init__(self) -> None:
            self.received: list[Any] = []

        def __call__(self, arrivals: list[Token]) -> None:
            self.received += arrivals

        def lengths(self, text: int, sample: int, lengths: tuple[int, ...]) -> None:
            self.received.append((text, sample, lengths))

    for options in ({"order": ByConfidence()}, {}, {"best_of": 4}):
        recorder, through = Recorder(), Recorder()
        results = lm.infill(
            "a [[1-4]] cat [[3]]", 2, length_draws=2, top=2, callback=recorder, **options
        )  # type: ignore[arg-type]
        engine = Engine(lm.model)
        lm.on(engine.request()).infill(
            "a [[1-4]] cat [[3]]", 2, length_draws=2, top=2, callback=through, **options
        )  # type: ignore[arg-type]
        engine.close()
        assert sorted(map(str, recorder.received)) == sorted(
            map(str, through.received)
        ) or alike_events(recorder.received, through.received)
        samples = options.get("best_of", 2)
        chosen, arrivals = recorder.received[:samples], recorder.received[samples:]
        assert [each[:2] for each in chosen] == [(0, sample) for sample in range(samples)]
        assert all(isinstance(each, Token) for each in arrivals)
        settled = [each for each in arrivals if each.candidates]
        assert all(len(each.candidates) == 2 for each in settled)
        assert len(settled) == sum(sum(lengths) for *_, lengths in chosen)
        if "best_of" in options:
            assert all(each.draft for each in arrivals)
        else:
            assert not any(each.draft for each in settled)
            assert [lengths for *_, lengths in chosen] == [
                tuple(len(s.token_ids) for s in r.spans) for r in results
            ]
            reported = {(each.sample, each.blank, each.index): each.token_id for each in settled}
            assert reported == {
                (i, b, k): token
                for i, r in enumerate(results)
                for b, s in enumerate(r.spans)
                for k, token in enumerate(s.token_ids)
            }
        if "order" in options:
            assert any(each.draft for each in arrivals)


def alike_events(some: list[Any], others: list[Any]) -> bool:
    """Samples may come in another order."""

    def key(event: Any) -> tuple[Any, ...]:
        return (
            (1, event.sample, event.blank, event.index, event.draft, event.token_id)
            if isinstance(event, Token)
            else (0, *event)
        )

    return alike(sorted(map(key, some)), sorted(map(key, others)))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_clients_that_join_and_leave_at_random(pool: ThreadPoolExecutor, seed: int) -> None:
    """Some clients cancel, some have a short deadline, some send contradictions.

    Every answer equals that of `fill`.
    """
    model = small_model(seed=seed)
    engine = Engine(model, rows=5)

    def client(number: int) -> str:
        rng = random.Random(1000 * seed + number)
        requested = random_question(model, rng)
        request = engine.request(
            time.monotonic() + rng.uniform(0, 0.2) if rng.random() < 0.2 else None
        )
        if rng.random() < 0.1:
            requested["only"] = lambda row, position: ()
        if rng.random() < 0.3:
            threading.Timer(rng.uniform(0, 0.1), request.cancel).start()
        try:
            filled = request.fill(**requested)
        except Cancelled as error:
            return type(error).__name__
        except ValueError as error:
            return "refused" if "no token is left" in str(error) else repr(error)
        assert_same(filled, fill(model, **requested))
        return "answered"

    ends = list(pool.map(client, range(200)))
    assert eventually(lambda: (engine.load.rows, engine.load.waiting) == (0, 0))
    assert ends.count("answered") > 50
    assert (
        {"answered", "refused", "Cancelled"}
        <= set(ends)
        <= {"answered", "refused", "Cancelled", "DeadlineExceeded"}
    )
    engine.close()


# ---- requests


def test_cancelling_frees_rows_before_the_next_step(
    engine: Engine, pool: ThreadPoolExecutor
) -> None:
    request, first, slow = endless(engine, pool, batch=4)
    waiting = pool.submit(lambda: engine.request().fill(**question(4, batch=4)))
    assert eventually(lambda: engine.load.waiting == 4)
    steps = engine.load.steps
    request.cancel()
    with pytest.raises(Cancelled):
        first.result(PATIENCE)
    slow.free()
    assert_same(waiting.result(PATIENCE), fill(engine.model, **question(4, batch=4)))
    assert engine.load.steps <= steps + 5  # the step under way, then four of the other's
    with pytest.raises(Cancelled):
        request.call(lambda: None)


def test_cancelling_a_queued_call(engine: Engine, pool: ThreadPoolExecutor) -> None:
    called: list[int] = []
    request = engine.request()
    with held(engine):
        future = pool.submit(lambda: request.call(lambda: called.append(1)))
        assert eventually(lambda: bool(request.works))
        request.cancel()
        with pytest.raises(Cancelled):
            future.result(PATIENCE)
    assert engine.request().call(lambda: 7) == 7
    assert not called


def test_a_deadline_ends_a_request_wherever_it_is(engine: Engine, pool: ThreadPoolExecutor) -> None:
    with pytest.raises(DeadlineExceeded):
        engine.request(deadline=time.monotonic()).fill(**question())
    with held(engine), pytest.raises(DeadlineExceeded):
        engine.request(deadline=time.monotonic() + 0.05).call(lambda: None)
    slow = Slow()
    future = pool.submit(
        lambda: engine.request(deadline=time.monotonic() + 0.1).fill(**question(stop=slow))
    )
    with pytest.raises(DeadlineExceeded):
        future.result(PATIENCE)
    slow.free()
    assert eventually(lambda: engine.load.rows == 0)
    assert engine.request(deadline=time.monotonic() + PATIENCE).call(lambda: 7) == 7


def test_an_error_reaches_its_own_request_alone(engine: Engine, pool: ThreadPoolExecutor) -> None:
    with held(engine):
        good = pool.submit(lambda: engine.request().fill(**question(7, batch=2)))
        bad = pool.submit(
            lambda: engine.request().fill(
                **question(7, only=lambda row, position: () if position == 3 else None)
            )
        )
        assert eventually(lambda: engine.load.waiting == 3)
    with pytest.raises(ValueError, match="no token is left"):
        bad.result(PATIENCE)
    assert_same(good.result(PATIENCE), fill(engine.model, **question(7, batch=2)))
    with pytest.raises(ZeroDivisionError):
        engine.request().call(lambda: 1 // 0)
    with pytest.raises(ValueError, match="mode is 'up'"):
        engine.request().fill(**question(mode="up"))


@pytest.mark.parametrize("where", ["empty_session", "choose", "_requests"])
def test_the_engine_survives_whatever_fails_in_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(f"tracformer.generation.scheduler.{where}", lambda *_, **__: 1 // 0)
        with pytest.raises((ZeroDivisionError, RuntimeError), match=r"by zero|step of the engine"):
            engine.request().fill(**question())
    assert_same(engine.request().fill(**question()), fill(engine.model, **question()))
    assert engine.load.rows == 0


def test_closing_finishes_running_requests_and_refuses_new_ones(
    engine: Engine, pool: ThreadPoolExecutor
) -> None:
    _, running, slow = endless(engine, pool)
    old = engine.request()
    closing = pool.submit(engine.close)
    assert eventually(lambda: engine._closing)
    with pytest.raises(Closed, match="takes nothing new"):
        engine.request()
    with pytest.raises(Closed):
        old.fill(**question())
    slow.free()
    assert_same(running.result(PATIENCE), fill(engine.model, **question()))
    closing.result(PATIENCE)
    assert not engine._thread.is_alive()


def test_an_open_request_continues_while_the_engine_closes(
    engine: Engine, pool: ThreadPoolExecutor
) -> None:
    with engine.request() as request:
        closing = pool.submit(engine.close)
        assert eventually(lambda: engine._closing)
        for _ in range(2):
            assert_same(request.fill(**question(4)), fill(engine.model, **question(4)))
        assert not closing.done()
    closing.result(PATIENCE)


def test_closing_without_drain_cancels_queued_requests(
    engine: Engine, pool: ThreadPoolExecutor
) -> None:
    _, running, slow = endless(engine, pool, batch=4)
    waiting = pool.submit(lambda: engine.request().fill(**question()))
    assert eventually(lambda: engine.load.waiting == 1)
    closing = pool.submit(lambda: engine.close(drain=False))
    slow.free()
    closing.result(PATIENCE)
    for future in (running, waiting):
        with pytest.raises(Cancelled, match="closed"):
            future.result(PATIENCE)


def test_draining_ends_when_its_time_is_over(engine: Engine, pool: ThreadPoolExecutor) -> None:
    with engine.request():  # never does anything
        engine.close(timeout=0.05)
    assert not engine._thread.is_alive()


def test_an_engine_needs_a_row() -> None:
    with pytest.raises(ValueError, match="rows is 0"):
        Engine(small_model(), rows=0)
