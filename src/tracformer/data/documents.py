"""Read documents from text, JSONL, Parquet, FASTA and alignment files.

A file is read in chunks, and a document is yielded as one or more `TextPiece`s, so that neither a
large file nor a large document has to fit in memory. Alignments alone are read whole.

    PieceBuilder          collect text into pieces
    DOCUMENTS             the ways to divide a text file into documents
    ReadOptions           options of all formats
    format_of, read_file  the format by a file's name; all documents of a file
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

from tracformer.data.alignment import read_alignment
from tracformer.data.input_files import (
    PACKINGS,
    InputFile,
    ReadMonitor,
    lines_of,
    open_raw,
    plain_name,
    read_text,
    size_of,
)
from tracformer.data.tokenizer import EOT
from tracformer.files import optional_package

PIECE_CHARACTERS = 1 << 18  # small enough that several are encoded at once, one per core
NEWLINES = "\r\n"
# a title line of WikiText; section titles have more signs
ARTICLE = re.compile(r"\s*= [^=\s](.*[^=\s])? =\s*")


class TextPiece(NamedTuple):
    """A document or a part of one.

    Attributes:
        text: The text.
        end: Whether the document ends with this piece.
        origin: Where the document came from, for error messages.
        offset: Number of characters of the document before this piece.
    """

    text: str
    end: bool
    origin: str
    offset: int = 0


def cut_point(text: str, limit: int, look_back: int) -> int:
    """Return where to cut a text into two parts that are tokenized as the whole text would be.

    The cut is before white space, preferably a newline: byte-level BPE never joins a word to the
    white space after it. If there is no white space near (a chromosome), the cut is at the limit.

    Args:
        text: The text.
        limit: Largest position of the cut.
        look_back: How many characters before the limit may be searched for white space.
    """
    for blank in "\n ":
        at = text.rfind(blank, max(1, limit - look_back), limit)
        while at > 0 and text[at - 1].isspace():
            at -= 1
        if at > 0:
            return at
    return limit


class PieceBuilder:
    """Collect the text of documents and yield it as pieces of bounded size.

    Documents of nothing but white space are left out.

    Args:
        origin: Where the document came from; may be changed between documents.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._parts: list[str] = []
        self._size = 0
        self._yielded = 0  # characters of this document

    def add(self, text: str) -> Iterator[TextPiece]:
        """Add text to the document; yield the pieces that are complete."""
        self._parts.append(text)
        self._size += len(text)
        if self._size >= 2 * PIECE_CHARACTERS:
            yield from self._yield_pieces("".join(self._parts))

    def end(self, strip: str = "") -> Iterator[TextPiece]:
        """End the document; characters in `strip` are removed from its end."""
        text = "".join(self._parts)
        if strip:
            text = text.rstrip(strip)
        if len(text) >= 2 * PIECE_CHARACTERS:
            yield from self._yield_pieces(text)
            text = "".join(self._parts)
        if self._yielded or text.strip():
            yield TextPiece(text, True, self.origin, self._yielded)
        self._parts, self._size, self._yielded = [], 0, 0

    @property
    def empty(self) -> bool:
        """Whether the document has no text yet."""
        return self._yielded == self._size == 0

    def _yield_pieces(self, text: str) -> Iterator[TextPiece]:
        start = 0
        while len(text) - start >= 2 * PIECE_CHARACTERS:
            window = text[start : start + PIECE_CHARACTERS]
            at = cut_point(window, PIECE_CHARACTERS, PIECE_CHARACTERS // 2)
            yield TextPiece(window[:at], False, self.origin, self._yielded)
            self._yielded += at
            start += at
        self._parts, self._size = [text[start:]], len(text) - start


def as_pieces(text: str, origin: str) -> Iterator[TextPiece]:
    """Yield the pieces of one document that is in memory."""
    if text.strip():
        builder = PieceBuilder(origin)
        yield from builder.add(text)
        yield from builder.end()


def by_separator(chunks: Iterable[str], origin: str, separator: str) -> Iterator[TextPiece]:
    """Yield documents that have a separator between them.

    Newlines around the separator belong to it. A text without the separator is one document.
    """
    builder = PieceBuilder(f"{origin}, document 1")
    number, rest = 1, ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(separator)
        for text in whole:
            yield from builder.add(_after_separator(text, number, builder))
            yield from builder.end(strip=NEWLINES)
            number += 1
            builder.origin = f"{origin}, document {number}"
        keep = len(separator) - 1  # the chunk may end inside a separator
        ready, rest = rest[: max(0, len(rest) - keep)], rest[max(0, len(rest) - keep) :]
        yield from builder.add(_after_separator(ready, number, builder))
    yield from builder.add(_after_separator(rest, number, builder))
    yield from builder.end(strip=NEWLINES if number > 1 else "")


def _after_separator(text: str, number: int, builder: PieceBuilder) -> str:
    return text.lstrip(NEWLINES) if number > 1 and builder.empty else text


def by_line(chunks: Iterable[str], origin: str, separator: str) -> Iterator[TextPiece]:
    """Yield every line that is not blank as a document."""
    for number, line in enumerate(lines_of(chunks), 1):
        yield from as_pieces(line.rstrip(NEWLINES), f"{origin}, line {number}")


def by_blank_line(chunks: Iterable[str], origin: str, separator: str) -> Iterator[TextPiece]:
    """Yield documents that have blank lines between them."""
    builder = PieceBuilder(origin)
    for number, line in enumerate(lines_of(chunks), 1):
        if not line.strip():
            yield from builder.end(strip=NEWLINES)
            continue
        if builder.empty:
            builder.origin = f"{origin}, line {number}"
        yield from builder.add(line)
    yield from builder.end(strip=NEWLINES)


def by_article(chunks: Iterable[str], origin: str, separator: str) -> Iterator[TextPiece]:
    """Yield the articles of WikiText: a line `= Title =` between blank lines begins one."""
    builder, blank_before = PieceBuilder(origin), True
    for number, (line, following) in enumerate(pairwise(chain(lines_of(chunks), ("",))), 1):
        if blank_before and not following.strip() and ARTICLE.fullmatch(line):
            yield from builder.end()
            builder.origin = f"{origin}, line {number}"
        blank_before = not line.strip()
        if not (blank_before and builder.empty):
            yield from builder.add(line)
    yield from builder.end()


def by_file(chunks: Iterable[str], origin: str, separator: str) -> Iterator[TextPiece]:
    """Yield the whole file as one document."""
    builder = PieceBuilder(origin)
    for chunk in chunks:
        yield from builder.add(chunk)
    yield from builder.end()


DOCUMENTS: dict[str, Callable[[Iterable[str], str, str], Iterator[TextPiece]]] = {
    "separator": by_separator,
    "file": by_file,
    "line": by_line,
    "blank-line": by_blank_line,
    "article": by_article,
}


SUFFIXES = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "fasta": (".fasta", ".fa", ".faa", ".fna", ".ffn", ".fas", ".afa"),
    "alignment": (".a2m", ".a3m", ".sto", ".stk", ".stockholm"),
}
FORMATS = tuple(SUFFIXES)
GAPS = ("remove", "keep")
# fields of `ReadOptions` that each format uses
READ_WITH = {
    "text": ("documents", "separator"),
    "jsonl": ("field",),
    "parquet": ("field",),
    "fasta": ("gaps",),
    "alignment": ("gaps",),
}
PARQUET_ROWS = 1024  # read at once
HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ReadOptions:
    """How to find the documents in files; each format uses its own fields.

    Attributes:
        documents: Text files: what divides a file into documents, a key of `DOCUMENTS`.
        separator: Text files with documents="separator": the string between two documents.
        field: JSONL and Parquet files: the field or column that holds the text.
        gaps: FASTA files and alignments: "remove" or "keep" the gaps `-` and `.`. If empty, they
            are kept if the tokenizer's alphabet has them. Alignments of a notation with insertions
            (A2M, A3M, Stockholm) lose their insertions where gaps are kept, so that all rows have
            the same columns.
    """

    documents: str = "separator"
    separator: str = EOT
    field: str = "text"
    gaps: str = ""

    def __post_init__(self) -> None:
        if self.documents not in DOCUMENTS:
            raise ValueError(f"documents is {self.documents!r}; allowed: {', '.join(DOCUMENTS)}")
        if self.gaps not in ("", *GAPS):
            raise ValueError(f"gaps is {self.gaps!r}; allowed: {', '.join(GAPS)}")
        if not self.separator:
            raise ValueError("separator is empty; give the string that stands between documents")


