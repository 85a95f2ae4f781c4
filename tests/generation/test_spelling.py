"""Blanks in the words of tokenisers that are not byte-level: a filling is spelt as the whole text would be."""

from collections.abc import Callable

import pytest

from tests.generation.texts import llama_tokenizer, make, metaspace_tokenizer, t5_tokenizer, wordpiece_tokenizer
from tracformer.data import Tokenizer, byte_tokenizer
from tracformer.generation.blanks import frame, literal_fills, parse
from tracformer.generation.samplers import Sampler
from tracformer.generation.spelling import Spelling

Maker = Callable[[], Tokenizer]
PIECES = [metaspace_tokenizer, llama_tokenizer, t5_tokenizer]  # a word has its space in its first token
ALL = [*PIECES, wordpiece_tokenizer]


def fixed(tokenizer: Tokenizer, *words: str) -> list[int]:
    return [tokenizer.encode(word)[0] for word in words]


@pytest.mark.parametrize("maker", ALL)
@pytest.mark.parametrize("text", ["the [[cat]] the", "the [[cats the]] cat", "[[the]] cat", "the cat [[the cats]]", "the[[ cat]] the"])
def test_marked_tokens_are_those_of_the_whole_text(maker: Maker, text: str) -> None:
    tokenizer = maker()
    spelling, template = Spelling(tokenizer), parse(text)
    of = frame(template, spelling, whole=False)
    laid = of.lay([ids for _, ids in literal_fills(template, of, spelling)])
    assert laid.tokens == tokenizer.encode(text.replace("[[", "").replace("]]", ""))


@pytest.mark.parametrize("maker", [metaspace_tokenizer, llama_tokenizer])
def test_no_space_is_put_before_text_that_goes_on(maker: Maker) -> None:
    tokenizer = maker()
    for text in ("the ca[[t]] the", "the c[[at]]s", "[[the c]]ats"):
        template, spelling = parse(text), Spelling(tokenizer)
        of = frame(template, spelling, whole=False)
        laid = of.lay([ids for _, ids in literal_fills(template, of, spelling)])
        assert tokenizer.decode(laid.tokens) == text.replace("[[", "").replace("]]", "")
    assert tokenizer.decode([*tokenizer.encode("the"), *tokenizer.encode("s", inside=True)]) == "thes"
    assert tokenizer.encode("the", inside=True) != tokenizer.encode("the")
    assert tokenizer.encode(" the", inside=True) == tokenizer.encode("the")


@pytest.mark.parametrize("maker", ALL)
def test_a_blank_behind_a_space_begins_with_a_word(maker: Maker) -> None:
    lm = make(maker())
    the, cat = fixed(lm.tokenizer, "the", "cat")
    [s] = lm.tokenizer.encode("cats")[1:]
    assert set(lm.spelling.word_starts) >= {the, cat}
    assert s not in lm.spelling.word_starts
    assert (lm.spelling.token(cat), lm.spelling.token(s)) == (" cat", "s")
    for seed in range(5):
        [result] = lm.infill("the [[2]] the", sampler=Sampler(allowed=(cat, s)), seed=seed)
        [span] = result.spans
        assert span.token_ids[0] == cat
        assert result.text == f"the{span.text} the"
        assert span.text == " cat" + lm.spelling.token(span.token_ids[1]) == "".join(span.tokens)
        assert result.text[span.start : span.stop] == span.text


@pytest.mark.parametrize("maker", ALL)
def test_fillings_are_spelt_as_the_whole_text_is(maker: Maker) -> None:
    lm = make(maker())
    cat = fixed(lm.tokenizer, "cat")[0]
    [s] = lm.tokenizer.encode("cats")[1:]
    only = Sampler(allowed=(cat,))
    assert lm.infill("[[1]] the", sampler=only)[0].text == "cat the"
    assert lm.infill("the[[1]] the [[2]]", sampler=only)[0].text == "the cat the cat cat"
    assert lm.infill("the cat[[1]]", sampler=Sampler(allowed=(s,)))[0].text == "the cats"
    assert lm.score("the [[cat]] the").log_prob == pytest.approx(lm.score("the[[ cat]] the").log_prob)


def test_a_capital_that_the_tokeniser_does_not_know_stays() -> None:
    lm = make(wordpiece_tokenizer())
    cat = fixed(lm.tokenizer, "cat")[0]
    assert lm.infill("The [[1]] The", sampler=Sampler(allowed=(cat,)))[0].text == "The cat The"


def test_a_character_in_two_blanks_is_two_halves() -> None:
    lm = make(byte_tokenizer())
    first, last = "é".encode()
    halves = {"[[1]][[1]]": [first, last], "a[[2]]": [first, last]}
    for text, wanted in halves.items():
        [result] = lm.infill(text, sampler=Sampler(allowed=(first, last), required=(first, last)), n=1)
        spelt = [span.text for span in result.spans]
        assert result.text == text[: text.index("[")] + "".join(spelt)
        assert [result.text[span.start : span.stop] for span in result.spans] == spelt
        assert sorted(i for span in result.spans for i in span.token_ids) == sorted(wanted)
        if len(spelt) == 2:
            assert spelt == ["\ufffd", "\ufffd"]
