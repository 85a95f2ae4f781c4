"""Small needs around files: write whole or not at all, flush, hash, hold a folder alone, and ask
for an optional package.
"""

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | Callable[[Path], Any]) -> None:
    """Write beside, flush to disk, rename: a reader finds the old file or the new one, never half
    of either.

    `content` is the text, or a function that writes a file at the path it is given.
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
def held(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone; BlockingIOError if another has it.

    A process that dies lets it go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows has none, and no other lock that a killed process lets go
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
    """Where what can be made again is kept for the next time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracformer"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Put a file, or the names inside a folder, on the disk, so that they last
    through a power cut.
    """
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def optional_package(name: str, purpose: str, extra: str) -> Any:
    """Import a package of an extra, or say what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != name.partition(".")[0]:
            raise  # the package is there and broken in itself: its own message says more
        raise ImportError(
            f"{purpose} needs the package {name!r}, which is not installed; install it with: pip "
            f"install 'tracformer[{extra}]'",
            name=name,
        ) from error
