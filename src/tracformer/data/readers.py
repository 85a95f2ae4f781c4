"""Documents of text, JSONL and FASTA files.

Text in bounded memory: files read in chunks, documents found in them, giant documents handed out
in pieces.

What a file's name says about its format, and the documents of each format.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, NamedTuple, cast

from tracformer.data.tokenizer import EOT

CHUNK_BYTES = 1 << 22
PIECE_CHARACTERS = 1 << 18  # several of them are encoded at once, one a core
NEWLINES = "\r\n"
# WikiText's title line; sections have more signs
ARTICLE = re.compile(r"\s*= [^=\s](.*[^=\s])? =\s*")


class Piece(NamedTuple):
    text: str
    end: bool  # the document ends with this piece
    origin: str  # where the document came from, for complaints
    offset: int = 0  # characters of the document before this piece


def read_text(path: Path) -> Iterator[str]:
    """The file's text, some MB at a time; `.gz` is unpacked.

    Bytes that are not UTF-8 are an error with their place.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    consumed = 0
    with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else open(path, "rb")) as file:
        while True:
            try:
                block = file.read(CHUNK_BYTES)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path} is not a whole gzip file: {error}") from error
            waiting = len(decoder.getstate()[0])  # bytes of a character that the last chunk began
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
                    f"{consumed - waiting + error.start}"
                    f"{' of the unpacked text' if path.suffix == '.gz' else ''}; convert the file "
                    "to UTF-8 first, for instance with iconv"
                ) from error
            if consumed == 0:
                text = text.removeprefix("\ufeff")
            consumed += len(block)
            if text:
                yield text
            if not block:
                return


def lines_of(chunks: Iterable[str]) -> Iterator[str]:
    """Lines with their newline. A line must fit in memory."""
    begun: list[str] = []
    for chunk in chunks:
        *whole, rest = chunk.split("\n")
        for line in whole:
            yield "".join([*begun, line, "\n"])
            begun.clear()
        if rest:
            begun.append(rest)
    if begun:
        yield "".join(begun)


def cut_point(text: str, limit: int, look_back: int) -> int:
    """Where to cut text into two parts that are tokenised as the whole would be: at most `limit`
    characters in, and not much before.

    Right before white space, best a newline: byte-level BPE never joins a word to the white space
    behind it, so the cut leaves no trace. Without white space near (a chromosome) at the limit
    itself.
    """
    for blank in "\n ":
        at = text.rfind(blank, max(1, limit - look_back), limit)
        while at > 0 and text[at - 1].isspace():
            at -= 1
        if at > 0:
            return at
    return limit