def format_of(file: InputFile) -> str:
    """Return the format of a file by the end of its name."""
    name = plain_name(file.name)
    for format, suffixes in SUFFIXES.items():
        if name.endswith(suffixes):
            return format
    known = "; ".join(f"{format}: {' '.join(suffixes)}" for format, suffixes in SUFFIXES.items())
    raise ValueError(
        f"{file}: unknown file name ending; rename the file ({known}; each also "
        f"{' '.join(PACKINGS)}), or give the format: `tracformer prepare --format text` (or "
        f"{', '.join(FORMATS[1:])})"
    )


def read_file(
    file: InputFile, format: str, options: ReadOptions, monitor: ReadMonitor | None = None
) -> Iterator[TextPiece]:
    """Yield the documents of a file.

    Args:
        file: The file.
        format: A key of `SUFFIXES`.
        options: How documents are found in it.
        monitor: Counts what is read, and decides about records that cannot be read; without one,
            the first of them is an error.
    """
    return READERS[format](file, options, ReadMonitor() if monitor is None else monitor)


def _read_plain(file: InputFile, options: ReadOptions, monitor: ReadMonitor) -> Iterator[TextPiece]:
    chunks = read_text(file, monitor)
    return DOCUMENTS[options.documents](chunks, str(file), options.separator)


