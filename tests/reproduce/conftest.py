"""Text that experiments run on, a reproduction at the smallest scale, and how to interrupt one."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tracformer.evaluation.task import Progress
from tracformer.reproduce import Reproduction
from tracformer.reproduce.experiment import read_experiment


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [
        "the",
        "a",
        "cat",
        "dog",
        "sat",
        "ran",
        "on",
        "under",
        "mat",
        "house",
        "and",
        "then",
        "saw",
        "it",
    ]
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n".join(" ".join(rng.choices(words, k=12)) + "." for _ in range(200)))
    return path


def work(out: Path, text: Path, experiment: str = "fig7", **changes: str) -> Reproduction:
    changes = {f"data.{key}": value for key, value in changes.items()} or {
        "data.wikitext2": str(text)
    }
    return Reproduction(
        read_experiment(experiment, "tiny", changes), out, Progress(), say=lambda text: None
    )


def stopping(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The function, interrupted as by Ctrl-C once it has been called so often."""
    calls = iter(range(after))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return call
