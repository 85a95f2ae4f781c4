"""Text as it comes: whole characters, given text in its turn, and shades that end with the line."""

import pytest

from tracformer.cli.output import StreamWriter, marked, rows_of, shade, visible
from tracformer.data import byte_tokenizer
from tracformer.generation.results import Span, Token

BYTES = byte_tokenizer()


def arrivals(blank: int, text: str) -> list[Token]:
    return [
        Token(0, index, byte, -1.0, blank=blank, index=index, token=BYTES.decode([byte]))
        for index, byte in enumerate(text.encode())
    ]


def test_each_piece_is_printed_once_and_in_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    writer = StreamWriter(["<", "|", "|", ">"], lambda fills: BYTES.decode(fills[-1]))
    seen = [capsys.readouterr().out]
    for arrival in [*arrivals(0, "é"), *arrivals(2, "b")]:  # nothing came for the second blank
        writer([arrival])
        seen.append(capsys.readouterr().out)
    writer.finish("<é||b>")
    assert [*seen, capsys.readouterr().out] == ["<", "", "é", "||b", ">\n"]


def test_bytes_that_never_become_a_character_come_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = StreamWriter(["a", "b"], lambda fills: BYTES.decode(fills[-1]))
    writer(arrivals(0, "é")[:1])
    writer.finish("a\ufffdb")
    assert capsys.readouterr().out == "a\ufffdb\n"


def test_a_text_that_turned_out_otherwise_is_printed_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = StreamWriter(["a", "b"], lambda fills: BYTES.decode(fills[-1]))
    writer(arrivals(0, "x"))
    writer.finish("a xb")
    assert capsys.readouterr().out == "ax\na xb\n"


def test_rows_of_a_terminal() -> None:
    assert [
        rows_of(text, 4) for text in ("", "abcd", "abcde", "a\nb", "a\n\n", "文文", "文文文")
    ] == [1, 1, 2, 2, 3, 1, 2]


def test_shades() -> None:
    assert shade("a", 0.0) != shade("a", -0.5) != shade("a", -5.0)
    assert shade("a", float("-inf")) == shade("a", -50.0)
    for line in shade("ab\n\ncd", -1.0).split("\n"):
        assert line == "" or (line.startswith("\033[") and line.endswith("\033[0m"))
    assert visible("a\x1b[31m\x07\t\n\x7f") == "a␛[31m␇\t\n␡"


def test_marks() -> None:
    spans = [Span(0, 1, "a", (0,), ("a",), (0.0,)), Span(3, 3, "", (), (), ())]
    assert marked("abc", spans) == "[[a]]bc[[]]"