def _read_jsonl(file: InputFile, options: ReadOptions, monitor: ReadMonitor) -> Iterator[TextPiece]:
    for number, line in enumerate(lines_of(read_text(file, monitor)), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = "too deeply nested" if isinstance(error, RecursionError) else error
            monitor.leave_out(
                f"{where} is not JSON: {what}; a JSONL file has one JSON object per line", error
            )
            continue
        text = record.get(options.field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = (
                f"the keys {', '.join(map(repr, record))}"
                if isinstance(record, dict)
                else f"a {type(record).__name__}"
            )
            monitor.leave_out(
                f"{where} has no text under {options.field!r}: it holds {found}; "
                "give the right field with field= (`tracformer prepare --field`)"
            )
        elif HALF_PAIR.search(text):
            monitor.leave_out(
                f"{where} contains half of a surrogate pair (\\ud800..\\udfff), which is not a "
                "character; clean the file"
            )
        else:
            yield from as_pieces(text, where)


def _read_parquet(
    file: InputFile, options: ReadOptions, monitor: ReadMonitor
) -> Iterator[TextPiece]:
    """Yield one document per row; a few thousand rows are in memory."""
    parquet: Any = optional_package("pyarrow.parquet", f"reading {file}", "parquet")
    size, done, counted = size_of(file) or 0, 0, 0
    with open_raw(file) as opened:
        try:
            table = parquet.ParquetFile(opened)
            columns, rows = table.schema_arrow.names, table.metadata.num_rows
        except Exception as error:  # pyarrow's own classes, and those of a remote file system
            raise ValueError(f"{file} cannot be read as Parquet: {error}") from error
        if options.field not in columns:
            raise ValueError(
                f"{file} has no column {options.field!r}; it has {', '.join(columns)}: choose one "
                "with field= (`tracformer prepare --field`)"
            )
        batches = table.iter_batches(batch_size=PARQUET_ROWS, columns=[options.field])
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:
                raise ValueError(
                    f"{file} cannot be read as Parquet after row {done}: {error}"
                ) from error
            if batch is None:
                return
            for number, text in enumerate(batch.column(0).to_pylist(), done + 1):
                if isinstance(text, str):
                    yield from as_pieces(text, f"{file}, row {number}")
                else:
                    monitor.leave_out(
                        f"{file}, row {number} has no text under {options.field!r}: it holds a "
                        f"{type(text).__name__}"
                    )
            done += batch.num_rows
            share = size * done // max(1, rows)
            monitor.bytes, counted = monitor.bytes + share - counted, share


def _read_fasta(file: InputFile, options: ReadOptions, monitor: ReadMonitor) -> Iterator[TextPiece]:
    """Yield one document per record: upper case, `.` written as `-`, without a final `*`."""
    builder: PieceBuilder | None = None
    table = str.maketrans({".": "-"} if options.gaps == "keep" else {"-": None, ".": None})
    for number, line in enumerate(lines_of(read_text(file, monitor)), 1):
        if line.startswith(">"):
            if builder is not None:
                yield from builder.end(strip="*")
            name = (line[1:].split() or ["without a name"])[0]
            builder = PieceBuilder(f"{file}, record {name}")
        elif builder is not None:
            yield from builder.add("".join(line.split()).upper().translate(table))
        elif line.strip() and not line.startswith(";"):
            monitor.leave_out(
                f"{file} is not FASTA: line {number} is {line.strip()[:40]!r} where a header such "
                "as '>name' is expected"
            )
    if builder is None:
        raise ValueError(f"{file} has no FASTA record: no line begins with '>'")
    yield from builder.end(strip="*")


def _read_aligned(
    file: InputFile, options: ReadOptions, monitor: ReadMonitor
) -> Iterator[TextPiece]:
    """Yield one document per record of an alignment, which is read whole."""
    for record in read_alignment(file).records:
        text = record.columns if options.gaps == "keep" else record.sequence
        yield from as_pieces(text, f"{file}, record {record.name}")
    monitor.bytes += size_of(file) or 0


READERS: dict[str, Callable[[InputFile, ReadOptions, ReadMonitor], Iterator[TextPiece]]] = {
    "text": _read_plain,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "fasta": _read_fasta,
    "alignment": _read_aligned,
}
