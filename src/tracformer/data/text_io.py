"""Read text files in chunks: UTF-8, plain or gzip."""

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

CHUNK_BYTES = 1 << 22


def read_text(path: Path) -> Iterator[str]:
    """Yield the text of a file in chunks of a few MB; `.gz` is unpacked.

    Raises:
        ValueError: The file is not UTF-8 (the error gives the offset) or not a whole gzip file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    consumed = 0
    with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else open(path, "rb")) as file:
        while True:
            try:
                block = file.read(CHUNK_BYTES)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path} is not a whole gzip file: {error}") from error
            waiting = len(decoder.getstate()[0])  # bytes of a character that began before
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
                    f"{consumed - waiting + error.start}"
                    f"{' of the unpacked text' if path.suffix == '.gz' else ''}; convert the file "
                    "to UTF-8 first, for instance with iconv"
                ) from error
            if consumed == 0:
                text = text.removeprefix("\ufeff")
            consumed += len(block)
            if text:
                yield text
            if not block:
                return


def lines_of(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text, each with its newline. A line must fit in memory."""
    begun: list[str] = []
    for chunk in chunks:
        *whole, rest = chunk.split("\n")
        for line in whole:
            yield "".join([*begun, line, "\n"])
            begun.clear()
        if rest:
            begun.append(rest)
    if begun:
        yield "".join(begun)
