"""Hold documents back for validation when the data comes in one piece.

Many documents: each is drawn by the hash of its text, so that a copy of a document falls on the same side, on any machine, in any order.
Few documents (a book, a genome): the data's end is held back, from the nearest document's end on, or else from inside a document,
whose two parts then count as two documents.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from tracformer.data.text import Piece, cut_point

EXPECTED_DOCUMENTS = 20  # hold back by hash only if about this many are drawn: the split's size is then what was asked for
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
                split = "validation" if int.from_bytes(digest, "little") < self.fraction * 2**64 else "train"
            yield split, piece
            begins = piece.end

    def describe(self) -> dict[str, Any]:
        return {"rule": "hash of the document", "fraction": self.fraction}


@dataclass(frozen=True)
class Tail:
    """The text from character `start` on; the cut moves back to white space if it falls inside a document."""

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
    near = [end for end in ends if total * (1.0 - 2.0 * fraction) <= end <= total * (1.0 - fraction / 2.0)]
    start = min(near, key=lambda end: abs(end - wanted)) if near else int(wanted)
    if not 0 < start < total:
        raise ValueError(f"the text is {total} characters long, too short to hold back {fraction:.1%} of it for validation; give more text")
    return Tail(fraction, start)
