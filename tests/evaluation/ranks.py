"""Two ranks in one process: threads that meet where ranks would."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")


class ThreadRanks:
    """What tasks use of `Ranks`, with sums over threads."""

    def __init__(self, rank: int, barrier: Barrier, board: dict[int, list[float]]) -> None:
        self.rank, self.world, self.device = rank, barrier.parties, torch.device("cpu")
        self._barrier, self._board = barrier, board

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        self._board[self.rank] = values
        self._barrier.wait(60)
        summed = [sum(each) for each in zip(*self._board.values(), strict=True)]
        self._barrier.wait(60)
        return summed

    def barrier(self) -> None:
        self._barrier.wait(60)


def on_ranks(world: int, work: Callable[[Any], Found]) -> list[Found]:
    """work(ranks) on every rank at once."""
    barrier, board = Barrier(world), dict[int, list[float]]()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: work(ThreadRanks(rank, barrier, board)), range(world)))
