"""Named data sets from files that lie in one folder, instead of a download.

    FOLDER/wikitext-2/{train,valid,test}.txt     FOLDER/ptb/ptb.{valid,test}.txt     FOLDER/lambada/test.jsonl
    FOLDER/1bw/dev.txt                           FOLDER/wikipedia-2006.txt, or enwik8, enwik8.zip, enwik8.gz

A set is a folder of its name, with files whose names tell their splits, or a single file of its name. Files are read as the set itself is.
"""

import re
from os import PathLike
from pathlib import Path
from typing import Any

from tracformer.data.formats import SUFFIXES
from tracformer.data.hub import NAMED

SPLITS = {"train": r"train", "validation": r"valid|dev|held", "test": r"test"}  # how the files of a split are called
ALSO_CALLED = {"wikitext2": ("wikitext-2",), "wikitext103": ("wikitext-103",), "1bw": ("lm1b",)}
ENDINGS = (*SUFFIXES["text"], *SUFFIXES["jsonl"])

Files = list[Path]


def find_set(name: str, folder: str | PathLike[str]) -> dict[str, Files]:
    """The files of a named set by split; a single file is its `train`."""
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder; name the one that holds the data sets")
    names = (name, *ALSO_CALLED.get(name, ()))
    for place in (root / each for each in names):
        if place.is_dir() and (found := split_files(place)):
            return found
    for file in (root / f"{each}{ending}" for each in names for ending in ENDINGS):
        if file.is_file():
            return {"train": [file]}
    raise FileNotFoundError(
        f"{root} holds no {name}: neither a folder {' or '.join(names)} with files called train, valid or test, nor a file {name}.txt"
    )


def split_files(folder: Path) -> dict[str, Files]:
    """The folder's files by the split that their names tell; nothing where no name tells any."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    found = {split: [path for path in files if re.search(pattern, path.name.lower())] for split, pattern in SPLITS.items()}
    return {split: paths for split, paths in found.items() if paths}


def reading_of(name: str, documents: str = "", detokenize: str = "") -> dict[str, Any]:
    """How files of a named set are read: WikiText by article and detokenised, 1BW line by line. Words given here go before."""
    named = NAMED[name][0] if name in NAMED else None
    documents = documents or (named.documents if named else "")
    documents = "line" if documents == "row" else documents  # a row of the hub is a line of a file
    detokenize = detokenize or (named.detokenize if named else "") or ""
    options = {"documents": documents, "detokenize": "" if detokenize == "none" else detokenize}
    return {key: value for key, value in options.items() if value}
