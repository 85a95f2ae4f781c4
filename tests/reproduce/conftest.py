"""Text that experiments are run on."""

import random
from pathlib import Path

import pytest


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
