"""An engine that is held, and requests that do not end by themselves."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from tracformer.generation.engine import Engine, Request
from tracformer.generation.fill_request import Filled
from tracformer.model.batch import Batch

PATIENCE = 60.0  # seconds: only a failure waits so long


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Keep the engine from running any step inside."""
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(PATIENCE)

    holder = threading.Thread(target=lambda: engine.request().call(hold))
    holder.start()
    assert reached.wait(PATIENCE)
    try:
        yield
    finally:
        go_on.set()
        holder.join()


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def question(length: int = 16, batch: int = 1, **options: Any) -> dict[str, Any]:
    """Nothing is given."""
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    return {"batch": Batch(tokens, torch.zeros(batch, length, dtype=torch.bool)), **options}


class Slow:
    """A `stop` that never stops; each step waits for a permit of `go`."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)

    def __call__(self, row: int, position: int, token: int) -> bool:
        assert self.go.acquire(timeout=PATIENCE)
        return False

    def free(self) -> None:
        self.go.release(10_000)


def endless(
    engine: Engine, pool: ThreadPoolExecutor, batch: int = 1
) -> tuple[Request, Future[Filled], Slow]:
    """Start a request that advances one token per permit."""
    slow, begun = Slow(), threading.Event()
    request = engine.request()
    slow.go.release(batch)
    future = pool.submit(
        lambda: request.fill(**question(batch=batch, stop=slow, callback=lambda _: begun.set()))
    )
    assert begun.wait(PATIENCE)
    return request, future, slow
