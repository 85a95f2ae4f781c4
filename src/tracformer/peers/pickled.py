"""Pickles of others, opened only as far as they hold tensors and plain values: nothing in them is run."""

import errno
from pathlib import Path
from typing import Any

import torch

NAMES_IT = ("GLOBAL", "Unsupported")  # in torch's many lines on how to read such a file all the same, what stands in that of the reason


def read_pickle(path: Path) -> Any:
    """What torch reads of the file without running anything; a file that is damaged, or that needs more, is a ValueError with advice."""
    with path.open("rb"):  # one that is not there, or may not be read, says so itself
        pass
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a file that is cut short or not a pickle at all, nearly every kind
        failing = isinstance(error, OSError) and error.errno != errno.EINVAL  # which is what a seek in a short file gives
        if failing or isinstance(error, MemoryError) or "allocate memory" in str(error):  # no fault of the file's
            raise
        raise ValueError(
            f"{path} cannot be read as tensors alone: it is damaged, or it holds more, and could then run code when read. If it was "
            "downloaded, get it again, best as model.safetensors. If you trust it, load it where it was written and save its tensors "
            f"again: torch.save({{name: tensor, ...}}, NEW). Reason: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    told = next((line for line in lines if any(word in line for word in NAMES_IT)), lines[0] if len(lines) == 1 else "")
    return f"{type(error).__name__}: {told}" if told else type(error).__name__
