"""Rows of tokens in shuffled order.

In which order examples are read: a shuffled, endless stream in which one integer is a place to
resume from.

Training examples out of a split: packed blocks, or one record a row.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tracformer.data.shards import Array, Split

# examples; above, positions are computed one by one instead of kept in a table of n
LARGEST_TABLE = 2**24
ROUNDS = 6
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class ExampleOrder:
    """Epoch after epoch, each a permutation of 0..n-1 that depends on (seed, epoch) alone.

    Examples are numbered along the whole stream, across epochs' ends, so that none is dropped. A
    batch is a stretch of the stream, and any number of ranks that share it reads the same examples.
    """

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"there are {n} examples to order; there must be at least one")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed!r}; it must lie in 0..2^64-1")
        self.n, self.seed = n, seed
        self._tables: dict[int, Array] = {}

    def indices(self, start: int, count: int) -> Array:
        """Examples number start..start+count-1 of the stream."""
        if start < 0 or count < 0:
            raise ValueError(
                f"examples {start}..{start + count} of the stream were asked for; both numbers "
                "must be at least 0"
            )
        parts: list[Array] = []
        while count > 0:
            epoch, offset = divmod(start, self.n)
            now = min(count, self.n - offset)
            parts.append(self._stretch(epoch, offset, now))
            start, count = start + now, count - now
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _stretch(self, epoch: int, offset: int, count: int) -> Array:
        if self.n > LARGEST_TABLE:
            return scattered(
                np.arange(offset, offset + count, dtype=np.uint64), self.n, self.seed, epoch
            )
        if epoch not in self._tables:
            # a batch spans two epochs at most, unless the data is smaller than a batch
            if len(self._tables) >= 2:
                self._tables.clear()
            generator = np.random.Generator(
                np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            )
            self._tables[epoch] = generator.permutation(self.n)
        return self._tables[epoch][offset : offset + count]


def scattered(positions: NDArray[np.uint64], n: int, seed: int, epoch: int) -> Array:
    """Each position's place in a permutation of 0..n-1, without a table.

    A Feistel network permutes 0..4^b-1, the next power of four; what falls outside 0..n-1 goes
    through it again until it falls inside.
    """
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(ROUNDS)
    out = positions.copy()
    open_ = np.ones(len(out), bool)
    while open_.any():
        left, right = out[open_] >> half, out[open_] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & low)
        out[open_] = (left << half) | right
        open_ = out >= n
    return out.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all others (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * MIX[0]
    x = (x ^ (x >> np.uint64(27))) * MIX[1]
    return x ^ (x >> np.uint64(31))


LONG = ("window", "cut")


class Examples(Protocol):
    """Numbered rows of `length` tokens.

    Rows may be shorter: `lengths` are their true lengths, and padding repeats end of text.
    """

    length: int

    def __len__(self) -> int: ...

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        """tokens (B, length) and lengths (B,)."""
        ...


class PackedBlocks:
    """Block i is tokens[i*T : (i+1)*T]: documents run on, an end of text between them, and
    attention crosses it.
    """

    def __init__(self, split: Split, block_size: int, keep_remainder: bool = False) -> None:
        """`keep_remainder` adds the last, shorter block: training drops it, an
        evaluation counts every token.
        """
        _check_length("block_size", block_size)
        self.split, self.length = split, block_size
        whole, rest = divmod(len(split.tokens), block_size)
        if whole == 0 and not keep_remainder:
            raise ValueError(
                f"split {split.name!r} has {len(split.tokens)} tokens, fewer than one block of "
                f"{block_size}; "
                "give more text, shorten the block, or train on records"
            )
        self._rows = whole + (keep_remainder and rest > 0)

    def __len__(self) -> int:
        return self._rows

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        starts = _checked(indices, len(self)) * self.length
        return _rows(
            self.split,
            starts,
            np.minimum(starts + self.length, len(self.split.tokens)),
            self.length,
        )


class Records:
    """One document a row. A longer one is cut at `max_length`, or goes on in further rows
    (`long="window"`).

    An end of text is never a row by itself: behind a document that fills its rows it is left out.
    """

    def __init__(
        self, split: Split, max_length: int, long: str = "window", keep_eot: bool = True
    ) -> None:
        _check_length("max_length", max_length)
        if long not in LONG:
            raise ValueError(f"long is {long!r}; allowed: {', '.join(LONG)}")
        self.split, self.length = split, max_length
        self._starts = np.asarray(split.index[:-1])
        self._stops = np.asarray(split.index[1:]) - (0 if keep_eot else 1)
        # 0 for a document without a token of its own
        rows = -(-(np.diff(split.index) - 1) // max_length)
        # rows up to and with each document
        self._ends = np.cumsum(np.minimum(rows, 1) if long == "cut" else rows)
        if len(self) == 0:
            raise ValueError(f"split {split.name!r} has no record with a token in it")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        rows = _checked(indices, len(self))
        documents = np.searchsorted(self._ends, rows, side="right")
        first = np.where(documents > 0, self._ends[documents - 1], 0)  # each document's first row
        starts = self._starts[documents] + (rows - first) * self.length
        return _rows(
            self.split,
            starts,
            np.minimum(starts + self.length, self._stops[documents]),
            self.length,
        )


def examples(
    split: Split, length: int, rows: str = "packed", cross_documents: bool = True
) -> Examples:
    """The view that a training configuration names.

    The model has no mask between the documents of one row, so `cross_documents=False` gives each
    row to a piece of one document.
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
            f"row numbers of shape {wanted.shape} from {wanted.min()} to {wanted.max()} were asked "
            f"for; rows are 0..{rows - 1}"
        )
    return wanted


def _rows(split: Split, starts: Array, stops: Array, length: int) -> tuple[Array, Array]:
    tokens = np.full((len(starts), length), split.eot_id, np.int64)
    for row, start, stop in zip(tokens, starts.tolist(), stops.tolist(), strict=True):
        row[: stop - start] = split.tokens.read(start, stop)
    return tokens, stops - starts
