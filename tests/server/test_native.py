"""The native protocol returns what the library returns, also with diffusion models."""

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from tests.generation.test_reverse_process import model_of
from tests.server.helpers import NAME, WORDS, Running, make, running, same, until
from tracformer import LanguageModel
from tracformer.baselines.plaid import Plaid
from tracformer.data import char_tokenizer, train_bpe
from tracformer.generation.orders import Ancestral, ByConfidence
from tracformer.generation.samplers import Sampler

TEXT = "the cat [[3]] the [[2]] mat"


def as_json(records: list[Any]) -> Any:
    return json.loads(json.dumps([record.to_dict() for record in records]))


def test_answers_equal_the_librarys(server: Running, lm: LanguageModel) -> None:
    fields = {
        "text": TEXT,
        "n": 3,
        "seed": 5,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "top": 2,
    }
    answer = server.good("/v1/infill", {**fields, "repetition_penalty": 1.2, "no_repeat_ngram": 2})
    sampler = Sampler(0.8, 50, 0.9, 0.01, 1.2, 2)
    assert same(answer["results"], as_json(lm.infill(TEXT, 3, seed=5, sampler=sampler, top=2)))
    assert answer["object"] == "infill"
    assert answer["model"] == "tiny"
    assert answer["seed"] == 5
    given = len(answer["results"][0]["token_ids"]) - 5
    assert answer["usage"] == {
        "prompt_tokens": given,
        "completion_tokens": 15,
        "total_tokens": given + 15,
    }
    assert set(answer["timings"]) == {
        "queued_ms",
        "first_token_ms",
        "total_ms",
        "tokens_per_second",
    }
    first = answer["results"][0]["spans"][0]
    assert [len(each) for each in first["candidates"]] == [2, 2, 2]
    assert set(first["candidates"][0][0]) == {"token_id", "text", "probability", "log_prob"}


def test_lengths_orders_and_searches_equal_the_librarys(server: Running, lm: LanguageModel) -> None:
    ranged = server.good(
        "/v1/infill",
        {
            "text": "the [[1-3]] sat",
            "seed": 2,
            "length_draws": 3,
            "lengths": "rank",
            "whole": False,
        },
    )
    assert same(
        ranged["results"],
        as_json(lm.infill("the [[1-3]] sat", seed=2, length_draws=3, lengths="rank", whole=False)),
    )
    ordered = server.good("/v1/infill", {"text": TEXT, "seed": 2, "order": "entropy", "k": 2})
    assert same(
        ordered["results"], as_json(lm.infill(TEXT, seed=2, order=ByConfidence("entropy", 2)))
    )
    stepped = server.good("/v1/infill", {"text": TEXT, "seed": 2, "steps": 3})
    assert same(stepped["results"], as_json(lm.infill(TEXT, seed=2, order=Ancestral(3))))
    best = server.good("/v1/infill", {"text": "the [[2]] sat", "search": "beam:3", "n": 2})
    assert [r["text"] for r in best["results"]] == [
        r.text for r in lm.infill("the [[2]] sat", 2, search="beam:3")
    ]
    drawn = server.good("/v1/infill", {"text": "the [[2]] sat", "best_of": 4, "n": 2, "seed": 1})
    assert same(drawn["results"], as_json(lm.infill("the [[2]] sat", 2, best_of=4, seed=1)))


def test_a_missing_seed_is_drawn_and_returned(server: Running) -> None:
    first = server.good("/v1/infill", {"text": TEXT})
    again = server.good("/v1/infill", {"text": TEXT, "seed": first["seed"]})
    assert same(again["results"], first["results"])
    assert server.good("/v1/infill", {"text": TEXT})["seed"] != first["seed"]


def test_segments_are_literal_text(server: Running, lm: LanguageModel) -> None:
    fields = {
        "segments": ["the [[2]] cat ", {"blank": 2}, " \\", {"blank": {"min": 1, "max": 2}}],
        "seed": 3,
        "length_draws": 2,
    }
    result = server.good("/v1/infill", fields)["results"][0]
    assert result["text"].startswith("the [[2]] cat ")
    written = lm.infill(r"the \[[2]] cat [[2]] \\[[1-2]]", seed=3, length_draws=2)
    assert same(result, as_json(written)[0])
    free = server.good(
        "/v1/infill", {"segments": ["the", {"blank": None}], "max_blank": 3, "length_draws": 2}
    )["results"][0]
    assert 1 <= len(free["spans"][0]["token_ids"]) <= 3


