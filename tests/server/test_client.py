"""The client returns what a local call returns."""

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
def test_fills_equal_local_fills(
    client: Client, lm: LanguageModel, options: dict[str, Any]
) -> None:
    remote, local = client.infill(TEXT, **options), lm.infill(TEXT, **options)
    assert len(remote) == len(local)
    for answer, expected in zip(remote, local, strict=True):
        assert equal(answer, expected)
        assert isinstance(answer, Infilled)
        assert hash(answer) is not None  # immutable: tuples, not lists
        assert answer.spans[0].log_prob == pytest.approx(expected.spans[0].log_prob, abs=1e-4)


@pytest.mark.parametrize(
    "order", [LeftToRight(2), RandomOrder(2), ByConfidence("entropy", threshold=-1.0), "random"]
)
def test_orders_can_be_sent(client: Client, lm: LanguageModel, order: Order | str) -> None:
    local = lm.infill(
        "the [[4]] mat", order=RandomOrder() if isinstance(order, str) else order, seed=2
    )
    assert equal(client.infill("the [[4]] mat", order=order, seed=2)[0], local[0])


def test_an_order_without_a_name_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        client.infill("the [[4]] mat", order=GivenOrder((3, 2)))
    with pytest.raises(ValueError, match="goes from left to right"):
        client.infill("the [[4]] mat", mode="car", order=Ancestral(4))


def test_scores_equal_local_scores(client: Client, lm: LanguageModel) -> None:
    for options in ({}, {"mode": "ac"}, {"whole": False, "top": 2}):
        answer = client.score("the [[cat]] sat", **options)  # type: ignore[arg-type]
        assert isinstance(answer, Scored)
        assert equal(answer, lm.score("the [[cat]] sat", **options))  # type: ignore[arg-type]
    assert client.score("the cat sat").mode == "ar"


def test_callbacks_receive_tokens_and_lengths(client: Client, lm: LanguageModel) -> None:
    class Recorder(Callback):
        def __init__(self) -> None:
            self.tokens: list[Token] = []
            self.chosen: list[tuple[int, ...]] = []

        def __call__(self, arrivals: list[Token]) -> None:
            self.tokens += arrivals

        def lengths(self, text: int, sample: int, lengths: tuple[int, ...]) -> None:
            self.chosen.append(lengths)

    remote, local = Recorder(), Recorder()
    [answer] = client.infill(TEXT, seed=5, top=2, callback=remote)
    [expected] = lm.infill(TEXT, seed=5, top=2, callback=local)
    assert equal(answer, expected)
    assert len(remote.tokens) == len(local.tokens)
    assert all(map(equal, remote.tokens, local.tokens))
    assert remote.chosen == local.chosen


def test_errors_equal_local_errors(client: Client, lm: LanguageModel) -> None:
    for text in ("no blank", "the [[70]]", "the [[2"):
        with pytest.raises(ValueError) as here:  # noqa: PT011 - compared below
            lm.infill(text)
        for callback in (None, lambda arrivals: None):
            with pytest.raises(ValueError) as there:  # noqa: PT011
                client.infill(text, callback=callback)
            assert str(there.value) == str(here.value)


def test_models_and_tokenize(client: Client, lm: LanguageModel) -> None:
    assert client.models()[0]["max_length"] == 64
    assert [i for i, _ in client.tokenize("the cat")] == lm.tokenizer.encode("the cat")


def test_the_api_key_is_sent(lm: LanguageModel) -> None:
    with running(lambda: lm, api_key="sesame") as there:
        assert Client(there.url, "sesame").infill("the [[1]]")
        with pytest.raises(RemoteError, match="API key") as caught:
            Client(there.url, "wrong").infill("the [[1]]")
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_requests_are_repeated_while_the_server_is_loading() -> None:
    def load() -> LanguageModel:
        import time

        time.sleep(0.5)
        return make()

    with running(load, wait=False) as there:
        with pytest.raises(RemoteError, match="Loading") as caught:
            Client(there.url, retries=0).infill("the [[1]]")
        assert caught.value.status == 503
        assert Client(there.url, retries=30).infill("the [[1]]")


def test_wrong_addresses(tmp_path: Any) -> None:
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
