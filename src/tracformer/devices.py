"""Where a model computes: devices by name."""

import torch


def pick_device(device: str) -> str:
    """`auto` is a GPU where there is one. A device that this machine has not is an error."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but this machine has no CUDA device; use cpu")
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}; it must be auto, cpu, cuda, or another name that PyTorch knows") from None
    return device