@pytest.mark.parametrize("blank", ["[[129-130]]", "[[1-999999999]]"])
def test_lengths_to_be_chosen_have_a_limit(server: Running, blank: str) -> None:
    found = server.refused("/v1/infill", {"text": f"the {blank}", "max_blank": 2})
    assert "the limit of this server is 128" in str(found)


def test_a_stream_has_lengths_then_tokens_then_the_whole_answer(server: Running) -> None:
    fields = {"text": "the [[2-3]] cat [[2]]", "n": 2, "seed": 4, "top": 2, "length_draws": 2}
    found = server.stream("/v1/infill", fields)
    names = [name for name, _ in found]
    assert names[0] == "start"
    assert names[-1] == "result"
    assert set(names) == {"start", "lengths", "token", "result"}
    answer = found[-1][1]
    plain = server.good("/v1/infill", fields)
    assert same(answer["results"], plain["results"])
    assert found[0][1] == {"id": answer["id"], "model": "tiny", "seed": 4}
    for sample, result in enumerate(answer["results"]):
        tokens = [
            data
            for name, data in found
            if name == "token" and data["sample"] == sample and not data["draft"]
        ]
        for blank, span in enumerate(result["spans"]):
            mine = sorted((t for t in tokens if t["blank"] == blank), key=lambda t: t["index"])
            assert [t["token_id"] for t in mine] == span["token_ids"]
            assert [t["token"] for t in mine] == span["tokens"]
            assert [t["log_prob"] for t in mine] == pytest.approx(span["log_probs"], abs=1e-6)
            assert [len(t["candidates"]) for t in mine] == [2] * len(mine)
        lengths = next(
            data["lengths"]
            for name, data in found
            if name == "lengths" and data["sample"] == sample
        )
        assert lengths == [len(span["token_ids"]) for span in result["spans"]]
        first = next(
            i
            for i, (name, data) in enumerate(found)
            if name == "token" and data["sample"] == sample
        )
        assert names.index("lengths") < first


def test_orders_by_confidence_stream_drafts(server: Running) -> None:
    found = server.stream(
        "/v1/infill", {"text": "the [[5]] cat", "order": "probability", "seed": 1}
    )
    tokens = [data for name, data in found if name == "token"]
    assert any(token["draft"] for token in tokens)
    final = [token for token in tokens if not token["draft"]]
    assert sorted(token["index"] for token in final) == list(range(5))


def test_scores_equal_the_librarys(server: Running, lm: LanguageModel) -> None:
    marked = server.good("/v1/score", {"text": "the [[cat]] sat", "top": 3})
    assert marked["object"] == "score"
    assert marked["usage"]["total_tokens"] == marked["tokens"]
    local = lm.score("the [[cat]] sat", top=3)
    assert same({name: marked[name] for name in local.to_dict()}, as_json([local])[0])
    assert server.good("/v1/score", {"text": "the [[cat]] sat", "mode": "ac"})["kind"] == "marginal"


def test_a_text_without_marks_is_scored_whole(server: Running, lm: LanguageModel) -> None:
    for text in ("the cat sat", "[the cat]", r"the \[[ cat"):
        scored = server.good("/v1/score", {"text": text, "whole": False})
        literal = text.replace("\\[[", "[[")
        ids = lm.tokenizer.encode(literal)
        assert scored["text"] == literal
        assert scored["mode"] == "ar"
        assert scored["log_prob"] == pytest.approx(
            math.fsum(lm.score_tokens(ids, [False] * len(ids), "ar")), abs=1e-5
        )
    for mode in ("car", "ac"):
        scored, local = (
            server.good("/v1/score", {"text": "the cat sat", "mode": mode}),
            lm.score("[[the cat sat]]", mode=mode),
        )
        assert same({name: scored[name] for name in local.to_dict()}, as_json([local])[0])
    for fields, found in (
        ({"text": ""}, "the text is empty"),
        ({"text": "the cat", "mode": "zigzag"}, "mode is 'zigzag'"),
    ):
        assert found in server.refused("/v1/score", fields)["error"]["message"]


