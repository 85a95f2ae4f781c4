"""Open a prepared folder: its splits as long rows of token ids, read through memory maps."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tracformer.data.manifest import DTYPES, INDEX_DTYPE, Manifest, SplitCounts, index_file
from tracformer.data.tokenizer import Tokenizer

Array = NDArray[np.int64]


class Tokens:
    """All shards of a split as one sequence; only what is asked for is read from disk."""

    def __init__(self, shards: list[NDArray[Any]], shard_tokens: int) -> None:
        self._shards, self._shard_tokens = shards, shard_tokens
        self._length = sum(map(len, shards))

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Array:
        """Ids start..stop-1, as int64."""
        if not 0 <= start <= stop <= self._length:
            raise ValueError(f"tokens {start}..{stop} were asked for; the split has {self._length}")
        out = np.empty(stop - start, np.int64)
        done = 0
        while start + done < stop:
            shard, offset = divmod(start + done, self._shard_tokens)
            part = self._shards[shard][offset : offset + stop - start - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out


@dataclass(frozen=True)
class Split:
    name: str
    tokens: Tokens
    index: Array  # (documents + 1,): where each document begins, then where the last one ends
    counts: SplitCounts
    eot_id: int

    def document(self, number: int) -> Array:
        """A document's ids, its end of text included."""
        return self.tokens.read(int(self.index[number]), int(self.index[number + 1]))


class PreparedData:
    """A folder that `prepare` wrote."""

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
        self.folder, self.manifest, self.tokenizer = folder, manifest, tokenizer

    @classmethod
    def open(cls, folder: str | PathLike[str], verify: bool = False) -> Self:
        """Checks names, sizes and the tokeniser; with `verify`, also the SHA-256 of every file."""
        path = Path(folder)
        manifest = Manifest.read(path)
        manifest.check_files(path, hashes=verify)
        tokenizer = Tokenizer.load(path)
        if tokenizer.fingerprint != manifest.tokenizer.get("fingerprint"):
            raise ValueError(f"{path} is damaged: its tokeniser is not the one that its tokens were made with; prepare the data again")
        return cls(path, manifest, tokenizer)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest.splits)

    def split(self, name: str) -> Split:
        if name not in self.manifest.splits:
            raise ValueError(f"{self.folder} has no split {name!r}; it has: {', '.join(self.splits)}")
        dtype = DTYPES[self.manifest.dtype]
        shards = [self._map(file, dtype, length) for file, length in self.manifest.shards(name)]
        counts = self.manifest.splits[name]
        index = self._map(index_file(name), INDEX_DTYPE, counts.documents + 1)
        if index[0] != 0 or index[-1] != counts.tokens:
            raise ValueError(f"{self.folder} is damaged: the index of split {name!r} does not end where its tokens end; prepare it again")
        return Split(name, Tokens(shards, self.manifest.shard_tokens), index, counts, self.tokenizer.eot_id)

    def _map(self, file: str, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        """A plain array over the map: slices of np.memmap's own class cost several times as much."""
        return np.memmap(self.folder / file, dtype, "r", shape=(length,)).view(np.ndarray)
