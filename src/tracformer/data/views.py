"""Training examples out of a split: packed blocks, or one record a row."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tracformer.data.loader import Array, Split

LONG = ("window", "cut")


class Examples(Protocol):
    """Numbered rows of `length` tokens. Rows may be shorter: `lengths` says by how much, and padding repeats end of text."""

    length: int

    def __len__(self) -> int: ...

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        """tokens (B, length) and lengths (B,)."""
        ...


class PackedBlocks:
    """Block i is tokens[i*T : (i+1)*T]: documents run on, an end of text between them, and attention crosses it."""

    def __init__(self, split: Split, block_size: int, keep_remainder: bool = False) -> None:
        """`keep_remainder` adds the last, shorter block: training drops it, an evaluation counts every token."""
        _check_length("block_size", block_size)
        self.split, self.length = split, block_size
        whole, rest = divmod(len(split.tokens), block_size)
        if whole == 0 and not keep_remainder:
            raise ValueError(
                f"split {split.name!r} has {len(split.tokens)} tokens, fewer than one block of {block_size}; "
                "give more text, shorten the block, or train on records"
            )
        self._rows = whole + (keep_remainder and rest > 0)

    def __len__(self) -> int:
        return self._rows

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        starts = _checked(indices, len(self)) * self.length
        return _rows(self.split, starts, np.minimum(starts + self.length, len(self.split.tokens)), self.length)


class Records:
    """One document a row. A longer one is cut at `max_length`, or goes on in further rows (`long="window"`).

    An end of text is never a row by itself: behind a document that fills its rows it is left out.
    """

    def __init__(self, split: Split, max_length: int, long: str = "window", keep_eot: bool = True) -> None:
        _check_length("max_length", max_length)
        if long not in LONG:
            raise ValueError(f"long is {long!r}; allowed: {', '.join(LONG)}")
        self.split, self.length = split, max_length
        self._starts = np.asarray(split.index[:-1])
        self._stops = np.asarray(split.index[1:]) - (0 if keep_eot else 1)
        rows = -(-(np.diff(split.index) - 1) // max_length)  # 0 for a document without a token of its own
        self._ends = np.cumsum(np.minimum(rows, 1) if long == "cut" else rows)  # rows up to and with each document
        if len(self) == 0:
            raise ValueError(f"split {split.name!r} has no record with a token in it")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        rows = _checked(indices, len(self))
        documents = np.searchsorted(self._ends, rows, side="right")
        first = np.where(documents > 0, self._ends[documents - 1], 0)  # each document's first row
        starts = self._starts[documents] + (rows - first) * self.length
        return _rows(self.split, starts, np.minimum(starts + self.length, self._stops[documents]), self.length)


def examples(split: Split, length: int, rows: str = "packed", cross_documents: bool = True) -> Examples:
    """The view that a training configuration names.

    The model has no mask between the documents of one row, so `cross_documents=False` gives each row to a piece of one document.
    """
    if rows == "records":
        return Records(split, length)
    if rows != "packed":
        raise ValueError(f"rows is {rows!r}; allowed: packed, records")
    return PackedBlocks(split, length) if cross_documents else Records(split, length)


def _check_length(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")


def _checked(indices: NDArray[np.integer], rows: int) -> Array:
    wanted = np.asarray(indices, np.int64)
    if wanted.ndim != 1 or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < rows):
        raise ValueError(
            f"row numbers of shape {wanted.shape} from {wanted.min()} to {wanted.max()} were asked for; rows are 0..{rows - 1}"
        )
    return wanted


def _rows(split: Split, starts: Array, stops: Array, length: int) -> tuple[Array, Array]:
    tokens = np.full((len(starts), length), split.eot_id, np.int64)
    for row, start, stop in zip(tokens, starts.tolist(), stops.tolist(), strict=True):
        row[: stop - start] = split.tokens.read(start, stop)
    return tokens, stops - starts