def test_a_model_without_mode_ar_scores_a_whole_text() -> None:
    lm = make(modes=("car",))
    with running(lambda: lm) as there:
        scored = there.good("/v1/score", {"text": "the cat sat"})
        assert (scored["mode"], scored["log_prob"]) == (
            "car",
            pytest.approx(lm.score("[[the cat sat]]").log_prob, abs=1e-5),
        )


def test_tokens_and_models(server: Running, lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode("the café")
    tokens = server.good("/v1/tokenize", {"text": "the café"})["tokens"]
    assert [token["id"] for token in tokens] == ids
    assert [token["text"] for token in tokens] == [lm.spelling.token(i) for i in ids]
    assert server.good("/v1/tokenize", {"text": ""}) == {"tokens": []}
    [model] = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["default"]) == ("tiny", "model", True)
    assert (model["max_length"], model["modes"], model["tokenizer"], model["alphabet"]) == (
        64,
        ["car", "ac", "ar"],
        "bpe",
        None,
    )


def test_a_character_model_lists_its_alphabet() -> None:
    lm = make(char_tokenizer("ACGT"))
    with running(lambda: lm) as there:
        [model] = there.http.get("/v1/models").json()["data"]
        assert (model["tokenizer"], model["alphabet"]) == ("characters", "ACGT")
        answer = there.good("/v1/infill", {"text": "ACG[[4]]TTA", "seed": 1})
        assert same(answer["results"], as_json(lm.infill("ACG[[4]]TTA", seed=1)))
        assert (
            "outside the tokenizer's alphabet"
            in there.refused("/v1/infill", {"text": "ACX[[2]]"})["error"]["message"]
        )


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"text": "no blank"}, "no blank found"),
        ({"text": "the [[2"}, "is not closed"),
        ({"text": "the [[cat]]"}, "write [[]]"),
        ({"segments": ["no blank"]}, "have no blank"),
        ({}, "either text or segments"),
        ({"text": TEXT, "segments": []}, "either text or segments"),
        (
            {"segments": ["a", {"blank": 0}]},
            "segments.1.blank: Input should be greater than or equal to 1",
        ),
        (
            {"segments": ["a", {"blank": {"min": 0, "max": 2}}]},
            "segments.1.blank.min: Input should be greater",
        ),
        ({"segments": ["a", {"Blank": 2}]}, "segments.1.blank: Field required"),
        (
            {"segments": ["a", 5]},
            'segments.1: must be a string or a blank such as {"blank": 8}',
        ),
        ({"text": TEXT, "temprature": 1}, "temprature"),
        ({"text": TEXT, "n": "2"}, "n: "),
        ({"text": TEXT, "n": 0}, "n: "),
        ({"text": TEXT, "n": 17}, "the limit of this server is 16"),
        ({"text": TEXT, "best_of": 33}, "best_of asks for 33"),
        ({"text": TEXT, "n": 3, "best_of": 2}, "best_of is 2"),
        ({"text": TEXT, "top": 21}, "top asks for 21"),
        ({"text": TEXT, "steps": 1025}, "steps asks for 1025"),
        ({"text": TEXT, "steps": 8, "order": "random"}, "steps go with the order 'ancestral'"),
        ({"text": TEXT, "steps": 8, "k": 2}, "set by steps"),
        ({"text": TEXT, "search": "beam:33"}, "search asks for 33"),
        ({"text": TEXT, "search": "deep"}, "search is 'deep'"),
        ({"text": TEXT, "mode": "zigzag"}, "mode is 'zigzag'"),
        ({"text": TEXT, "mode": "car", "order": "random"}, "goes from left to right"),
        ({"text": TEXT, "temperature": -1}, "temperature"),
        ({"text": TEXT, "banned": [10**6]}, "1000000"),
        ({"text": "[[1]]" * 65}, "blanks asks for 65"),
        ({"text": "the cat " * 40 + "[[2]]"}, "takes 64 tokens"),
        ({"text": "the [[70]]"}, "fit"),
        ({"text": "the\0[[2]]"}, "NUL"),
        ({"text": TEXT, "seed": -1}, "seed"),
        ({"text": TEXT, "seed": 2**63}, "seed"),
    ],
)
def test_wrong_requests_are_refused(server: Running, fields: dict[str, Any], found: str) -> None:
    for stream in (False, True):
        error = server.refused("/v1/infill", {**fields, "stream": stream})["error"]
        assert found in error["message"]
        assert (error["type"], set(error)) == (
            "invalid_request_error",
            {"message", "type", "param", "code"},
        )


