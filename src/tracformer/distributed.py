"""Ranks: alone, or under torchrun. Nothing here pickles: what ranks tell each other are tensors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tracformer.devices import pick_device


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        """Each number summed over ranks, in float64."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def share(self, start: int, count: int) -> range:
        """This rank's stretch of the numbers start..start+count-1; stretches differ
        by at most one.
        """
        low, high = (start + count * r // self.world for r in (self.rank, self.rank + 1))
        return range(low, high)

    def local_rows(self, rows: int) -> tuple[int, int]:
        """The rows of a tensor that FSDP leaves on this rank: chunks of ceil(rows / world)."""
        chunk = -(-rows // self.world)
        return min(self.rank * chunk, rows), min((self.rank + 1) * chunk, rows)


@contextmanager
def join_ranks(device: str = "auto") -> Iterator[Ranks]:
    """The process group that torchrun describes in the environment, or a lone rank.

    One inside another has the outer one's group.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    kind = pick_device(device)
    if world == 1:
        yield Ranks(0, 1, torch.device(kind))
        return
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    outer = dist.is_initialized()
    if not outer:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        where = (
            torch.device("cuda", torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )
        yield Ranks(dist.get_rank(), world, where)
    finally:
        if not outer:
            dist.destroy_process_group()


def local(tensor: Tensor) -> Tensor:
    """The part of a possibly sharded tensor that lies on this rank; writing to it
    writes to the tensor.
    """
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
