"""Input files: local or at an address, plain or compressed, read as bytes or as text.

    RemoteFile                 a file at an address of `fsspec`, such as s3://bucket/part.jsonl.zst
    find_files                 the files of a folder, a glob or an address
    size_of, version_of,       what is known about a file
    digest_of
    plain_name                 the name of a file without .gz, .bz2, .xz or .zst
    ReadMonitor                counts what is read, and decides about broken records
    open_input                 the unpacked bytes
    read_text, lines_of        the text in chunks; its lines

Reading .zst needs the package `pyarrow` (extra `parquet`), addresses need `fsspec` (extra `remote`)
and the package of their protocol, for instance `s3fs`.
"""

import bz2
import codecs
import glob
import gzip
import io
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, cast

from tracformer.files import optional_package, sha256_of

CHUNK_BYTES = 1 << 22
SHOWN = 20  # messages about broken records


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address, read through `fsspec`.

    Attributes:
        address: Protocol and place, such as "https://host/corpus.jsonl.gz".
    """

    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.partition("?")[0].rstrip("/").rpartition("/")[2]

    def open(self) -> IO[bytes]:
        """Open the file for reading."""
        system, path = _file_system(self.address)
        return cast(IO[bytes], _ask(self.address, lambda: system.open(path, "rb")))

    def size(self) -> int | None:
        """Return the number of bytes; None if the server does not say."""
        system, path = _file_system(self.address)
        size: int | None = _ask(self.address, lambda: system.info(path))["size"]
        return size

    def version(self) -> str:
        """Return a text that changes with the file, as far as its server says when it changed."""
        system, path = _file_system(self.address)
        facts = _ask(self.address, lambda: system.info(path))
        known = {name: str(facts[name]) for name in VERSION_FACTS if facts.get(name) is not None}
        return ", ".join(f"{name} {value}" for name, value in known.items())


# what file systems call the size, the hash and the time of the last change of a file
VERSION_FACTS = (
    "size",
    "ETag",
    "etag",
    "sha256",
    "blob_id",
    "md5Hash",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)

InputFile = Path | RemoteFile


def is_address(where: object) -> bool:
    """Return whether a place is an address rather than a local path."""
    return isinstance(where, str) and "://" in where


def find_remote(address: str) -> list[RemoteFile]:
    """Return the file at an address, or the files that match it if it contains `*`, in order.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: A package is missing.
        ValueError: The protocol is unknown, the address is a folder, or the server fails.
    """
    system, path = _file_system(address)
    if "*" in address:
        found = _ask(address, lambda: sorted(system.glob(path)))
        files = [RemoteFile(system.unstrip_protocol(each)) for each in found]
        if not files:
            raise FileNotFoundError(f"no file matches {address!r}")
        return files
    if _ask(address, lambda: system.info(path)).get("type") == "directory":
        raise ValueError(f"{address} is a folder; give its files, for instance {address}/*.jsonl")
    # the same file always gets the same address; chains such as filecache::s3://... stay
    return [RemoteFile(address if "::" in address else system.unstrip_protocol(path))]


def _file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address and the path in it."""
    fsspec = optional_package("fsspec.core", f"reading {address}", "remote")
    try:
        return cast(tuple[Any, str], fsspec.url_to_fs(address))
    except ImportError as error:
        remedy = "; install them with: pip install 'tracformer[remote]'"
        needed = remedy if address.startswith(("http:", "https:")) else ""
        raise ImportError(f"reading {address}: {error}{needed}") from error
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from error


def _ask(address: str, question: Callable[[], Any]) -> Any:
    """Ask a file system; whatever it raises becomes one error that names the address."""
    try:
        return question()
    except FileNotFoundError as error:
        why = f" ({error.__cause__})" if error.__cause__ else ""
        raise FileNotFoundError(f"there is no file {address}{why}") from error
    except Exception as error:  # each protocol has its own classes
        what = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{address} cannot be read: {what}") from error


# ---- finding files

RUN_FILES = ("train.json", "log.jsonl")


