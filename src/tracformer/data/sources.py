"""Where documents come from: files, folders, globs, texts in memory, and data sets by name.

    DataSource        what every source of documents can do
    FileSource        text, JSONL or FASTA files
    TextSource        texts in memory
    JoinedSource      several sources, one after the other
    open_source       files, a folder or a glob as a FileSource
    open_sources      the same or a named data set, as one source per split
    find_set          the files of a named data set that lie in a local folder

Data sets of the Hugging Face hub are in `hub_sources`. Instead of a download, a named data set may
be in a local folder, as a folder of its name with files whose names tell their splits, or as a
single file of its name:

    FOLDER/wikitext-2/{train,valid,test}.txt     FOLDER/ptb/ptb.{valid,test}.txt
    FOLDER/lambada/test.jsonl                    FOLDER/1bw/dev.txt
    FOLDER/wikipedia-2006.txt, or enwik8, enwik8.zip, enwik8.gz
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from tracformer.data.corpora import HALVES, STORIES, WIKIPEDIA, HeldOutStories, Wikipedia2006
from tracformer.data.documents import (
    FORMATS,
    READ_WITH,
    SUFFIXES,
    ReadOptions,
    TextPiece,
    as_pieces,
    format_of,
    read_file,
)
from tracformer.data.hub_sources import HUB_PREFIX, NAMED, HubSource, detokenizer, named_source
from tracformer.data.input_files import (
    InputFile,
    ReadMonitor,
    digest_of,
    find_files,
    is_address,
    is_glob,
    packing_of,
    size_of,
)
from tracformer.data.tokenizer import Tokenizer

# patterns in the names of a split's files
SPLITS = {"train": r"train", "validation": r"valid|dev|held", "test": r"test"}
ALSO_CALLED = {"wikitext2": ("wikitext-2",), "wikitext103": ("wikitext-103",), "1bw": ("lm1b",)}
ENDINGS = (*SUFFIXES["text"], *SUFFIXES["jsonl"])

Files = list[Path]
Where = str | PathLike[str]
SETS = (*NAMED, WIKIPEDIA, STORIES)
AND = "+"  # wikitext2+wikipedia-2006 means both


class DataSource(Protocol):
    """Documents that can be read again and again, always in the same order."""

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the documents as pieces."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what the manifest records about the source."""
        ...

    def size(self) -> int | None:
        """Return the number of bytes to read, for a progress bar; None if it is not known."""
        ...


def find_set(name: str, folder: Where) -> dict[str, Files]:
    """Return the files of a named data set by split; a single file is its `train`.

    Args:
        name: Name of the data set.
        folder: Folder that holds data sets.

    Raises:
        FileNotFoundError: The folder does not exist or does not hold the data set.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder; give the folder that has the data sets")
    names = (name, *ALSO_CALLED.get(name, ()))
    for place in (root / each for each in names):
        if place.is_dir() and (found := split_files(place)):
            return found
    for file in (root / f"{each}{ending}" for each in names for ending in ENDINGS):
        if file.is_file():
            return {"train": [file]}
    raise FileNotFoundError(
        f"{root} has no data set {name}: neither a folder {' or '.join(names)} with files called "
        f"train, valid or test, nor a file {name}.txt"
    )


def split_files(folder: Path) -> dict[str, Files]:
    """Return the folder's files by the split that their names contain."""
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    )
    found = {
        split: [path for path in files if re.search(pattern, path.name.lower())]
        for split, pattern in SPLITS.items()
    }
    return {split: paths for split, paths in found.items() if paths}


def reading_of(name: str, documents: str = "", detokenize: str = "") -> dict[str, Any]:
    """Return the options with which files of a named data set are read.

    WikiText is read by article and detokenized, 1BW line by line, and so on.

    Args:
        name: Name of the data set.
        documents: Replaces its option `documents`.
        detokenize: Replaces its option `detokenize`; "none" switches it off.
    """
    named = NAMED[name][0] if name in NAMED else None
    documents = documents or (named.documents if named else "")
    documents = "line" if documents == "row" else documents  # a row of the hub is a line of a file
    detokenize = detokenize or (named.detokenize if named else "") or ""
    options = {"documents": documents, "detokenize": "" if detokenize == "none" else detokenize}
    return {key: value for key, value in options.items() if value}


