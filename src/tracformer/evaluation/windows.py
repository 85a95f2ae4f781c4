"""Windows of text: the sequences that all compared models read.

Windows are cut by the tokenizer of the first model (`Subject.reference`). A model with another
tokenizer reads the same text in its own tokens and predicts the same stretches of it: a token is a
target if it overlaps one. Perplexities per token are then not comparable, bits per byte are.

`Windows` are the windows in the reference's tokens, `Sequences` what one model reads, and
`TextTask` is the base class of tasks on text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracformer.contexts import Strategy, draw_contexts
from tracformer.data import (
    DataSource,
    PreparedData,
    Tokenizer,
    named_sets,
    open_sources,
    whole_documents,
)
from tracformer.data.hub_sources import HUB_PREFIX
from tracformer.data.shards import MANIFEST_FILE, Tokens
from tracformer.data.sources import with_gaps_of
from tracformer.data.tokenizer import AlphabetError
from tracformer.evaluation import TextTaskOptions
from tracformer.evaluation.result_files import array_hash
from tracformer.evaluation.task import Subject, Task
from tracformer.generation.token_text import spelled_bytes

READ_BYTES = 2**26  # windows come from the first 64 MB of raw text
ENCODE_AT_ONCE = 512  # documents
END = b"\xff"  # stands for an end of text among bytes: UTF-8 never uses it

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of equal length, in the ids of the tokenizer that cut them."""

    tokens: Integers  # (N, T)
    tokenizer: Tokenizer

    @cached_property
    def hash(self) -> str:
        """Hash of the tokens."""
        return array_hash([self.tokens])

    def contexts(self, strategy: Strategy, seed: int, count_eos: bool = False) -> Flags:
        """Return contexts (N, T), True where given; sequence i draws from (seed, i).

        An end of text is always given, unless `count_eos`.
        """
        N, T = self.tokens.shape
        given = draw_contexts(strategy, np.full(N, T), seed, np.arange(N))
        return given if count_eos else given | (self.tokens == self.tokenizer.eot_id)

    @cached_property
    def spelled(self) -> list[list[bytes]]:
        """The bytes of each token; an end of text is `END`."""
        table = spelled_bytes(self.tokenizer)
        if table is None:
            raise ValueError(
                f"the tokenizer {self.tokenizer!r} does not map its tokens to bytes, so models "
                "with other tokenizers cannot read the same stretches of text; compare models of "
                "one tokenizer, or name another model first"
            )
        table = [*table[: self.tokenizer.eot_id], END, *table[self.tokenizer.eot_id + 1 :]]
        return [[table[i] for i in row] for row in self.tokens.tolist()]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Windows in one model's own tokens, padded on the right where they differ in length.

    Args:
        tokens: (N, T) ids.
        lengths: (N,) numbers of tokens without padding.
        sizes: (N, T) number of bytes of each token; None if the tokenizer does not tell.
        windows: The windows as the reference cut them.
        starts: (N, T) first byte of the window that each token covers; None if the model's
            tokenizer is the reference.
        stops: (N, T) end of these bytes.
    """

    tokens: Integers
    lengths: Integers
    sizes: Integers | None
    windows: Windows
    starts: Integers | None = None
    stops: Integers | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def hash(self) -> str:
        """Hash of the windows, equal for all models that are compared."""
        return self.windows.hash

    def contexts(self, strategy: Strategy, seed: int, count_eos: bool = False) -> Flags:
        """Return contexts (N, T), True where given and in padding.

        A token is a target if it overlaps a target of the windows' contexts.
        """
        given = self.windows.contexts(strategy, seed, count_eos)
        if self.starts is None or self.stops is None:
            return given
        own = np.ones(self.tokens.shape, np.bool_)
        for row, (known, spelled) in enumerate(zip(given, self.windows.spelled, strict=True)):
            targets = np.repeat(~known, [len(token) for token in spelled])  # by byte
            before = np.concatenate(([0], np.cumsum(targets)))  # target bytes before each byte
            n = self.lengths[row]
            own[row, :n] = before[self.stops[row, :n]] == before[self.starts[row, :n]]
        return own


@dataclass(frozen=True)
class TextTask(Task, TextTaskOptions):
    """Base class of tasks on windows of a text."""

    def read(self, subject: Subject) -> Sequences:
        """Return the windows as this model reads them."""
        own = subject.tokenizer
        if own is None:
            raise ValueError(f"task {self.name!r} reads text, but {subject.name} has no tokenizer")
        reference = subject.reference or own
        place = (self.data, self.split, self.documents, self.detokenize)
        try:
            windows = _windows(place, self.length, self.sequences, self.rows, reference)
            read = _as_read(windows, own)
        except AlphabetError as error:
            raise ValueError(f"{subject.name} cannot read {self.data}: {error}") from error
        longest = subject.model.config.max_length
        if read.tokens.shape[1] > longest:
            raise ValueError(
                f"windows of {self.length} tokens have up to {read.tokens.shape[1]} tokens in "
                f"{subject.name}, which takes at most {longest}; choose a smaller length"
            )
        return read

    def data_facts(self, subject: Subject) -> dict[str, Any]:
        """Return what the manifest tells about the data."""
        read = self.read(subject)
        shared = read.starts is None
        return {
            "name": self.options["data"],
            "sequences": len(read),
            "windows": "its own tokens"
            if shared
            else "text windows of the first model's tokenizer, read in its own tokens",
            "windows_tokenizer": read.windows.tokenizer.fingerprint,
        }

    def manifest(self, subject: Subject) -> dict[str, Any]:
        """Return what identifies a result of this task and how it is made."""
        return {**super().manifest(subject), "data": self.data_facts(subject)}


@lru_cache(maxsize=16)
def _windows(
    place: tuple[str, str, str, str | None],
    length: int,
    sequences: int,
    rows: str,
    tokenizer: Tokenizer,
) -> Windows:
    stream, starts = _stream(place, tokenizer)
    if rows == "packed":
        first = np.arange(len(stream) // length) * length
        have = f"{place[0]} has {len(stream)} tokens"
    else:
        sizes = np.diff(starts) - 1  # without the end of text
        first = starts[:-1][sizes >= length]
        have = f"the longest document of {place[0]} has {sizes.max()} tokens"
    if len(first) == 0:
        raise ValueError(
            f"{have}, fewer than a window of {length}; give more text or choose a smaller length"
        )
    wanted = sequences or len(first)
    if wanted > len(first):
        raise ValueError(
            f"sequences is {wanted}, but {place[0]} holds only {len(first)} windows of {length} "
            "tokens; 0 takes all"
        )
    chosen = first[np.arange(wanted) * len(first) // wanted]
    return Windows(
        np.stack([stream.read(start, start + length) for start in chosen.tolist()]), tokenizer
    )


def _stream(
    place: tuple[str, str, str, str | None], tokenizer: Tokenizer
) -> tuple[Tokens, Integers]:
    """Return all tokens, each document followed by an end of text, and the documents' edges."""
    data, split, division, detokenize = place
    folder = _prepared(data)
    if folder is None:
        return _encoded(
            whole_documents(with_gaps_of(tokenizer, _source(data, split, division, detokenize))),
            tokenizer,
        )
    prepared = PreparedData.open(folder)
    part = prepared.split(split)
    if prepared.tokenizer.fingerprint == tokenizer.fingerprint:
        return part.tokens, np.asarray(part.index)
    numbers = range(part.counts.documents)
    return _encoded((prepared.tokenizer.decode(part.document(i)[:-1]) for i in numbers), tokenizer)


