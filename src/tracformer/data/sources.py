"""Where documents come from: files, folders and globs of them, or a data set of the Hugging Face hub."""

import glob
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from tracformer.data.detokenize import detokenizer
from tracformer.data.formats import FORMATS, SUFFIXES, Reading, format_of, read_file
from tracformer.data.hub import HUB_PREFIX, NAMED, HubSource, named_source
from tracformer.data.text import Piece, as_pieces

Where = str | PathLike[str]


class Source(Protocol):
    """Documents that can be read again and again, always in the same order."""

    def pieces(self) -> Iterator[Piece]: ...

    def describe(self) -> dict[str, Any]:
        """What the manifest says about it."""
        ...

    def size(self) -> int | None:
        """Bytes to read, for a progress bar; None if nobody knows."""
        ...


@dataclass(frozen=True)
class FileSource:
    files: tuple[Path, ...]
    format: str
    reading: Reading = field(default_factory=Reading)
    detokenize: str | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format is {self.format!r}; allowed: {', '.join(FORMATS)}")
        detokenizer(self.detokenize)

    def pieces(self) -> Iterator[Piece]:
        natural, empty = detokenizer(self.detokenize), True
        for path in self.files:
            for piece in read_file(path, self.format, self.reading):
                empty = False
                yield piece._replace(text=natural(piece.text)) if self.detokenize else piece
        if empty:
            names = ", ".join(map(str, self.files[:3])) + (" ..." if len(self.files) > 3 else "")
            raise ValueError(f"{names}: there is no text in it; give a file with at least one document that is not blank")

    def describe(self) -> dict[str, Any]:
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.files]
        return {"files": files, "format": self.format, "detokenize": self.detokenize, **asdict(self.reading)}

    def size(self) -> int | None:
        return None if any(path.suffix == ".gz" for path in self.files) else sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class TextSource:
    """Documents that are in memory."""

    texts: Sequence[str]
    name: str = "texts in memory"

    def pieces(self) -> Iterator[Piece]:
        for number, text in enumerate(self.texts, 1):
            yield from as_pieces(text, f"{self.name}, document {number}")

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def size(self) -> int | None:
        return None


def documents(source: Source) -> Iterator[str]:
    """Whole documents, one string each. For data of any size use `source.pieces()`."""
    parts: list[str] = []
    for piece in source.pieces():
        parts.append(piece.text)
        if piece.end:
            yield "".join(parts)
            parts.clear()


def open_source(where: Where | Sequence[Where], format: str | None = None, detokenize: str | None = None, **reading: str) -> FileSource:
    """A file, a folder (all files of one format in it, however deep), a glob, or several of these; see `Reading` for the options."""
    wheres = [where] if isinstance(where, str | PathLike) else list(where)
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}; allowed: {', '.join(FORMATS)}")
    try:
        how = Reading(**reading)
    except TypeError:
        unknown = sorted(set(reading) - set(asdict(Reading())))
        raise ValueError(f"unknown options: {', '.join(unknown)}; known: {', '.join(asdict(Reading()))}") from None
    files = [file for each in wheres for file in _files(each, format)]
    if not files:
        raise ValueError("no file to read; name at least one")
    formats = {format_of(file) for file in files} if format is None else {format}
    if len(formats) > 1:
        raise ValueError(f"the files are of several formats ({', '.join(sorted(formats))}); say which to read with format=")
    return FileSource(tuple(files), formats.pop(), how, detokenize)


def open_sources(where: Where | Sequence[Where], *, validation: Where | None = None, **options: Any) -> dict[str, Source]:
    """By split: the paper's data sets by name, `hf:owner/name` or `hf:owner/name:config` from the hub, anything else as `open_source`.

    `validation` names a file, folder or glob that becomes that split, read with the same options.
    """
    sources: dict[str, Source]
    if isinstance(where, str) and where in NAMED:
        sources = dict(named_source(where, **options))
    elif isinstance(where, str) and where.startswith(HUB_PREFIX):
        path, _, config = where.removeprefix(HUB_PREFIX).partition(":")
        sources = {"train": HubSource(path, config or None, **options)}
    else:
        sources = {"train": open_source(where, **options)}
    if validation is not None:
        sources["validation"] = _held_out(validation, sources.get("train"), options)
    return sources


def parse_validation(text: str) -> tuple[float, str | None]:
    """What to validate on, in a word: a fraction of the data to hold back, such as `0.05`, or a file, folder or glob (and then 0)."""
    try:
        fraction = float(text)
    except ValueError:
        if text:
            return 0.0, text
        fraction = math.nan
    if not 0.0 <= fraction <= 0.5:
        raise ValueError(f"validation is {text!r}; it must be a fraction from 0 to 0.5 to hold back, or a file, folder or glob")
    return fraction, None


def _held_out(where: Where, train: Source | None, options: Mapping[str, Any]) -> FileSource:
    if not Path(where).exists() and not glob.has_magic(str(where)):
        raise FileNotFoundError(f"validation is {str(where)!r}: no such file or folder; it may also be a glob, or a fraction to hold back")
    source = open_source(where, **options)
    used = {file.resolve() for file in train.files} if isinstance(train, FileSource) else set()
    if both := [str(file) for file in source.files if file.resolve() in used]:
        raise ValueError(f"{both[0]} is given both for training and for validation; a model must be validated on other text")
    return source


def _files(where: Where, format: str | None) -> list[Path]:
    path = Path(where)
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = [suffix for each in ([format] if format else FORMATS) for suffix in SUFFIXES[each]]
        found = sorted(
            file for file in path.rglob("*") if file.is_file() and file.name.removesuffix(".gz").lower().endswith(tuple(suffixes))
        )
        if not found:
            raise ValueError(
                f"{path} holds no file that ends in {', '.join(suffixes)} (or these with .gz); name the files, or a glob of them"
            )
        return found
    if glob.has_magic(str(where)):
        found = sorted(Path(name) for name in glob.glob(str(where), recursive=True) if Path(name).is_file())
        if found:
            return found
        raise FileNotFoundError(f"no file matches {str(where)!r}")
    known = ", ".join(NAMED)
    raise FileNotFoundError(
        f"{str(where)!r}: no such file or folder, nor a named data set ({known}); for another of the hub write {HUB_PREFIX}owner/name"
    )
