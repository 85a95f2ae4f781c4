"""llama.cpp's infill."""

from typing import Any

import pytest

from tests.server.helpers import Running
from tracformer import LanguageModel
from tracformer.generation.samplers import Sampler
from tracformer.generation.template import write
from tracformer.server.completion import LENGTH_DRAWS, length_prior

ASKED: dict[str, Any] = {
    "input_prefix": "the cat ",
    "input_suffix": " on the mat",
    "n_predict": 5,
    "seed": 3,
}
SAMPLER = Sampler(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)  # llama.cpp's defaults


def test_the_text_between(server: Running, lm: LanguageModel) -> None:
    answer = server.good("/infill", ASKED)
    options: dict[str, Any] = {
        "whole": False,
        "prior": length_prior(1, 5),
        "length_draws": LENGTH_DRAWS,
        "seed": 3,
    }
    [local] = lm.infill(write(["the cat ", " on the mat"], ["1-5"]), sampler=SAMPLER, **options)
    filled = len(local.spans[0].token_ids)
    assert f"the cat {answer['content']} on the mat" == local.text
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"], answer["truncated"]) == (
        True,
        "eos",
        "",
        False,
    )
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (
        filled,
        len(local.token_ids) - filled,
    )
    assert (answer["index"], answer["model"], answer["tokens"]) == (0, "tiny", [])
    assert answer["generation_settings"]["seed"] == 3
    assert answer["generation_settings"]["top_k"] == 40
    for part, count in (("prompt", answer["tokens_evaluated"]), ("predicted", filled)):
        assert answer["timings"][f"{part}_n"] == count
        assert answer["timings"][f"{part}_ms"] >= 0
    assert server.good("/infill", {**ASKED, "return_tokens": True})["tokens"] == list(
        local.spans[0].token_ids
    )


def test_samplers_are_the_librarys(server: Running, lm: LanguageModel) -> None:
    asked = {
        "input_prefix": "a dog",
        "n_predict": 6,
        "seed": 1,
        "temperature": 1.3,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repeat_penalty": 1.5,
    }
    [local] = lm.sample(
        prompt="a dog", max_tokens=6, seed=1, sampler=Sampler(1.3, repetition_penalty=1.5)
    )
    answer = server.good("/infill", asked)
    assert "a dog" + answer["content"] == local.text
    assert answer["stop_type"] == ("eos" if local.ended else "limit")
    greedy = [
        server.good("/infill", {**asked, "temperature": -1, "seed": seed})["content"]
        for seed in (1, 2)
    ]
    assert greedy[0] == greedy[1]


def test_the_prompt_begins_what_is_filled_in(server: Running) -> None:
    both = server.good("/infill", {**ASKED, "input_prefix": "the", "prompt": " cat "})
    assert both["content"] == server.good("/infill", ASKED)["content"]


def test_other_files_go_before_the_prefix_as_far_as_there_is_room(server: Running) -> None:
    extra = [{"filename": "a.txt", "text": "the cat " * 40}, {"text": "a dog sat"}]
    answer = server.good("/infill", {**ASKED, "input_extra": extra})
    assert (answer["prompt"], answer["truncated"]) == ("a dog sat\nthe cat ", True)
    joined = server.good("/infill", {**ASKED, "input_prefix": "a dog sat\nthe cat "})
    assert answer["content"] == joined["content"]


def test_a_stream_adds_up_to_the_plain_answer(server: Running) -> None:
    for asked in (ASKED, {**ASKED, "input_suffix": ""}):
        plain = server.good("/infill", asked)
        *chunks, last = [data for _, data in server.stream("/infill", asked)]
        assert "".join(chunk["content"] for chunk in chunks) == plain["content"]
        assert not any(chunk["stop"] for chunk in chunks)
        assert last["stop"]
        assert last["content"] == ""
        assert {
            name: last[name]
            for name in ("tokens_predicted", "tokens_evaluated", "stop_type", "prompt")
        } == {
            name: plain[name]
            for name in ("tokens_predicted", "tokens_evaluated", "stop_type", "prompt")
        }
        assert chunks[-1]["tokens_predicted"] == plain["tokens_predicted"] - (
            plain["stop_type"] == "eos" and not asked["input_suffix"]
        )


def test_fields_are_chosen_by_their_path(server: Running) -> None:
    answer = server.good(
        "/infill",
        {
            **ASKED,
            "response_fields": [
                "content",
                "timings/predicted_ms",
                "generation_settings/seed",
                "a/b",
            ],
        },
    )
    assert set(answer) == {"content", "timings/predicted_ms", "generation_settings/seed"}
    assert answer["generation_settings/seed"] == 3


def test_probabilities(server: Running) -> None:
    told = server.good("/infill", {**ASKED, "n_probs": 3})["completion_probabilities"]
    for token in told:
        assert set(token) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert len(token["top_logprobs"]) == 3
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"]


def test_a_stop_string(server: Running) -> None:
    whole = server.good("/infill", ASKED)["content"]
    answer = server.good("/infill", {**ASKED, "stop": [whole[1:3]]})
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (
        whole[: whole.index(whole[1:3])],
        "word",
        whole[1:3],
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input_prefix": 3}, "input_prefix"),
        ({"input_prefix": "the cat " * 40}, "takes 64"),
        ({"input_prefix": "a\0"}, "NUL"),
        ({"n_predict": -3}, "n_predict"),
        ({"top_p": 2}, "top_p"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra.0.text"),
    ],
)
def test_mistakes_have_llama_cpps_shape(
    server: Running, changes: dict[str, Any], told: str
) -> None:
    error = server.refused("/infill", {**ASKED, **changes})["error"]
    assert (error["code"], error["type"], set(error)) == (
        400,
        "invalid_request_error",
        {"code", "message", "type"},
    )
    assert told in error["message"]


def test_fields_that_mean_nothing_here_are_ignored(server: Running) -> None:
    more = {"cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "t_max_predict_ms": 500}
    assert (
        server.good("/infill", {**ASKED, **more})["content"]
        == server.good("/infill", ASKED)["content"]
    )
