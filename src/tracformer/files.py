"""Files: write atomically, read text in chunks, flush, hash, lock a folder; optional packages."""

import codecs
import gzip
import hashlib
import importlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast


def write_atomically(path: Path, content: str | Callable[[Path], Any]) -> None:
    """Write a file so that a reader finds the old file or the new one, never a part of either.

    Args:
        path: The file.
        content: The text, or a function that writes a file at the path that it is given.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if isinstance(content, str):
            part.write_text(content, encoding="utf-8", newline="\n")
        else:
            content(part)
        flush(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; it is created if necessary.

    The lock ends with the process, even if the process is killed.

    Raises:
        BlockingIOError: Another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows has no lock that ends when the process is killed
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Return the folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracformer"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that they survive a power cut."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def optional_package(name: str, purpose: str, extra: str) -> Any:
    """Import a package that an extra installs.

    Args:
        name: The package.
        purpose: What needs it, for the error message.
        extra: The extra of `tracformer` that installs it.

    Raises:
        ImportError: The package is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != name.partition(".")[0]:
            raise  # the package is there but broken: its own message says more
        raise ImportError(
            f"{purpose} needs the package {name!r}, which is not installed; install it with: pip "
            f"install 'tracformer[{extra}]'",
            name=name,
        ) from error


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
