"""In which order examples are read: a shuffled, endless stream in which one integer is a place to resume from."""

import numpy as np
from numpy.typing import NDArray

from tracformer.data.loader import Array

LARGEST_TABLE = 2**24  # examples; above, positions are computed one by one instead of kept in a table of n
ROUNDS = 6
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class ExampleOrder:
    """Epoch after epoch, each a permutation of 0..n-1 that depends on (seed, epoch) alone.

    Examples are numbered along the whole stream, across epochs' ends, so that none is dropped. A batch is a stretch of the stream, and any
    number of ranks that share it reads the same examples.
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
            raise ValueError(f"examples {start}..{start + count} of the stream were asked for; both numbers must be at least 0")
        parts: list[Array] = []
        while count > 0:
            epoch, offset = divmod(start, self.n)
            now = min(count, self.n - offset)
            parts.append(self._stretch(epoch, offset, now))
            start, count = start + now, count - now
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _stretch(self, epoch: int, offset: int, count: int) -> Array:
        if self.n > LARGEST_TABLE:
            return scattered(np.arange(offset, offset + count, dtype=np.uint64), self.n, self.seed, epoch)
        if epoch not in self._tables:
            if len(self._tables) >= 2:  # a batch spans two epochs at most, unless the data is smaller than a batch
                self._tables.clear()
            generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, epoch], np.uint64)))
            self._tables[epoch] = generator.permutation(self.n)
        return self._tables[epoch][offset : offset + count]


def scattered(positions: NDArray[np.uint64], n: int, seed: int, epoch: int) -> Array:
    """Each position's place in a permutation of 0..n-1, without a table.

    A Feistel network permutes 0..4^b-1, the next power of four; what falls outside 0..n-1 goes through it again until it falls inside.
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
