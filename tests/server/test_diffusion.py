"""A diffusion model behind the server: its own mode, its steps, and its place among others."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from tests.generation.test_diffusion_texts import model_of
from tests.server.helpers import NAME, WORDS, Running, running, same, until
from tests.server.test_native import as_json
from tracformer import LanguageModel
from tracformer.baselines.plaid import Plaid
from tracformer.data import train_bpe
from tracformer.generation.orders import Ancestral

TEXT = "the cat [[3]] the [[2]] mat"
# of a slow model: many seconds
LONG = {"text": "the [[8]] cat", "mode": "diffusion", "steps": 1000}


class Slow(Plaid):
    """Takes its time over each pass."""

    passes = 0

    def states(self, *question: Tensor) -> Tensor:
        self.passes += 1
        time.sleep(0.02)
        return super().states(*question)


def serve(system: str) -> LanguageModel:
    tokenizer = train_bpe(WORDS, 300)
    return LanguageModel(model_of(system, tokenizer), tokenizer, NAME)


@pytest.fixture
def slow() -> Iterator[Running]:
    lm = serve("plaid")
    lm.model.__class__ = Slow
    with running(lambda: lm, drain=1) as there:
        yield there


@pytest.mark.parametrize("system", ["mdlm", "plaid"])
def test_an_answer_is_the_librarys(system: str) -> None:
    lm = serve(system)
    with running(lambda: lm) as there:
        asked: dict[str, Any] = {"text": TEXT, "mode": "diffusion", "n": 2, "seed": 5}
        own = there.good("/v1/infill", {**asked, "top": 6})["results"]
        assert same(own, as_json(lm.infill(TEXT, 2, mode="diffusion", seed=5, top=6)))
        assert all(
            len(candidates) == 6
            for result in own
            for span in result["spans"]
            for candidates in span["candidates"]
        )
        expected = as_json(lm.infill(TEXT, 2, mode="diffusion", seed=5, order=Ancestral(8)))
        assert same(there.good("/v1/infill", {**asked, "steps": 8})["results"], expected)
        assert same(
            there.good("/v1/infill", {**asked, "steps": 8, "order": "ancestral"})["results"],
            expected,
        )
        assert "steps asks for 1025; the limit of this server is 1024" in str(
            there.refused("/v1/infill", {**asked, "steps": 1025})
        )
        assert there.good("/v1/completions", {"prompt": "the cat", "max_tokens": 3, "logprobs": 2})[
            "choices"
        ][0]["logprobs"]


def test_others_are_answered_while_a_long_process_runs(slow: Running) -> None:
    model = slow.backend.engine.model
    with slow.raw("/v1/infill", LONG):
        until(lambda: model.passes > 0)
        began = model.passes
        assert slow.good("/v1/tokenize", {"text": "the cat"})["tokens"]
        assert slow.good("/v1/infill", {"text": "the [[1]] cat", "steps": 3})["results"]
        assert model.passes - began < 100  # of a thousand
    until(lambda: slow.backend.gate.running == 0)  # the client has hung up
    passes = slow.backend.engine.request().call(lambda: model.passes)
    assert passes < 200
    time.sleep(0.1)
    assert model.passes == passes


def test_a_deadline_ends_a_long_process(slow: Running) -> None:
    slow.refused("/v1/infill", {**LONG, "timeout": 0.2}, 408)
    model = slow.backend.engine.model
    passes = slow.backend.engine.request().call(lambda: model.passes)
    assert passes < 100
    time.sleep(0.1)
    assert model.passes == passes


def test_stopping_does_not_wait_for_a_long_process(slow: Running) -> None:
    model = slow.backend.engine.model
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(slow.refused, "/v1/infill", LONG, 503)
        until(lambda: model.passes > 0)
        slow.server.should_exit = True  # and a second is left to drain
        assert answer.result(20)["error"]["code"] == "stopping"
    assert model.passes < 500