class Gatherer:
    """Collects text until a document ends, and hands out pieces on the way when it grows large.

    Blank documents vanish.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._parts: list[str] = []
        self._size = 0
        self._handed_out = 0  # characters of this document

    def add(self, text: str) -> Iterator[Piece]:
        self._parts.append(text)
        self._size += len(text)
        if self._size >= 2 * PIECE_CHARACTERS:
            yield from self._hand_out("".join(self._parts))

    def end(self, strip: str = "") -> Iterator[Piece]:
        """Close the document, without the characters of `strip` at its end."""
        text = "".join(self._parts)
        if strip:
            text = text.rstrip(strip)
        if len(text) >= 2 * PIECE_CHARACTERS:
            yield from self._hand_out(text)
            text = "".join(self._parts)
        if self._handed_out or text.strip():
            yield Piece(text, True, self.origin, self._handed_out)
        self._parts, self._size, self._handed_out = [], 0, 0

    @property
    def empty(self) -> bool:
        return self._handed_out == self._size == 0

    def _hand_out(self, text: str) -> Iterator[Piece]:
        start = 0
        while len(text) - start >= 2 * PIECE_CHARACTERS:
            window = text[start : start + PIECE_CHARACTERS]
            at = cut_point(window, PIECE_CHARACTERS, PIECE_CHARACTERS // 2)
            yield Piece(window[:at], False, self.origin, self._handed_out)
            self._handed_out += at
            start += at
        self._parts, self._size = [text[start:]], len(text) - start


def as_pieces(text: str, origin: str) -> Iterator[Piece]:
    """One document that is in memory already."""
    if text.strip():
        gatherer = Gatherer(origin)
        yield from gatherer.add(text)
        yield from gatherer.end()


def by_separator(chunks: Iterable[str], origin: str, separator: str) -> Iterator[Piece]:
    """Documents with a string between them.

    Newlines around the separator are its own; a text without it is one document, untouched.
    """
    gatherer = Gatherer(f"{origin}, document 1")
    number, rest = 1, ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(separator)
        for text in whole:
            yield from gatherer.add(_behind_separator(text, number, gatherer))
            yield from gatherer.end(strip=NEWLINES)
            number += 1
            gatherer.origin = f"{origin}, document {number}"
        keep = len(separator) - 1  # the chunk may end inside a separator
        ready, rest = rest[: max(0, len(rest) - keep)], rest[max(0, len(rest) - keep) :]
        yield from gatherer.add(_behind_separator(ready, number, gatherer))
    yield from gatherer.add(_behind_separator(rest, number, gatherer))
    yield from gatherer.end(strip=NEWLINES if number > 1 else "")


def _behind_separator(text: str, number: int, gatherer: Gatherer) -> str:
    return text.lstrip(NEWLINES) if number > 1 and gatherer.empty else text


def by_line(chunks: Iterable[str], origin: str, separator: str) -> Iterator[Piece]:
    for number, line in enumerate(lines_of(chunks), 1):
        yield from as_pieces(line.rstrip(NEWLINES), f"{origin}, line {number}")


def by_blank_line(chunks: Iterable[str], origin: str, separator: str) -> Iterator[Piece]:
    gatherer = Gatherer(origin)
    for number, line in enumerate(lines_of(chunks), 1):
        if not line.strip():
            yield from gatherer.end(strip=NEWLINES)
            continue
        if gatherer.empty:
            gatherer.origin = f"{origin}, line {number}"
        yield from gatherer.add(line)
    yield from gatherer.end(strip=NEWLINES)


def by_article(chunks: Iterable[str], origin: str, separator: str) -> Iterator[Piece]:
    """WikiText: a line `= Title =` between blank lines opens an article."""
    gatherer, blank_before = Gatherer(origin), True
    for number, (line, following) in enumerate(pairwise(chain(lines_of(chunks), ("",))), 1):
        if blank_before and not following.strip() and ARTICLE.fullmatch(line):
            yield from gatherer.end()
            gatherer.origin = f"{origin}, line {number}"
        blank_before = not line.strip()
        if not (blank_before and gatherer.empty):
            yield from gatherer.add(line)
    yield from gatherer.end()


def by_file(chunks: Iterable[str], origin: str, separator: str) -> Iterator[Piece]:
    gatherer = Gatherer(origin)
    for chunk in chunks:
        yield from gatherer.add(chunk)
    yield from gatherer.end()


DOCUMENTS: dict[str, Callable[[Iterable[str], str, str], Iterator[Piece]]] = {
    "separator": by_separator,
    "file": by_file,
    "line": by_line,
    "blank-line": by_blank_line,
    "article": by_article,
}


SUFFIXES = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson"),
    "fasta": (".fasta", ".fa", ".faa", ".fna", ".ffn", ".fas", ".afa", ".a2m"),
}
FORMATS = tuple(SUFFIXES)
GAPS = ("remove", "keep")
# fields of `Reading`
READ_WITH = {"text": ("documents", "separator"), "jsonl": ("field",), "fasta": ("gaps",)}
HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Reading:
    """How documents are found in files; each format looks at its own fields."""

    documents: str = "separator"  # text: what divides a file into documents
    separator: str = EOT  # text, documents=separator; a file without it is one document
    field: str = "text"  # jsonl: the member that holds the text
    # fasta: remove or keep '-' and '.' of an alignment; empty: keep them where the tokeniser has
    # them
    gaps: str = ""

    def __post_init__(self) -> None:
        if self.documents not in DOCUMENTS:
            raise ValueError(f"documents is {self.documents!r}; allowed: {', '.join(DOCUMENTS)}")
        if self.gaps not in ("", *GAPS):
            raise ValueError(f"gaps is {self.gaps!r}; allowed: {', '.join(GAPS)}")
        if not self.separator:
            raise ValueError("separator is empty; give the string that stands between documents")


def format_of(path: Path) -> str:
    name = path.name.removesuffix(".gz").lower()
    for format, suffixes in SUFFIXES.items():
        if name.endswith(suffixes):
            return format
    known = "; ".join(f"{format}: {' '.join(suffixes)}" for format, suffixes in SUFFIXES.items())
    raise ValueError(
        f"{path}: the name does not tell the format; rename it ({known}; each also .gz), "
        "or read it by `tracformer prepare --format text` (jsonl, fasta)"
    )


def read_file(path: Path, format: str, reading: Reading) -> Iterator[Piece]:
    return READERS[format](path, reading)


def _read_plain(path: Path, reading: Reading) -> Iterator[Piece]:
    return DOCUMENTS[reading.documents](read_text(path), str(path), reading.separator)


def _read_jsonl(path: Path, reading: Reading) -> Iterator[Piece]:
    for number, line in enumerate(lines_of(read_text(path)), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{where} is not JSON: {error}; a JSONL file holds one JSON object a line"
            ) from error
        text = record.get(reading.field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = (
                f"the keys {', '.join(map(repr, record))}"
                if isinstance(record, dict)
                else f"a {type(record).__name__}"
            )
            raise ValueError(
                f"{where} has no text under {reading.field!r}: it holds {found}; "
                "name the right one with field= (`tracformer prepare --field`)"
            )
        if HALF_PAIR.search(text):
            raise ValueError(
                f"{where} holds half of a surrogate pair (\\ud800..\\udfff), which is not a "
                "character; clean the file"
            )
        yield from as_pieces(text, where)


def _read_fasta(path: Path, reading: Reading) -> Iterator[Piece]:
    """One record a document: header dropped, upper case, `.` written as `-`, and a
    closing `*` taken off.
    """
    gatherer: Gatherer | None = None
    table = str.maketrans({".": "-"} if reading.gaps == "keep" else {"-": None, ".": None})
    for number, line in enumerate(lines_of(read_text(path)), 1):
        if line.startswith(">"):
            if gatherer is not None:
                yield from gatherer.end(strip="*")
            name = (line[1:].split() or ["without a name"])[0]
            gatherer = Gatherer(f"{path}, record {name}")
        elif gatherer is not None:
            yield from gatherer.add("".join(line.split()).upper().translate(table))
        elif line.strip() and not line.startswith(";"):
            raise ValueError(
                f"{path} is not FASTA: line {number} is {line.strip()[:40]!r} where a header such "
                "as '>name' is expected"
            )
    if gatherer is None:
        raise ValueError(f"{path} holds no FASTA record: no line begins with '>'")
    yield from gatherer.end(strip="*")


READERS: dict[str, Callable[[Path, Reading], Iterator[Piece]]] = {
    "text": _read_plain,
    "jsonl": _read_jsonl,
    "fasta": _read_fasta,
}
