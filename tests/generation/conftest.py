from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.toys import WORDS, make, small_model
from tracformer import LanguageModel
from tracformer.data import train_bpe
from tracformer.generation.engine import Engine


@pytest.fixture(scope="session")
def lm() -> LanguageModel:
    return make(train_bpe(WORDS, 290))


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(small_model(), rows=4)
    yield made
    made.close(drain=False)
    assert not made._thread.is_alive()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as made:
        yield made
