"""Texts are continued until their end, a stop string or a number of tokens."""

import pytest

from tests.toys import Chain, make, metaspace_tokenizer, wordpiece_tokenizer
from tracformer import LanguageModel, load
from tracformer.data import byte_tokenizer, char_tokenizer
from tracformer.generation.engine import Engine
from tracformer.generation.results import Token
from tracformer.generation.samplers import Sampler
from tracformer.rng import derived_seed


def test_samples_continue_their_prompt_until_the_end_of_text(lm: LanguageModel) -> None:
    eot, samples = lm.tokenizer.eot_id, lm.sample(4, prompt="the cat ", max_tokens=9, batch=3)
    prompt = lm.tokenizer.encode("the cat")
    for i, sample in enumerate(samples):
        assert sample.seed == derived_seed(0, i)
        assert sample.text.startswith("the cat ")
        assert sample.ended == (sample.token_ids[-1] == eot)
        assert eot not in sample.token_ids[:-1]
        assert sample.ended or len(sample.token_ids) == 9
        scores = lm.score_tokens(
            [*prompt, *sample.token_ids],
            [True] * len(prompt) + [False] * len(sample.token_ids),
            "ar",
        )
        assert scores[len(prompt) :] == pytest.approx(sample.log_probs, abs=1e-9)
    assert [s.token_ids for s in lm.sample(4, prompt="the cat ", max_tokens=9, batch=1)] == [
        s.token_ids for s in samples
    ]


def test_a_stop_string_ends_its_own_sample_and_is_cut_off(lm: LanguageModel) -> None:
    free = lm.sample(8, prompt="the", max_tokens=14, seed=3)
    written = [sample.text.removeprefix("the") for sample in free]
    stops = [written[0][2:4], written[1][1], "no such text"]
    stopped = lm.sample(8, prompt="the", max_tokens=14, seed=3, stop=stops)
    assert sum(sample.stopped is not None for sample in stopped) >= 2
    for whole, before, sample in zip(free, written, stopped, strict=True):
        places = [at for stop in stops if (at := before.find(stop)) >= 0]
        assert sample.text == "the" + (before[: min(places)] if places else before)
        assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
        assert sample.log_probs == pytest.approx(whole.log_probs[: len(sample.log_probs)], abs=1e-9)
        if places:
            assert sample.stopped in stops
            shorter, longer = (lm.tokenizer.decode(sample.token_ids[:end]) for end in (-1, None))
            assert not any(stop in shorter for stop in stops)  # it ended at once
            assert any(stop in longer for stop in stops)
        else:
            assert sample.stopped is None
            assert sample.token_ids == whole.token_ids


def test_stop_strings_may_be_spread_over_many_tokens() -> None:
    lm = make(byte_tokenizer())
    [free] = lm.sample(1, max_tokens=20, sampler=Sampler(allowed=tuple(b"ab")))
    stop = free.text[7:16]
    [sample] = lm.sample(1, max_tokens=20, sampler=Sampler(allowed=tuple(b"ab")), stop=[stop])
    assert sample.stopped == stop
    assert sample.text == free.text[: free.text.index(stop)]
    assert len(sample.token_ids) == free.text.index(stop) + 9
    for wrong, message in (("ab", "list of strings"), ([""], "is empty")):
        with pytest.raises(ValueError, match=message):
            lm.sample(stop=wrong)


