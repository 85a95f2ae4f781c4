"""The protocols of OpenAI, llama.cpp and Mistral: what they share, then what is particular to
llama.cpp and Mistral. OpenAI's particulars are in test_openai.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from mistralai.client import Mistral, errors

from tests.server.helpers import NAME, Running, running, shaped
from tracformer import LanguageModel
from tracformer.generation.generation_config import GenerationConfig
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.generation.template import write
from tracformer.server.completion import LENGTH_DRAWS, length_prior

BEFORE, AFTER, LONG = "the cat ", " on the mat", "the cat " * 40


@dataclass(frozen=True)
class Protocol:
    """Where a protocol has its fields."""

    path: str
    prompt: str  # names of fields in a request
    suffix: str
    max_tokens: str
    seed: str
    sampler: Sampler  # its defaults
    text: Callable[[Any], str]  # of a whole answer
    usage: Callable[[Any], tuple[int, int]]  # tokens of the prompt and of the completion
    finish: Callable[[Any], str]
    chunk: Callable[[Any], str]  # text of a stream's event

    def fields(self, suffix: str | None = AFTER, max_tokens: int = 6, **more: Any) -> Any:
        """Return a request with seed 3."""
        found = {"model": "tiny", self.prompt: BEFORE, self.max_tokens: max_tokens, self.seed: 3}
        return {**found, **({} if suffix is None else {self.suffix: suffix}), **more}


def openai_usage(answer: Any) -> tuple[int, int]:
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


OPENAI = Protocol(
    *("/v1/completions", "prompt", "suffix", "max_tokens", "seed", PLAIN),
    text=lambda answer: answer["choices"][0]["text"],
    usage=openai_usage,
    finish=lambda answer: answer["choices"][0]["finish_reason"],
    chunk=lambda data: data["choices"][0]["text"],
)
LLAMACPP = Protocol(
    *("/infill", "input_prefix", "input_suffix", "n_predict", "seed"),
    Sampler(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    text=lambda answer: answer["content"],
    usage=lambda answer: (answer["tokens_evaluated"], answer["tokens_predicted"]),
    finish=lambda answer: {"eos": "stop", "word": "stop", "limit": "length"}[answer["stop_type"]],
    chunk=lambda data: data["content"],
)
MISTRAL = Protocol(
    *("/v1/fim/completions", "prompt", "suffix", "max_tokens", "random_seed", PLAIN),
    text=lambda answer: answer["choices"][0]["message"]["content"],
    usage=openai_usage,
    finish=lambda answer: answer["choices"][0]["finish_reason"],
    chunk=lambda data: data["choices"][0]["delta"]["content"],
)
PROTOCOLS = pytest.mark.parametrize(
    "protocol", [OPENAI, LLAMACPP, MISTRAL], ids=lambda protocol: protocol.path
)


@PROTOCOLS
def test_with_a_suffix_the_model_fills_a_blank_of_unknown_length(
    server: Running, lm: LanguageModel, protocol: Protocol
) -> None:
    answer = server.good(protocol.path, protocol.fields())
    [local] = lm.infill(
        write([BEFORE, AFTER], ["1-6"]),
        sampler=protocol.sampler,
        whole=False,
        prior=length_prior(1, 6),
        length_draws=LENGTH_DRAWS,
        seed=3,
    )
    filled = len(local.spans[0].token_ids)
    assert BEFORE + protocol.text(answer) + AFTER == local.text
    assert protocol.usage(answer) == (len(local.token_ids) - filled, filled)
    assert protocol.finish(answer) == "stop"
    assert answer["model"] == "tiny"


@PROTOCOLS
def test_without_a_suffix_the_model_continues_the_prompt(
    server: Running, lm: LanguageModel, protocol: Protocol
) -> None:
    answer = server.good(protocol.path, protocol.fields(suffix=None))
    [local] = lm.sample(prompt=BEFORE, max_tokens=6, seed=3, sampler=protocol.sampler)
    assert BEFORE + protocol.text(answer) == local.text
    assert protocol.finish(answer) == ("stop" if local.ended else "length")
    nothing = server.good(protocol.path, protocol.fields(suffix=None, max_tokens=0))
    assert (protocol.text(nothing), protocol.finish(nothing)) == ("", "length")


@pytest.mark.parametrize("suffix", [None, AFTER])
@PROTOCOLS
def test_a_stream_adds_up_to_the_plain_answer(
    server: Running, protocol: Protocol, suffix: str | None
) -> None:
    fields = protocol.fields(suffix)
    plain = server.good(protocol.path, fields)
    events = [data for _, data in server.stream(protocol.path, fields) if data is not None]
    assert "".join(map(protocol.chunk, events)) == protocol.text(plain)
    finishes = [protocol.finish(data) for data in events[-1:]]
    assert finishes == [protocol.finish(plain)]


@pytest.mark.parametrize("suffix", [None, AFTER])
@PROTOCOLS
def test_a_stop_string_ends_the_text_before_it(
    server: Running, protocol: Protocol, suffix: str | None
) -> None:
    whole = protocol.text(server.good(protocol.path, protocol.fields(suffix)))
    stop = whole[1:3]
    for stops in (stop, [stop, "never there"]):
        fields = protocol.fields(suffix, stop=stops)
        cut = server.good(protocol.path, fields)
        expected = (whole[: whole.index(stop)], "stop")
        assert (protocol.text(cut), protocol.finish(cut)) == expected
        events = [data for _, data in server.stream(protocol.path, fields) if data is not None]
        assert "".join(map(protocol.chunk, events)) == expected[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"prompt": LONG}, "takes 64"),
        ({"prompt": "a\0"}, "NUL"),
        ({"prompt": 3}, "Input should be a valid string"),
        ({"max_tokens": -3}, "greater than or equal to"),
        ({"seed": 2**63}, "less than"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop asks for 5; the limit of this server is 4"),
        ({"stop": [""]}, "String should have at least 1 character"),
        ({"top_p": 2}, "less than or equal to 1"),
        ({"temperature": 101}, "less than or equal to"),
    ],
)
@PROTOCOLS
def test_wrong_requests_are_refused_in_the_protocols_shape(
    server: Running, protocol: Protocol, changes: dict[str, Any], expected: str
) -> None:
    fields = protocol.fields(
        **{getattr(protocol, name, name): value for name, value in changes.items()}
    )
    response = server.post(protocol.path, fields)
    schema = protocol is MISTRAL and "detail" in response.json()
    assert response.status_code == (422 if schema else 400)
    assert shaped(protocol.path, response.json())
    assert expected in response.text


@PROTOCOLS
def test_an_unknown_model_is_not_found(server: Running, protocol: Protocol) -> None:
    error = server.refused(protocol.path, protocol.fields(model="gpt"), 404)
    assert shaped(protocol.path, error)
    assert "there is no model 'gpt' here; this server has 'tiny'" in str(error)


@PROTOCOLS
def test_unknown_fields_are_ignored(server: Running, protocol: Protocol) -> None:
    more = {"cache_prompt": True, "id_slot": -1, "user": "someone", "samplers": ["top_k"]}
    changed = server.good(protocol.path, protocol.fields(**more))
    assert protocol.text(changed) == protocol.text(server.good(protocol.path, protocol.fields()))


@pytest.fixture(scope="module")
def text_server(lm: LanguageModel) -> Iterator[Running]:
    """Serve the same model with the settings of a model for text."""
    config = GenerationConfig("best", temperature=0.5, top_p=0.7)
    with running(lambda: LanguageModel(lm.model, lm.tokenizer, NAME, config)) as there:
        yield there


@PROTOCOLS
def test_only_unset_values_take_the_models_settings(
    server: Running, text_server: Running, protocol: Protocol
) -> None:
    """The first server's model has no settings, so its answers follow the client alone."""

    def texts(there: Running, **changes: Any) -> list[str]:
        seeds = ({protocol.seed: seed} for seed in range(3, 9))
        fields = [protocol.fields(None, **changes) | seed for seed in seeds]
        return [protocol.text(there.good(protocol.path, each)) for each in fields]

    sampling = {"temperature": 1.1, "top_p": 0.95}
    assert texts(text_server, **sampling) == texts(server, **sampling)
    assert texts(text_server) == texts(server, temperature=0.5, top_p=0.7)
    assert texts(text_server, top_p=1) == texts(server, temperature=0.5, top_p=1)
    assert texts(text_server) != texts(server)