@dataclass(frozen=True)
class FileSource:
    """Files of one format.

    Attributes:
        files: The files, in order; local or remote.
        format: "text", "jsonl", "parquet", "fasta" or "alignment".
        options: How documents are found in them.
        detokenize: A key of `DETOKENIZERS`, or None.
        monitor: Counts what is read, and decides about records that cannot be read (see
            `with_monitor`); without one, the first of them is an error.
    """

    files: tuple[InputFile, ...]
    format: str
    options: ReadOptions = field(default_factory=ReadOptions)
    detokenize: str | None = None
    monitor: ReadMonitor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format is {self.format!r}; allowed: {', '.join(FORMATS)}")
        detokenizer(self.detokenize)

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the documents of all files."""
        natural, empty = detokenizer(self.detokenize), True
        for file in self.files:
            for piece in read_file(file, self.format, self.options, self.monitor):
                empty = False
                yield piece._replace(text=natural(piece.text)) if self.detokenize else piece
        if empty:
            names = ", ".join(map(str, self.files[:3])) + (" ..." if len(self.files) > 3 else "")
            raise ValueError(
                f"{names}: there is no text in it; give a file with at least one document that is "
                "not blank"
            )

    def describe(self) -> dict[str, Any]:
        """Return names and sizes of the files, and the options."""
        files = [{"name": file.name, "bytes": size_of(file)} for file in self.files]
        gaps = self.options.gaps or "remove"
        return {
            "files": files,
            "format": self.format,
            "detokenize": self.detokenize,
            **asdict(self.options),
            "gaps": gaps,
        }

    def size(self) -> int | None:
        """Return the size of all files; None if one is packed, or its server does not say."""
        if self.format == "parquet" or any(packing_of(file.name) for file in self.files):
            return None
        return stored_size(self)


@dataclass(frozen=True)
class TextSource:
    """Documents in memory.

    Attributes:
        texts: The documents.
        name: A name for the manifest and for error messages.
    """

    texts: Sequence[str]
    name: str = "texts in memory"

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the documents."""
        for number, text in enumerate(self.texts, 1):
            yield from as_pieces(text, f"{self.name}, document {number}")

    def describe(self) -> dict[str, Any]:
        """Return the name."""
        return {"name": self.name}

    def size(self) -> int | None:
        """Return None: the size is not computed."""
        return None


