from collections.abc import Iterator

import pytest

from tests.server.helpers import Running, make, running
from tracformer import LanguageModel


@pytest.fixture(scope="session")
def lm() -> LanguageModel:
    return make()


@pytest.fixture(scope="session")
def server(lm: LanguageModel) -> Iterator[Running]:
    with running(lambda: lm) as there:
        yield there
