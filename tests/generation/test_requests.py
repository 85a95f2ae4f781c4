"""How a request ends: cancelled, late, with an error, with its engine; and nobody else notices."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.generation.engines import PATIENCE, Slow, endless, eventually, held, question
from tests.generation.test_filling import assert_same
from tests.helpers import small_model
from tracformer.generation.decode import fill
from tracformer.generation.engine import Cancelled, Closed, DeadlineExceeded, Engine


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


def test_cancelling_what_waits_for_a_call(engine: Engine, pool: ThreadPoolExecutor) -> None:
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


def test_closing_finishes_what_runs_and_refuses_what_is_new(
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


def test_a_request_that_is_open_may_go_on_while_the_engine_closes(
    engine: Engine, pool: ThreadPoolExecutor
) -> None:
    with engine.request() as request:
        closing = pool.submit(engine.close)
        assert eventually(lambda: engine._closing)
        for _ in range(2):
            assert_same(request.fill(**question(4)), fill(engine.model, **question(4)))
        assert not closing.done()
    closing.result(PATIENCE)


def test_closing_at_once_cancels_what_waits(engine: Engine, pool: ThreadPoolExecutor) -> None:
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
