from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import logging

from tests.toys import small_model
from tracformer import Tracformer
from tracformer.data import Tokenizer, build_tokenizer


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence transformers; its switches are global, so they are restored."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


@pytest.fixture
def tokenizer() -> Tokenizer:
    return build_tokenizer("char:abcdef", [])


@pytest.fixture
def core() -> Tracformer:
    return small_model().float()


@pytest.fixture
def folder(tmp_path: Path, core: Tracformer, tokenizer: Tokenizer) -> Path:
    """What the core writes: weights, configuration, tokenizer."""
    core.save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"
