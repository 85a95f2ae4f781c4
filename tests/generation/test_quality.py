"""Quality of fills: the model's settings, their precedence, and what best, fast and raw give."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import tracformer
from tests.toys import make
from tracformer import InfillOptions, LanguageModel
from tracformer.data import char_tokenizer
from tracformer.generation.generation_config import (
    FOR_SYMBOLS,
    FOR_TEXT,
    RAW,
    GenerationConfig,
    read_generation_config,
    settings_for,
    write_generation_config,
)

LETTERS = "abc "


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return make(char_tokenizer(LETTERS))


@pytest.fixture(scope="module")
def best(lm: LanguageModel) -> LanguageModel:
    """Return the same model with the settings of a model for text."""
    return LanguageModel(lm.model, lm.tokenizer, generation=FOR_TEXT)


def test_raw_samples_follow_the_law_of_the_model(best: LanguageModel) -> None:
    """Under `raw` every fill comes as often as its exact probability says, by enumeration."""
    n, end = 3000, best.tokenizer.eot_id
    before, after = best.tokenizer.encode("ab"), [*best.tokenizer.encode("c"), end]
    letters = best.tokenizer.encode(LETTERS)

    def share(token: int, known: list[int], rest: int) -> float:
        """Return the probability of the next token given those known; no end of text in a blank."""
        ids = [*before, *known, token, *[letters[0]] * rest, *after]
        given = [i < 2 + len(known) or i >= 4 for i in range(len(ids))]
        ended = [*ids[: 2 + len(known)], end, *ids[3 + len(known) :]]
        own, never = (
            math.exp(best.score_tokens(each, given)[2 + len(known)]) for each in (ids, ended)
        )
        return own / (1 - never)

    law = {(i, j): share(i, [], 1) * share(j, [i], 0) for i, j in product(letters, letters)}
    assert sum(law.values()) == pytest.approx(1.0)
    counts = dict.fromkeys(law, 0)
    results = best.infill("ab[[2]]c", n, quality="raw", batch=500)
    for result in results:
        counts[result.spans[0].token_ids] += 1  # type: ignore[index]
    chi_square = sum((counts[each] - n * p) ** 2 / (n * p) for each, p in law.items())
    assert chi_square < 37.7  # 15 degrees of freedom, p = 0.001
    assert results[:5] == best.infill("ab[[2]]c", 5, quality="raw")


def test_a_model_without_settings_gives_raw_samples(lm: LanguageModel) -> None:
    assert lm.generation == RAW
    assert lm.infill("ab[[3]]c", 4) == lm.infill("ab[[3]]c", 4, quality="raw")


@pytest.mark.parametrize("text", ["ab[[3]]c", "ab[[]]c", "a[[1-4]]b[[]]c"])
def test_best_returns_distinct_fills_in_the_order_of_their_scores(
    best: LanguageModel, text: str
) -> None:
    results = best.infill(text, 5, max_blank=6)
    scores = [result.score for result in results]
    assert None not in scores
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len({result.text for result in results}) == 5
    assert results[:2] == best.infill(text, 2, max_blank=6)
    for result in results:
        spans = zip(text.split("[[")[1:], result.spans, strict=True)
        marked = text.split("[[")[0] + "".join(
            f"[[{span.text}]]" + piece.split("]]")[1] for piece, span in spans
        )
        # the reported log-probability is the model's own
        assert result.log_prob == pytest.approx(best.score(marked).log_prob, abs=1e-4)


def test_best_beats_the_samples_it_ranks(best: LanguageModel) -> None:
    def score(result: Any) -> float:
        again = best.score_tokens(result.token_ids, [False] * len(result.token_ids), "ar")
        return float(result.log_prob + sum(again) + len(result.spans[0].token_ids))

    [found] = best.infill("ab[[3]]c")
    assert found.score == pytest.approx(score(found), abs=1e-4)
    assert all(
        score(each) <= score(found) + 1e-4 for each in best.infill("ab[[3]]c", 30, temperature=0.5)
    )


def test_precedence() -> None:
    config = GenerationConfig("best", temperature=0.7, top_p=0.8, best_of=5, beam=3)

    def used(stream: bool = False, **changes: Any) -> InfillOptions:
        return config.apply(InfillOptions.make(**changes), stream=stream)

    plain = used()
    assert (plain.quality, plain.search, plain.best_of, plain.reread) == ("best", "beam:3", 5, True)
    assert (plain.sampler.temperature, plain.sampler.top_p) == (0.7, 0.8)
    assert used(n=9).search == "beam:9"
    # an option that says how to draw replaces best; the others keep the model's values
    fast = used(temperature=1.0)
    assert (fast.quality, fast.sampler.temperature, fast.sampler.top_p) == ("fast", 1.0, 0.8)
    assert used(stream=True).quality == "fast"
    assert used(search="beam:4").sampler.temperature == 1.0
    # options of a caller that asks for best change its settings
    assert used(quality="best", top_p=0.5, best_of=7).sampler.top_p == 0.5
    raw = used(quality="raw", seed=3)
    assert raw == replace(InfillOptions.make(seed=3), quality="raw")
    assert config.apply(InfillOptions.make(), searchable=False).quality == "fast"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"order": "entropy"}, "order has no meaning"),
        ({"required": (1,)}, "required has no meaning"),
        ({"temperature": 0}, "temperature is 0"),
        ({"search": "best-first:10"}, "beam:WIDTH only"),
    ],
)
def test_contradictions_of_best_are_refused(
    best: LanguageModel, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        best.infill("ab[[2]]c", quality="best", **changes)


def test_best_is_not_streamed(best: LanguageModel) -> None:
    with pytest.raises(ValueError, match="cannot be streamed"):
        best.infill("ab[[2]]c", quality="best", callback=print)
    seen: list[Any] = []
    fast = best.infill("ab[[2]]c", callback=seen.extend)
    assert fast == best.infill("ab[[2]]c", quality="fast")
    assert [each.draft for each in seen] == [False, False]


def test_an_unknown_quality_is_refused() -> None:
    with pytest.raises(ValueError, match="quality is 'good'; it must be one of best, fast, raw"):
        InfillOptions.make(quality="good")


def test_settings_are_read_back(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == RAW
    config = GenerationConfig("fast", temperature=0.5, beam=4)
    write_generation_config(tmp_path, config)
    assert read_generation_config(tmp_path) == config
    # what transformers writes for itself counts as none; its keys beside ours are ignored
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"transformers_version": "5", "eos_token_id": 1}))
    assert read_generation_config(tmp_path) == RAW
    path.write_text(json.dumps({**config.to_dict(), "transformers_version": "5"}))
    assert read_generation_config(tmp_path) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"quality": "best", "topp": 0.9}', "unknown option 'topp'; did you mean 'top_p'"),
        ('{"quality": "good"}', "quality is 'good'; it must be one of best, fast, raw"),
        ('{"quality": "best", "top_p": 1.5}', r"top_p is 1.5; it must be in \(0, 1\]"),
        ('{"quality": "best", "beam": "wide"}', "beam is 'wide'; it must be an integer"),
        ("[1]", "holds a list"),
        ("{", "not valid JSON"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        read_generation_config(tmp_path)
    assert str(tmp_path / "generation_config.json") in str(caught.value)


def test_text_gets_best_and_symbols_raw() -> None:
    assert settings_for(char_tokenizer(LETTERS)) == FOR_TEXT
    proteins = tracformer.load("proteins")
    assert settings_for(proteins.tokenizer) == FOR_SYMBOLS
    assert proteins.generation.quality == "raw"
    assert tracformer.load("stories").generation == FOR_TEXT
