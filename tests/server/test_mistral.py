"""Mistral's fill-in-the-middle, asked by Mistral's own client."""

from typing import Any

import pytest
from mistralai.client import Mistral, errors

from tests.server.helpers import Running
from tracformer import LanguageModel
from tracformer.generation.template import write
from tracformer.server.completion import LENGTH_DRAWS, length_prior

ASKED: dict[str, Any] = {
    "model": "tiny",
    "prompt": "the cat ",
    "suffix": " on the mat",
    "max_tokens": 6,
    "random_seed": 3,
}


@pytest.fixture(scope="module")
def client(server: Running) -> Mistral:
    return Mistral(server_url=server.url, api_key="none")


def test_the_text_between(client: Mistral, lm: LanguageModel) -> None:
    answer = client.fim.complete(**ASKED)
    options: dict[str, Any] = {
        "whole": False,
        "prior": length_prior(1, 6),
        "length_draws": LENGTH_DRAWS,
        "seed": 3,
    }
    [local] = lm.infill(write([ASKED["prompt"], ASKED["suffix"]], ["1-6"]), **options)
    [choice] = answer.choices
    assert choice.message is not None
    assert f"{ASKED['prompt']}{choice.message.content}{ASKED['suffix']}" == local.text
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "stop", 0)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.usage.completion_tokens == len(local.spans[0].token_ids)
    assert answer.usage.prompt_tokens == len(local.token_ids) - len(local.spans[0].token_ids)
    assert answer.usage.total_tokens == len(local.token_ids)


def test_least_and_most_tokens_bound_the_blank(client: Mistral) -> None:
    answer = client.fim.complete(**{**ASKED, "min_tokens": 5})
    assert answer.usage.completion_tokens in (5, 6)


def test_without_a_suffix_it_writes_on(client: Mistral, lm: LanguageModel) -> None:
    answer = client.fim.complete(**{**ASKED, "suffix": None})
    [sample] = lm.sample(prompt=ASKED["prompt"], max_tokens=6, seed=3)
    assert answer.choices[0].message is not None
    assert ASKED["prompt"] + str(answer.choices[0].message.content) == sample.text


@pytest.mark.parametrize("suffix", [None, " on the mat"])
def test_a_stream_adds_up_to_the_plain_answer(client: Mistral, suffix: str | None) -> None:
    asked = {**ASKED, "suffix": suffix}
    plain = client.fim.complete(**asked)
    with client.fim.stream(**asked) as stream:
        chunks = [event.data for event in stream]
    assert plain.choices[0].message is not None
    assert (
        "".join(str(chunk.choices[0].delta.content) for chunk in chunks)
        == plain.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == plain.choices[
        0
    ].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == plain.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_stop_string(client: Mistral) -> None:
    whole = str(client.fim.complete(**ASKED).choices[0].message.content)  # type: ignore[union-attr]
    stop = whole[1:3]
    cut = client.fim.complete(**ASKED, stop=stop).choices[0]
    assert cut.message is not None
    assert cut.message.content == whole[: whole.index(stop)]


def test_what_does_not_fit_the_schema_is_a_validation_error(
    client: Mistral, server: Running
) -> None:
    with pytest.raises(errors.HTTPValidationError) as caught:
        client.fim.complete(**{**ASKED, "temperature": 7})
    assert caught.value.data.detail is not None
    assert caught.value.data.detail[0].loc == ["body", "temperature"]
    assert set(server.refused("/v1/fim/completions", {"model": "tiny"}, 422)["detail"][0]) == {
        "loc",
        "msg",
        "type",
    }


@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({"prompt": "the cat " * 40}, 400, "takes 64"),
        ({"model": "codestral"}, 404, "there is no model 'codestral'"),
        ({"min_tokens": 9}, 400, "min_tokens is 9"),
        ({"min_tokens": 9, "suffix": None}, 400, "min_tokens needs a suffix"),
    ],
)
def test_other_mistakes_are_told(
    client: Mistral, changes: dict[str, Any], status: int, told: str
) -> None:
    with pytest.raises(errors.SDKError) as caught:
        client.fim.complete(**{**ASKED, **changes})
    assert caught.value.status_code == status
    assert told in caught.value.body


def test_an_error_has_mistrals_shape(server: Running) -> None:
    error = server.refused("/v1/fim/completions", {**ASKED, "model": "codestral"}, 404)
    assert error["object"] == "error"
    assert set(error) == {"object", "message", "type", "param", "code"}