def is_glob(where: str | PathLike[str]) -> bool:
    """Return whether a place has wildcards."""
    return glob.has_magic(str(where))


def fixed_part(where: str | PathLike[str]) -> Path:
    """Return the folder before the first wildcard of a glob; of another path, the path itself."""
    path = Path(where)
    if path.exists() or not is_glob(where):
        return path
    return next(parent for parent in path.parents if not is_glob(parent))


def find_files(where: str | PathLike[str], suffixes: Sequence[str]) -> list[InputFile]:
    """Return the files at a place, in order; empty if there is no such place.

    Args:
        where: A file, a folder, a glob or an address.
        suffixes: Of a folder, only files whose names end so, packed or not, at any depth.
    """
    if is_address(where):
        return list(find_remote(str(where)))
    path = Path(where)
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = _outside_runs(path.rglob("*"), path)
        found = [file for file in inside if plain_name(file.name).endswith(tuple(suffixes))]
        if not found:
            raise ValueError(
                f"{path} has no file that ends in {', '.join(suffixes)} (or these with "
                f"{', '.join(PACKINGS)}); give the files, or a glob"
            )
        return list(found)
    if is_glob(where):
        names = map(Path, glob.glob(str(where), recursive=True))
        if found := _outside_runs(names, fixed_part(where)):
            return list(found)
        raise FileNotFoundError(f"no file matches {str(where)!r}")
    return []


def _outside_runs(files: Iterable[Path], root: Path) -> list[Path]:
    """Return the files in order, without those of training runs, such as their logs."""
    found = sorted(file for file in files if file.is_file())
    runs = {
        file.parent
        for file in found
        if file.name in RUN_FILES and all((file.parent / name).is_file() for name in RUN_FILES)
    } - {root}
    return [file for file in found if runs.isdisjoint(file.parents)]


def size_of(file: InputFile) -> int | None:
    """Return the size of a file in bytes; None if its server does not say."""
    return file.stat().st_size if isinstance(file, Path) else file.size()


def version_of(file: InputFile) -> int | str:
    """Return a value that changes with the file."""
    return file.stat().st_mtime_ns if isinstance(file, Path) else file.version()


def digest_of(file: InputFile) -> str:
    """Return the SHA-256 of a local file; of a remote one, its version, without reading it."""
    return sha256_of(file) if isinstance(file, Path) else file.version()


# ---- what is read


class BadRecordError(ValueError):
    """A record cannot be read, and such records are not skipped."""


@dataclass
class ReadMonitor:
    """Counts what is read, and decides about records that cannot be read.

    Attributes:
        skip_bad: Leave such records out. False: stop at the first.
        quiet: Show no messages.
        bytes: Bytes read from files, before unpacking.
        bad: Number of records left out.
    """

    skip_bad: bool = False
    quiet: bool = True
    bytes: int = 0
    bad: int = 0

    def leave_out(self, message: str, cause: Exception | None = None) -> None:
        """Note that a record is left out.

        Raises:
            BadRecordError: Such records are not skipped.
        """
        if not self.skip_bad:
            raise BadRecordError(message) from cause
        self.bad += 1
        if self.quiet:
            return
        if self.bad <= SHOWN:
            print(f"skipped: {message}", file=sys.stderr)
        elif self.bad == SHOWN + 1:
            print("skipped: more; only their number is shown", file=sys.stderr)


