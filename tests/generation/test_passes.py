"""A reverse process takes its turns pass by pass: nobody waits for the whole of it, and who gives
it up stops it.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.baselines.small import question as random_question
from tests.baselines.small import small_diffusion, small_plaid
from tests.generation.engines import PATIENCE, Slow, eventually, question
from tracformer.baselines.sedd import SEDD
from tracformer.generation.decode import Filled, fill
from tracformer.generation.engine import Cancelled, DeadlineExceeded, Engine, Request
from tracformer.generation.orders import Ancestral
from tracformer.model.base import ConditionalModel, at_once, finish
from tracformer.model.batch import Batch

MANY = 1000  # steps: far more than the tests let it take


class Paced(SEDD):
    """Each pass of its reverse process waits for a permit."""

    slow: Slow
    passes = 0

    def _leave(self, *question: Any) -> tuple[Tensor, Tensor]:
        self.passes += 1
        self.slow(0, 0, 0)
        logits, _ = super()._leave(*question)
        # nothing is revealed before the last step
        return logits, torch.zeros(len(logits), dtype=torch.float64)


@pytest.fixture
def paced(pool: ThreadPoolExecutor) -> Iterator[Engine]:
    """Closed before the pool, whose threads wait for it."""
    model = small_diffusion("sedd")
    model.__class__ = Paced
    model.slow = Slow()
    engine = Engine(model, rows=4)
    yield engine
    model.slow.free()
    engine.close(drain=False)
    assert not engine._thread.is_alive()


def diffuse(
    engine: Engine, pool: ThreadPoolExecutor, request: Request | None = None, steps: int = MANY
) -> Future[Filled]:
    """On its way, and waiting for its first permit."""
    request = request or engine.request()
    future = pool.submit(
        lambda: request.fill(**question(6, mode="diffusion", order=Ancestral(steps)))
    )
    assert eventually(lambda: engine.model.passes == 1)  # type: ignore[attr-defined]
    return future


def permit(engine: Engine, passes: int) -> None:
    engine.model.slow.go.release(passes)  # type: ignore[union-attr]


def test_others_have_their_turn_between_passes(paced: Engine, pool: ThreadPoolExecutor) -> None:
    long = diffuse(paced, pool)
    filled = pool.submit(lambda: paced.request().fill(**question(3, mode="ac")))
    called = pool.submit(lambda: paced.request().call(lambda: 7))
    assert eventually(lambda: len(paced._submitted) == 2)
    permit(paced, 5)  # a pass and three steps; and one pass more, should the call's turn come later
    assert called.result(PATIENCE) == 7
    assert torch.equal(
        filled.result(PATIENCE).tokens, fill(paced.model, **question(3, mode="ac")).tokens
    )
    assert not long.done()


def test_who_came_meanwhile_is_before_the_next_pass(
    paced: Engine, pool: ThreadPoolExecutor
) -> None:
    diffuse(paced, pool)
    called = pool.submit(lambda: paced.request().call(lambda: paced.model.passes))
    assert eventually(lambda: bool(paced._submitted))
    permit(paced, 1)
    assert called.result(PATIENCE) == 1


def test_a_request_that_is_given_up_takes_no_further_pass(
    paced: Engine, pool: ThreadPoolExecutor
) -> None:
    request = paced.request()
    long = diffuse(paced, pool, request)
    request.cancel()
    with pytest.raises(Cancelled):
        long.result(PATIENCE)
    permit(paced, MANY)
    assert paced.request().call(lambda: 7) == 7
    assert paced.request().call(lambda: paced.model.passes) == 1
    assert not paced._submitted


def test_a_deadline_passes_between_two_passes(paced: Engine, pool: ThreadPoolExecutor) -> None:
    long = diffuse(paced, pool, paced.request(deadline=time.monotonic() + 0.2))
    with pytest.raises(DeadlineExceeded):
        long.result(PATIENCE)
    permit(paced, MANY)
    assert paced.request().call(lambda: 7) == 7
    assert paced.request().call(lambda: paced.model.passes) == 1


def test_closing_waits_for_one_pass_alone(paced: Engine, pool: ThreadPoolExecutor) -> None:
    long = diffuse(paced, pool)
    closing = pool.submit(lambda: paced.close(drain=False))
    assert eventually(lambda: paced._stopping)
    permit(paced, 1)
    closing.result(PATIENCE)
    with pytest.raises(Cancelled, match="closed"):
        long.result(PATIENCE)
    assert paced.model.passes == 1


def test_draining_waits_for_all_of_them(paced: Engine, pool: ThreadPoolExecutor) -> None:
    long = diffuse(paced, pool, steps=5)
    closing = pool.submit(paced.close)
    assert eventually(lambda: paced._closing)
    permit(paced, MANY)
    assert bool((long.result(PATIENCE).steps == 0).all())
    closing.result(PATIENCE)
    assert paced.model.passes == 5


@pytest.mark.parametrize("system", ["mdlm", "sedd", "d3pm", "plaid"])
def test_processes_that_take_turns_give_what_each_gives_alone(
    system: str, pool: ThreadPoolExecutor
) -> None:
    model: ConditionalModel = (
        small_plaid()
        if system == "plaid"
        else small_diffusion(system, **({"n_step": 30} if system == "d3pm" else {}))
    )
    engine = Engine(model, rows=2)
    asked = []
    for number in range(8):
        tokens, context, lengths = random_question(3, 10, seed=number)
        order = Ancestral(3 + number) if number % 2 else None
        asked.append(
            {
                "batch": Batch(tokens, context, lengths),
                "mode": "diffusion",
                "seed": number,
                "order": order,
            }
        )
    threads = set()

    def stop(row: int, position: int, token: int) -> bool:
        threads.add(threading.current_thread())
        return position > 6 and token == 3

    futures = [
        pool.submit(lambda each: engine.request().fill(**each, top=2, stop=stop), each)
        for each in asked
    ]
    for each, future in zip(asked, futures, strict=True):
        mine, expected = future.result(PATIENCE), fill(model, **each, top=2, stop=stop)  # type: ignore[arg-type]
        assert torch.equal(mine.tokens, expected.tokens)
        assert torch.equal(mine.log_probs, expected.log_probs)
        assert torch.equal(mine.lengths, expected.lengths)
        assert mine.top is not None
        assert expected.top is not None
        assert torch.equal(mine.top.tokens, expected.top.tokens)
    engine.close()
    assert threads == {engine._thread, threading.current_thread()}


def test_finishing() -> None:
    assert finish(at_once(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        finish(at_once(lambda: 1 // 0))
