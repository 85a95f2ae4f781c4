"""Hold out data for validation: by hash, by tail, or by sequence identity.

    WholeSource   no hold-out: all documents belong to one split
    ByHash        many documents: the hash of a document's text decides, so copies of a document are
                  in the same split, on any machine and in any order
    Tail          few documents (a book, a genome): the end of the data is held out, from the end of
                  a near document on, or from inside a document, whose parts become two documents
    ByIdentity    aligned sequences: no held-out sequence is similar to a training sequence
    choose_rule   ByHash or Tail, by the number of documents

Sequence identity is for families in which nearly every sequence has a near copy:

    identity(a, b) = columns in which both have the same residue / residues of the shorter one

Sequences with an identity above `threshold` are linked, and sequences that are linked directly or
through others form a cluster. Whole clusters are held out, which guarantees that no held-out
sequence has a higher identity to any training sequence; clusters around representatives would not
guarantee it. A cluster that is too large for its split stays in training.

"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracformer.data.alignment import GAP, Alignment, as_rows, read_alignment
from tracformer.data.documents import TextPiece, cut_point
from tracformer.data.sources import DataSource, FileSource

# Use the hash only if about this many documents are held out: the split then has about the
# requested size.
EXPECTED_DOCUMENTS = 20
LOOK_BACK = 200  # characters in which the cut before the tail may look for white space


class SplitRule(Protocol):
    """A rule that divides a source into splits."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        ...

    def route(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[str, TextPiece]]:
        """Yield each piece with the name of its split."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the rule for the manifest."""
        ...


@dataclass(frozen=True)
class WholeSource:
    """Put all documents in one split."""

    split: str

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,)

    def route(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[str, TextPiece]]:
        return ((self.split, piece) for piece in pieces)

    def describe(self) -> dict[str, Any]:
        return {"rule": "given"}


@dataclass(frozen=True)
class ByHash:
    """Hold out about this fraction of the documents, by the hash of their text.

    The text of a document's first piece decides.
    """

    fraction: float
    splits = ("train", "validation")

    def route(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[str, TextPiece]]:
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
    """Hold out the text from character `start` on.

    If `start` is inside a document, the cut moves back to white space.
    """

    fraction: float
    start: int
    splits = ("train", "validation")

    def route(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[str, TextPiece]]:
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


def choose_rule(pieces: Iterable[TextPiece], fraction: float) -> SplitRule:
    """Return a rule that holds out this fraction: `ByHash` if there are enough documents.

    The documents are counted only until there are enough.

    Raises:
        ValueError: The text is too short.
    """
    if fraction == 0.0:
        return WholeSource("train")
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
            f"the text is {total} characters long, too short to hold out {fraction:.1%} of it for "
            "validation; give more text"
        )
    return Tail(fraction, start)


BLOCK = 1024  # rows compared with all others at a time
HELD = ("validation", "test")
AMINO_ACIDS = frozenset("ACDEFGHIKLMNPQRSTVWY")

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


def cluster(rows: NDArray[np.uint8], threshold: float) -> Integers:
    """Return (N,) the cluster of each row of letters (N, columns), as the number of its first row.

    Args:
        rows: Letters as bytes, as from `as_rows`.
        threshold: Rows with an identity above this are linked.
    """
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
    """Hold out whole clusters for `validation`, and as many sequences again for `test`.

    Equal sequences are in the same split, whichever file they are in.

    Attributes:
        threshold: Largest identity of a held-out sequence to a training sequence.
        fraction: Share of the sequences for each of the two splits.
        sides: The split of each held-out sequence, gaps removed.
        distinct: Keep only the first of equal sequences.
        found: Number of records, of copies of another sequence, and of each letter other than the
            20 amino acids.
    """

    threshold: float
    fraction: float
    sides: Mapping[str, str] = field(repr=False)
    distinct: bool = False
    found: Mapping[str, Any] = field(default_factory=dict)
    splits = ("train", *HELD)

    def route(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[str, TextPiece]]:
        seen: set[str] = set()
        for document in _documents(pieces):
            sequence = "".join(piece.text for piece in document).replace(GAP, "")
            if self.distinct and sequence in seen:
                continue
            seen.add(sequence)
            for piece in document:
                yield self.sides.get(sequence, "train"), piece

    def describe(self) -> dict[str, Any]:
        return {
            "rule": "clusters by identity in columns",
            "threshold": self.threshold,
            "fraction": self.fraction,
            "distinct": self.distinct,
            **self.found,
        }


