"""What the pieces about generation share: a model with random weights, and rivals that take turns."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from tracformer.bench.steps import build
from tracformer.model import Tracformer
from tracformer.runtime import keep_freed_memory


def in_turns(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each, measured in turns so that a busy moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(each) for name, each in times.items()}


def tracformer_of(config: dict[str, Any]) -> Tracformer:
    from tracformer.native import available

    keep_freed_memory()
    available()  # compile what is compiled before anything is timed
    torch.manual_seed(0)
    model = build("tracformer", config, "native").eval()
    assert isinstance(model, Tracformer)
    return model
