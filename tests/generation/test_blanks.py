"""Blanks in text: what is parsed, what is refused, and where tokens stand."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tracformer.data import Tokenizer, byte_tokenizer, char_tokenizer, train_bpe
from tracformer.data.tokenizer import reserve
from tracformer.generation.scoring import marked_parts
from tracformer.generation.template import (
    Lengths,
    Template,
    parse,
    parse_lengths,
    tokenize,
    write,
)
from tracformer.generation.token_text import Spelling

WORDS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "once upon a time there was a cat",
    "the dog sat",
] * 5


@pytest.fixture(scope="module")
def bpe() -> Spelling:
    return Spelling(train_bpe(WORDS, 300))


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
def test_what_is_written_is_what_is_parsed(pairs: list[tuple[str, str]], last: str) -> None:
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
    ("content", "said"),
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
def test_other_lengths_are_refused_with_advice(content: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_lengths(content)


@pytest.mark.parametrize(
    ("text", "said"),
    [("a [[3", "character 2 is not closed"), ("no blank", "no blank"), (r"a \[[3]]", "no blank")],
)
def test_texts_without_a_whole_blank_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


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
    laid = tokenize(parse("a [[2]] b"), Spelling(tokenizer), whole=False)
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
    assert Spelling(Tokenizer(backend.to_str(), "hf")).word_starts == bpe.word_starts
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert Spelling(Tokenizer(backend.to_str(), "hf")).word_starts == bpe.word_starts


def test_every_special_token_but_the_mask_is_not_text() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="?"))
    backend.add_special_tokens(["<|pad|>", "<|endoftext|>"])
    assert Spelling(reserve(backend, "hf")).special == (2, 3)


def test_marked_text_takes_its_space_as_a_filling_would(bpe: Spelling) -> None:
    outside, inside = parse("the [[cat]] sat"), parse("the[[ cat]] sat")
    for template in (outside, inside):
        of = tokenize(template, bpe, whole=True)
        assert marked_parts(template, of, bpe) == [(" cat", bpe.tokenizer.encode(" cat"))]
        assert of.texts == ("the", " sat")
    with pytest.raises(ValueError, match="is empty"):
        marked_parts(parse("the [[]] sat"), of, bpe)


def test_layout_places_tokens_and_blanks() -> None:
    of = tokenize(parse("ab[[2]]c[[1]]"), Spelling(char_tokenizer("abc")), whole=True)
    laid = of.with_fills([[0, 0], [1]])
    assert laid.tokens == [0, 1, 0, 0, 2, 1, 3]
    assert laid.context == [True, True, False, False, True, False, True]
    assert (laid.starts, laid.lengths) == ((2, 5), (2, 1))
    assert [laid.place(p) for p in (2, 3, 5)] == [(0, 0), (0, 1), (1, 0)]


def test_ranges_are_cut_to_the_room() -> None:
    of = tokenize(parse("ab[[]]c[[2-9]]"), Spelling(char_tokenizer("abc")), whole=True)  # 4 given
    wanted = [Lengths(1, None), Lengths(2, 9)]
    assert of.length_ranges(wanted, 10, 32) == ([(1, 4), (2, 5)], 6)
    assert of.length_ranges(wanted, 100, 32) == ([(1, 32), (2, 9)], 96)
    with pytest.raises(ValueError, match="ask for 3 tokens where 2 fit"):
        of.length_ranges(wanted, 6, 32)
    with pytest.raises(ValueError, match="shorten the text"):
        of.length_ranges(wanted, 4, 32)


def test_what_is_cut_already_stays_as_it_is() -> None:
    template = Template(("[[", "]]"), ("3",))
    assert parse(template) is template
    assert parse(r"a \[[", required=False) == Template(("a [[",), ())
