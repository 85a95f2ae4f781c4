"""Read the alignment of a protein family: FASTA, A2M, A3M or Stockholm, plain or gzip.

The rows show which of two notations is used. Plain: all rows have the same width, with `-` or `.`
where a record has no residue. With insertions (A2M, A3M, Stockholm as Pfam writes it): upper case
and `-` are the columns of the family; lower case and `.` are insertions between columns and belong
to no column.
"""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracformer.data.input_files import InputFile, RemoteFile, lines_of, plain_name, read_text
from tracformer.files import optional_package

GAP = "-"
INSERTED = -1
STOCKHOLM = (".sto", ".stk", ".stockholm")
BLOCK = 1024  # rows compared with all others at a time

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class AlignedRecord:
    """One record of an alignment.

    Attributes:
        name: First word of its header.
        columns: One upper-case letter per column, `-` where the record has no residue.
        sequence: All residues, with insertions, as `prepare` reads them with gaps removed.
        places: The column of each residue, or INSERTED.
    """

    name: str
    columns: str
    sequence: str
    places: tuple[int, ...]


class WrittenRow(NamedTuple):
    """A row of an alignment as its file has it."""

    name: str
    text: str
    line: int = 0  # of its header; 0: not known


@dataclass(frozen=True)
class Alignment:
    """The records of an alignment that have a residue."""

    name: str
    records: tuple[AlignedRecord, ...]

    @cached_property
    def rows(self) -> Bytes:
        """(records, columns) letters as bytes."""
        return as_rows([record.columns for record in self.records])

    @cached_property
    def by_sequence(self) -> dict[str, AlignedRecord]:
        """The first record with each sequence."""
        return {record.sequence: record for record in reversed(self.records)}


def read_alignment(where: str | PathLike[str] | RemoteFile) -> Alignment:
    """Read an alignment file; Stockholm is recognized by the file's name.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file has another format, or its records differ in their number of columns.
        ImportError: The file is Stockholm, and the package pyhmmer is not installed.
    """
    path = where if isinstance(where, RemoteFile) else Path(where)
    if isinstance(path, Path) and not path.is_file():
        raise FileNotFoundError(
            f"{path}: there is no such file; give an alignment (FASTA, A2M, A3M or Stockholm)"
        )
    stockholm = plain_name(path.name).endswith(STOCKHOLM)
    written = list(_stockholm_rows(path) if stockholm else _fasta_rows(path))
    texts = _unified(written, path)
    names = [row.name for row in written]
    records = [aligned_record(name, text) for name, text in zip(names, texts, strict=True)]
    records = [record for record in records if record.sequence]
    if not records:
        raise ValueError(f"{path} has no record with a residue")
    return Alignment(path.name, tuple(records))


def as_rows(columns: list[str]) -> Bytes:
    """Return strings of equal length as (strings, columns) bytes."""
    return np.frombuffer("".join(columns).encode("ascii"), np.uint8).reshape(len(columns), -1)


def sequence_weights(rows: Bytes, identity: float = 0.8) -> NDArray[np.float64]:
    """Return (N,) weights 1/n, where n rows agree with a row in at least this share of columns.

    A row agrees with itself, and gaps count as letters. The sum of the weights is the effective
    number of sequences.

    Args:
        rows: (N, columns) letters as bytes.
        identity: Share of the columns from which two rows count as neighbours.
    """
    distinct, origin, copies = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    letters = np.unique(rows)
    indicators = (distinct[:, :, None] == letters).reshape(len(distinct), -1).astype(np.float32)
    least = identity * rows.shape[1] - 1e-3
    neighbours = [
        (indicators[start : start + BLOCK] @ indicators.T >= least) @ copies
        for start in range(0, len(distinct), BLOCK)
    ]
    return np.asarray(1.0 / np.concatenate(neighbours)[origin.ravel()], np.float64)


def _fasta_rows(path: InputFile) -> Iterator[WrittenRow]:
    name, parts = "", list[str]()
    begun = 0  # line of the header
    for number, line in enumerate(lines_of(read_text(path)), 1):
        if line.startswith(">"):
            if begun:
                yield WrittenRow(name, "".join(parts).rstrip("*"), begun)
            name, parts, begun = (line[1:].split() or ["without a name"])[0], [], number
        elif begun:
            parts.append("".join(line.split()))
        elif line.strip() and not line.startswith((";", "#")):
            raise ValueError(
                f"{path} is not FASTA: line {number} is {line.strip()[:40]!r} where a header such "
                "as '>name' is expected"
            )
    if begun:
        yield WrittenRow(name, "".join(parts).rstrip("*"), begun)


def _stockholm_rows(path: InputFile) -> Iterable[WrittenRow]:
    pyhmmer = optional_package("pyhmmer", "reading a Stockholm alignment", "proteins")
    content = "".join(read_text(path)).encode()
    try:
        with pyhmmer.easel.MSAFile(io.BytesIO(content), format="stockholm") as file:
            alignment: Any = file.read()
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a Stockholm alignment: {error}") from error
    if alignment is None:
        raise ValueError(f"{path} holds no alignment")
    names = [name.decode() if isinstance(name, bytes) else str(name) for name in alignment.names]
    return [WrittenRow(*row) for row in zip(names, alignment.alignment, strict=True)]


def _unified(rows: list[WrittenRow], path: InputFile) -> list[str]:
    """Return the rows in A2M notation, in which every letter shows whether it is in a column."""
    texts = [row.text for row in rows]
    columns = [sum(letter.isupper() or letter == GAP for letter in text) for text in texts]
    widths = set(columns)
    if len(widths) == 1 and widths != {0}:
        return texts
    if len({len(text) for text in texts}) == 1:
        return [text.upper().replace(".", GAP) for text in texts]
    if not texts:
        raise ValueError(f"{path} has no record: no line begins with '>'")
    columns = [len(text) for text in texts] if widths == {0} else columns
    usual = Counter(columns).most_common(1)[0][0]
    odd = next(number for number, width in enumerate(columns) if width != usual)
    line = f"line {rows[odd].line}: " if rows[odd].line else ""
    raise ValueError(
        f"{path} is not an alignment: {line}record {rows[odd].name} has {columns[odd]} columns, "
        f"but most have {usual}; all must have the same number: align the sequences first "
        "(hmmalign, MAFFT, Clustal Omega)"
    )


def aligned_record(name: str, text: str) -> AlignedRecord:
    """Return the record of a row in A2M notation."""
    columns, sequence, places = [], [], []
    for letter in text:
        if letter.isupper() or letter == GAP:
            columns.append(letter)
        if letter.isalpha():
            sequence.append(letter.upper())
            places.append(len(columns) - 1 if letter.isupper() else INSERTED)
    return AlignedRecord(name, "".join(columns), "".join(sequence), tuple(places))
