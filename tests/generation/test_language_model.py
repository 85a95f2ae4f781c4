"""A language model fills, scores and ranks texts."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.toys import TEXT, Chain, make
from tracformer import LanguageModel
from tracformer.data import byte_tokenizer, char_tokenizer
from tracformer.generation import scoring
from tracformer.generation.infill import InfillRun
from tracformer.generation.orders import ByConfidence, RandomOrder
from tracformer.generation.ranking import left_to_right
from tracformer.generation.request_options import InfillOptions
from tracformer.generation.results import Infilled, Token
from tracformer.generation.samplers import Sampler
from tracformer.generation.template import write
from tracformer.rng import derived_seed


def context_of(result: Infilled) -> list[bool]:
    blank = {
        i
        for span in result.spans
        for i in range(span.first_token, span.first_token + len(span.token_ids))
    }
    return [i not in blank for i in range(len(result.token_ids))]


def test_a_result_is_the_given_text_with_fillings_in_it(lm: LanguageModel) -> None:
    for result in lm.infill(TEXT, 6, seed=3):
        first, second = result.spans
        assert result.text == "the cat" + first.text + " the" + second.text + " mat"
        assert [result.text[span.start : span.stop] for span in result.spans] == [
            first.text,
            second.text,
        ]
        assert [len(span.token_ids) for span in result.spans] == [3, 2]
        assert all(
            result.token_ids[s.first_token : s.first_token + len(s.token_ids)] == s.token_ids
            for s in result.spans
        )
        assert all(span.text[0] == " " and not span.text[1].isspace() for span in result.spans)
        assert "".join(first.tokens) == first.text or "\ufffd" in first.text
        assert result.log_prob == pytest.approx(first.log_prob + second.log_prob)
        assert result.token_ids[-1] == lm.tokenizer.eot_id
        assert lm.tokenizer.eot_id not in (*first.token_ids, *second.token_ids)


def test_no_space_is_forced_at_the_start_or_inside_a_word(lm: LanguageModel) -> None:
    starts = {r.spans[0].text[:1] for r in lm.infill("[[1]] cat", 20) + lm.infill("ca[[1]]", 20)}
    assert len(starts - {" "}) > 5


def test_end_of_text_comes_only_where_the_sampler_names_it(lm: LanguageModel) -> None:
    eot = lm.tokenizer.eot_id
    [result] = lm.infill("the[[1]]", sampler=Sampler(allowed=(eot,)))
    assert result.spans[0].token_ids == (eot,)


def test_the_second_sample_is_that_of_its_seed(lm: LanguageModel) -> None:
    second = lm.infill(TEXT, 2, seed=7)[1]
    assert second.seed == derived_seed(7, 1)
    assert lm.infill(TEXT, seed=second.seed)[0].token_ids == second.token_ids


def test_the_score_of_a_sample_is_its_reported_log_probability(lm: LanguageModel) -> None:
    round_trips = 0
    for result in lm.infill(TEXT, 12, sampler=Sampler(temperature=0.5)):
        scores = lm.score_tokens(result.token_ids, context_of(result), "car")
        reported = [value for span in result.spans for value in span.log_probs]
        assert [
            score for score, given in zip(scores, context_of(result), strict=True) if not given
        ] == pytest.approx(reported, abs=1e-9)
        assert all(
            score == 0 for score, given in zip(scores, context_of(result), strict=True) if given
        )
        if all(lm.tokenizer.encode(span.text) == list(span.token_ids) for span in result.spans):
            round_trips += 1
            scored = lm.score(
                write(["the cat", " the", " mat"], [span.text for span in result.spans])
            )
            assert scored.log_prob == pytest.approx(result.log_prob, abs=1e-9)
            assert [(s.start, s.stop, s.text) for s in scored.spans] == [
                (s.start, s.stop, s.text) for s in result.spans
            ]
            assert scored.text == result.text
    assert round_trips > 0


def test_scores_in_their_units(lm: LanguageModel) -> None:
    scored = lm.score("the [[cat]] sat on [[a mat]]")
    assert [span.text for span in scored.spans] == [" cat", " a mat"]
    assert scored.text == "the cat sat on a mat"
    assert scored.tokens == sum(len(span.token_ids) for span in scored.spans)
    assert scored.log_prob == pytest.approx(sum(span.log_prob for span in scored.spans))
    assert scored.bits_per_byte == pytest.approx(-scored.log_prob / math.log(2) / len(" cat a mat"))
    assert scored.perplexity == pytest.approx(math.exp(-scored.log_prob / scored.tokens))
    assert scored.kind == "exact"
    assert lm.score("the [[cat]] sat", mode="ac").kind == "marginal"
    assert scored == lm.score("the[[ cat]] sat on[[ a mat]]")
    assert lm.score("the [[cat]] sat", whole=False).log_prob != lm.score("the [[cat]] sat").log_prob


def test_long_texts_are_scored_in_smaller_batches(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = lm.score_requests([f"{'some ' * words}[[words]]" for words in (1, 5, 2, 1, 4)])
    lengths = [len(request.layout.tokens) for request in requests]
    monkeypatch.setattr(scoring, "TOKENS_AT_ONCE", 2 * max(lengths) - 1)
    batches = list(scoring.batches_of(requests))
    assert [i for some in batches for i in some] == sorted(range(5), key=lengths.__getitem__)
    for some in batches:
        assert len(some) * max(lengths[i] for i in some) < 2 * max(lengths)
    assert len(batches) < 5
    one = [replace(each, options=replace(each.options, batch=1)) for each in requests]
    assert [len(some) for some in scoring.batches_of(one)] == [1] * 5


def test_scores_do_not_depend_on_the_batch(lm: LanguageModel) -> None:
    texts = ["the [[cat]] sat", "[[a]] dog and a cat on the mat", "a[[dog]]"]
    for scored, text in zip(lm.score(texts, batch=2), texts, strict=True):
        assert scored.log_prob == pytest.approx(lm.score(text).log_prob, abs=1e-9)
        assert scored.text == lm.score(text).text


def test_bytes_are_counted_in_utf8() -> None:
    scored = make(byte_tokenizer()).score("a[[é]]")
    assert scored.tokens == 2
    assert scored.bits_per_byte == pytest.approx(-scored.log_prob / math.log(2) / 2)


def test_incomplete_characters_are_joined_and_broken_ones_noted() -> None:
    lm = make(byte_tokenizer())
    first, second = "é".encode()
    drawn = lm.infill(
        "a[[2]]b", 20, sampler=Sampler(allowed=(first, second), required=(first, second))
    )
    whole = next(result for result in drawn if result.spans[0].token_ids == (first, second))
    assert (whole.text, whole.note) == ("aéb", "")
    assert whole.spans[0].tokens == ("\ufffd", "\ufffd")
    [broken] = lm.infill("a[[1]]b", sampler=Sampler(allowed=(first,)))
    assert broken.text == "a\ufffdb"
    assert broken.spans[0].stop == 2
    assert "not UTF-8" in broken.note


def test_the_best_of_many_are_the_most_probable_and_differ(lm: LanguageModel) -> None:
    drawn = lm.infill("the cat [[1]] mat", 30)
    best = lm.infill("the cat [[1]] mat", 3, best_of=30)
    values = sorted({result.text: result.log_prob for result in drawn}.values(), reverse=True)
    assert [result.log_prob for result in best] == pytest.approx(values[:3])
    assert len({result.text for result in best}) == 3


def test_of_equal_texts_the_likeliest_is_kept(lm: LanguageModel) -> None:
    def found(text: str, log_prob: float) -> Infilled:
        return Infilled(text, (), log_prob, 0, "ac", (), None, "")

    results = [
        found("a", -3.0),
        found("b", -2.0),
        found("c", -2.5),
        found("a", -1.0),
        found("b", -9.0),
    ]
    run = InfillRun(lm.runner, lm.spelling, InfillOptions(n=3, best_of=5))
    best = run.best(results)
    assert [(each.text, each.log_prob) for each in best] == [("a", -1.0), ("b", -2.0), ("c", -2.5)]
    assert [
        each.text for each in replace(run, options=InfillOptions(n=1, best_of=5)).best(results)
    ] == ["a"]


def test_the_best_of_different_lengths_weigh_the_length_too() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))

    def weight(result: Infilled) -> float:
        assert result.length_choice is not None
        posterior = dict(
            zip(result.length_choice.lengths, result.length_choice.log_probabilities, strict=True)
        )
        return result.log_prob + posterior[result.length_choice.chosen]

    drawn = {result.text: weight(result) for result in lm.infill("a[[1-3]]b", 40)}
    best = lm.infill("a[[1-3]]b", 4, best_of=40)
    assert [weight(result) for result in best] == pytest.approx(
        sorted(drawn.values(), reverse=True)[:4]
    )


def test_search_finds_no_less_than_sampling_does(lm: LanguageModel) -> None:
    [best] = lm.infill("the cat [[2]] mat", search="best-first:5000")
    assert "proven" in best.note
    assert best.spans[0].text.startswith(" ")
    assert (
        best.log_prob
        >= max(result.log_prob for result in lm.infill("the cat [[2]] mat", 50)) - 1e-9
    )
    scores = lm.score_tokens(best.token_ids, context_of(best))
    assert sum(scores) == pytest.approx(best.log_prob, abs=1e-9)
    beam = lm.infill("the cat [[2]] mat", 3, search="beam:4")
    assert "approximate" in beam[0].note
    assert [r.log_prob for r in beam] == sorted((r.log_prob for r in beam), reverse=True)
    [given_up] = lm.infill("the cat [[4]] mat", search="best-first:1", batch=1)
    assert "gave up" in given_up.note


def test_any_order_fills_everything_and_its_probability_is_that_of_its_order(
    lm: LanguageModel,
) -> None:
    for order in (RandomOrder(), ByConfidence("entropy")):
        arrivals: list[Token] = []
        [result] = lm.infill("the cat [[3]] mat", order=order, callback=arrivals.extend)
        assert result.mode == "ac"
        assert sorted(a.index for a in arrivals) == [0, 1, 2]
        context, total = context_of(result), 0.0
        for arrival in arrivals:
            position = result.spans[0].first_token + arrival.index
            total += lm.score_tokens(result.token_ids, context, "ac")[position]
            context[position] = True
        assert total == pytest.approx(result.log_prob, abs=1e-9)


def test_the_callback_receives_tokens_as_they_are_drawn(lm: LanguageModel) -> None:
    arrivals: list[Token] = []
    results = lm.infill([TEXT, "a [[2]]"], 2, callback=arrivals.extend)
    seen = {(a.text, a.sample, a.blank, a.index): a.token_id for a in arrivals}
    expected = {
        (t, s, b, i): token
        for t, samples in enumerate(results)
        for s, result in enumerate(samples)
        for b, span in enumerate(result.spans)
        for i, token in enumerate(span.token_ids)
    }
    assert seen == expected


def test_a_model_without_length_probabilities_is_an_error() -> None:
    lm = make(char_tokenizer("abc"), modes=("car", "ac"))
    [result] = lm.infill("a[[2-6]]b")
    assert len(result.spans[0].token_ids) == 4
    assert "middle" in result.note
    assert result.length_choice is None


def test_marginals_are_the_candidates_of_each_position(lm: LanguageModel) -> None:
    found = lm.marginals("the [[2]] sat [[1]]", top=300)
    assert [(m.blank, m.index) for m in found] == [(0, 0), (0, 1), (1, 0)]
    for marginal in found:
        assert sum(c.probability for c in marginal.candidates) == pytest.approx(1.0)
        assert [c.log_prob for c in marginal.candidates] == sorted(
            (c.log_prob for c in marginal.candidates), reverse=True
        )
    cat = lm.score("the [[cat]] sat", mode="ac").spans[0]
    [first] = lm.marginals("the [[1]] sat", top=300)
    assert {c.token_id: c.log_prob for c in first.candidates}[cat.token_ids[0]] == pytest.approx(
        cat.log_probs[0]
    ) or len(cat.token_ids) > 1
    assert len(lm.marginals("the [[1]] sat", mode="car")) == 1


def test_candidates_of_filled_written_and_scored_tokens(lm: LanguageModel) -> None:
    [filled] = lm.infill(TEXT, top=3)
    [sample] = lm.sample(prompt="the cat", max_tokens=5, top=3)
    scored = lm.score("the [[cat]] sat [[on the]] mat", top=3)
    parts = [*((s.token_ids, s.log_probs, s.candidates) for s in (*filled.spans, *scored.spans))]
    for token_ids, log_probs, candidates in (
        *parts,
        (sample.token_ids, sample.log_probs, sample.candidates),
    ):
        assert len(candidates) == len(token_ids)
        for token, log_prob, likely in zip(token_ids, log_probs, candidates, strict=True):
            assert len(likely) == 3
            values = [each.log_prob for each in likely]
            assert values == sorted(values, reverse=True)
            assert [math.exp(value) for value in values] == pytest.approx(
                [each.probability for each in likely]
            )
            assert [each.text for each in likely] == [
                lm.spelling.token(each.token_id) for each in likely
            ]
            own = {each.token_id: each.log_prob for each in likely}
            assert own.get(token, log_prob) == pytest.approx(log_prob, abs=1e-9)
            assert log_prob <= values[0] + 1e-9
    context = context_of(filled)
    top = lm.top_tokens(filled.token_ids, context, 3, "car")
    assert [bool(each) for each in top] == [not given for given in context]
    assert [each[0].token_id for each in top if each] == [
        each[0].token_id for span in filled.spans for each in span.candidates
    ]
    assert lm.infill(TEXT)[0].spans[0].candidates == ()
    [found] = lm.infill("the [[1]] sat", search="beam:4", top=2)
    assert found.spans[0].candidates[0][0].log_prob >= found.log_prob
    for result in lm.infill("the [[2]] sat", 5, search="beam:5", top=2, batch=2):
        top = [
            each for each in lm.top_tokens(result.token_ids, context_of(result), 2, "car") if each
        ]
        assert [each.token_id for pair in result.spans[0].candidates for each in pair] == [
            each.token_id for pair in top for each in pair
        ]
    for ask in (lambda: lm.infill(TEXT, top=-1), lambda: lm.top_tokens([1], [False], 0)):
        with pytest.raises(ValueError, match="top is"):
            ask()


def test_the_default_mode_is_the_first_that_the_model_has() -> None:
    letters = char_tokenizer("abc")
    assert make(letters).infill("a[[1]]")[0].mode == "car"
    assert make(letters, modes=("ac",)).infill("a[[1]]")[0].mode == "ac"
    left = make(letters, modes=("ar",)).infill("a[[1]]b")[0]
    assert left.mode == "ar"
    assert "does not see the text after a blank" in left.note
    with pytest.raises(ValueError, match="trained for: ac"):
        make(letters, modes=("ac",)).infill("a[[1]]", mode="car")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("no blank", {}, "no blank found"),
        ("a [[3", {}, "not closed"),
        ("a [[0]]", {}, "least is 1"),
        ("a [[x]]", {}, "'x'"),
        ("a [[40]]", {}, "40 tokens where"),
        ("the cat " * 20 + "[[1]]", {}, "shorten the text"),
        ("a [[1]]", {"n": 0}, "n is 0"),
        ("a [[1]]", {"n": 3, "best_of": 2}, "best_of is 2"),
        ("a [[1]]", {"search": "widely"}, "beam:WIDTH"),
        ("a [[1]]", {"search": "beam:4", "mode": "ac"}, "exact joint"),
        (
            "a [[1]]",
            {"search": "beam:4", "sampler": Sampler(temperature=0.5)},
            "only banned and allowed",
        ),
        ("a [[1]]", {"order": RandomOrder(), "mode": "car"}, "left to right"),
        (
            "a [[1]]",
            {"order": "sideways"},
            "order is 'sideways'; allowed: left-to-right",
        ),
        ("a [[]]", {"lengths": "best"}, "sample, rank"),
        ("a [[]]", {"length_draws": 1}, "at least 2"),
    ],
)
def test_wrong_fills_are_refused_with_a_reason(
    lm: LanguageModel, text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lm.infill(text, **options)
    with pytest.raises(ValueError, match=message):
        lm.infill_requests([text], **options)


def test_requests_are_checked_when_they_are_made(lm: LanguageModel) -> None:
    for search in (None, "beam:4"):
        assert len(lm.infill_requests(["the [[3]] cat"] * 2, 2, search=search)) == 2
    with pytest.raises(ValueError, match="mode is 'up'"):
        lm.infill_requests([], mode="up")
    assert len(lm.score_requests(["the [[cat]] sat"])) == 1
    for text, mode, message in (
        (None, "up", "mode is 'up'"),
        ("", None, "the text is empty"),
        ("a [[" + "the cat " * 20 + "]]", None, "shorten"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.score_requests([] if text is None else [text], mode=mode)


def test_a_text_without_marks_is_scored_whole(lm: LanguageModel) -> None:
    marked, whole, other = lm.score(["the [[cat]] sat", "the cat sat", "a dog"])
    assert (marked.mode, whole.mode, other.mode) == ("car", "ar", "ar")
    ids = lm.tokenizer.encode("the cat sat")
    expected = math.fsum(lm.score_tokens(ids, [False] * len(ids), "ar"))
    assert whole.log_prob == pytest.approx(expected, abs=1e-5)
    assert [(span.start, span.stop) for span in whole.spans] == [(0, len("the cat sat"))]
    assert marked.log_prob == pytest.approx(lm.score("the [[cat]] sat").log_prob, abs=1e-5)
    assert lm.score("the cat sat", mode="ac").mode == "ac"


def test_blanks_of_other_programs_are_read_and_named(lm: LanguageModel) -> None:
    [fill] = lm.infill("the ____ sat", seed=1, quality="raw")
    [same] = lm.infill("the [[]] sat", seed=1, quality="raw")
    assert (fill.text, fill.log_prob) == (same.text, same.log_prob)
    assert fill.note == "no [[...]] in the text; read as blanks of any length: ____"
    assert "[[...]]" not in same.note


def test_wrong_scores_and_marginals_are_refused(lm: LanguageModel) -> None:
    for text, message in (
        ("a [[]]", "is empty"),
        ("", "the text is empty"),
        ("a [[" + "the cat " * 20 + "]]", "shorten"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.score(text)
    for text, message in (("a [[]]", "fixed number"), ("a [[2-3]]", "fixed number")):
        with pytest.raises(ValueError, match=message):
            lm.marginals(text)
    with pytest.raises(ValueError, match="leave one blank of one token"):
        lm.marginals("a [[2]]", mode="car")
    with pytest.raises(ValueError, match="max_tokens is 99, but only 32 fit"):
        lm.sample(max_tokens=99)


def test_results_are_json(lm: LanguageModel) -> None:
    seed: Any = np.random.default_rng(0).integers(100)
    records = [
        *lm.infill("a [[1-2]] cat"),
        lm.score("a [[cat]]", seed=seed),
        *lm.marginals("a [[1]]"),
        *lm.sample(max_tokens=3, seed=seed),
    ]
    records += [
        *lm.infill("a [[1]] cat", 2, seed=seed),
        *lm.infill("a [[1]] cat", search="beam:2", seed=seed),
    ]
    for record in records:
        assert json.loads(json.dumps(record.to_dict(), allow_nan=False)) == record.to_dict()
    assert records[0].to_dict()["spans"][0]["text"] == records[0].spans[0].text  # type: ignore[union-attr]


# ---- rereading

BLANK = "the cat [[2]] on the mat"


def reading(lm: LanguageModel, result: Infilled) -> float:
    return sum(lm.score_tokens(result.token_ids, [False] * len(result.token_ids), "ar"))


@pytest.mark.parametrize("options", [{"search": "beam:12"}, {"best_of": 20}])
@pytest.mark.parametrize("batch", [16, 5])
def test_the_best_by_both_rankings_are_first(
    lm: LanguageModel, options: dict[str, Any], batch: int
) -> None:
    found = lm.infill(BLANK, 12, **options)
    expected = sorted(found, key=lambda each: -each.log_prob - reading(lm, each))
    assert [each.text for each in expected] != [each.text for each in found]
    best = lm.infill(BLANK, 12, reread=True, batch=batch, **options)
    if "search" in options:
        assert [each.text for each in best] == [each.text for each in expected]
    both = [each.log_prob + reading(lm, each) for each in best]
    assert both == sorted(both, reverse=True)
    assert all(f"log p {reading(lm, each):.3f} from left to right" in each.note for each in best)
    [one] = lm.infill(BLANK, reread=True, batch=batch, **options)
    assert (one.text, one.log_prob) == (best[0].text, pytest.approx(best[0].log_prob))


def test_two_rankings_by_one_law_differ_by_a_constant() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))
    found = lm.infill("a[[2]]ca", 9, search="beam:9", whole=False)
    apart = [reading(lm, each) - each.log_prob for each in found]
    assert len(found) == 9
    assert apart == pytest.approx([apart[0]] * 9)


def test_candidates_of_other_lengths_are_read_too() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))
    best = lm.infill("a[[1-3]]b", 8, best_of=40, reread=True)
    assert len({len(each.token_ids) for each in best}) > 1

    def both(result: Infilled) -> float:
        assert result.length_choice is not None
        posterior = dict(
            zip(result.length_choice.lengths, result.length_choice.log_probabilities, strict=True)
        )
        return result.log_prob + posterior[result.length_choice.chosen] + reading(lm, result)

    assert [both(each) for each in best] == sorted(map(both, best), reverse=True)


def test_reread_samples_of_mode_ar_are_sorted(lm: LanguageModel) -> None:
    found = left_to_right(
        lm.runner,
        [each.token_ids for each in lm.infill(BLANK, 12, best_of=12, mode="ar", reread=True)],
        16,
    )
    assert found == sorted(found, reverse=True)


def test_wrong_uses_of_reread_are_refused(lm: LanguageModel) -> None:
    for options in ({}, {"search": "best-first:10"}):
        with pytest.raises(
            ValueError,
            match=r"ranks candidates: ask for several with best_of, or with search beam:WIDTH",
        ):
            lm.infill_requests([BLANK], reread=True, **options)
    with pytest.raises(ValueError, match="trained for: car"):
        make(byte_tokenizer(), modes=("car",)).infill_requests(["a[[2]]"], best_of=4, reread=True)
