"""Training examples: rows of tokens from a split, and the shuffled order in which they are read.

open_examples   the view of a split that a training configuration names
PackedBlocks    documents one after the other, cut into blocks of equal length
Records         one document per row
ExampleOrder    an endless shuffled stream of row numbers; one integer is a place to resume from
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tracformer.data.alignment import sequence_weights
from tracformer.data.shards import Array, Split
from tracformer.splitmix import scramble

# With more examples, positions are computed one by one instead of kept in a table.
LARGEST_TABLE = 2**24
ROUNDS = 6


class ExampleOrder:
    """An endless stream of example numbers: one shuffled epoch after the other.

    Each epoch is a permutation of 0..n-1 that depends on (seed, epoch) only. Positions count along
    the whole stream, across the ends of epochs, so no example is dropped. A batch is a stretch of
    the stream; ranks that divide it among them read the same examples, however many they are.

    With weights, an epoch has n examples too: each appears about n * weight / (sum of the weights)
    times, rounded up or down at random anew in each epoch.

    Args:
        n: Number of examples.
        seed: Seed of the order, 0 to 2^64-1.
        weights: (n,) weight of each example; None: all alike.
    """

    def __init__(self, n: int, seed: int, weights: NDArray[np.float64] | None = None) -> None:
        if n < 1:
            raise ValueError(f"there are {n} examples to order; at least one is needed")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed!r}; it must be in 0..2^64-1")
        if weights is not None and n > LARGEST_TABLE:
            raise ValueError(f"{n} examples cannot be weighted; at most {LARGEST_TABLE} can")
        self.n, self.seed = n, seed
        self._ends = None if weights is None else np.cumsum(weights) * (n / weights.sum())
        self._tables: dict[int, Array] = {}

    def indices(self, start: int, count: int) -> Array:
        """Return the examples at positions start..start+count-1 of the stream."""
        if start < 0 or count < 0:
            raise ValueError(
                f"cannot read positions {start}..{start + count} of the stream; start and count "
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
            positions = np.arange(offset, offset + count, dtype=np.uint64)
            return permuted(positions, self.n, self.seed, epoch)
        if epoch not in self._tables:
            # a batch spans at most two epochs, unless the data is smaller than a batch
            if len(self._tables) >= 2:
                self._tables.clear()
            generator = np.random.Generator(
                np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            )
            drawn = generator.permutation(self.n)
            if self._ends is not None:  # systematic sampling: n equal steps from a random start
                steps = np.arange(self.n) + generator.random()
                examples = np.searchsorted(self._ends, steps, side="right").clip(max=self.n - 1)
                drawn = examples[drawn]
            self._tables[epoch] = drawn
        return self._tables[epoch][offset : offset + count]


def permuted(positions: NDArray[np.uint64], n: int, seed: int, epoch: int) -> Array:
    """Return where a permutation of 0..n-1 sends each position, without a table of n numbers.

    A Feistel network permutes 0..4^b-1, where 4^b is the next power of four. A result outside
    0..n-1 goes through the network again until it is inside.
    """
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(ROUNDS)
    out = positions.copy()
    outside = np.ones(len(out), bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & low
        for key in keys:
            left, right = right, left ^ (scramble(right ^ key) & low)
        out[outside] = (left << half) | right
        outside = out >= n
    return out.astype(np.int64)


class Examples(Protocol):
    """Numbered rows of at most `length` tokens; shorter rows are padded with end of text.

    `weights` (rows,) say how often each row is read in training; None: all alike.
    """

    length: int
    weights: NDArray[np.float64] | None

    def __len__(self) -> int: ...

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        """Return the tokens (B, length) and the true lengths (B,) of these rows."""
        ...


class PackedBlocks:
    """Row i is tokens[i*T : (i+1)*T] of the split; the last, shorter block is left out.

    A row may hold the end of one document and the beginning of the next, with an end of text
    between them; attention crosses it.

    Args:
        split: The split.
        block_size: Length T of every row.
    """

    weights: NDArray[np.float64] | None = None

    def __init__(self, split: Split, block_size: int) -> None:
        _check_length("block_size", block_size)
        self.split, self.length = split, block_size
        self._rows = len(split.tokens) // block_size
        if self._rows == 0:
            raise ValueError(
                f"split {split.name!r} has {len(split.tokens)} tokens, fewer than one block of "
                f"{block_size}; give more text, shorten the block, or train on records"
            )

    def __len__(self) -> int:
        return self._rows

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        """Return the tokens (B, block_size) and the lengths (B,), all `block_size`."""
        starts = _checked(indices, len(self)) * self.length
        return _rows(self.split, starts, starts + self.length, self.length)


class Records:
    """One document per row; a longer document continues in further rows.

    An end of text is never a row of its own: it is left out after a document that fills its rows.

    Args:
        split: The split.
        max_length: Largest length of a row.
        identity_weights: For sequences of an aligned family: weight a row by 1 / number of rows
            that agree with it in at least this share of the columns. 0: all alike.
    """

    def __init__(self, split: Split, max_length: int, identity_weights: float = 0.0) -> None:
        _check_length("max_length", max_length)
        self.split, self.length = split, max_length
        self._starts = np.asarray(split.index[:-1])
        self._stops = np.asarray(split.index[1:])
        # number of rows up to and with each document; a document without tokens has none
        self._ends = np.cumsum(-(-(np.diff(split.index) - 1) // max_length))
        if len(self) == 0:
            raise ValueError(f"split {split.name!r} has no document with a token in it")
        self.weights = self._identity_weights(identity_weights) if identity_weights else None

    def _identity_weights(self, identity: float) -> NDArray[np.float64]:
        tokens, lengths = self.get(np.arange(len(self)))
        if (lengths != lengths[0]).any():
            raise ValueError(
                "identity weights need the rows of an alignment, all of one length; those of split "
                f"{self.split.name!r} have from {lengths.min()} to {lengths.max()} tokens: use a "
                "tokenizer with gaps, such as protein-aligned, and a length that holds a whole row"
            )
        if tokens.max() > 255:
            raise ValueError("identity weights need an alphabet of letters, not words")
        return sequence_weights(tokens.astype(np.uint8), identity)

    @property
    def columns(self) -> int:
        """The number of tokens that every row has.

        Raises:
            ValueError: The rows differ in their number of tokens.
        """
        lengths = np.diff(self.split.index) - 1
        if lengths.min() != lengths.max():
            raise ValueError(
                f"the rows of split {self.split.name!r} have from {lengths.min()} to "
                f"{lengths.max()} tokens, but those of an alignment have one length: prepare an "
                "aligned file with a tokenizer with gaps, such as protein-aligned"
            )
        return int(lengths[0])

    def column_shares(self, vocab_size: int, pseudocount: float = 0.5) -> NDArray[np.float64]:
        """Return (columns, vocab_size) the weighted share of each token in each column."""
        tokens, _ = self.get(np.arange(len(self)))
        weights = np.ones(len(self)) if self.weights is None else self.weights
        counts = np.full((tokens.shape[1], vocab_size), pseudocount)
        for column, letters in enumerate(tokens.T):
            np.add.at(counts[column], letters, weights)
        return counts / counts.sum(1, keepdims=True)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def get(self, indices: NDArray[np.integer]) -> tuple[Array, Array]:
        """Return the tokens (B, max_length) and the true lengths (B,)."""
        rows = _checked(indices, len(self))
        documents = np.searchsorted(self._ends, rows, side="right")
        first = np.where(documents > 0, self._ends[documents - 1], 0)  # each document's first row
        starts = self._starts[documents] + (rows - first) * self.length
        stops = np.minimum(starts + self.length, self._stops[documents])
        return _rows(self.split, starts, stops, self.length)


def open_examples(
    split: Split,
    length: int,
    rows: str = "packed",
    cross_documents: bool = True,
    identity_weights: float = 0.0,
) -> Examples:
    """Return the rows of a split that a training configuration names.

    Args:
        split: The split.
        length: Largest length of a row.
        rows: "packed" for blocks of equal length, "records" for one document per row.
        cross_documents: Whether a packed row may span several documents. The model has no mask
            between documents, so False gives each row to a part of one document.
        identity_weights: See `Records`.
    """
    if rows == "records":
        return Records(split, length, identity_weights)
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
            f"row numbers of shape {wanted.shape} go from {wanted.min()} to {wanted.max()}; they "
            f"must be one-dimensional and in 0..{rows - 1}"
        )
    return wanted


def _rows(split: Split, starts: Array, stops: Array, length: int) -> tuple[Array, Array]:
    tokens = np.full((len(starts), length), split.eot_id, np.int64)
    for row, start, stop in zip(tokens, starts.tolist(), stops.tolist(), strict=True):
        row[: stop - start] = split.tokens.read(start, stop)
    return tokens, stops - starts
