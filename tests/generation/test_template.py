"""Blanks in text: parsing, tokens, and how tokens are written."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tests.toys import (
    fallback_tokenizer,
    llama_tokenizer,
    make,
    metaspace_tokenizer,
    t5_tokenizer,
    wordpiece_tokenizer,
)
from tracformer.data import Tokenizer, byte_tokenizer, char_tokenizer, train_bpe
from tracformer.data.tokenizer import reserve
from tracformer.generation.samplers import Sampler
from tracformer.generation.scoring import marked_parts
from tracformer.generation.template import (
    Lengths,
    Template,
    parse,
    parse_lengths,
    tokenize,
    write,
)
from tracformer.generation.token_text import Spelling, spelling_of
from tracformer.server.streaming import PartialText, TokenNames

WORDS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "once upon a time there was a cat",
    "the dog sat",
] * 5


@pytest.fixture(scope="module")
def bpe() -> Spelling:
    return spelling_of(train_bpe(WORDS, 300))


@pytest.mark.parametrize(
    ("text", "pieces", "contents"),
    [
        ("a[[]]b", ("a", "b"), ("",)),
        ("[[8]]", ("", ""), ("8",)),
        ("x [[3-8]] y[[]]", ("x ", " y", ""), ("3-8", "")),
        (r"\[[no]] [[1]]", ("[[no]] ", ""), ("1",)),
        (r"[[a \]] b]]", ("", ""), ("a ]] b",)),
        (r"C:\\[[1]]", ("C:\\", ""), ("1",)),
        (r"\x [[1]]", (r"\x ", ""), ("1",)),
        ("a[[[1]]]", ("a[", "]"), ("1",)),
        ("a]] [[1]]", ("a]] ", ""), ("1",)),
        ("[[a [[ b]]", ("", ""), ("a [[ b",)),
    ],
)
def test_texts_are_cut_at_their_blanks(
    text: str, pieces: tuple[str, ...], contents: tuple[str, ...]
) -> None:
    assert parse(text) == Template(pieces, contents)


bits = st.text(alphabet="[]\\a ", max_size=8)
inner = bits.filter(lambda text: not text.startswith("[") and not text.endswith("]"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(bits, inner), min_size=1, max_size=3), bits)
def test_writing_and_parsing_are_inverse(pairs: list[tuple[str, str]], last: str) -> None:
    pieces, contents = (
        (*(piece for piece, _ in pairs), last),
        tuple(content for _, content in pairs),
    )
    assert parse(write(pieces, contents)) == Template(pieces, contents)


@pytest.mark.parametrize(
    ("content", "lengths"), [("", (1, None)), ("8", (8, 8)), ("3-8", (3, 8)), ("4-4", (4, 4))]
)
def test_lengths(content: str, lengths: tuple[int, int | None]) -> None:
    assert parse_lengths(content) == lengths


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0", "the least is 1"),
        ("0-3", "the least is 1"),
        ("8-3", "[[3-8]]"),
        ("cat", "'cat'"),
        ("-3", "a range such as"),
        ("3-", "[[8]]"),
        (" 8", "' 8'"),
    ],
)
def test_other_lengths_are_refused_with_advice(content: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_lengths(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a [[3", "character 2 is not closed"), ("no blank", "no blank"), (r"a \[[3]]", "no blank")],
)
def test_texts_without_a_whole_blank_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a [MASK] b", ("a ", " b")),
        ("<mask> b", ("", " b")),
        ("a ____, b ___.", ("a ", ", b ", ".")),
        ("a [MASK] [MASK]<mask> b", ("a ", " b")),
        (r"\[[x]] ____", ("[[x]] ", "")),
    ],
)
def test_blanks_of_other_programs_are_read(text: str, pieces: tuple[str, ...]) -> None:
    template = parse(text)
    assert template.pieces == pieces
    assert set(template.contents) == {""}
    assert "read as blanks of any length" in template.note
    marked = parse(f"{text} [[2]]")  # with blanks of our own, they are text
    assert marked.contents == ("2",)
    assert marked.note == ""
    assert parse("snake__case __init__", required=False).contents == ()


def test_a_space_before_a_blank_moves_into_it_where_tokens_begin_with_spaces(bpe: Spelling) -> None:
    laid = tokenize(parse("the cat [[2]] the [[1]] mat"), bpe, whole=True)
    assert laid.texts == ("the cat", " the", " mat")
    assert laid.spaced == (True, True)
    assert laid.ids[2] == tuple(bpe.tokenizer.encode(" mat"))
    assert laid.end == (bpe.tokenizer.eot_id,)
    assert tokenize(parse("[[2]] cat"), bpe, whole=True).spaced == (False,)
    assert tokenize(parse("ca[[1]]s"), bpe, whole=True).spaced == (False,)
    assert tokenize(parse("a  [[1]]"), bpe, whole=True).texts == ("a ", "")


@pytest.mark.parametrize(
    "tokenizer", [byte_tokenizer(), char_tokenizer("abc ")], ids=["byte", "char"]
)
def test_no_space_moves_where_a_space_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    laid = tokenize(parse("a [[2]] b"), spelling_of(tokenizer), whole=False)
    assert laid.texts == ("a ", " b")
    assert laid.spaced == (False,)
    assert laid.end == ()


def test_word_starts_are_the_tokens_of_one_space_and_more(bpe: Spelling) -> None:
    texts = [bpe.tokenizer.decode([i]) for i in bpe.word_starts]
    assert " cat" in texts
    assert all(re.match(r" \S", text) for text in texts)
    others = [
        bpe.tokenizer.decode([i])
        for i in range(bpe.tokenizer.vocab_size)
        if i not in bpe.word_starts
    ]
    assert not any(re.match(r" [a-z]", text) for text in others)


def test_a_tokeniser_made_elsewhere_is_known_by_its_decoder(bpe: Spelling) -> None:
    backend = Backend.from_str(bpe.tokenizer.document)
    assert spelling_of(Tokenizer(backend.to_str(), "hf")).word_starts == bpe.word_starts
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert spelling_of(Tokenizer(backend.to_str(), "hf")).word_starts == bpe.word_starts


def test_every_special_token_but_the_mask_is_not_text() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="?"))
    backend.add_special_tokens(["<|pad|>", "<|endoftext|>"])
    assert spelling_of(reserve(backend, "hf")).special == (2, 3)


def test_marked_text_takes_its_space_as_a_filling_would(bpe: Spelling) -> None:
    outside, inside = parse("the [[cat]] sat"), parse("the[[ cat]] sat")
    for template in (outside, inside):
        of = tokenize(template, bpe, whole=True)
        assert marked_parts(template, of, bpe) == [(" cat", bpe.tokenizer.encode(" cat"))]
        assert of.texts == ("the", " sat")
    with pytest.raises(ValueError, match="is empty"):
        marked_parts(parse("the [[]] sat"), of, bpe)


def test_layout_places_tokens_and_blanks() -> None:
    of = tokenize(parse("ab[[2]]c[[1]]"), spelling_of(char_tokenizer("abc")), whole=True)
    laid = of.with_fills([[0, 0], [1]])
    assert laid.tokens == [0, 1, 0, 0, 2, 1, 3]
    assert laid.context == [True, True, False, False, True, False, True]
    assert (laid.starts, laid.lengths) == ((2, 5), (2, 1))
    assert [laid.place(p) for p in (2, 3, 5)] == [(0, 0), (0, 1), (1, 0)]


def test_ranges_are_cut_to_the_room() -> None:
    of = tokenize(
        parse("ab[[]]c[[2-9]]"), spelling_of(char_tokenizer("abc")), whole=True
    )  # 4 given
    wanted = [Lengths(1, None), Lengths(2, 9)]
    assert of.length_ranges(wanted, 10, 32) == ([(1, 4), (2, 5)], 6)
    assert of.length_ranges(wanted, 100, 32) == ([(1, 32), (2, 9)], 96)
    with pytest.raises(ValueError, match="ask for 3 tokens where 2 fit"):
        of.length_ranges(wanted, 6, 32)
    with pytest.raises(ValueError, match="shorten the text"):
        of.length_ranges(wanted, 4, 32)


def test_a_parsed_template_is_unchanged() -> None:
    template = Template(("[[", "]]"), ("3",))
    assert parse(template) is template
    assert parse(r"a \[[", required=False) == Template(("a [[",), ())


# ---- spelling

Maker = Callable[[], Tokenizer]
# a word has its space in its first token
PIECES = [metaspace_tokenizer, llama_tokenizer, t5_tokenizer]
ALL = [*PIECES, wordpiece_tokenizer]


def fixed(tokenizer: Tokenizer, *words: str) -> list[int]:
    return [tokenizer.encode(word)[0] for word in words]


@pytest.mark.parametrize("maker", ALL)
@pytest.mark.parametrize(
    "text",
    [
        "the [[cat]] the",
        "the [[cats the]] cat",
        "[[the]] cat",
        "the cat [[the cats]]",
        "the[[ cat]] the",
    ],
)
def test_marked_tokens_are_those_of_the_whole_text(maker: Maker, text: str) -> None:
    tokenizer = maker()
    spelling, template = spelling_of(tokenizer), parse(text)
    of = tokenize(template, spelling, whole=False)
    laid = of.with_fills([ids for _, ids in marked_parts(template, of, spelling)])
    assert laid.tokens == tokenizer.encode(text.replace("[[", "").replace("]]", ""))


@pytest.mark.parametrize("maker", [metaspace_tokenizer, llama_tokenizer])
def test_no_space_is_put_before_a_continued_word(maker: Maker) -> None:
    tokenizer = maker()
    for text in ("the ca[[t]] the", "the c[[at]]s", "[[the c]]ats"):
        template, spelling = parse(text), spelling_of(tokenizer)
        of = tokenize(template, spelling, whole=False)
        laid = of.with_fills([ids for _, ids in marked_parts(template, of, spelling)])
        assert tokenizer.decode(laid.tokens) == text.replace("[[", "").replace("]]", "")
    assert (
        tokenizer.decode([*tokenizer.encode("the"), *tokenizer.encode("s", inside=True)]) == "thes"
    )
    assert tokenizer.encode("the", inside=True) != tokenizer.encode("the")
    assert tokenizer.encode(" the", inside=True) == tokenizer.encode("the")


@pytest.mark.parametrize("maker", ALL)
def test_a_blank_after_a_space_begins_with_a_word(maker: Maker) -> None:
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
    assert lm.score("the [[cat]] the").log_prob == pytest.approx(
        lm.score("the[[ cat]] the").log_prob
    )


def test_a_capital_that_the_tokeniser_does_not_know_stays() -> None:
    lm = make(wordpiece_tokenizer())
    cat = fixed(lm.tokenizer, "cat")[0]
    assert lm.infill("The [[1]] The", sampler=Sampler(allowed=(cat,)))[0].text == "The cat The"


@pytest.mark.parametrize("maker", ALL)
@pytest.mark.parametrize(
    "text",
    [
        "the  [[1]] the",
        " [[1]] the",
        "the:\n    [[1]]",
        "the\n[[1]]",
        "[[1]] [[1]] the",
        "the cat [[1]][[1]]",
    ],
)
def test_given_white_space_stays(maker: Maker, text: str) -> None:
    lm = make(maker())
    only = Sampler(allowed=(fixed(lm.tokenizer, "cat")[0],))
    [result] = lm.infill(text, sampler=only)
    expected = text.replace("]][[", "]] [[")  # two words
    expected = expected.replace("[[1]]", "cat")
    if text == "the\n[[1]]" and not lm.spelling.dropped:
        expected = "the\n cat"  # the word has its space, and the line's end is a token too
    if text == " [[1]] the" and not lm.spelling.dropped:
        expected = "  cat the"  # a space is a token too
    assert result.text == expected
    assert [result.text[span.start : span.stop] for span in result.spans] == [
        span.text for span in result.spans
    ]
    words = ["".join(span.tokens) for span in result.spans]
    assert [word.strip() for word in words] == ["cat"] * len(words)
    marked = text.replace("[[1]]", "[[cat]]")
    if maker is not t5_tokenizer and text in ("the  [[1]] the", "the:\n    [[1]]"):
        assert lm.score(marked).text == result.text


def test_words_of_dropped_white_space_stand_apart_where_words_do() -> None:
    vocabulary = {
        "[UNK]": 0,
        "the": 1,
        "cat": 2,
        "##s": 3,
        "(": 4,
        ")": 5,
        "-": 6,
        '"': 7,
        "天": 8,
        "好": 9,
    }
    backend = Backend(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    backend.decoder = decoders.WordPiece()
    lm = make(reserve(backend, "hf"))
    for text, token, filled in (
        ("the ([[1]])", "cat", "the (cat)"),
        ("the-[[1]]", "cat", "the-cat"),
        ('"[[1]]"', "cat", '"cat"'),
        ("天[[1]]", "好", "天好"),
        ("the[[1]]", "cat", "the cat"),
        ("the\t[[1]]", "cat", "the\tcat"),
    ):
        assert lm.infill(text, sampler=Sampler(allowed=(vocabulary[token],)))[0].text == filled


def test_letters_that_a_decoder_sets_apart_are_not() -> None:
    """As of protein models: no decoder, so that spaces come between the letters of what is decoded,
    and none before the first.
    """
    backend = Backend(
        models.WordLevel({letter: i for i, letter in enumerate("ACGT?")}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    lm = make(reserve(backend, "hf"))
    assert lm.infill("ACG[[1]]AC", sampler=Sampler(allowed=(3,)))[0].text == "ACGTAC"


@pytest.mark.parametrize(
    "strip", [normalizers.Strip(), normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])]
)
def test_a_normaliser_that_strips_takes_no_word_s_space(strip: Any) -> None:
    backend = Backend.from_str(metaspace_tokenizer().document)
    backend.normalizer = strip
    lm = make(Tokenizer(backend.to_str(), "hf"))
    the, cat = fixed(lm.tokenizer, "the", "cat")
    of = tokenize(parse("the[[1]] the cat"), lm.spelling, whole=False)
    assert of.ids == ((the,), (the, cat))
    assert lm.score("the [[cat]] the").spans[0].token_ids == (cat,)


def test_bytes_of_a_character_make_it_wherever_they_stand() -> None:
    lm = make(fallback_tokenizer())
    raw = {byte: i for i, byte in lm.tokenizer.bytes_of_ids.items()}
    word = "日本語日本語"
    ids = tuple(raw[byte] for byte in "本".encode())
    assert lm.tokenizer.decode(lm.tokenizer.encode(f"the {word}")) == f"the {word}"
    assert lm.spelling.filling(f"the {word}", lm.tokenizer.encode(f"the {word}"), ids) == "本"
    given = lm.tokenizer.encode("the 日本")
    assert lm.spelling.text_after("the 日本", given, ids[:1]) == ("the 日本", "\ufffd")
    text = lm.tokenizer.decode([*given, *ids[:2]])
    assert lm.spelling.text_after(text, [*given, *ids[:2]], ids[2:]) == ("the 日本", "本")
    assert TokenNames(lm).raw(ids[0]) == "本".encode()[:1]
    growing = PartialText(lambda tokens: lm.spelling.filling("", [], tokens), eot=-1)
    for token in lm.tokenizer.encode("日本"):
        growing.add(token, -1.0)
    # the first is the space, which is hidden
    assert [piece.start for piece in growing.tokens] == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("count", [5, 17, 40])
def test_a_prompt_s_last_character_may_be_finished(count: int) -> None:
    lm = make(byte_tokenizer())
    *ids, last = ("é" * count).encode()
    [sample] = lm.sample(prompt=ids[-25:], max_tokens=1, sampler=Sampler(allowed=(last,)))
    assert sample.text == lm.tokenizer.decode([*ids[-25:], last])


def test_a_character_in_two_blanks_is_two_halves() -> None:
    lm = make(byte_tokenizer())
    both = tuple("é".encode())
    [result] = lm.infill("[[1]][[1]]", sampler=Sampler(allowed=both, required=both))
    assert [span.text for span in result.spans] == ["\ufffd", "\ufffd"]
    assert [(span.start, span.stop) for span in result.spans] == [(0, 1), (1, 2)]
    assert sorted(i for span in result.spans for i in span.token_ids) == sorted(both)
