"""Process groups: a single process, or the ranks that torchrun starts.

Ranks exchange tensors only; nothing is pickled.
"""

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
    """This process among the processes that work together."""

    rank: int
    world: int  # number of processes
    device: torch.device

    @property
    def first(self) -> bool:
        """Return whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        """Return each number summed over the ranks, in float64."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def share(self, start: int, count: int) -> range:
        """Return this rank's part of the numbers start..start+count-1.

        The parts are contiguous, and their sizes differ by at most one.
        """
        low, high = (start + count * r // self.world for r in (self.rank, self.rank + 1))
        return range(low, high)

    def local_rows(self, rows: int) -> tuple[int, int]:
        """Return the rows of a tensor that FSDP keeps here, in chunks of ceil(rows / world)."""
        chunk = -(-rows // self.world)
        return min(self.rank * chunk, rows), min((self.rank + 1) * chunk, rows)


@contextmanager
def join_ranks(device: str = "auto") -> Iterator[Ranks]:
    """Join the process group that torchrun describes in the environment, if any.

    A nested call uses the group of the outer call.
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
    """Return this rank's part of a possibly sharded tensor; writing to it changes the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
