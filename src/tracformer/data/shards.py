"""A prepared folder: its manifest, and its splits as memory-mapped token ids.

    train-00000.bin ...   token ids, little-endian; all shards but the last have equal length
    train.index.bin       int64: where each document begins, then where the split ends
    tokenizer.json        and tokenizer_config.json
    manifest.json         counts, hashes, sources, and the SHA-256 of all this; written last

`SplitWriter` writes the shards and the index of one split, and continues after a kill.
`PreparedData.open` opens a folder that `prepare` wrote; `PreparedData.split` gives a `Split` with
its `Tokens`.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tracformer.data.tokenizer import CONFIG_FILE, Tokenizer
from tracformer.files import digest_of, sha256_of

MANIFEST_FILE = "manifest.json"
FORMAT, VERSION = "tracformer-data", 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
CHECKSUM = "sha256"  # key in the manifest
INDEX_DTYPE = np.dtype("<i8")


def dtype_name(vocab_size: int) -> str:
    """Return the narrowest integer type that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def shard_file(split: str, number: int) -> str:
    """Return the name of a shard."""
    return f"{split}-{number:05d}.bin"


def index_file(split: str) -> str:
    """Return the name of a split's index."""
    return f"{split}.index.bin"


@dataclass(frozen=True)
class SplitCounts:
    """Sizes of one split.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens, with an end of text after each document.
        bytes: Size of the tokenized text in UTF-8; needed for bits per byte.
    """

    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        dtype: Integer type of the token ids, a key of `DTYPES`.
        shard_tokens: Number of tokens in every shard but the last.
        tokenizer: Kind, fingerprint and sizes of the tokenizer.
        splits: Counts of each split.
        sources: Description of each source.
        carving: How each source was divided into splits.
        files: Size and SHA-256 of each file.
        contents: SHA-256 of the local files of each source, versions of remote ones; empty in
            older folders.
        left_out: Number of records that could not be read or tokenized.
    """

    dtype: str
    shard_tokens: int
    tokenizer: dict[str, Any]
    splits: dict[str, SplitCounts]
    sources: dict[str, dict[str, Any]]
    carving: dict[str, Any]
    files: dict[str, dict[str, Any]]
    contents: dict[str, list[str]] = field(default_factory=dict)
    left_out: int = 0

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        # ASCII, because the name of a source file may not be UTF-8
        return json.dumps({**document, CHECKSUM: digest_of(document)}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read and check the manifest of a folder."""
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} is not prepared data: there is no {MANIFEST_FILE} in it; prepare data "
                "with `tracformer prepare`"
            )
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']!r}, not {FORMAT!r}")
            if document["version"] != VERSION:
                raise ValueError(
                    f"its version is {document['version']!r}, but this program reads version "
                    f"{VERSION}; prepare the data again"
                )
            splits = {name: SplitCounts(**counts) for name, counts in document["splits"].items()}
            needed = ("dtype", "shard_tokens", "tokenizer", "sources", "carving", "files")
            manifest = cls(
                splits=splits,
                contents=document.get("contents", {}),
                left_out=document.get("left_out", 0),
                **{name: document[name] for name in needed},
            )
            if manifest.dtype not in DTYPES:
                raise ValueError(f"its dtype is {manifest.dtype!r}; allowed: {', '.join(DTYPES)}")
            known = document.pop(CHECKSUM, None)
            if known not in (None, digest_of(document)):
                raise ValueError("it does not match its SHA-256; prepare the data again")
            # Older folders have no SHA-256, and one whose key is damaged must not pass for them.
            names = {"format", "version", *(each.name for each in fields(cls))}
            if unknown := sorted(document.keys() - names):
                raise ValueError(f"it has unknown keys: {', '.join(map(repr, unknown))}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} cannot be used as a manifest: {what}") from error
        return manifest

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens, the documents' ends and the tokenizer.

        It covers all files except `tokenizer_config.json`, which only other tools need.
        """
        hashes = {
            name: facts["sha256"] for name, facts in self.files.items() if name != CONFIG_FILE
        }
        return digest_of(hashes)

    def shards(self, split: str) -> list[tuple[str, int]]:
        """Return the names and lengths of a split's shards."""
        tokens, size = self.splits[split].tokens, self.shard_tokens
        return [
            (shard_file(split, i), min(size, tokens - i * size)) for i in range(-(-tokens // size))
        ]

    def check_files(self, folder: Path, hashes: bool) -> None:
        """Raise ValueError unless every file is there with the right size.

        Args:
            folder: The folder.
            hashes: Check the SHA-256 of every file too.
        """
        problems = []
        for name, facts in self.files.items():
            path = folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif (size := path.stat().st_size) != facts["bytes"]:
                problems.append(f"{name} has {size} bytes where {facts['bytes']} were written")
            elif hashes and sha256_of(path) != facts["sha256"]:
                problems.append(f"{name} does not match its SHA-256")
        width = DTYPES[self.dtype].itemsize
        needed = {
            name: length * width for split in self.splits for name, length in self.shards(split)
        }
        needed |= {
            index_file(split): (counts.documents + 1) * INDEX_DTYPE.itemsize
            for split, counts in self.splits.items()
        }
        problems += [
            f"{name} does not have the length that the counts require"
            for name, size in needed.items()
            if self._size(name) != size
        ]
        if problems:
            shown = "; ".join(problems[:5]) + (
                f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            )
            raise ValueError(f"{folder} is damaged: {shown}; prepare the data again")

    def _size(self, name: str) -> int | None:
        size: int | None = self.files.get(name, {}).get("bytes")
        return size


class SplitTokens(NamedTuple):
    """Tokens of one split, to be appended to it.

    Attributes:
        ids: Token ids, with an end of text after each document.
        ends: Where in `ids` documents end.
        bytes: Size of the text in UTF-8.
    """

    ids: NDArray[np.unsignedinteger[Any]]
    ends: NDArray[np.int64]
    bytes: int


class SplitWriter:
    """Write the shards and the index of one split, and hash them.

    Args:
        folder: The folder.
        split: Name of the split.
        dtype: Type of the ids.
        shard_tokens: Number of tokens per shard.
        files: Closes the files.
        state: What `state` returned at an earlier time: continue from there.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype[Any],
        shard_tokens: int,
        files: ExitStack,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.documents = self.tokens = self.bytes = 0
        self.facts: dict[str, dict[str, Any]] = {}  # of finished files
        self._files = files
        self._shard: _HashedFile | None = None
        if state is None:
            self._index = self._open(index_file(split))
            self._index.write(np.zeros(1, INDEX_DTYPE).tobytes())
            return
        self.documents, self.tokens, self.bytes = (
            state["documents"],
            state["tokens"],
            state["bytes"],
        )
        self.facts = dict(state["facts"])
        self._index = self._open(index_file(split), (state["documents"] + 1) * INDEX_DTYPE.itemsize)
        if rest := self.tokens - len(self.facts) * shard_tokens:
            self._shard = self._open(shard_file(split, len(self.facts)), rest * dtype.itemsize)

    def add(self, tokens: SplitTokens) -> None:
        """Append tokens, and note where documents end in them."""
        self._index.write((self.tokens + tokens.ends).astype(INDEX_DTYPE).tobytes())
        self.documents += len(tokens.ends)
        self.bytes += tokens.bytes
        data = tokens.ids.astype(self.dtype, copy=False)
        while len(data):
            number, filled = divmod(self.tokens, self.shard_tokens)
            if filled == 0 or self._shard is None:
                self._finish_shard()
                self._shard = self._open(shard_file(self.split, number))
            now, data = data[: self.shard_tokens - filled], data[self.shard_tokens - filled :]
            self._shard.write(now.tobytes())
            self.tokens += len(now)

    def state(self) -> dict[str, Any]:
        """Flush the files to disk and return what is needed to continue from here."""
        for file in (self._index, self._shard):
            if file is not None:
                file.flush()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "facts": self.facts,
        }

    def finish(self) -> SplitCounts:
        """Close the files and return the split's sizes."""
        self._finish_shard()
        self.facts[index_file(self.split)] = self._index.finish()
        return SplitCounts(self.documents, self.tokens, self.bytes)

    def _open(self, name: str, size: int = 0) -> "_HashedFile":
        """Open a file of which `size` bytes are kept."""
        path = self.folder / name
        file: BinaryIO = open(path, "r+b") if size else open(path, "wb")  # noqa: SIM115
        return _HashedFile(self._files.enter_context(file), size)

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self.facts[shard_file(self.split, len(self.facts))] = self._shard.finish()
            self._shard = None


class _HashedFile:
    """A file that hashes what is written to it, after `size` bytes that it has already."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), size
        left = size
        while left:
            block = file.read(min(left, 1 << 22))
            if not block:
                raise ValueError(
                    f"{file.name} is shorter than recorded: delete the folder and prepare the data "
                    "again"
                )
            self.digest.update(block)
            left -= len(block)
        if size:
            file.truncate(size)  # what was written after the last record
            file.seek(size)

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.bytes += len(data)

    def flush(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> dict[str, Any]:
        self.flush()
        self.file.close()
        return {"bytes": self.bytes, "sha256": self.digest.hexdigest()}


Array = NDArray[np.int64]


class Tokens:
    """All shards of a split as one sequence; only the tokens in use are read from disk.

    Args:
        shards: The shards.
        shard_tokens: Number of tokens in every shard but the last.
        verify: Called with the number of a shard before its first tokens are read.
    """

    def __init__(
        self,
        shards: list[NDArray[Any]],
        shard_tokens: int,
        verify: Callable[[int], None] | None = None,
    ) -> None:
        self._shards, self._shard_tokens, self._verify = shards, shard_tokens, verify
        self._verified: set[int] = set()
        self._length = sum(map(len, shards))

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Array:
        """Return tokens start..stop-1 as int64."""
        if not 0 <= start <= stop <= self._length:
            raise ValueError(
                f"cannot read tokens {start}..{stop}; the split has {self._length} tokens"
            )
        out = np.empty(stop - start, np.int64)
        done = 0
        while start + done < stop:
            shard, offset = divmod(start + done, self._shard_tokens)
            if self._verify is not None and shard not in self._verified:
                self._verify(shard)
                self._verified.add(shard)
            part = self._shards[shard][offset : offset + stop - start - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out


@dataclass(frozen=True)
class Split:
    """One split of prepared data.

    Attributes:
        name: Name of the split, for instance "train".
        tokens: All token ids.
        index: (documents + 1,) where each document begins, then where the last one ends.
        counts: Sizes.
        eot_id: Id of end of text.
    """

    name: str
    tokens: Tokens
    index: Array
    counts: SplitCounts
    eot_id: int

    def document(self, number: int) -> Array:
        """Return the ids of a document, with its end of text."""
        return self.tokens.read(int(self.index[number]), int(self.index[number + 1]))


class PreparedData:
    """A folder that `prepare` wrote; open it with `PreparedData.open`.

    Attributes:
        folder: The folder.
        manifest: Its manifest.
        tokenizer: Its tokenizer.
    """

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
        self.folder, self.manifest, self.tokenizer = folder, manifest, tokenizer

    @classmethod
    def open(cls, folder: str | PathLike[str], verify: bool = False) -> Self:
        """Open a prepared folder after checking its files' names and sizes and its tokenizer.

        Args:
            folder: The folder.
            verify: Check the SHA-256 of every file too.
        """
        path = Path(folder)
        manifest = Manifest.read(path)
        manifest.check_files(path, hashes=verify)
        tokenizer = Tokenizer.load(path)
        if tokenizer.fingerprint != manifest.tokenizer.get("fingerprint"):
            raise ValueError(
                f"{path} is damaged: its tokens were made with another tokenizer than the one in "
                "it; prepare the data again"
            )
        return cls(path, manifest, tokenizer)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self.manifest.splits)

    def split(self, name: str) -> Split:
        """Return a split by its name."""
        if name not in self.manifest.splits:
            raise ValueError(
                f"{self.folder} has no split {name!r}; it has: {', '.join(self.splits)}"
            )
        dtype = DTYPES[self.manifest.dtype]
        shards = [self._map(file, dtype, length) for file, length in self.manifest.shards(name)]
        counts = self.manifest.splits[name]
        index = self._map(index_file(name), INDEX_DTYPE, counts.documents + 1)
        if index[0] != 0 or index[-1] != counts.tokens:
            raise ValueError(
                f"{self.folder} is damaged: the index of split {name!r} does not end where its "
                "tokens end; prepare it again"
            )
        self._verify(index_file(name))
        tokens = Tokens(
            shards,
            self.manifest.shard_tokens,
            lambda shard: self._verify(shard_file(name, shard)),
        )
        return Split(name, tokens, index, counts, self.tokenizer.eot_id)

    def _verify(self, file: str) -> None:
        """Raise a ValueError if a file does not match its SHA-256."""
        if sha256_of(self.folder / file) != self.manifest.files[file]["sha256"]:
            raise ValueError(
                f"{self.folder} is damaged: {file} does not match its SHA-256; prepare the data "
                "again"
            )

    def _map(self, file: str, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        # a plain array over the map: slices of np.memmap itself are several times slower
        return np.memmap(self.folder / file, dtype, "r", shape=(length,)).view(np.ndarray)