def test_the_native_route_takes_the_models_quality_and_streams_fast(text_server: Running) -> None:
    fields = {"text": "the cat [[2]] mat", "seed": 3}
    [default] = text_server.good("/v1/infill", fields)["results"]
    [best] = text_server.good("/v1/infill", {**fields, "quality": "best"})["results"]
    [fast] = text_server.good("/v1/infill", {**fields, "quality": "fast"})["results"]
    assert (default, fast["score"]) == (best, None)
    events = text_server.stream("/v1/infill", {**fields, "stream": True})
    assert [data["results"] for name, data in events if name == "result"] == [[fast]]
    refused = text_server.refused("/v1/infill", {**fields, "quality": "best", "stream": True})
    assert "quality is 'best', which compares whole fills" in refused["error"]["message"]


# llama.cpp


def test_llamacpp_fields(server: Running) -> None:
    fields = LLAMACPP.fields(max_tokens=5)
    answer = server.good("/infill", fields)
    assert (answer["stop"], answer["stopping_word"], answer["truncated"]) == (True, "", False)
    assert (answer["index"], answer["model"], answer["tokens"]) == (0, "tiny", [])
    assert answer["generation_settings"]["seed"] == 3
    assert answer["generation_settings"]["top_k"] == 40
    for part, count in zip(("prompt", "predicted"), LLAMACPP.usage(answer), strict=True):
        assert answer["timings"][f"{part}_n"] == count
        assert answer["timings"][f"{part}_ms"] >= 0
    tokens = server.good("/infill", {**fields, "return_tokens": True})["tokens"]
    assert len(tokens) == answer["tokens_predicted"]


