"""Files: write atomically, flush, hash, lock a folder; optional packages.

- `write_checksums`, `verify_checksums`: `checksums.json` of a model folder, with the SHA-256 of its
  weights and tokenizer. It is written whenever the folder is saved and verified when it is loaded.
  Large files have the SHA-256 of each block too, since blocks can be verified in parallel.
- `write_record`, `read_record`: a small JSON file that can be made again if it is damaged.
- `bundled_models`, `bundled_folder`: the models that come with the package, one folder each in
  `bundled/`. Weights are stored at half precision, with tokenizer and model card.
"""

import hashlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def digest_of(document: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON object."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def write_record(path: Path, document: dict[str, Any]) -> None:
    """Write a small JSON object with its SHA-256; see `read_record`."""
    write_atomically(path, json.dumps({**document, "sha256": digest_of(document)}) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """Return what `write_record` wrote, or {} if the file is missing or damaged."""
    try:
        document = dict(json.loads(path.read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    known = document.pop("sha256", None)  # files of older versions have none
    return document if known in (None, digest_of(document)) else {}


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


BUNDLED = Path(__file__).parent / "bundled"
DEFAULT_MODEL = "stories"  # bundled model of commands that name none

CHECKSUMS_FILE = "checksums.json"
# Other files, such as generation settings and the model card, are edited by hand.
CHECKED = ("*.safetensors", "config.json", "tokenizer.json")
BLOCK_BYTES = 2**26
READ_BYTES = 2**18  # at a time; a block of them stays in the processor's cache


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of a model folder's weights, configuration and tokenizer.

    Call `remove_checksums` before these files are written: a process that is killed in between
    then leaves a folder without checksums rather than one that looks damaged.
    """
    found = sorted(path for pattern in CHECKED for path in folder.glob(pattern))
    hashes: dict[str, Any] = {}
    for path in found:
        hashes[path.name] = sha256_of(path)
        if path.stat().st_size > BLOCK_BYTES:
            hashes[path.name] = {
                "sha256": hashes[path.name],
                "block_bytes": BLOCK_BYTES,
                "block_sha256": _block_hashes(path, BLOCK_BYTES),
            }
    write_atomically(folder / CHECKSUMS_FILE, json.dumps(hashes, indent=2) + "\n")


def _block_hashes(path: Path, size: int) -> list[str]:
    """Return the SHA-256 of each block of a file; hashing runs in all cores."""

    def digest(number: int) -> str:
        found, left = hashlib.sha256(), size
        buffer = memoryview(bytearray(READ_BYTES))
        with open(path, "rb", buffering=0) as file:
            file.seek(number * size)
            while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
                found.update(buffer[:count])
                left -= count
        return found.hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(digest, range(-(-path.stat().st_size // size))))


def _differs(path: Path, recorded: Any) -> bool:
    """Return whether a file has another SHA-256 than `checksums.json` records."""
    if isinstance(recorded, str):
        return sha256_of(path) != recorded
    return _block_hashes(path, recorded["block_bytes"]) != recorded["block_sha256"]


def remove_checksums(folder: Path) -> None:
    """Remove `checksums.json`, because files that it describes are about to change."""
    (folder / CHECKSUMS_FILE).unlink(missing_ok=True)


def verify_checksums(folder: Path) -> None:
    """Check the files of a model folder against its `checksums.json`.

    A folder without that file gets a notice on standard error.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or was changed.
    """
    path = folder / CHECKSUMS_FILE
    if not path.exists():
        logging.getLogger("tracformer").warning(
            "note: %s has no %s, so damage to its files may go unnoticed", folder, CHECKSUMS_FILE
        )
        return
    try:
        hashes = dict(json.loads(path.read_text(encoding="utf-8")).items())
        for name, recorded in hashes.items():
            if Path(name).name != name:
                raise ValueError(f"it names {name!r}, which is not a file of this folder")
            if not isinstance(recorded, str) and not (
                isinstance(recorded["block_bytes"], int)
                and recorded["block_bytes"] >= READ_BYTES
                and isinstance(recorded["block_sha256"], list)
            ):
                raise ValueError(f"its entry of {name} is not one that `write_checksums` writes")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: {error}; get the folder again, or delete this file to load "
            "without checks"
        ) from error
    for name, recorded in hashes.items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; {CHECKSUMS_FILE} lists it")
        if _differs(file, recorded):
            raise ValueError(
                f"{file} is damaged or was changed: its SHA-256 is not the one in "
                f"{CHECKSUMS_FILE}; get the folder again, or load it with --no-verify "
                "(verify=False) if the change is intended"
            )


def bundled_models() -> tuple[str, ...]:
    """Return the names of the bundled models."""
    return tuple(sorted(path.parent.name for path in BUNDLED.glob("*/config.json")))


def bundled_folder(name: str) -> Path | None:
    """Return the folder of the bundled model of that name, or None if there is none."""
    return BUNDLED / name if name in bundled_models() else None