def _prepared(data: str) -> Path | None:
    """Return the prepared folder that `data` names, itself or inside a run; None if it is text."""
    if not data:
        raise ValueError(
            "no data given; name a folder, files or a data set by --data, or by data= in the task"
        )
    return next(
        (
            folder
            for folder in (Path(data), Path(data) / "data")
            if (folder / MANIFEST_FILE).is_file()
        ),
        None,
    )


def _source(data: str, split: str, division: str, detokenize: str | None) -> DataSource:
    """Return one split of files, of a named data set, or of a data set of the hub."""
    named = bool(named_sets(data))
    if not named and not data.startswith(HUB_PREFIX):
        try:
            return open_sources(data, documents=division, detokenize=detokenize)["train"]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}. Looked for at {Path(data).absolute()}; give text files, or fetch a "
                "named data set by `tracformer prepare NAME --out FOLDER`"
            ) from error
    options = {"detokenize": detokenize} if detokenize else {}
    sources = open_sources(data, **options, **({} if named else {"split": split}))
    if named and split not in sources:
        raise ValueError(f"data set {data!r} has no split {split!r}; it has: {', '.join(sources)}")
    return sources[split if named else "train"]


def _encoded(texts: Iterator[str], tokenizer: Tokenizer) -> tuple[Tokens, Integers]:
    """Return the tokens of texts and their edges, up to READ_BYTES of text."""
    parts: list[Integers] = []
    batch: list[str] = []
    end = np.array([tokenizer.eot_id], np.int64)

    def encode() -> None:
        for ids in tokenizer.encode_batch(batch):
            parts.append(np.concatenate((ids.astype(np.int64), end)))
        batch.clear()

    seen = 0
    for text in texts:
        batch.append(text)
        seen += len(text.encode())
        if len(batch) >= ENCODE_AT_ONCE:
            encode()
        if seen >= READ_BYTES:
            break
    encode()
    tokens = np.concatenate(parts)
    return Tokens([tokens], len(tokens)), np.concatenate(
        ([0], np.cumsum([len(part) for part in parts]))
    )