def test_llamacpp_samplers_are_the_librarys(server: Running, lm: LanguageModel) -> None:
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    fields = LLAMACPP.fields(None, input_prefix="a dog", temperature=1.3, repeat_penalty=1.5, **off)
    sampler = Sampler(1.3, repetition_penalty=1.5)
    [local] = lm.sample(prompt="a dog", max_tokens=6, seed=3, sampler=sampler)
    answer = server.good("/infill", fields)
    assert "a dog" + answer["content"] == local.text
    assert answer["stop_type"] == ("eos" if local.ended else "limit")
    greedy = {
        server.good("/infill", {**fields, "temperature": -1, "seed": seed})["content"]
        for seed in (1, 2)
    }
    assert len(greedy) == 1


def test_llamacpp_prompt_begins_the_filled_text(server: Running) -> None:
    both = server.good("/infill", LLAMACPP.fields(input_prefix="the", prompt=" cat "))
    assert both["content"] == server.good("/infill", LLAMACPP.fields())["content"]


def test_llamacpp_extra_texts_go_before_the_prefix_as_far_as_they_fit(server: Running) -> None:
    extra = [{"filename": "a.txt", "text": "the cat " * 40}, {"text": "a dog sat"}]
    answer = server.good("/infill", LLAMACPP.fields(max_tokens=5, input_extra=extra))
    assert (answer["prompt"], answer["truncated"]) == ("a dog sat\nthe cat ", True)
    joined = LLAMACPP.fields(max_tokens=5, input_prefix="a dog sat\nthe cat ")
    assert answer["content"] == server.good("/infill", joined)["content"]
    wrong = server.refused("/infill", LLAMACPP.fields(input_extra=[{"filename": "x"}]))
    assert "input_extra.0.text" in wrong["error"]["message"]
    assert wrong["error"]["code"] == 400


