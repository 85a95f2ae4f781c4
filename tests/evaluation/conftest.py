"""Data that several files of tests read."""

from pathlib import Path

import pytest

from tests.toys import write_prepared


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of 1000 sequences of `small_source`."""
    return write_prepared(tmp_path_factory.mktemp("text"), 1000)
