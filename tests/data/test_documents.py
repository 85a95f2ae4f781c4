"""Documents of files: every division, in bounded memory, whatever the chunks."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracformer.data import documents as module
from tracformer.data import input_files
from tracformer.data.documents import (
    DOCUMENTS,
    TextPiece,
    as_pieces,
    cut_point,
)
from tracformer.data.input_files import lines_of, read_text
from tracformer.data.make_tokenizer import byte_tokenizer, train_bpe

SEPARATOR = "<|end|>"
WORDS = st.text(alphabet="ab cé\n\t.'1", max_size=80)


def small_pieces(monkeypatch: pytest.MonkeyPatch, size: int = 8) -> None:
    monkeypatch.setattr(module, "PIECE_CHARACTERS", size)


def joined(pieces: Iterator[TextPiece]) -> list[str]:
    documents, parts = [], []
    for piece in pieces:
        parts.append(piece.text)
        if piece.end:
            documents.append("".join(parts))
            parts = []
    assert not parts, "the last document has no end"
    return documents


def found(text: str, documents: str, chunk: int = 1000) -> list[str]:
    chunks = (text[i : i + chunk] for i in range(0, len(text), chunk))
    return joined(DOCUMENTS[documents](chunks, "here", SEPARATOR))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("size", [3, 1 << 18])
def test_ways_to_divide_a_file(chunk: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch, size)
    stories = (
        f"\nOne day.\n\nThe end.\n{SEPARATOR}\nTwo\n\n{SEPARATOR}{SEPARATOR}\n \n{SEPARATOR}three\n"
    )
    assert found(stories, "separator", chunk) == ["\nOne day.\n\nThe end.", "Two", "three"]
    assert found("no\nseparator\n", "separator", chunk) == ["no\nseparator\n"]
    assert found(stories, "file", chunk) == [stories]
    assert found("a b\r\n\n  \nc\n d", "line", chunk) == ["a b", "c", " d"]
    assert found("a\nb\n\n\nc\n \nd\n", "blank-line", chunk) == ["a\nb", "c", "d"]
    wiki = (
        " \n = One = \n \n text = x \n = = Part = = \n\n = = = Sub = = = \n = not a title = \n "
        "\n\n = Two ( film ) = \n\n more\n"
    )
    assert found(wiki, "article", chunk) == [
        wiki[2 : wiki.index(" = Two")],
        " = Two ( film ) = \n\n more\n",
    ]
    for way in DOCUMENTS:
        assert found("", way) == found(" \n \n", way) == []


def test_origins_name_the_place() -> None:
    pieces = DOCUMENTS["line"](iter(["a\n\nb\n"]), "file.txt", SEPARATOR)
    assert [piece.origin for piece in pieces] == ["file.txt, line 1", "file.txt, line 3"]


@settings(deadline=None)
@given(WORDS, st.integers(1, 9))
def test_lines_are_those_of_the_whole(text: str, chunk: int) -> None:
    chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)]
    lines = list(lines_of(chunks))
    assert "".join(lines) == text
    assert all(
        line.count("\n") <= 1 and (line.endswith("\n") or line is lines[-1]) for line in lines
    )


TOKENIZERS = (byte_tokenizer(), train_bpe(["a b ab aab  ab.\n\n ba é 11 'b\n"] * 9, 290))


@settings(deadline=None)
@given(st.text(alphabet="ab é\n\t.'1", min_size=2, max_size=60), st.data())
def test_a_cut_at_white_space_leaves_no_trace_in_the_tokens(text: str, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, len(text) - 1))
    at = cut_point(text, limit, look_back=len(text))
    assert 1 <= at <= limit
    if at < limit:
        for tokenizer in TOKENIZERS:
            assert tokenizer.encode(text[:at]) + tokenizer.encode(text[at:]) == tokenizer.encode(
                text
            )


def test_cuts_prefer_newlines_then_blanks_then_the_limit() -> None:
    assert cut_point("one two\nthree four", 15, 15) == 7
    assert cut_point("one two\nthree four", 15, 4) == 13
    assert cut_point("one  two", 7, 7) == 3
    assert cut_point("chromosome", 4, 4) == 4


@settings(deadline=None)
@given(WORDS)
def test_giant_documents_are_read_in_bounded_pieces(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        pieces = list(as_pieces(text, "here"))
    assert joined(iter(pieces)) == ([text] if text.strip() else [])
    assert all(len(piece.text) < 16 for piece in pieces)
    assert all(text[piece.offset :].startswith(piece.text) for piece in pieces)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_bytes_that_are_not_utf8_are_named_with_their_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    good = "é—𝄞a" * 5
    for bad, offset in ((b"\xff", 0), (b"abc\xe9 ", 3), (b"\xf0\x9f", 0), (b"\xc3", 0)):
        data = good.encode() + bad
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        for chunk in (1, 2, 3, 5, 1000):
            monkeypatch.setattr(input_files, "CHUNK_BYTES", chunk)
            with pytest.raises(
                ValueError,
                match=rf"{name} is not UTF-8 text: byte 0x\w\w at offset {len(good.encode()) + offset}\b",
            ):
                list(read_text(path))


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_text_survives_chunks_of_any_size(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "CHUNK_BYTES", chunk)
    text = "é—𝄞a\r\n\ufeffb"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8-sig") if chunk > 2 else text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert (
        "".join(read_text(tmp_path / "a.txt")) == "".join(read_text(tmp_path / "a.txt.gz")) == text
    )


def test_half_a_gzip_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-20])
    (tmp_path / "b.txt.gz").write_bytes(b"plain text")
    for name in ("a.txt.gz", "b.txt.gz"):
        with pytest.raises(ValueError, match="not a whole gzip file"):
            list(read_text(tmp_path / name))
