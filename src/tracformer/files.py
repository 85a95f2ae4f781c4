"""Files: write atomically, flush, hash, lock a folder; optional packages."""

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
