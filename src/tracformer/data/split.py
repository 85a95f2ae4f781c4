"""Hold out validation data: by hash, by tail, or by sequence identity.

Aligned FASTA: which column of the family each residue stands in.

Two ways of writing are read. Plain: every row has the same width, `-` or `.` where a record has no
residue. A2M: upper case and `-` are the family's columns, lower case and `.` are insertions between
them, which belong to no column.

Hold documents back for validation when the data comes in one piece.

Many documents: each is drawn by the hash of its text, so that a copy of a document falls on the
same side, on any machine, in any order. Few documents (a book, a genome): the data's end is held
back, from the nearest document's end on, or else from inside a document, whose two parts then count
as two documents.

Hold sequences back that resemble no training sequence, for families in which nearly every sequence
has a near copy.

    identity(a, b) = columns in which both have the same residue / residues of the shorter one

Sequences of more than `threshold` identity are linked, and whatever is linked, directly or through
others, forms a cluster. Whole clusters are held back, so that no held-out sequence is more than
that identical to any training sequence: a guarantee, where clusters around representatives give
none. A cluster too large for its split stays in training: at a low threshold most of a family may
be one.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracformer.data.readers import Piece, cut_point, lines_of, read_text
from tracformer.data.sources import FileSource, Source

GAP = "-"
INSERTED = -1

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class AlignedRecord:
    """One record."""

    columns: str  # upper case, `-` where it has no residue
    sequence: str  # all its residues, insertions too, as `prepare` reads them with gaps removed
    places: tuple[int, ...]  # each residue's column, or INSERTED


@dataclass(frozen=True)
class Alignment:
    name: str
    records: tuple[AlignedRecord, ...]

    @cached_property
    def rows(self) -> Bytes:
        """(records, columns): letters as bytes."""
        return as_rows([record.columns for record in self.records])

    @cached_property
    def by_sequence(self) -> dict[str, AlignedRecord]:
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
            raise ValueError(
                f"{path} is not FASTA: line {number} is {line.strip()[:40]!r} where a header such "
                "as '>name' is expected"
            )
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
        f"{path} is not an alignment: its records have from {min(widths)} to {max(widths)} "
        "columns; all must have the same number. "
        "Align the sequences first (hmmalign, MAFFT, Clustal Omega)"
    )


def _aligned(text: str) -> AlignedRecord:
    columns, sequence, places = [], [], []
    for letter in text:
        if letter.isupper() or letter == GAP:
            columns.append(letter)
        if letter.isalpha():
            sequence.append(letter.upper())
            places.append(len(columns) - 1 if letter.isupper() else INSERTED)
    return AlignedRecord("".join(columns), "".join(sequence), tuple(places))


# hold back by hash only if about this many are drawn: the split's size is then what was asked for
EXPECTED_DOCUMENTS = 20
LOOK_BACK = 200  # characters in which the tail's cut looks for white space


class Rule(Protocol):
    @property
    def splits(self) -> tuple[str, ...]: ...

    def route(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        """Each piece with the split that it belongs to."""
        ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Whole:
    """Everything to one split."""

    split: str

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,)

    def route(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        return ((self.split, piece) for piece in pieces)

    def describe(self) -> dict[str, Any]:
        return {"rule": "given"}


@dataclass(frozen=True)
class ByHash:
    fraction: float
    splits = ("train", "validation")

    def route(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        split, begins = "train", True
        for piece in pieces:
            if begins:
                digest = hashlib.blake2b(piece.text.encode(), digest_size=8).digest()
                split = (
                    "validation"
                    if int.from_bytes(digest, "little") < self.fraction * 2**64
                    else "train"
                )
            yield split, piece
            begins = piece.end

    def describe(self) -> dict[str, Any]:
        return {"rule": "hash of the document", "fraction": self.fraction}


@dataclass(frozen=True)
class Tail:
    """The text from character `start` on; the cut moves back to white space if it
    falls inside a document.
    """

    fraction: float
    start: int
    splits = ("train", "validation")

    def route(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        position = 0
        for piece in pieces:
            before, position = self.start - position, position + len(piece.text)
            if before <= 0:
                yield "validation", piece
            elif before > len(piece.text) or (before == len(piece.text) and piece.end):
                yield "train", piece
            else:
                at = cut_point(piece.text, before, LOOK_BACK)
                yield "train", piece._replace(text=piece.text[:at], end=True)
                yield "validation", piece._replace(text=piece.text[at:], offset=piece.offset + at)

    def describe(self) -> dict[str, Any]:
        return {"rule": "tail", "fraction": self.fraction, "start": self.start}


def choose_rule(pieces: Iterable[Piece], fraction: float) -> Rule:
    """Counts documents, and stops as soon as there are enough to draw by hash."""
    if fraction == 0.0:
        return Whole("train")
    enough = EXPECTED_DOCUMENTS / fraction
    lengths = [0]
    for piece in pieces:
        lengths[-1] += len(piece.text)
        if piece.end:
            if len(lengths) >= enough:
                return ByHash(fraction)
            lengths.append(0)
    *ends, total = accumulate(lengths[:-1])
    wanted = total * (1.0 - fraction)
    near = [
        end
        for end in ends
        if total * (1.0 - 2.0 * fraction) <= end <= total * (1.0 - fraction / 2.0)
    ]
    start = min(near, key=lambda end: abs(end - wanted)) if near else int(wanted)
    if not 0 < start < total:
        raise ValueError(
            f"the text is {total} characters long, too short to hold back {fraction:.1%} of it for "
            "validation; give more text"
        )
    return Tail(fraction, start)


BLOCK = 1024  # rows compared at once with all others
HELD = ("validation", "test")

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


def identities(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> Floats:
    """(A, B) from rows of letters (A, columns) and (B, columns)."""
    letters = np.setdiff1d(np.union1d(a, b), [ord(GAP)])
    return _shares(_indicators(a, letters), _indicators(b, letters))


def nearest_identity(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> Floats:
    """(A,): of each row of `a`, the largest identity to any row of `b`."""
    letters = np.setdiff1d(np.union1d(a, b), [ord(GAP)])
    others = _indicators(b, letters)
    parts = [
        _shares(_indicators(a[i : i + BLOCK], letters), others).max(1)
        for i in range(0, len(a), BLOCK)
    ]
    return np.concatenate(parts)


def cluster(rows: NDArray[np.uint8], threshold: float) -> Integers:
    """(N,): each row's cluster, named by the first row in it."""
    letters = np.setdiff1d(np.unique(rows), [ord(GAP)])
    indicators = _indicators(rows, letters)
    labels = np.arange(len(rows))
    for start in range(0, len(rows), BLOCK):
        near = _shares(indicators[start : start + BLOCK], indicators[start:]) > threshold
        one, other = (each + start for each in np.nonzero(near))
        labels = _linked(labels, one, other)
    return labels