def identity_rule(
    source: DataSource, threshold: float, fraction: float, distinct: bool = False
) -> ByIdentity:
    """Return the rule that holds out sequences of aligned FASTA files by identity.

    Each file is a family; families are not compared with each other.

    Args:
        source: The files.
        threshold: Largest identity of a held-out sequence to a training sequence.
        fraction: Share of the sequences for `validation`, and again for `test`.
        distinct: Keep only the first of equal sequences.
    """
    if not 0.0 < threshold < 1.0:
        raise ValueError(
            f"identity is {threshold!r}; it must be between 0 and 1, as in --identity 0.6"
        )
    if not 0.0 < fraction <= 0.25:
        raise ValueError(
            f"validation is {fraction!r}; with identity the same share goes to `test` too, so it "
            "must be above 0 and at most 0.25"
        )
    if not isinstance(source, FileSource) or source.format not in ("fasta", "alignment"):
        raise ValueError(
            "identity is for aligned sequences (FASTA, A2M, A3M, Stockholm); hold out other data "
            "by a fraction or a file"
        )
    sides: dict[str, str] = {}
    letters: Counter[str] = Counter()
    records: list[str] = []
    for path in source.files:
        alignment = read_alignment(path)
        records += [record.sequence for record in alignment.records]
        sides |= _held_out(alignment, threshold, fraction)
    for sequence in records:
        letters.update(sequence)
    found = {
        "records": len(records),
        "copies": len(records) - len(set(records)),
        "other_letters": {x: n for x, n in sorted(letters.items()) if x not in AMINO_ACIDS},
    }
    return ByIdentity(threshold, fraction, sides, distinct, found)


def _held_out(alignment: Alignment, threshold: float, fraction: float) -> dict[str, str]:
    """Return the split of each held-out sequence of one family.

    Clusters are taken in the order of a hash of their members. Each goes to the split with more
    room, if it fits.
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
            # as read with gaps: without insertions
            columns = (alignment.by_sequence[sequence].columns for sequence in each)
            sides |= {row.replace(GAP, ""): split for row in columns}
    if empty := [name for name in HELD if name not in sides.values()]:
        raise ValueError(
            f"{alignment.name}: at an identity of {threshold:g} its {len(sequences)} sequences "
            f"form {len(members)} clusters, and none is small enough for {empty[0]}; raise "
            "identity or validation"
        )
    return sides


def _order(sequences: Sequence[str]) -> bytes:
    return min(hashlib.blake2b(sequence.encode(), digest_size=8).digest() for sequence in sequences)


def _indicators(rows: NDArray[np.uint8], letters: NDArray[np.uint8]) -> Floats:
    """Return (N, columns * letters): the product of two rows counts the columns that agree."""
    return (rows[:, :, None] == letters).reshape(len(rows), -1).astype(np.float32)


def _shares(a: Floats, b: Floats) -> Floats:
    shorter = np.minimum(a.sum(1)[:, None], b.sum(1))
    return np.asarray((a @ b.T) / np.maximum(shorter, 1.0), np.float32)


def _linked(labels: Integers, one: Integers, other: Integers) -> Integers:
    """Return the labels after joining the clusters of each pair.

    The lower label spreads until nothing changes.
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


def _documents(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    document: list[TextPiece] = []
    for piece in pieces:
        document.append(piece)
        if piece.end:
            yield document
            document = []
