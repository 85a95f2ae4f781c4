"""Tokenize documents in batches, in this process or in several.

    for batch in encode(tokenizer, routed, workers=4):
        for split, tokens in batch.splits.items():
            ...

Batches are made in the order of the documents, and what they contain does not depend on the number
of workers.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracformer.data.documents import TextPiece
from tracformer.data.input_files import BadRecordError
from tracformer.data.shards import DTYPES, SplitTokens, dtype_name
from tracformer.data.tokenizer import AlphabetError, Ids, Tokenizer
from tracformer.workers import ordered_map

# documents are tokenized in batches large enough for all cores
BATCH_CHARACTERS, BATCH_PIECES = 1 << 21, 4096

Routed = tuple[str, TextPiece]  # a piece with the name of its split


class TokenBatch(NamedTuple):
    """A tokenized batch.

    Attributes:
        pieces: Number of pieces that it was made of.
        splits: Tokens by split.
        left_out: A message for each piece that cannot be tokenized.
    """

    pieces: int
    splits: dict[str, SplitTokens]
    left_out: list[str]


def encode(
    tokenizer: Tokenizer, batches: Iterable[list[Routed]], workers: int | None, skip_bad: bool
) -> Iterator[TokenBatch]:
    """Yield the tokens of each batch, in order.

    Args:
        tokenizer: The tokenizer.
        batches: Lists of pieces, as from `batches_of`.
        workers: Number of processes with one thread each. None: this process, with the tokenizer
            library's threads.
        skip_bad: Leave out pieces with characters that the tokenizer does not have. False: such a
            piece is an error.
    """
    arguments = (tokenizer.document, tokenizer.kind, tokenizer.eot, skip_bad)
    if workers is None:
        yield from map(make_encoder(*arguments), batches)
        return
    with _one_thread():
        yield from ordered_map(make_encoder, arguments, batches, workers)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if threads is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = threads


def batches_of(routed: Iterable[Routed], errors: list[ValueError]) -> Iterator[list[Routed]]:
    """Yield lists of pieces of about 2 MB.

    If reading fails, what was read before is yielded, and the error is added to `errors`.
    """
    batch: list[Routed] = []
    characters = 0
    try:
        for item in routed:
            batch.append(item)
            characters += len(item[1].text)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
                yield batch
                batch, characters = [], 0
    except ValueError as error:
        errors.append(error)
    if batch:
        yield batch


def make_encoder(document: str, kind: str, eot: str, skip_bad: bool) -> "BatchEncoder":
    """Return what tokenizes batches in a process."""
    return BatchEncoder(Tokenizer(document, kind, eot), skip_bad)


class BatchEncoder:
    """Tokenizes batches of pieces.

    Args:
        tokenizer: The tokenizer.
        skip_bad: Leave out pieces with characters that it does not have.
    """

    def __init__(self, tokenizer: Tokenizer, skip_bad: bool) -> None:
        self.tokenizer, self.skip_bad = tokenizer, skip_bad
        self._dtype = DTYPES[dtype_name(tokenizer.vocab_size)]

    def __call__(self, batch: list[Routed]) -> TokenBatch:
        """Return the tokens of a batch."""
        arrays: dict[str, list[NDArray[Any]]] = {}
        lengths: dict[str, int] = {}
        ends: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        eot = np.array([self.tokenizer.eot_id], self._dtype)
        left_out: list[str] = []
        for (split, piece), ids in zip(batch, self._ids(batch, left_out), strict=True):
            if ids is None and piece.end and not piece.offset:
                continue  # the whole document is left out
            found = arrays.setdefault(split, [])
            length = lengths.get(split, 0)
            if ids is not None:
                found.append(ids.astype(self._dtype, copy=False))
                length += len(ids)
                sizes[split] = sizes.get(split, 0) + _bytes_of(piece.text)
            if piece.end:
                found.append(eot)
                length += 1
                ends.setdefault(split, []).append(length)
            lengths[split] = length
        splits = {
            split: SplitTokens(
                np.concatenate(found) if found else eot[:0],
                np.array(ends.get(split, []), np.int64),
                sizes.get(split, 0),
            )
            for split, found in arrays.items()
        }
        return TokenBatch(len(batch), splits, left_out)

    def _ids(self, batch: list[Routed], left_out: list[str]) -> Iterator[Ids | None]:
        """Yield the ids of each piece; None for one that is left out."""
        try:
            encoded: list[Ids | None] = [
                *self.tokenizer.encode_batch([piece.text for _, piece in batch])
            ]
        except AlphabetError as error:
            message = _explain(error, batch[error.text_number][1])
            if not self.skip_bad:
                raise BadRecordError(message) from error
            if len(batch) == 1:
                left_out.append(message)
                yield None
            else:
                for item in batch:
                    yield from self._ids([item], left_out)
            return
        for (_, piece), ids in zip(batch, encoded, strict=True):
            if piece.offset and self.tokenizer.adds_prefix_space:  # not a document's beginning
                yield np.array(self.tokenizer.encode(piece.text, inside=True), np.uint32)
            else:
                yield ids


def _explain(error: AlphabetError, piece: TextPiece) -> str:
    excerpt = piece.text[max(0, error.offset - 10) : error.offset + 10]
    where = f"at offset {piece.offset + error.offset} ({excerpt!r})"
    return f"{piece.origin}: {error.explain(where)}"


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