@dataclass(frozen=True)
class ByIdentity:
    """Whole clusters to `validation` and as many again to `test`.

    Equal sequences go together, in whichever file they are.
    """

    threshold: float
    fraction: float
    # held-out sequences, gaps removed, and their split
    sides: Mapping[str, str] = field(repr=False)
    splits = ("train", *HELD)

    def route(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        for document in _documents(pieces):
            split = self.sides.get(
                "".join(piece.text for piece in document).replace(GAP, ""), "train"
            )
            for piece in document:
                yield split, piece

    def describe(self) -> dict[str, Any]:
        return {
            "rule": "clusters by identity in columns",
            "threshold": self.threshold,
            "fraction": self.fraction,
        }


def identity_rule(source: Source, threshold: float, fraction: float) -> ByIdentity:
    """From aligned FASTA files; each is a family of its own, and families are not compared."""
    if not 0.0 < threshold < 1.0:
        raise ValueError(
            f"identity is {threshold!r}; it must lie between 0 and 1, as in --identity 0.6"
        )
    if not 0.0 < fraction <= 0.25:
        raise ValueError(
            f"validation is {fraction!r}; with identity as much again goes to `test`, so it must "
            "lie above 0 and be at most 0.25"
        )
    if not isinstance(source, FileSource) or source.format != "fasta":
        raise ValueError(
            "identity is for aligned FASTA files; other data is held back by a fraction or a file "
            "alone"
        )
    sides: dict[str, str] = {}
    for path in source.files:
        sides |= _held_out(read_alignment(path), threshold, fraction)
    return ByIdentity(threshold, fraction, sides)


def _held_out(alignment: Alignment, threshold: float, fraction: float) -> dict[str, str]:
    """Clusters in the order of a hash of their members, dealt to one split after the
    other until each is full.
    """
    sequences = list(alignment.by_sequence)
    labels = cluster(
        as_rows([alignment.by_sequence[sequence].columns for sequence in sequences]), threshold
    )
    members: dict[int, list[str]] = {}
    for label, sequence in zip(labels.tolist(), sequences, strict=True):
        members.setdefault(label, []).append(sequence)
    room = dict.fromkeys(HELD, round(fraction * len(sequences)))
    sides: dict[str, str] = {}
    for each in sorted(members.values(), key=_order):
        split = max(room, key=lambda name: room[name])
        if len(each) <= room[split]:
            room[split] -= len(each)
            sides |= dict.fromkeys(each, split)
    if empty := [name for name in HELD if name not in sides.values()]:
        raise ValueError(
            f"{alignment.name}: at an identity of {threshold:g} its {len(sequences)} sequences "
            f"form {len(members)} clusters, and none is "
            f"small enough for {empty[0]}; raise identity, or validation"
        )
    return sides


def _order(sequences: Sequence[str]) -> bytes:
    return min(hashlib.blake2b(sequence.encode(), digest_size=8).digest() for sequence in sequences)


def _indicators(rows: NDArray[np.uint8], letters: NDArray[np.uint8]) -> Floats:
    """(N, columns * letters): a product of two rows counts the columns in which they agree."""
    return (rows[:, :, None] == letters).reshape(len(rows), -1).astype(np.float32)


def _shares(a: Floats, b: Floats) -> Floats:
    shorter = np.minimum(a.sum(1)[:, None], b.sum(1))
    return np.asarray((a @ b.T) / np.maximum(shorter, 1.0), np.float32)


def _linked(labels: Integers, one: Integers, other: Integers) -> Integers:
    """Labels after joining the clusters of each pair: the lower label spreads until
    nothing changes.
    """
    while True:
        a, b = labels[one], labels[other]
        if (a == b).all():
            return labels
        lower = np.minimum(a, b)
        np.minimum.at(labels, a, lower)
        np.minimum.at(labels, b, lower)
        while (labels[labels] != labels).any():
            labels = labels[labels]


def _documents(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    document: list[Piece] = []
    for piece in pieces:
        document.append(piece)
        if piece.end:
            yield document
            document = []