def test_an_unknown_model_is_not_found(server: Running) -> None:
    error = server.refused("/v1/infill", {"text": TEXT, "model": "other"}, 404)["error"]
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]
    assert server.good("/v1/infill", {"text": TEXT, "model": "tiny"})["model"] == "tiny"


# Diffusion models

# takes many seconds with a slow model
DIFFUSION = {"text": "the [[8]] cat", "mode": "diffusion", "steps": 1000}


class SlowPlaid(Plaid):
    """Sleeps in each pass."""

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
    lm.model.__class__ = SlowPlaid
    with running(lambda: lm, drain=1) as there:
        yield there


@pytest.mark.parametrize("system", ["mdlm", "plaid"])
def test_diffusion_answers_equal_the_librarys(system: str) -> None:
    lm = serve(system)
    with running(lambda: lm) as there:
        fields: dict[str, Any] = {"text": TEXT, "mode": "diffusion", "n": 2, "seed": 5}
        own = there.good("/v1/infill", {**fields, "top": 6})["results"]
        assert same(own, as_json(lm.infill(TEXT, 2, mode="diffusion", seed=5, top=6)))
        assert all(
            len(candidates) == 6
            for result in own
            for span in result["spans"]
            for candidates in span["candidates"]
        )
        expected = as_json(lm.infill(TEXT, 2, mode="diffusion", seed=5, order=Ancestral(8)))
        assert same(there.good("/v1/infill", {**fields, "steps": 8})["results"], expected)
        assert same(
            there.good("/v1/infill", {**fields, "steps": 8, "order": "ancestral"})["results"],
            expected,
        )
        assert "steps asks for 1025; the limit of this server is 1024" in str(
            there.refused("/v1/infill", {**fields, "steps": 1025})
        )
        assert there.good("/v1/completions", {"prompt": "the cat", "max_tokens": 3, "logprobs": 2})[
            "choices"
        ][0]["logprobs"]


def test_other_requests_are_answered_during_a_long_reverse_process(slow: Running) -> None:
    model = slow.backend.engine.model
    with slow.raw("/v1/infill", DIFFUSION):
        until(lambda: model.passes > 0)
        began = model.passes
        assert slow.good("/v1/tokenize", {"text": "the cat"})["tokens"]
        assert slow.good("/v1/infill", {"text": "the [[1]] cat", "steps": 3})["results"]
        assert model.passes - began < 100  # of a thousand
    until(lambda: slow.backend.gate.running == 0)  # the client has disconnected
    passes = slow.backend.engine.request().call(lambda: model.passes)
    assert passes < 200
    time.sleep(0.1)
    assert model.passes == passes


def test_a_time_limit_ends_a_long_reverse_process(slow: Running) -> None:
    slow.refused("/v1/infill", {**DIFFUSION, "timeout": 0.2}, 408)
    model = slow.backend.engine.model
    passes = slow.backend.engine.request().call(lambda: model.passes)
    assert passes < 100
    time.sleep(0.1)
    assert model.passes == passes


def test_shutdown_does_not_wait_for_a_long_reverse_process(slow: Running) -> None:
    model = slow.backend.engine.model
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(slow.refused, "/v1/infill", DIFFUSION, 503)
        until(lambda: model.passes > 0)
        slow.server.should_exit = True  # and one second to drain
        assert answer.result(20)["error"]["code"] == "stopping"
    assert model.passes < 500
