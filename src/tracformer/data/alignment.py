"""Aligned FASTA: which column of the family each residue stands in.

Two ways of writing are read. Plain: every row has the same width, `-` or `.` where a record has no residue. A2M: upper case and `-` are the
family's columns, lower case and `.` are insertions between them, which belong to no column.
"""

from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracformer.data.text import lines_of, read_text

GAP = "-"
INSERTED = -1

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Aligned:
    """One record."""

    columns: str  # upper case, `-` where it has no residue
    sequence: str  # all its residues, insertions too, as `prepare` reads them with gaps removed
    places: tuple[int, ...]  # each residue's column, or INSERTED


@dataclass(frozen=True)
class Alignment:
    name: str
    records: tuple[Aligned, ...]

    @cached_property
    def rows(self) -> Bytes:
        """(records, columns): letters as bytes."""
        return as_rows([record.columns for record in self.records])

    @cached_property
    def by_sequence(self) -> dict[str, Aligned]:
        """The first record of each sequence."""
        return {record.sequence: record for record in reversed(self.records)}


def read_alignment(where: str | PathLike[str]) -> Alignment:
    path = Path(where)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; name an aligned FASTA file")
    written: list[list[str]] = []
    for number, line in enumerate(lines_of(read_text(path)), 1):
        if line.startswith(">"):
            written.append([])
        elif written:
            written[-1].append("".join(line.split()))
        elif line.strip() and not line.startswith(";"):
            raise ValueError(f"{path} is not FASTA: line {number} is {line.strip()[:40]!r} where a header such as '>name' is expected")
    texts = ["".join(parts).rstrip("*") for parts in written]
    records = [record for record in map(_aligned, _unified(texts, path)) if record.sequence]
    if not records:
        raise ValueError(f"{path} holds no FASTA record with a residue in it")
    return Alignment(path.name, tuple(records))


def as_rows(columns: list[str]) -> Bytes:
    return np.frombuffer("".join(columns).encode("ascii"), np.uint8).reshape(len(columns), -1)


def _unified(texts: list[str], path: Path) -> list[str]:
    """All rows in A2M's way of writing, which says of each letter whether it stands in a column."""
    widths = {sum(letter.isupper() or letter == GAP for letter in text) for text in texts}
    if len(widths) == 1 and widths != {0}:
        return texts
    if len({len(text) for text in texts}) == 1:
        return [text.upper().replace(".", GAP) for text in texts]
    raise ValueError(
        f"{path} is not an alignment: its records have from {min(widths)} to {max(widths)} columns; all must have the same number. "
        "Align the sequences first (hmmalign, MAFFT, Clustal Omega)"
    )


def _aligned(text: str) -> Aligned:
    columns, sequence, places = [], [], []
    for letter in text:
        if letter.isupper() or letter == GAP:
            columns.append(letter)
        if letter.isalpha():
            sequence.append(letter.upper())
            places.append(len(columns) - 1 if letter.isupper() else INSERTED)
    return Aligned("".join(columns), "".join(sequence), tuple(places))
