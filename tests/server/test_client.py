"""The client's answers are the local call's."""

import subprocess
import sys
from typing import Any

import pytest

import tracformer
from tests.server.helpers import Running, make, running, same
from tracformer import Client, LanguageModel
from tracformer.client import RemoteError
from tracformer.generation.orders import (
    Ancestral,
    ByConfidence,
    GivenOrder,
    LeftToRight,
    Order,
    RandomOrder,
)
from tracformer.generation.results import Callback, Infilled, Scored, Token
from tracformer.generation.samplers import Sampler

TEXT = "the cat [[3]] the [[1-2]] mat"


@pytest.fixture(scope="module")
def client(server: Running) -> Client:
    return Client(server.url)


def equal(answer: Any, expected: Any) -> bool:
    return type(answer) is type(expected) and same(answer.to_dict(), expected.to_dict())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "n": 3,
            "seed": 7,
            "sampler": Sampler(
                0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, banned=(5, 6)
            ),
            "top": 2,
        },
        {"mode": "ac", "order": ByConfidence("margin", k=2), "whole": False},
        {"n": 2, "best_of": 4, "length_draws": 3, "lengths": "rank", "max_blank": 4},
        {"search": "beam:4"},
        {"search": "beam:4", "reread": True},
    ],
)
def test_fillings_are_the_local_ones(
    client: Client, lm: LanguageModel, options: dict[str, Any]
) -> None:
    remote, local = client.infill(TEXT, **options), lm.infill(TEXT, **options)
    assert len(remote) == len(local)
    for answer, expected in zip(remote, local, strict=True):
        assert equal(answer, expected)
        assert isinstance(answer, Infilled)
        assert hash(answer) is not None  # frozen all through: tuples, not lists
        assert answer.spans[0].log_prob == pytest.approx(expected.spans[0].log_prob, abs=1e-4)


@pytest.mark.parametrize(
    "order", [LeftToRight(2), RandomOrder(2), ByConfidence("entropy", threshold=-1.0), "random"]
)
def test_orders_are_sent(client: Client, lm: LanguageModel, order: Order | str) -> None:
    local = lm.infill(
        "the [[4]] mat", order=RandomOrder() if isinstance(order, str) else order, seed=2
    )
    assert equal(client.infill("the [[4]] mat", order=order, seed=2)[0], local[0])


def test_an_order_that_has_no_name_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        client.infill("the [[4]] mat", order=GivenOrder((3, 2)))
    with pytest.raises(ValueError, match="goes from left to right"):
        client.infill("the [[4]] mat", mode="car", order=Ancestral(4))


def test_scores_are_the_local_ones(client: Client, lm: LanguageModel) -> None:
    for options in ({}, {"mode": "ac"}, {"whole": False, "top": 2}):
        answer = client.score("the [[cat]] sat", **options)  # type: ignore[arg-type]
        assert isinstance(answer, Scored)
        assert equal(answer, lm.score("the [[cat]] sat", **options))  # type: ignore[arg-type]
    assert client.score("the cat sat").mode == "ar"


def test_tokens_come_while_the_answer_is_on_its_way(client: Client, lm: LanguageModel) -> None:
    class Listener(Callback):
        def __init__(self) -> None:
            self.heard: list[Token] = []
            self.chosen: list[tuple[int, ...]] = []

        def __call__(self, arrivals: list[Token]) -> None:
            self.heard += arrivals

        def lengths(self, text: int, sample: int, lengths: tuple[int, ...]) -> None:
            self.chosen.append(lengths)

    remote, local = Listener(), Listener()
    [answer] = client.infill(TEXT, seed=5, top=2, callback=remote)
    [expected] = lm.infill(TEXT, seed=5, top=2, callback=local)
    assert equal(answer, expected)
    assert len(remote.heard) == len(local.heard)
    assert all(map(equal, remote.heard, local.heard))
    assert remote.chosen == local.chosen


def test_mistakes_are_the_local_ones(client: Client, lm: LanguageModel) -> None:
    for text in ("no blank", "the [[70]]", "the [[2"):
        with pytest.raises(ValueError) as here:  # noqa: PT011 - compared below
            lm.infill(text)
        for callback in (None, lambda arrivals: None):
            with pytest.raises(ValueError) as there:  # noqa: PT011
                client.infill(text, callback=callback)
            assert str(there.value) == str(here.value)


def test_models_and_tokens(client: Client, lm: LanguageModel) -> None:
    assert client.models()[0]["max_length"] == 64
    assert [i for i, _ in client.tokenize("the cat")] == lm.tokenizer.encode("the cat")


def test_a_key_is_sent(lm: LanguageModel) -> None:
    with running(lambda: lm, api_key="sesame") as there:
        assert Client(there.url, "sesame").infill("the [[1]]")
        with pytest.raises(RemoteError, match="API key") as caught:
            Client(there.url, "wrong").infill("the [[1]]")
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_server_that_is_loading_is_asked_again() -> None:
    def load() -> LanguageModel:
        import time

        time.sleep(0.5)
        return make()

    with running(load, wait=False) as there:
        with pytest.raises(RemoteError, match="Loading") as caught:
            Client(there.url, retries=0).infill("the [[1]]")
        assert caught.value.status == 503
        assert Client(there.url, retries=30).infill("the [[1]]")


def test_what_is_not_a_server(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="must begin with http"):
        Client("localhost:8000")
    with pytest.raises(ConnectionRefusedError):
        Client("http://127.0.0.1:9", retries=0).models()


def test_the_client_needs_no_torch() -> None:
    code = "import sys, tracformer; tracformer.Client; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )
    assert tracformer.Client is Client
