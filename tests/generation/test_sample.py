"""Samples go on from a prompt, and end where they should."""

import pytest

from tests.generation.chain import Chain
from tests.generation.texts import make
from tracformer import LanguageModel
from tracformer.data import byte_tokenizer, char_tokenizer
from tracformer.generation.randomness import derived_seed
from tracformer.generation.samplers import Sampler


def test_samples_go_on_from_their_prompt_until_the_end_of_text(lm: LanguageModel) -> None:
    eot, samples = lm.tokenizer.eot_id, lm.sample(4, prompt="the cat ", max_tokens=9, batch=3)
    prompt = lm.tokenizer.encode("the cat")
    for i, sample in enumerate(samples):
        assert sample.seed == derived_seed(0, i)
        assert sample.text.startswith("the cat ")
        assert sample.ended == (sample.token_ids[-1] == eot)
        assert eot not in sample.token_ids[:-1]
        assert sample.ended or len(sample.token_ids) == 9
        scores = lm.score_tokens([*prompt, *sample.token_ids], [True] * len(prompt) + [False] * len(sample.token_ids), "ar")
        assert scores[len(prompt) :] == pytest.approx(sample.log_probs, abs=1e-9)
    assert [s.token_ids for s in lm.sample(4, prompt="the cat ", max_tokens=9, batch=1)] == [s.token_ids for s in samples]


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
    for wrong, said in (("ab", "list of strings"), ([""], "is empty")):
        with pytest.raises(ValueError, match=said):
            lm.sample(stop=wrong)


def test_a_prompt_may_be_token_ids(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode("the cat")
    [one], [other] = (lm.sample(prompt=prompt, max_tokens=6) for prompt in ("the cat", ids))
    assert one == other


def test_a_sample_that_ends_does_not_show_its_end() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))
    samples = lm.sample(20)
    assert any(sample.ended for sample in samples)
    for sample in samples:
        assert len(sample.text) == len(sample.token_ids) - sample.ended
        assert (sample.mode, sample.note) == ("ar", "")


def test_without_mode_ar_a_sample_says_that_its_length_was_fixed() -> None:
    [sample] = make(char_tokenizer("abc"), modes=("car",)).sample(max_tokens=5)
    assert sample.mode == "car"
    assert "fixed" in sample.note