def test_a_prompt_may_be_token_ids(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode("the cat")
    [one], [other] = (lm.sample(prompt=prompt, max_tokens=6) for prompt in ("the cat", ids))
    assert one == other


def test_a_prompt_of_tokens_may_hold_a_special_one() -> None:
    lm = make(char_tokenizer("abc"))
    [sample] = lm.sample(
        prompt=[0, lm.tokenizer.eot_id],
        max_tokens=3,
        sampler=Sampler(banned=(lm.tokenizer.eot_id,)),
    )
    assert sample.text.startswith("a<|endoftext|>")
    assert len(sample.token_ids) == 3


def test_a_character_that_begins_in_the_prompt_ends_in_the_sample() -> None:
    lm = make(byte_tokenizer())
    first, second = "é".encode()
    [whole] = lm.sample(prompt=[97, first], max_tokens=1, sampler=Sampler(allowed=(second,)))
    assert (whole.text, whole.note) == ("aé", "")
    [broken] = lm.sample(prompt=[97, first], max_tokens=2, sampler=Sampler(allowed=(98,)))
    assert broken.text == "a\ufffdbb"
    assert broken.note == "the text holds bytes that are not UTF-8, shown as U+FFFD"
    [half] = lm.sample(prompt="a", max_tokens=1, sampler=Sampler(allowed=(first,)))
    assert (half.text, half.note) == ("a\ufffd", broken.note)


def test_a_character_of_a_bundled_model_may_be_split() -> None:
    lm = load("stories")
    *ids, last = lm.tokenizer.encode("café")
    [sample] = lm.sample(prompt=ids, max_tokens=1, sampler=Sampler(allowed=(last,)))
    assert (sample.text, sample.note) == ("café", "")


def test_a_sample_stands_apart_from_its_prompt_as_the_tokeniser_spells_both() -> None:
    lm = make(metaspace_tokenizer())
    cat, s = lm.tokenizer.encode("cat")[0], lm.tokenizer.encode("cats")[1]
    for prompt in ("the", "the ", lm.tokenizer.encode("the")):
        [sample] = lm.sample(prompt=prompt, max_tokens=2, sampler=Sampler(allowed=(cat,)))
        assert sample.text == "the cat cat"
    assert lm.sample(max_tokens=1, sampler=Sampler(allowed=(cat,)))[0].text == "cat"
    assert (
        lm.sample(prompt="the cat", max_tokens=1, sampler=Sampler(allowed=(s,)))[0].text
        == "the cats"
    )
    [stopped] = lm.sample(
        prompt="the", max_tokens=2, sampler=Sampler(allowed=(cat,)), stop=[" cat"]
    )
    assert (stopped.text, stopped.stopped, len(stopped.token_ids)) == ("the", " cat", 1)
    lm = make(wordpiece_tokenizer())
    cat, s = lm.tokenizer.encode("cats")
    for prompt, token, text in (
        ("the", cat, "the cat"),
        ("the ", cat, "the cat"),
        ("The", cat, "The cat"),
        ("the cat", s, "the cats"),
    ):
        assert (
            lm.sample(prompt=prompt, max_tokens=1, sampler=Sampler(allowed=(token,)))[0].text
            == text
        )


def test_a_sample_does_not_end_before_its_required_tokens() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))
    eot, wanted = lm.tokenizer.eot_id, Sampler(required=(2,))
    assert any("c" not in sample.text for sample in lm.sample(30))
    samples = lm.sample(30, sampler=wanted)
    assert all("c" in sample.text and eot not in sample.token_ids[:-1] for sample in samples)
    assert any(sample.ended for sample in samples)
    assert all(
        sample.text.endswith("c")
        for sample in lm.sample(9, prompt="ab", max_tokens=1, sampler=wanted)
    )
    for sample in lm.sample(30, sampler=Sampler(required=(2, eot))):
        assert sample.ended
        assert "c" in sample.text


def test_stop_strings_count_after_required_text() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))
    free, samples = (
        lm.sample(30, sampler=Sampler(required=(2,)), stop=stop) for stop in ((), ["a"])
    )
    assert any("a" in sample.text for sample in samples)
    for whole, sample in zip(free, samples, strict=True):
        found = whole.text.find("a", whole.text.index("c"))
        assert sample.text == (whole.text if found < 0 else whole.text[:found])
        assert sample.stopped == (None if found < 0 else "a")
        assert len(sample.token_ids) == (len(whole.token_ids) if found < 0 else found + 1)


def test_a_callback_that_returns_false_is_detached_in_any_batch(lm: LanguageModel) -> None:
    reported: list[int] = []

    def callback(arrivals: list[Token]) -> bool:
        reported.append(len(arrivals))
        return len(reported) < 2

    engine = Engine(lm.model)
    for on in (lm, lm.on(engine.request())):
        reported.clear()
        assert len(on.infill("the [[3]] cat", 3, batch=1, callback=callback)) == 3
        assert reported == [1, 1]
        reported.clear()
        assert len(on.sample(3, max_tokens=3, batch=1, callback=callback)) == 3
        assert reported == [1, 1]
    engine.close()


def test_a_sample_that_ends_does_not_show_its_end() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))
    samples = lm.sample(20)
    assert any(sample.ended for sample in samples)
    for sample in samples:
        assert len(sample.text) == len(sample.token_ids) - sample.ended
        assert (sample.mode, sample.note) == ("ar", "")


def test_without_mode_ar_a_sample_notes_its_fixed_length() -> None:
    [sample] = make(char_tokenizer("abc"), modes=("car",)).sample(max_tokens=5)
    assert sample.mode == "car"
    assert "fixed" in sample.note