@lru_cache(maxsize=16)
def _as_read(windows: Windows, own: Tokenizer) -> Sequences:
    """Return windows in the ids of a tokenizer."""
    table = spelled_bytes(own)
    lengths = None if table is None else np.array([len(token) for token in table], np.int64)
    if own.fingerprint == windows.tokenizer.fingerprint:
        sizes = None if lengths is None else lengths[windows.tokens]
        whole = np.full(len(windows.tokens), windows.tokens.shape[1], np.int64)
        return Sequences(windows.tokens, whole, sizes, windows)
    if table is None or lengths is None:
        raise ValueError(
            f"the tokenizer {own!r} does not map its tokens to bytes, so it cannot read the "
            "stretches of text of another tokenizer; compare models of one tokenizer"
        )
    rows = [_respelled(b"".join(spelled), own, lengths) for spelled in windows.spelled]
    counts = np.array([len(ids) for ids, _ in rows], np.int64)
    tokens = np.full((len(rows), counts.max()), own.eot_id, np.int64)
    starts, stops = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, (ids, edges) in enumerate(rows):
        n = len(ids)
        tokens[row, :n], starts[row, :n], stops[row, :n] = ids, edges[:, 0], edges[:, 1]
    return Sequences(tokens, counts, lengths[tokens], windows, starts, stops)


def _respelled(window: bytes, own: Tokenizer, lengths: Integers) -> tuple[list[int], Integers]:
    """Return the ids of a window's bytes in another tokenizer, and the bytes each covers, (n, 2).

    A character that is cut by the window's edge is left out.
    """
    ids: list[int] = []
    edges: list[tuple[int, int]] = []
    cuts = [-1, *(i for i, byte in enumerate(window) if byte == END[0]), len(window)]
    for before, after in pairwise(cuts):
        if before >= 0:
            ids.append(own.eot_id)
            edges.append((before, before + 1))
        at = before + 1
        # skip the rest of a character that began before the window
        while at < after and window[at] & 0xC0 == 0x80:
            at += 1
        segment = window[at:after].decode(errors="ignore")
        encoded = own.encode(segment, inside=True)
        if sum(int(lengths[i]) for i in encoded) != len(segment.encode()):
            raise ValueError(
                f"the tokenizer {own!r} changes text before encoding it, so it cannot read the "
                "stretches of text of another tokenizer; compare models of one tokenizer"
            )
        for i in encoded:
            ids.append(i)
            edges.append((at, at + int(lengths[i])))
            at += int(lengths[i])
    return ids, np.array(edges, np.int64).reshape(-1, 2)
