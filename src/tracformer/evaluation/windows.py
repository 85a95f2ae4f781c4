"""The sequences that every model is shown: windows of one text, the same for all of them.

Windows are cut by the tokeniser of the first model (`Subject.reference`). A model with another
tokeniser reads the same text in its own tokens, and is asked for the same stretches of it: a token
is a target where it overlaps one. Perplexities then count different things, and bits per byte
compare.
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
from tracformer.data.hub import HUB_PREFIX
from tracformer.data.shards import MANIFEST_FILE, Tokens
from tracformer.data.sources import with_gaps_of
from tracformer.data.tokenizer import AlphabetError
from tracformer.evaluation.provenance import array_hash
from tracformer.evaluation.task import Subject, Task
from tracformer.generation.token_text import spelled_bytes

ROWS = ("packed", "documents")
READ_BYTES = 2**26  # of raw text: windows come from the first 64 MB of it
ENCODE_AT_ONCE = 512  # documents
END = b"\xff"  # stands for an end of text among bytes: UTF-8 never uses it

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Windows:
    """Equal windows of a text in one tokeniser's ids."""

    tokens: Integers  # (N, T)
    tokenizer: Tokenizer

    @cached_property
    def hash(self) -> str:
        return array_hash([self.tokens])

    def contexts(self, strategy: Strategy, seed: int, count_eos: bool = False) -> Flags:
        """(N, T) bool, True where given; an end of text always, unless `count_eos`.

        Sequence i draws from (seed, i).
        """
        N, T = self.tokens.shape
        given = draw_contexts(strategy, np.full(N, T), seed, np.arange(N))
        return given if count_eos else given | (self.tokens == self.tokenizer.eot_id)

    @cached_property
    def spelled(self) -> list[list[bytes]]:
        """Each token's bytes; an end of text is `END`."""
        table = spelled_bytes(self.tokenizer)
        if table is None:
            raise ValueError(
                f"the tokeniser {self.tokenizer!r} does not spell its tokens byte by byte, so that "
                "another tokeniser cannot be asked for "
                "the same stretches of text; compare models of one tokeniser, or put another model "
                "first"
            )
        table = [*table[: self.tokenizer.eot_id], END, *table[self.tokenizer.eot_id + 1 :]]
        return [[table[i] for i in row] for row in self.tokens.tolist()]


@dataclass(frozen=True, eq=False)
class Sequences:
    """What one model reads: windows in its own tokens, padded on the right where
    they differ in length.
    """

    tokens: Integers  # (N, T)
    lengths: Integers  # (N,)
    # (N, T) bytes of text that each token stands for; None where the tokeniser does not say
    sizes: Integers | None
    eot_id: int
    windows: Windows
    # (N, T), where the tokeniser is not the windows': which bytes of the window each token covers
    starts: Integers | None = None
    stops: Integers | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def hash(self) -> str:
        """Of the windows: equal for all models that are compared."""
        return self.windows.hash

    def contexts(self, strategy: Strategy, seed: int, count_eos: bool = False) -> Flags:
        """(N, T) bool, True where given, padding too: the windows' contexts, a token being a target
        where it overlaps one of theirs.
        """
        given = self.windows.contexts(strategy, seed, count_eos)
        if self.starts is None or self.stops is None:
            return given
        own = np.ones(self.tokens.shape, np.bool_)
        for row, (known, spelled) in enumerate(zip(given, self.windows.spelled, strict=True)):
            open_bytes = np.repeat(~known, [len(token) for token in spelled])
            before = np.concatenate(([0], np.cumsum(open_bytes)))  # target bytes before each byte
            n = self.lengths[row]
            own[row, :n] = before[self.stops[row, :n]] == before[self.starts[row, :n]]
        return own


