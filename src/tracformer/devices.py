"""Choose a device and threads, keep freed memory, choose the precision of sums; group ranks.

A group is a single process, or the ranks that torchrun starts. Ranks exchange tensors only; nothing
is pickled.
"""

import ctypes
import ctypes.util
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def pick_device(device: str) -> str:
    """Return the device to compute on.

    Args:
        device: "auto" for a GPU if there is one, else the CPU; or a name that PyTorch knows.

    Raises:
        ValueError: This machine cannot compute on the device.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but this machine has no CUDA device; use cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device is {device!r}; it must be auto, cpu, cuda, or another name that PyTorch knows"
        ) from None
    try:
        torch.empty(1, device=found).item()  # fails for "meta", which has no values
    # builds of PyTorch raise different errors
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(
            f"device is {device!r}, but this machine or its PyTorch cannot compute on it; use cpu"
        ) from None
    return "cpu" if found.type == "cpu" else device  # weights are read to "cpu", not to "cpu:0"


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU multiplies matrices in bfloat16 faster than in float32."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, bool)() for check in checks)


def machine_memory() -> int | None:
    """Return the bytes of memory that this process may use; None where that is not known."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    with suppress(OSError, ValueError):  # a container's share
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


def require_memory(needed: int, purpose: str) -> None:
    """Raise a ValueError if a model needs more memory than this machine has.

    Args:
        needed: Bytes.
        purpose: What needs them, for the message.
    """
    limit = machine_memory()
    if limit is not None and needed > limit:
        raise ValueError(
            f"{purpose} needs about {needed / 2**30:.3g} GiB of memory, and this machine has "
            f"{limit / 2**30:.3g} GiB; use smaller sizes, such as d_model, n_layer and vocab_size"
        )


def use_threads(wanted: int = 0) -> str:
    """Set the number of processor threads of this process.

    Args:
        wanted: The number. 0 keeps that of `OMP_NUM_THREADS` if it is set, else takes the machine's
            cores, or this process's fair share of them if more is running than there are cores.

    Returns:
        A sentence for the user if the machine is busy, else an empty text.
    """
    if wanted:
        torch.set_num_threads(wanted)
        return ""
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "getloadavg"):
        return ""
    cores, load = torch.get_num_threads(), os.getloadavg()[0]
    if cores == 1 or load <= cores:
        return ""
    fair = max(1, round(cores * cores / (cores + load)))
    torch.set_num_threads(fair)
    return (
        f"the machine is busy (load {load:.1f} on {cores} cores): using {fair} "
        f"thread{'s' if fair > 1 else ''}; --threads {cores} uses them all"
    )


def processor_name(device: torch.device | None = None) -> str:
    """Return the name of the processor, or of a GPU, as the system gives it."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = [line for line in lines if line.startswith(("model name", "Model"))]
    return found[0].partition(":")[2].strip() if found else "unknown processor"


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # names and values of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory, so that large tensors reuse mapped pages.

    By default glibc maps every large tensor anew, and the page faults cost more than the arithmetic
    (measured: encoder attention at T = 16384 takes half the time with this, a training step of
    preset `laptop-long` 0.83 of it).

    Returns:
        Whether it took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(ctypes.util.find_library("c")).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precisions, in which sums would be inexact; else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


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
