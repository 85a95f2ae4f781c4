"""Checksums of a model folder: `checksums.json`, with the SHA-256 of weights and tokenizer.

They are written whenever the folder is saved and verified whenever it is loaded.
"""

import json
import logging
from pathlib import Path

from tracformer.files import sha256_of, write_atomically

CHECKSUMS_FILE = "checksums.json"
# Other files, such as generation settings and the model card, are edited by hand.
CHECKED = ("*.safetensors", "tokenizer.json")


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of a model folder's weights and tokenizer.

    Call `remove_checksums` before these files are written: a process that is killed in between
    then leaves a folder without checksums rather than one that looks damaged.
    """
    found = sorted(path for pattern in CHECKED for path in folder.glob(pattern))
    hashes = {path.name: sha256_of(path) for path in found}
    write_atomically(folder / CHECKSUMS_FILE, json.dumps(hashes, indent=2) + "\n")


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
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: {error}; get the folder again, or delete this file to load "
            "without checks"
        ) from error
    for name, digest in hashes.items():
        file = folder / name
        if Path(name).name != name:
            raise ValueError(f"{path} names {name!r}, which is not a file of this folder")
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; {CHECKSUMS_FILE} lists it")
        if (found := sha256_of(file)) != digest:
            raise ValueError(
                f"{file} is damaged or was changed: its SHA-256 begins with {found[:12]}, but "
                f"{CHECKSUMS_FILE} has {str(digest)[:12]}; get the folder again, or load it with "
                "--no-verify (verify=False) if the change is intended"
            )
