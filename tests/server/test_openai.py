"""OpenAI's completions through OpenAI's own client; completions shared by all protocols."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.helpers import Running
from tests.toys import (
    llama_tokenizer,
    make,
    metaspace_tokenizer,
    t5_tokenizer,
    wordpiece_tokenizer,
)
from tracformer import LanguageModel
from tracformer.data import Tokenizer
from tracformer.generation.samplers import Sampler
from tracformer.generation.template import Template, write
from tracformer.rng import derived_seed
from tracformer.server.completion import (
    LENGTH_DRAWS,
    LENGTHS,
    CompletionOptions,
    complete,
    length_prior,
    read_prompt,
)
from tracformer.server.streaming import PartialText

PROMPT = "the cat"


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 3, **fields}
    )


def test_without_a_suffix_it_samples_a_continuation(
    client: openai.OpenAI, lm: LanguageModel
) -> None:
    answer = ask(client, n=2, temperature=0.7, top_p=0.9)
    samples = lm.sample(2, prompt=PROMPT, max_tokens=8, sampler=Sampler(0.7, top_p=0.9), seed=3)
    assert [PROMPT + choice.text for choice in answer.choices] == [
        sample.text for sample in samples
    ]
    assert [choice.finish_reason for choice in answer.choices] == [
        "stop" if sample.ended else "length" for sample in samples
    ]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.usage.prompt_tokens == len(lm.tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == sum(len(sample.token_ids) for sample in samples)
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_text_ends_where_the_model_ends_it(client: openai.OpenAI, lm: LanguageModel) -> None:
    seed = next(
        sample.seed
        for sample in lm.sample(100, prompt=PROMPT, max_tokens=20, batch=100)
        if sample.ended
    )
    [choice] = ask(client, max_tokens=20, seed=seed, logprobs=0).choices
    [sample] = lm.sample(prompt=PROMPT, max_tokens=20, seed=seed)
    assert (PROMPT + choice.text, choice.finish_reason) == (sample.text, "stop")
    assert len(choice.logprobs.tokens) == len(sample.token_ids)  # the end of text among them
    assert choice.logprobs.tokens[-1] == lm.tokenizer.eot


def test_prompts_are_texts_token_ids_and_lists_of_them(
    client: openai.OpenAI, lm: LanguageModel
) -> None:
    ids = lm.tokenizer.encode(PROMPT)
    texts = [PROMPT, "a dog", "the cat "]
    several = ask(client, prompt=texts, n=2)
    for i, text in enumerate(texts):
        alone = ask(client, prompt=text, n=2)
        assert [c.text for c in several.choices[2 * i : 2 * i + 2]] == [
            c.text for c in alone.choices
        ]
    assert [c.index for c in several.choices] == list(range(6))
    assert ask(client, prompt=ids).choices[0].text == several.choices[0].text
    assert ask(client, prompt=[ids, ids]).choices[1].text == several.choices[0].text
    assert ask(client, prompt="", max_tokens=3).usage.prompt_tokens == 0


def test_equal_prompts_without_a_seed_get_different_samples(client: openai.OpenAI) -> None:
    drawn = [choice.text for choice in ask(client, prompt=[PROMPT] * 3, seed=None).choices]
    named = [choice.text for choice in ask(client, prompt=[PROMPT] * 3).choices]
    assert len(set(drawn)) == 3
    assert len(set(named)) == 1


def test_with_a_suffix_it_fills_a_blank(client: openai.OpenAI, lm: LanguageModel) -> None:
    before, after = "the [[3]] cat ", " on the [[mat]]"
    answer = ask(client, prompt=before, suffix=after, max_tokens=5, n=3)
    options: dict[str, Any] = {
        "whole": False,
        "prior": length_prior(1, 5),
        "length_draws": LENGTH_DRAWS,
        "seed": 3,
    }
    local = lm.infill(write([before, after], ["1-5"]), 3, **options)
    assert [before + choice.text + after for choice in answer.choices] == [
        result.text for result in local
    ]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert all(1 <= len(result.spans[0].token_ids) <= 5 for result in local)
    assert answer.usage.completion_tokens == sum(len(result.spans[0].token_ids) for result in local)
    whole = ask(client, prompt=before, suffix=after, max_tokens=2, extra_body={"whole": True})
    [expected] = lm.infill(
        write([before, after], ["1-2"]), **{**options, "whole": True, "prior": length_prior(1, 2)}
    )
    assert before + whole.choices[0].text + after == expected.text


def test_token_ids_before_a_suffix_are_kept(client: openai.OpenAI, lm: LanguageModel) -> None:
    """Also ids that the tokenizer would not produce; a space at their end belongs to them."""
    ids = [lm.tokenizer.encode(letter)[-1] for letter in "the cat "]
    assert ids != lm.tokenizer.encode("the cat ")
    answer = ask(client, prompt=ids, suffix=" on the mat", max_tokens=3, logprobs=0)
    [choice] = answer.choices
    options: dict[str, Any] = {
        "whole": False,
        "prior": length_prior(1, 3),
        "length_draws": LENGTH_DRAWS,
        "seed": 3,
    }
    [local] = lm.infill(Template(("the cat ", " on the mat"), ("1-3",), tuple(ids)), **options)
    assert local.token_ids[: len(ids)] == tuple(ids)
    assert "the cat " + choice.text + " on the mat" == local.text
    assert choice.logprobs.token_logprobs == pytest.approx(local.spans[0].log_probs)
    assert answer.usage.prompt_tokens == len(ids) + len(lm.tokenizer.encode(" on the mat"))


def test_best_of_returns_the_most_likely_per_token(
    client: openai.OpenAI, lm: LanguageModel
) -> None:
    samples = lm.sample(6, prompt=PROMPT, max_tokens=8, seed=3)
    ranked = sorted(samples, key=lambda s: -s.log_prob / len(s.token_ids))
    answer = ask(client, n=2, best_of=6)
    assert [PROMPT + choice.text for choice in answer.choices] == [
        sample.text for sample in ranked[:2]
    ]


def test_logprobs_are_the_models_own(client: openai.OpenAI, lm: LanguageModel) -> None:
    [choice] = ask(client, logprobs=3, temperature=0.5).choices
    [sample] = lm.sample(prompt=PROMPT, max_tokens=8, seed=3, sampler=Sampler(0.5), top=3)
    found = choice.logprobs
    assert found.token_logprobs == pytest.approx(list(sample.log_probs), abs=1e-4)
    for token, log_prob, top, likeliest in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, sample.candidates, strict=True
    ):
        assert top[token] == log_prob
        assert max(top.values()) == pytest.approx(likeliest[0].log_prob, abs=1e-4)
        assert 1 <= len(top) <= 4
    assert found.text_offset[0] == len(PROMPT)
    assert found.text_offset == sorted(found.text_offset)
    for i, token in enumerate(found.tokens):
        if not token.startswith("bytes:") and token != lm.tokenizer.eot:
            assert (PROMPT + choice.text)[found.text_offset[i] :].startswith(token)


@pytest.mark.parametrize("prompt", ["the cat sat", "café €", "the cat "])
def test_echo_scores_the_prompt_by_the_chain_rule(
    client: openai.OpenAI, lm: LanguageModel, prompt: str
) -> None:
    ids = lm.tokenizer.encode(prompt)
    answer = ask(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert answer.usage.prompt_tokens == len(choice.logprobs.tokens)
    assert (choice.text, choice.finish_reason) == (prompt, "length")
    assert choice.logprobs.token_logprobs == pytest.approx(
        list(lm.score_tokens(ids, [False] * len(ids), "ar")), abs=1e-4
    )
    if "€" not in prompt:
        assert "".join(choice.logprobs.tokens) == prompt
    [more] = ask(client, prompt=prompt, max_tokens=4, echo=True, logprobs=1).choices
    assert more.text.startswith(prompt)
    assert more.text == prompt + ask(client, prompt=prompt, max_tokens=4).choices[0].text
    given = ids[:-1] if prompt.endswith(" ") else ids  # the last space belongs to the completion
    assert len(more.logprobs.tokens) == len(given) + 4 or more.finish_reason == "stop"
    assert more.logprobs.token_logprobs[: len(given)] == pytest.approx(
        choice.logprobs.token_logprobs[: len(given)], abs=1e-4
    )


def test_echo_of_token_ids_scores_these_ids(client: openai.OpenAI, lm: LanguageModel) -> None:
    """As lm-eval does: one token more than was given, however the text would be tokenized."""
    ids = [lm.tokenizer.encode(letter)[0] for letter in "the cat"]
    [choice] = ask(client, prompt=[ids], max_tokens=1, echo=True, logprobs=1, temperature=0).choices
    assert len(choice.logprobs.tokens) == len(ids) + 1
    assert choice.logprobs.token_logprobs[:-1] == pytest.approx(
        list(lm.score_tokens(ids, [False] * len(ids), "ar")), abs=1e-4
    )
    assert choice.logprobs.token_logprobs[-1] == max(choice.logprobs.top_logprobs[-1].values())


@pytest.mark.parametrize("suffix", [None, " on the mat"])
@pytest.mark.parametrize("prompt", ["the cat", "the cat ", "café"])
def test_a_stream_adds_up_to_the_plain_answer(
    client: openai.OpenAI, prompt: str, suffix: str | None
) -> None:
    fields: dict[str, Any] = {"prompt": prompt, "suffix": suffix, "n": 2, "logprobs": 2}
    plain = ask(client, **fields)
    chunks = list(ask(client, **fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in plain.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [
            choice.finish_reason
        ]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            found = [
                value for part in parts if part.logprobs for value in getattr(part.logprobs, name)
            ]
            if name in ("tokens", "text_offset"):
                assert found == getattr(choice.logprobs, name)
            assert len(found) == len(choice.logprobs.tokens)


def test_a_stream_with_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    plain = ask(client, echo=True, logprobs=0)
    chunks = list(ask(client, echo=True, logprobs=0, stream=True))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == plain.choices[0].text
    tokens = [t for chunk in chunks for c in chunk.choices if c.logprobs for t in c.logprobs.tokens]
    assert tokens == plain.choices[0].logprobs.tokens


@pytest.mark.parametrize("suffix", [None, " on the mat"])
def test_logprobs_end_at_a_stop_string(client: openai.OpenAI, suffix: str | None) -> None:
    whole = ask(client, suffix=suffix, seed=derived_seed(3, 1)).choices[0].text
    stop = whole[2:4]
    fields: dict[str, Any] = {
        "suffix": suffix,
        "seed": derived_seed(3, 1),
        "stop": [stop, "never there"],
        "logprobs": 0,
    }
    [choice] = ask(client, **fields).choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    chunks = list(ask(client, **fields, stream=True))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == choice.text


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"n": 3, "best_of": 2}, "best_of is 2"),
        ({"n": 17}, "n asks for 17"),
        ({"best_of": 3, "stream": True}, "cannot be streamed"),
        ({"echo": True, "suffix": "x"}, "cannot be combined with a suffix"),
        ({"prompt": [[1], ["a"]]}, "prompt.1.0: Input should be a valid integer"),
        ({"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        ({"prompt": [1, "a", 2, 3]}, "prompt.1: Input should be a valid integer"),
        ({"prompt": ["a", 1]}, "prompt.1: Input should be a valid string"),
        ({"prompt": ["a", "b", -1, "c"]}, "prompt.2: Input should be a valid string"),
        ({"prompt": [5, -1, 7]}, "prompt.1: Input should be greater than or equal to 0"),
        ({"logprobs": 100}, "logprobs asks for 100"),
        ({"prompt": []}, "empty list"),
        ({"prompt": [10**6]}, "token id 1000000 is out of range"),
        ({"prompt": "the cat " * 20, "suffix": " sat" * 40}, "takes 64 tokens"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ],
)
def test_wrong_requests_are_bad_requests(
    client: openai.OpenAI, fields: dict[str, Any], found: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert found in caught.value.body["message"]  # type: ignore[index]
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt")
    assert caught.value.code == "model_not_found"


def test_unsupported_fields_are_accepted_with_neutral_values(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        user="someone",
        frequency_penalty=0,
        logit_bias={},
        extra_body={"use_beam_search": False},
    )
    assert answer.choices[0].text == ask(client).choices[0].text
    assert ask(client, max_tokens=1000).usage.completion_tokens <= 64
    assert ask(client, max_tokens=0).choices[0].text == ""


# ---- completions: what can be sent already, spaces after the prompt, weights of lengths


def test_the_possible_beginning_of_a_stop_string_is_held_back() -> None:
    letters = dict(enumerate("abcxyz"))
    growing = PartialText(lambda ids: "".join(letters[i] for i in ids), eot=9, stops=("xyz", "bb"))
    found = []
    for token in (0, 3, 4, 1, 0, 3, 4, 5, 0):
        growing.add(token, -1.0)
        found.append(growing.release()[0])
    assert found == ["a", "", "", "xy", "ba", "", "", "", ""]
    growing.finish()
    assert (growing.text, growing.stopped, growing.release(finished=True)) == (
        "axyba",
        "xyz",
        ("", []),
    )


def test_an_incomplete_character_is_held_back() -> None:
    raw = "a€".encode()
    growing = PartialText(lambda ids: bytes(ids).decode("utf-8", "replace"), eot=999)
    found = []
    for byte in raw:
        growing.add(byte, -1.0)
        found.append(growing.release())
    assert [text for text, _ in found] == ["a", "", "", "€"]
    assert [[piece.start for piece in tokens] for _, tokens in found] == [[0], [], [], [1, 1, 1]]


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, LENGTHS), (1, 16), (3, 128), (1, 1000)])
def test_the_weights_of_lengths_sum_to_their_number(low: int, high: int) -> None:
    prior = length_prior(low, high)
    assert len(prior) <= LENGTHS
    assert min(prior) == low
    assert max(prior) == high
    assert sum(prior.values()) == pytest.approx(high - low + 1)
    assert min(prior.values()) > 0


@pytest.mark.parametrize(
    "maker", [metaspace_tokenizer, llama_tokenizer, t5_tokenizer, wordpiece_tokenizer]
)
def test_words_are_spaced_from_the_prompt_as_the_tokenizer_does(
    maker: Callable[[], Tokenizer],
) -> None:
    lm = make(maker())
    only = Sampler(allowed=(lm.tokenizer.encode("cat")[0],))
    for prompt, text in (
        ("the", " cat cat"),
        ("the ", "cat cat"),
        ("", "cat cat"),
        (tuple(lm.tokenizer.encode("the")), " cat cat"),
    ):
        for suffix in ("", " the"):
            found: list[str] = []
            options = CompletionOptions(suffix, min_tokens=2, max_tokens=2, sampler=only)
            [written] = complete(
                lm,
                read_prompt(lm, prompt),
                options,
                0,
                lambda _, text, __, found=found: found.append(text),  # type: ignore[misc]
            )
            assert written.text == "".join(found) == text
            assert [piece.start for piece in written.tokens] == ([0, 4] if prompt else [0, 3])