def test_llamacpp_streams_count_tokens_and_end_with_all_fields(server: Running) -> None:
    for suffix in (AFTER, None):
        fields = LLAMACPP.fields(suffix)
        plain = server.good("/infill", fields)
        *chunks, last = [data for _, data in server.stream("/infill", fields)]
        assert not any(chunk["stop"] for chunk in chunks)
        assert (last["stop"], last["content"]) == (True, "")
        for name in ("tokens_predicted", "tokens_evaluated", "stop_type", "prompt"):
            assert last[name] == plain[name]
        ended = plain["stop_type"] == "eos" and suffix is None
        assert chunks[-1]["tokens_predicted"] == plain["tokens_predicted"] - ended


def test_llamacpp_fields_are_chosen_by_their_path(server: Running) -> None:
    wanted = ["content", "timings/predicted_ms", "generation_settings/seed", "a/b"]
    answer = server.good("/infill", LLAMACPP.fields(response_fields=wanted))
    assert set(answer) == set(wanted) - {"a/b"}
    assert answer["generation_settings/seed"] == 3


def test_llamacpp_probabilities(server: Running) -> None:
    answer = server.good("/infill", LLAMACPP.fields(n_probs=3))
    for token in answer["completion_probabilities"]:
        assert set(token) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert len(token["top_logprobs"]) == 3
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"]
    assert "n_probs asks for 21" in str(server.refused("/infill", LLAMACPP.fields(n_probs=21)))


# Mistral, through its own client


@pytest.fixture(scope="module")
def client(server: Running) -> Mistral:
    return Mistral(server_url=server.url, api_key="none")


@pytest.mark.parametrize("suffix", [None, AFTER])
def test_mistrals_client_reads_answers_and_streams(client: Mistral, suffix: str | None) -> None:
    fields = MISTRAL.fields() | {"suffix": suffix}
    plain = client.fim.complete(**fields)
    [choice] = plain.choices
    assert choice.message is not None
    assert (choice.message.role, choice.index) == ("assistant", 0)
    assert (plain.object, plain.model) == ("chat.completion", "tiny")
    with client.fim.stream(**fields) as stream:
        chunks = [event.data for event in stream]
    texts = [str(chunk.choices[0].delta.content) for chunk in chunks]
    assert "".join(texts) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert chunks[-1].usage == plain.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_mistrals_min_tokens_bound_the_blank(client: Mistral) -> None:
    answer = client.fim.complete(**MISTRAL.fields(), min_tokens=5)
    assert answer.usage.completion_tokens in (5, 6)


def test_mistrals_client_gets_schema_errors_as_validation_errors(
    client: Mistral, server: Running
) -> None:
    with pytest.raises(errors.HTTPValidationError) as caught:
        client.fim.complete(**MISTRAL.fields(temperature=7))
    assert caught.value.data.detail is not None
    assert caught.value.data.detail[0].loc == ["body", "temperature"]
    [detail, *_] = server.refused("/v1/fim/completions", {"model": "tiny"}, 422)["detail"]
    assert set(detail) == {"loc", "msg", "type"}


@pytest.mark.parametrize(
    ("changes", "status", "expected"),
    [
        ({"prompt": LONG}, 400, "takes 64"),
        ({"model": "codestral"}, 404, "there is no model 'codestral'"),
        ({"min_tokens": 9}, 400, "min_tokens is 9"),
        ({"min_tokens": 9, "suffix": None}, 400, "min_tokens needs a suffix"),
    ],
)
def test_mistrals_client_reads_other_errors(
    client: Mistral, changes: dict[str, Any], status: int, expected: str
) -> None:
    with pytest.raises(errors.SDKError) as caught:
        client.fim.complete(**(MISTRAL.fields() | changes))
    assert caught.value.status_code == status
    assert expected in caught.value.body
