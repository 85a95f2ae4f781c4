"""Work that takes several passes of the network, of which each can wait for its turn: others compute in between."""

from collections.abc import Callable, Generator
from typing import TypeVar

A = TypeVar("A")

Passes = Generator[None, None, A]
"""Each `next` computes for at most one pass; the result comes at the end. It may be left at any pass."""


def finish(passes: Passes[A]) -> A:
    """All of them, one right after another."""
    while True:
        try:
            next(passes)
        except StopIteration as end:
            result: A = end.value
            return result


def at_once(f: Callable[[], A]) -> Passes[A]:
    """Everything in one."""
    yield from ()
    return f()
