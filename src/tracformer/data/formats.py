"""What a file's name says about its format, and the documents of each format."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tracformer.data.text import DOCUMENTS, Gatherer, Piece, as_pieces, lines_of, read_text
from tracformer.data.tokenizer import EOT

SUFFIXES = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson"),
    "fasta": (".fasta", ".fa", ".faa", ".fna", ".ffn", ".fas", ".afa", ".a2m"),
}
FORMATS = tuple(SUFFIXES)
GAPS = ("remove", "keep")
READ_WITH = {"text": ("documents", "separator"), "jsonl": ("field",), "fasta": ("gaps",)}  # fields of `Reading`
HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Reading:
    """How documents are found in files; each format looks at its own fields."""

    documents: str = "separator"  # text: what divides a file into documents
    separator: str = EOT  # text, documents=separator; a file without it is one document
    field: str = "text"  # jsonl: the member that holds the text
    gaps: str = ""  # fasta: remove or keep '-' and '.' of an alignment; empty: keep them where the tokeniser has them

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
            raise ValueError(f"{where} is not JSON: {error}; a JSONL file holds one JSON object a line") from error
        text = record.get(reading.field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = f"the keys {', '.join(map(repr, record))}" if isinstance(record, dict) else f"a {type(record).__name__}"
            raise ValueError(
                f"{where} has no text under {reading.field!r}: it holds {found}; "
                "name the right one with field= (`tracformer prepare --field`)"
            )
        if HALF_PAIR.search(text):
            raise ValueError(f"{where} holds half of a surrogate pair (\\ud800..\\udfff), which is not a character; clean the file")
        yield from as_pieces(text, where)


def _read_fasta(path: Path, reading: Reading) -> Iterator[Piece]:
    """One record a document: header dropped, upper case, `.` written as `-`, and a closing `*` taken off."""
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
            raise ValueError(f"{path} is not FASTA: line {number} is {line.strip()[:40]!r} where a header such as '>name' is expected")
    if gatherer is None:
        raise ValueError(f"{path} holds no FASTA record: no line begins with '>'")
    yield from gatherer.end(strip="*")


READERS: dict[str, Callable[[Path, Reading], Iterator[Piece]]] = {"text": _read_plain, "jsonl": _read_jsonl, "fasta": _read_fasta}