@dataclass(frozen=True)
class JoinedSource:
    """Several sources, one after the other."""

    parts: tuple[DataSource, ...]

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the documents of all sources."""
        for part in self.parts:
            yield from part.pieces()

    def describe(self) -> dict[str, Any]:
        """Return the descriptions of all sources."""
        return {"joined": [part.describe() for part in self.parts]}

    def size(self) -> int | None:
        """Return the sum of all sizes; None if one is not known."""
        sizes = [part.size() for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def files_of(source: DataSource) -> list[InputFile]:
    """Return the files that a source reads, in order; empty if it does not read files."""
    if isinstance(source, JoinedSource):
        return [file for part in source.parts for file in files_of(part)]
    return list(source.files) if isinstance(source, FileSource | HeldOutStories) else []


def file_hashes(source: DataSource) -> list[str]:
    """Return the SHA-256 of each local file that a source reads, the version of each other one."""
    return [digest_of(file) for file in files_of(source)]


def stored_size(source: DataSource) -> int | None:
    """Return the size of a source's files as they are stored, perhaps compressed.

    None if the source has no files, or a server does not say.
    """
    sizes = [size_of(file) for file in files_of(source)]
    return sum(size for size in sizes if size is not None) if sizes and None not in sizes else None


def with_monitor(source: DataSource, monitor: ReadMonitor) -> DataSource:
    """Return a source whose files are read with a monitor; one without files as it is."""
    if isinstance(source, JoinedSource):
        return JoinedSource(tuple(with_monitor(part, monitor) for part in source.parts))
    return replace(source, monitor=monitor) if isinstance(source, FileSource) else source


def with_gaps_of(tokenizer: Tokenizer, source: DataSource) -> DataSource:
    """Return a source of sequences that keeps gaps if the tokenizer's alphabet has them.

    A source whose option `gaps` is set, and a source of another format, is returned as it is.
    """
    if (
        not isinstance(source, FileSource)
        or "gaps" not in READ_WITH[source.format]
        or source.options.gaps
        or not tokenizer.has_gaps
    ):
        return source
    return replace(source, options=replace(source.options, gaps="keep"))


def whole_documents(source: DataSource) -> Iterator[str]:
    """Yield whole documents as strings. For large documents use `source.pieces()`."""
    parts: list[str] = []
    for piece in source.pieces():
        parts.append(piece.text)
        if piece.end:
            yield "".join(parts)
            parts.clear()


def open_source(
    where: Where | Sequence[Where],
    format: str | None = None,
    detokenize: str | None = None,
    **options: str,
) -> FileSource:
    """Return the files at one or several places as a source.

    Args:
        where: A file, a folder (all files of one format in it, at any depth), a glob, an address
            such as s3://bucket/*.parquet, or a list of these.
        format: "text", "jsonl", "parquet", "fasta" or "alignment"; by default the files' names tell
            it.
        detokenize: A key of `DETOKENIZERS`, or None.
        **options: Fields of `ReadOptions`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: An option is unknown, or the files have several formats.
    """
    wheres = [where] if isinstance(where, str | PathLike) else list(where)
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}; allowed: {', '.join(FORMATS)}")
    try:
        how = ReadOptions(**options)
    except TypeError:
        unknown = sorted(set(options) - set(asdict(ReadOptions())))
        raise ValueError(
            f"unknown options: {', '.join(unknown)}; known: {', '.join(asdict(ReadOptions()))}"
        ) from None
    files = [file for each in wheres for file in _files(each, format)]
    if not files:
        raise ValueError("there is no file to read; give at least one")
    formats = {format_of(file) for file in files} if format is None else {format}
    if len(formats) > 1:
        raise ValueError(
            f"the files have several formats ({', '.join(sorted(formats))}); "
            "choose one with format= (`tracformer prepare --format`)"
        )
    return FileSource(tuple(files), formats.pop(), how, detokenize)


def open_sources(
    where: Where | Sequence[Where],
    *,
    validation: Where | None = None,
    folder: Where | None = None,
    **options: Any,
) -> dict[str, DataSource]:
    """Return one source per split.

    Args:
        where: Names of data sets, as a list or joined by `+`; or `hf:owner/name` or
            `hf:owner/name:config` of the hub; or anything that `open_source` takes. Several named
            data sets are trained on together; the other splits are those of the first one.
        validation: A file, folder or glob that becomes the split `validation`, read with the same
            options.
        folder: Folder with the files of named data sets, instead of a download.
        **options: Options of `open_source`, or fields of `HubSource`.
    """
    sources: dict[str, DataSource]
    if names := named_sets(where):
        # options may be for the validation file
        if names == (WIKIPEDIA,) and options and validation is None:
            raise ValueError(
                f"{', '.join(options)} is given for {WIKIPEDIA}, a text with a recorded hash that "
                "takes no options; leave it out"
            )
        sources = _joined([_named(name, folder, options) for name in names])
    elif folder is not None:
        raise ValueError(
            f"the folder {str(folder)!r} is given for {where!r}, but only named data sets are "
            f"looked up in a folder: {', '.join(SETS)}"
        )
    elif isinstance(where, str) and where.startswith(HUB_PREFIX) and not is_address(where):
        path, _, config = where.removeprefix(HUB_PREFIX).partition(":")
        try:
            sources = {"train": HubSource(path, config or None, **options)}
        except TypeError as error:
            raise ValueError(f"data set {where!r}: {error}") from error
    else:
        source = open_source(where, **options)
        _require_in_use(source, options)
        sources = {"train": source}
    if validation is not None:
        sources["validation"] = _held_out(validation, sources.get("train"), options)
    return sources


def named_sets(where: Where | Sequence[Where]) -> tuple[str, ...]:
    """Return the names of data sets in `where`; empty if it contains anything else.

    >>> named_sets("wikitext2+wikipedia-2006"), named_sets("my.txt")
    (('wikitext2', 'wikipedia-2006'), ())
    """
    words = (
        where.split(AND)
        if isinstance(where, str)
        else [where]
        if isinstance(where, PathLike)
        else list(where)
    )
    names = tuple(word for word in words if isinstance(word, str) and word in SETS)
    return names if len(names) == len(words) else ()


def _named(name: str, folder: Where | None, options: Mapping[str, Any]) -> dict[str, DataSource]:
    if name == WIKIPEDIA:
        return {"train": Wikipedia2006(None if folder is None else Path(folder))}
    if name == STORIES:
        return _stories(folder)
    if folder is None:
        return dict(named_source(name, **options))
    how = {**reading_of(name), **options}
    return {split: open_source(files, **how) for split, files in find_set(name, folder).items()}


def _stories(folder: Where | None) -> dict[str, DataSource]:
    if folder is None:
        raise FileNotFoundError(
            f"{STORIES} is read from files, not downloaded; give the folder that has {STORIES}/ "
            "with files called train and valid (`--from FOLDER`, or data=FOLDER of `tracformer "
            "reproduce`)"
        )
    files = find_set(STORIES, folder)
    if missing := [split for split in ("train", "validation") if split not in files]:
        raise FileNotFoundError(f"{Path(folder) / STORIES} has no file for {missing[0]}")
    held_out, training = tuple(files["validation"]), tuple(files["train"])
    halves = {split: HeldOutStories(held_out, training, split) for split in HALVES}
    return {"train": open_source(list(training)), **halves}


def _joined(sets: list[dict[str, DataSource]]) -> dict[str, DataSource]:
    first, *others = sets
    if not others:
        return first
    return {
        **first,
        "train": JoinedSource(tuple(each["train"] for each in sets if "train" in each)),
    }


def parse_validation(text: str) -> tuple[float, str | None]:
    """Return the fraction to hold out and the place of validation data that a text means.

    A number such as `0.05` gives (0.05, None); a file, folder or glob gives (0.0, text).
    """
    try:
        fraction = float(text)
    except ValueError:
        if text:
            return 0.0, text
        fraction = math.nan
    if not 0.0 <= fraction <= 0.5:
        raise ValueError(
            f"validation is {text!r}; it must be a fraction from 0 to 0.5 to hold out, or a file, "
            "folder or glob"
        )
    return fraction, None


def _held_out(where: Where, train: DataSource | None, options: Mapping[str, Any]) -> FileSource:
    if not (is_address(where) or Path(where).exists() or is_glob(where)):
        raise FileNotFoundError(
            f"validation is {str(where)!r}: no such file or folder; it may also be a glob, or a "
            "fraction to hold out"
        )
    source = open_source(where, **options)
    used = set(map(_place, train.files)) if isinstance(train, FileSource) else set()
    if both := [str(file) for file in source.files if _place(file) in used]:
        raise ValueError(
            f"{both[0]} is given both for training and for validation; validate on other text"
        )
    return source


def _require_in_use(source: FileSource, options: Mapping[str, Any]) -> None:
    # an option of another format would have no effect
    for name, default in vars(ReadOptions()).items():
        if name not in READ_WITH[source.format] and options.get(name, default) != default:
            formats = [format for format, names in READ_WITH.items() if name in names]
            raise ValueError(
                f"{name} is {options[name]!r}, but {source.files[0]} is read as {source.format}: "
                f"the option is for {' and '.join(formats)} only"
            )


def _place(file: InputFile) -> InputFile:
    return file.resolve() if isinstance(file, Path) else file


def _files(where: Where, format: str | None) -> list[InputFile]:
    formats = [format] if format else FORMATS
    suffixes = [suffix for each in formats for suffix in SUFFIXES[each]]
    if found := find_files(where, suffixes):
        return found
    known = ", ".join(SETS)
    raise FileNotFoundError(
        f"{str(where)!r}: no such file or folder, and no named data set ({known}); for another "
        f"data set of the hub write {HUB_PREFIX}owner/name"
    )
