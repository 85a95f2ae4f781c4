"""Choose a device, keep freed memory, and choose the precision of sums."""

import ctypes
import ctypes.util
import sys

import torch


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
