"""Where a model computes: devices by name."""

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
        raise ValueError(f"device is {device!r}; it must be auto, cpu, cuda, or another name that PyTorch knows") from None
    try:
        torch.empty(1, device=found).item()  # "meta" holds nothing that could be read
    except (RuntimeError, AssertionError, NotImplementedError):  # builds of PyTorch tell it in different ways
        raise ValueError(f"device is {device!r}, which this machine or its PyTorch cannot compute on; use cpu") from None
    return "cpu" if found.type == "cpu" else device  # weights are read to "cpu", not to "cpu:0"
