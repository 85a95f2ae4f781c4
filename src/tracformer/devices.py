"""Pick a device, keep its memory, and choose the precision of sums."""

import ctypes
import ctypes.util
import sys

import torch


def pick_device(device: str) -> str:
    """`auto` is a GPU where there is one. A device that this machine has not is an error."""
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
        torch.empty(1, device=found).item()  # "meta" holds nothing that could be read
    # builds of PyTorch tell it in different ways
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(
            f"device is {device!r}, which this machine or its PyTorch cannot compute on; use cpu"
        ) from None
    return "cpu" if found.type == "cpu" else device  # weights are read to "cpu", not to "cpu:0"


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # names and values of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory instead of handing it back: large tensors then reuse warm
    pages.

    By default glibc maps every large tensor anew, and the page faults cost more than the arithmetic
    (measured: encoder attention at T = 16384 takes half the time with this, a training step of
    preset `laptop-long` 0.83 of it). Returns whether it took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(ctypes.util.find_library("c")).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half precisions; every other dtype as it is."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
