"""Hold sequences back that resemble no training sequence, for families in which nearly every sequence has a near copy.

    identity(a, b) = columns in which both have the same residue / residues of the shorter one, counted in columns

Sequences of more than `threshold` identity are linked, and whatever is linked, directly or through others, forms a cluster. Whole clusters
are held back, so that no held-out sequence is more than that identical to any training sequence: a guarantee, where clusters around
representatives give none. A cluster too large for its split stays in training: at a low threshold most of a family may be one.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracformer.data.alignment import GAP, Alignment, as_rows, read_alignment
from tracformer.data.sources import FileSource, Source
from tracformer.data.text import Piece

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
    parts = [_shares(_indicators(a[i : i + BLOCK], letters), others).max(1) for i in range(0, len(a), BLOCK)]
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
    """Whole clusters to `validation` and as many again to `test`. Equal sequences go together, in whichever file they are."""

    threshold: float
    fraction: float
    sides: Mapping[str, str] = field(repr=False)  # held-out sequences, gaps removed, and their split
    splits = ("train", *HELD)

    def route(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        for document in _documents(pieces):
            split = self.sides.get("".join(piece.text for piece in document).replace(GAP, ""), "train")
            for piece in document:
                yield split, piece

    def describe(self) -> dict[str, Any]:
        return {"rule": "clusters by identity in columns", "threshold": self.threshold, "fraction": self.fraction}


def identity_rule(source: Source, threshold: float, fraction: float) -> ByIdentity:
    """From aligned FASTA files; each is a family of its own, and families are not compared."""
    if not 0.0 < threshold < 1.0:
        raise ValueError(f"identity is {threshold!r}; it must lie between 0 and 1, as in --identity 0.6")
    if not 0.0 < fraction <= 0.25:
        raise ValueError(
            f"validation is {fraction!r}; with identity as much again goes to `test`, so it must lie above 0 and be at most 0.25"
        )
    if not isinstance(source, FileSource) or source.format != "fasta":
        raise ValueError("identity is for aligned FASTA files; other data is held back by a fraction or a file alone")
    sides: dict[str, str] = {}
    for path in source.files:
        sides |= _held_out(read_alignment(path), threshold, fraction)
    return ByIdentity(threshold, fraction, sides)


def _held_out(alignment: Alignment, threshold: float, fraction: float) -> dict[str, str]:
    """Clusters in the order of a hash of their members, dealt to one split after the other until each is full."""
    sequences = list(alignment.by_sequence)
    labels = cluster(as_rows([alignment.by_sequence[sequence].columns for sequence in sequences]), threshold)
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
            f"{alignment.name}: at an identity of {threshold:g} its {len(sequences)} sequences form {len(members)} clusters, and none is "
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
    """Labels after joining the clusters of each pair: the lower label spreads until nothing changes."""
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