@dataclass(frozen=True)
class TextTask(Task):
    """A task on windows of a text."""

    # a folder of `tracformer prepare`, text files, a data set of the paper by name, or
    # hf:OWNER/NAME
    data: str = ""
    split: str = "validation"  # of a prepared folder or named data set; files are read whole
    length: int = 128  # tokens of a window
    sequences: int = 1000  # windows, spread evenly over the text; 0: all there are
    # documents run on, an end of text between them; "documents": each window is the beginning of a
    # document
    rows: str = "packed"
    documents: str = "separator"  # text files: what ends a document, as in `tracformer prepare`
    detokenize: str | None = None  # undo the tokenisation of wikitext, ptb, lambada or 1bw
    seed: int = 0  # of contexts and noise
    count_eos: bool = False  # is an end of text a token to predict? False: it is always given

    def __post_init__(self) -> None:
        if self.rows not in ROWS:
            raise ValueError(f"rows is {self.rows!r}; allowed: {', '.join(ROWS)}")
        if self.length < 1 or self.sequences < 0:
            raise ValueError(
                f"length is {self.length} and sequences {self.sequences}; a window has at least 1 "
                "token, and 0 means all windows"
            )

    def read(self, subject: Subject) -> Sequences:
        """The windows as this model reads them."""
        own = subject.tokenizer
        if own is None:
            raise ValueError(f"task {self.name!r} reads text, and {subject.name} has no tokeniser")
        reference = subject.reference or own
        place = (self.data, self.split, self.documents, self.detokenize)
        try:
            windows = _windows(place, self.length, self.sequences, self.rows, reference)
            read = _as_read(windows, own)
        except AlphabetError as error:
            raise ValueError(
                f"{subject.name} cannot be asked about {self.data}: {error}"
            ) from error
        longest = subject.model.config.max_length
        if read.tokens.shape[1] > longest:
            raise ValueError(
                f"windows of {self.length} tokens take up to {read.tokens.shape[1]} in "
                f"{subject.name}, which takes at most {longest}; "
                f"ask for a smaller length"
            )
        return read

    def data_facts(self, subject: Subject) -> dict[str, Any]:
        """What a manifest says about the data in words."""
        read = self.read(subject)
        shared = read.starts is None
        return {
            "name": self.options["data"],
            "sequences": len(read),
            "windows": "its own tokens"
            if shared
            else "text windows of the first model's tokeniser, read in its own tokens",
            "windows_tokenizer": read.windows.tokenizer.fingerprint,
        }

    def manifest(self, subject: Subject) -> dict[str, Any]:
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
            f"{have}, and windows of {length} are asked for; give more text, or a smaller length"
        )
    wanted = sequences or len(first)
    if wanted > len(first):
        raise ValueError(
            f"{place[0]} holds {len(first)} windows of {length} tokens, and {wanted} are asked "
            "for; 0 asks for all there are"
        )
    chosen = first[np.arange(wanted) * len(first) // wanted]
    return Windows(
        np.stack([stream.read(start, start + length) for start in chosen.tolist()]), tokenizer
    )


def _stream(
    place: tuple[str, str, str, str | None], tokenizer: Tokenizer
) -> tuple[Tokens, Integers]:
    """All tokens, an end of text behind each document, and where documents start and
    the last one stops.
    """
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
    """The prepared folder that `data` names: itself, or the one inside a run."""
    if not data:
        raise ValueError(
            "no data named; give --data FOLDER or FILE, a data set of the paper by name, or data= "
            "in the task"
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
    named = bool(named_sets(data))
    if not named and not data.startswith(HUB_PREFIX):
        try:
            return open_sources(data, documents=division, detokenize=detokenize)["train"]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}. It was looked for at {Path(data).absolute()}; text files are read as "
                "they are, and "
                "`tracformer prepare NAME --out FOLDER` fetches a named data set"
            ) from error
    options = {"detokenize": detokenize} if detokenize else {}
    sources = open_sources(data, **options, **({} if named else {"split": split}))
    if named and split not in sources:
        raise ValueError(f"data set {data!r} has no split {split!r}; it has: {', '.join(sources)}")
    return sources[split if named else "train"]


def _encoded(texts: Iterator[str], tokenizer: Tokenizer) -> tuple[Tokens, Integers]:
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
    table = spelled_bytes(own)
    lengths = None if table is None else np.array([len(token) for token in table], np.int64)
    if own.fingerprint == windows.tokenizer.fingerprint:
        sizes = None if lengths is None else lengths[windows.tokens]
        whole = np.full(len(windows.tokens), windows.tokens.shape[1], np.int64)
        return Sequences(windows.tokens, whole, sizes, own.eot_id, windows)
    if table is None or lengths is None:
        raise ValueError(
            f"the tokeniser {own!r} does not spell its tokens byte by byte, so that it cannot be "
            "asked for another tokeniser's stretches "
            "of text; compare models of one tokeniser"
        )
    rows = [_respelled(b"".join(spelled), own, lengths) for spelled in windows.spelled]
    counts = np.array([len(ids) for ids, _ in rows], np.int64)
    tokens = np.full((len(rows), counts.max()), own.eot_id, np.int64)
    starts, stops = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, (ids, edges) in enumerate(rows):
        tokens[row, : len(ids)], starts[row, : len(ids)], stops[row, : len(ids)] = (
            ids,
            edges[:, 0],
            edges[:, 1],
        )
    return Sequences(tokens, counts, lengths[tokens], own.eot_id, windows, starts, stops)


def _respelled(window: bytes, own: Tokenizer, lengths: Integers) -> tuple[list[int], Integers]:
    """A window's bytes in another tokeniser's ids, and (n, 2) the bytes each covers.

    Half a character at an edge is left out.
    """
    ids: list[int] = []
    edges: list[tuple[int, int]] = []
    cuts = [-1, *(i for i, byte in enumerate(window) if byte == END[0]), len(window)]
    for before, after in pairwise(cuts):
        if before >= 0:
            ids.append(own.eot_id)
            edges.append((before, before + 1))
        at = before + 1
        # the rest of a character that began before the window
        while at < after and window[at] & 0xC0 == 0x80:
            at += 1
        segment = window[at:after].decode(errors="ignore")
        spelt = own.encode(segment, inside=True)
        if sum(int(lengths[i]) for i in spelt) != len(segment.encode()):
            raise ValueError(
                f"the tokeniser {own!r} changes text before it spells it, so that it cannot be "
                "asked for another tokeniser's stretches of "
                "text; compare models of one tokeniser"
            )
        for i in spelt:
            ids.append(i)
            edges.append((at, at + int(lengths[i])))
            at += int(lengths[i])
    return ids, np.array(edges, np.int64).reshape(-1, 2)