class _Metered(io.RawIOBase):
    """A file that counts the bytes that are read from it."""

    def __init__(self, file: IO[bytes], monitor: ReadMonitor) -> None:
        self._file, self._monitor = file, monitor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._monitor.bytes += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_zst(file: IO[bytes]) -> IO[bytes]:
    pyarrow = optional_package("pyarrow", "reading .zst", "parquet")
    return cast(IO[bytes], pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd"))


# name of each compression, and how its files are unpacked
PACKINGS: dict[str, tuple[str, Callable[[IO[bytes]], Any]]] = {
    ".gz": ("gzip", gzip.open),
    ".bz2": ("bzip2", bz2.open),
    ".xz": ("xz", lzma.open),
    ".zst": ("Zstandard", _open_zst),
}


def packing_of(name: str) -> str:
    """Return the ending that tells how a file is compressed; empty if it is not."""
    return next((ending for ending in PACKINGS if name.lower().endswith(ending)), "")


def plain_name(name: str) -> str:
    """Return the name of a file, in lower case, without the ending of its compression.

    >>> plain_name("Corpus.jsonl.zst")
    'corpus.jsonl'
    """
    return name.lower().removesuffix(packing_of(name))


def open_raw(file: InputFile) -> IO[bytes]:
    """Open a file as it is, for reading from any place."""
    return open(file, "rb") if isinstance(file, Path) else file.open()


def open_input(file: InputFile, monitor: ReadMonitor | None = None) -> IO[bytes]:
    """Open a file for reading from its beginning, unpacked."""
    raw = open_raw(file)
    if monitor is not None:
        raw = cast(IO[bytes], io.BufferedReader(_Metered(raw, monitor), 1 << 20))
    packing = packing_of(file.name)
    return cast(IO[bytes], PACKINGS[packing][1](raw)) if packing else raw


# ---- text


def read_text(file: InputFile, monitor: ReadMonitor | None = None) -> Iterator[str]:
    """Yield the text of a file in chunks of a few MB.

    If the monitor skips bad records, a line that is not UTF-8 is read as an empty line. Lines must
    then fit in memory.

    Raises:
        ValueError: The file is not UTF-8 (the error gives the place), or cannot be unpacked.
    """
    monitor = ReadMonitor() if monitor is None else monitor
    blocks = _blocks(file, monitor)
    chunks = _decode_lines(file, blocks, monitor) if monitor.skip_bad else _decode(file, blocks)
    for number, text in enumerate(chunks):
        if text := text.removeprefix("\ufeff") if number == 0 else text:
            yield text


def _blocks(file: InputFile, monitor: ReadMonitor) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file in blocks; the last one is empty."""
    packing = packing_of(file.name)
    with open_input(file, monitor) as unpacked:
        block = b"."
        while block:
            try:
                block = unpacked.read(CHUNK_BYTES)
            except Exception as error:  # each compression and each protocol has its own classes
                if packing:
                    name = PACKINGS[packing][0]
                    raise ValueError(f"{file} is not a whole {name} file: {error}") from error
                if isinstance(file, RemoteFile):
                    raise ValueError(f"{file} cannot be read further: {error!r}") from error
                raise
            yield block


def _decode(file: InputFile, blocks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    consumed = lines = 0
    for block in blocks:
        waiting = len(decoder.getstate()[0])  # bytes of a character that began before
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            unpacked = " of the unpacked text" if packing_of(file.name) else ""
            line = lines + error.object.count(b"\n", 0, error.start) + 1
            raise BadRecordError(
                f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
                f"{consumed - waiting + error.start}{unpacked} (line {line}); convert the file to "
                "UTF-8 first, for instance with iconv"
            ) from error
        consumed += len(block)
        lines += block.count(b"\n")


def _decode_lines(file: InputFile, blocks: Iterable[bytes], monitor: ReadMonitor) -> Iterator[str]:
    """Yield the text of whole lines; lines that are not UTF-8 become empty."""
    begun: list[bytes] = []
    lines = 0
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if block and not end:
            begun.append(block)
            continue
        whole = b"".join([*begun, block[:end]])
        begun = [block[end:]]
        try:
            yield whole.decode()
        except UnicodeDecodeError:
            found = []
            for number, line in enumerate(whole.split(b"\n"), lines + 1):
                try:
                    found.append(line.decode())
                except UnicodeDecodeError as error:
                    found.append("")
                    monitor.leave_out(
                        f"{file}, line {number} is not UTF-8 text: byte 0x{line[error.start]:02x}"
                    )
            yield "\n".join(found)
        lines += whole.count(b"\n")


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
