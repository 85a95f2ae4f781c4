"""Where documents come from: files, folders, named data sets, the Hugging Face hub.

Data sets of the Hugging Face hub, the paper's by name. Needs the package `datasets` (extra
`hub`).

Named data sets from files that lie in one folder, instead of a download.

    FOLDER/wikitext-2/{train,valid,test}.txt     FOLDER/ptb/ptb.{valid,test}.txt
    FOLDER/lambada/test.jsonl                    FOLDER/1bw/dev.txt
    FOLDER/wikipedia-2006.txt, or enwik8, enwik8.zip, enwik8.gz

A set is a folder of its name, with files whose names tell their splits, or a single file of its
name. Files are read as the set itself is.

Where documents come from: files, folders and globs of them, or data sets by name, fetched or from a
folder that holds them.
"""

import glob
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from tracformer.data.detokenize import detokenizer
from tracformer.data.readers import (
    DOCUMENTS,
    FORMATS,
    READ_WITH,
    SUFFIXES,
    Piece,
    Reading,
    as_pieces,
    format_of,
    read_file,
)
from tracformer.data.stories import HALVES, HeldOutStories
from tracformer.data.stories import NAME as STORIES
from tracformer.data.tokenizer import EOT, Tokenizer
from tracformer.data.wikipedia import NAME as WIKIPEDIA
from tracformer.data.wikipedia import Wikipedia2006
from tracformer.files import optional_package, sha256_of

HUB_PREFIX = "hf:"
# the hub's own copy of a data set whose main branch is still a script
PARQUET_BRANCH = "refs/convert/parquet"
ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class HubSource:
    path: str  # "owner/name", a local folder, or a builder such as "json" with data_files
    config: str | None = None
    split: str = "train"
    field: str = "text"
    documents: str = "row"  # or a way of `text.DOCUMENTS`, over the rows as lines
    detokenize: str | None = None
    revision: str | None = None
    data_files: str | list[str] | None = None
    data_dir: str | None = None
    streaming: bool = False  # read over the network without a copy on disk
    cache_dir: str | None = None
    # how many the split must have: the hub's parquet copies of large data sets may be partial
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.documents != "row" and self.documents not in DOCUMENTS:
            raise ValueError(
                f"documents is {self.documents!r}; allowed: row, {', '.join(DOCUMENTS)}"
            )
        detokenizer(self.detokenize)

    def pieces(self) -> Iterator[Piece]:
        natural, empty = detokenizer(self.detokenize), True
        for piece in self._documents():
            empty = False
            yield piece._replace(text=natural(piece.text)) if self.detokenize else piece
        if empty:
            raise ValueError(f"{self._name()} holds no text in its column {self.field!r}")

    def describe(self) -> dict[str, Any]:
        # data_files and data_dir are places on this machine, and no concern of the manifest
        names = ("path", "config", "split", "field", "documents", "detokenize", "revision")
        return {name: getattr(self, name) for name in names}

    def size(self) -> int | None:
        return None

    def _documents(self) -> Iterator[Piece]:
        if self.documents == "row":
            for number, text in enumerate(self._rows(), 1):
                yield from as_pieces(text, f"{self._name()}, row {number}")
        else:
            lines = (text if text.endswith("\n") else text + "\n" for text in self._rows())
            yield from DOCUMENTS[self.documents](lines, self._name(), EOT)

    def _rows(self) -> Iterator[str]:
        data = self._load()
        columns = list(data.column_names or [])
        if columns and self.field not in columns:
            raise ValueError(
                f"{self._name()} has no column {self.field!r}; it has {', '.join(columns)}: name "
                "one with field="
            )
        if self.rows is not None and not self.streaming and len(data) != self.rows:
            raise ValueError(
                f"{self._name()} has {len(data):,} rows where {self.rows:,} are expected: the copy "
                "on the hub is partial or was changed; "
                f"give another copy as {HUB_PREFIX}owner/name"
            )
        for batch in data.select_columns([self.field]).iter(batch_size=ROWS_AT_ONCE):
            for text in batch[self.field]:
                if not isinstance(text, str):
                    raise ValueError(
                        f"{self._name()}: column {self.field!r} holds a {type(text).__name__}, not "
                        "text; name another with field="
                    )
                yield text

    def _load(self) -> Any:
        datasets = optional_package(
            "datasets", f"reading the data set {self.path!r} of the Hugging Face hub", "hub"
        )
        options: dict[str, Any] = {
            "split": self.split,
            "streaming": self.streaming,
            "cache_dir": self.cache_dir,
            "data_files": self.data_files,
        }
        try:
            try:
                return datasets.load_dataset(
                    self.path,
                    self.config,
                    revision=self.revision,
                    data_dir=self.data_dir,
                    **options,
                )
            except RuntimeError as error:
                if self.revision is not None or "script" not in str(error).lower():
                    raise
                # That branch keeps each config as a folder.
                return datasets.load_dataset(
                    self.path, revision=PARQUET_BRANCH, data_dir=self.config, **options
                )
        # many kinds: no network, no such name, config or split, a damaged file
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(
                f"{self._name()} could not be loaded: {first}; check the name, the config, the "
                "split and the network, "
                "or fetch the files yourself and name them instead"
            ) from error

    def _name(self) -> str:
        return " ".join(
            part
            for part in (f"data set {self.path!r}", self.config, f"split {self.split!r}")
            if part
        )


THREE = {"train": "train", "validation": "validation", "test": "test"}
OPENWEBTEXT = HubSource("Skylion007/openwebtext", "plain_text")

# The paper's data sets: how to read one, and which of its splits is which of ours.
NAMED: dict[str, tuple[HubSource, Mapping[str, str]]] = {
    "wikitext2": (
        HubSource(
            "Salesforce/wikitext", "wikitext-2-raw-v1", documents="article", detokenize="wikitext"
        ),
        THREE,
    ),
    "wikitext103": (
        HubSource(
            "Salesforce/wikitext", "wikitext-103-raw-v1", documents="article", detokenize="wikitext"
        ),
        THREE,
    ),
    "lambada": (HubSource("cimec/lambada", "plain_text", detokenize="lambada"), THREE),
    "1bw": (
        HubSource("dvruette/lm1b", detokenize="1bw"),
        {"train": "train", "validation": "test"},
    ),  # heldout section; there is no third
    "ptb": (
        HubSource(
            "ptb-text-only/ptb_text_only", "penn_treebank", field="sentence", detokenize="ptb"
        ),
        THREE,
    ),
    # One split on the hub; the last 100,000 documents validate, as in the papers compared with.
    "openwebtext": (OPENWEBTEXT, {"train": "train[:-100000]", "validation": "train[-100000:]"}),
}
ROWS = {("openwebtext", "train"): 7_913_769, ("openwebtext", "validation"): 100_000}


def named_source(name: str, **options: Any) -> dict[str, HubSource]:
    """A data set of the paper, by split; options replace fields of every split's source."""
    if name not in NAMED:
        raise ValueError(f"data set is {name!r}; named ones: {', '.join(NAMED)}")
    source, splits = NAMED[name]
    try:
        return {
            ours: replace(source, **{"split": theirs, "rows": ROWS.get((name, ours)), **options})
            for ours, theirs in splits.items()
        }
    except TypeError as error:
        raise ValueError(f"data set {name!r}: {error}") from error


# how the files of a split are called
SPLITS = {"train": r"train", "validation": r"valid|dev|held", "test": r"test"}
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
        f"{root} holds no {name}: neither a folder {' or '.join(names)} with files called train, "
        f"valid or test, nor a file {name}.txt"
    )


def split_files(folder: Path) -> dict[str, Files]:
    """The folder's files by the split that their names tell; nothing where no name tells any."""
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    )
    found = {
        split: [path for path in files if re.search(pattern, path.name.lower())]
        for split, pattern in SPLITS.items()
    }
    return {split: paths for split, paths in found.items() if paths}


def reading_of(name: str, documents: str = "", detokenize: str = "") -> dict[str, Any]:
    """How files of a named set are read: WikiText by article and detokenised, 1BW line by line.

    Words given here go before.
    """
    named = NAMED[name][0] if name in NAMED else None
    documents = documents or (named.documents if named else "")
    documents = "line" if documents == "row" else documents  # a row of the hub is a line of a file
    detokenize = detokenize or (named.detokenize if named else "") or ""
    options = {"documents": documents, "detokenize": "" if detokenize == "none" else detokenize}
    return {key: value for key, value in options.items() if value}


Where = str | PathLike[str]
SETS = (*NAMED, WIKIPEDIA, STORIES)
AND = "+"  # wikitext2+wikipedia-2006: both
OF_A_RUN = ("train.json", "log.jsonl")  # files that a run's folder holds


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
            raise ValueError(
                f"{names}: there is no text in it; give a file with at least one document that is "
                "not blank"
            )

    def describe(self) -> dict[str, Any]:
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.files]
        gaps = self.reading.gaps or "remove"
        return {
            "files": files,
            "format": self.format,
            "detokenize": self.detokenize,
            **asdict(self.reading),
            "gaps": gaps,
        }

    def size(self) -> int | None:
        return (
            None
            if any(path.suffix == ".gz" for path in self.files)
            else sum(path.stat().st_size for path in self.files)
        )


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


@dataclass(frozen=True)
class JoinedSource:
    """Several sources, one after the other."""

    parts: tuple[Source, ...]

    def pieces(self) -> Iterator[Piece]:
        for part in self.parts:
            yield from part.pieces()

    def describe(self) -> dict[str, Any]:
        return {"joined": [part.describe() for part in self.parts]}

    def size(self) -> int | None:
        sizes = [part.size() for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def contents(source: Source) -> list[str]:
    """The SHA-256 of each file that a source reads, in order; none of what is not in files."""
    if isinstance(source, JoinedSource):
        return [digest for part in source.parts for digest in contents(part)]
    files = source.files if isinstance(source, FileSource | HeldOutStories) else ()
    return [sha256_of(path) for path in files]


def with_gaps_of(tokenizer: Tokenizer, source: Source) -> Source:
    """FASTA is read with an alignment's gaps if the tokeniser's alphabet has them,
    where nobody said otherwise.
    """
    if (
        not isinstance(source, FileSource)
        or source.format != "fasta"
        or source.reading.gaps
        or not tokenizer.has_gaps
    ):
        return source
    return replace(source, reading=replace(source.reading, gaps="keep"))


def documents(source: Source) -> Iterator[str]:
    """Whole documents, one string each. For data of any size use `source.pieces()`."""
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
    **reading: str,
) -> FileSource:
    """A file, a folder (all files of one format in it, however deep), a glob, or several of these;
    see `Reading` for the options.
    """
    wheres = [where] if isinstance(where, str | PathLike) else list(where)
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}; allowed: {', '.join(FORMATS)}")
    try:
        how = Reading(**reading)
    except TypeError:
        unknown = sorted(set(reading) - set(asdict(Reading())))
        raise ValueError(
            f"unknown options: {', '.join(unknown)}; known: {', '.join(asdict(Reading()))}"
        ) from None
    files = [file for each in wheres for file in _files(each, format)]
    if not files:
        raise ValueError("no file to read; name at least one")
    formats = {format_of(file) for file in files} if format is None else {format}
    if len(formats) > 1:
        raise ValueError(
            f"the files are of several formats ({', '.join(sorted(formats))}); "
            "say which to read with format= (`tracformer prepare --format`)"
        )
    return FileSource(tuple(files), formats.pop(), how, detokenize)


def open_sources(
    where: Where | Sequence[Where],
    *,
    validation: Where | None = None,
    folder: Where | None = None,
    **options: Any,
) -> dict[str, Source]:
    """By split: data sets by name, `hf:owner/name` or `hf:owner/name:config` from the hub, anything
    else as `open_source`.

    Several named sets (a list, or joined by `+`) are trained on together; other splits are the
    first one's. `folder` holds the files of named sets, instead of a download (see `shelf`).
    `validation` names a file, folder or glob that becomes that split, read with the same options.
    """
    sources: dict[str, Source]
    if names := named_sets(where):
        # else they are for the validation file
        if names == (WIKIPEDIA,) and options and validation is None:
            raise ValueError(
                f"{', '.join(options)} is given for {WIKIPEDIA}, which is one text of known hash "
                "and is read in one way alone"
            )
        sources = _joined([_named(name, folder, options) for name in names])
    elif folder is not None:
        raise ValueError(
            f"{str(folder)!r} is given for {where!r}, and only data sets by name are looked for in "
            f"a folder: {', '.join(SETS)}"
        )
    elif isinstance(where, str) and where.startswith(HUB_PREFIX):
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
    """The names of data sets that `where` consists of; none where it is anything else.

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


def _named(name: str, folder: Where | None, options: Mapping[str, Any]) -> dict[str, Source]:
    if name == WIKIPEDIA:
        return {"train": Wikipedia2006(None if folder is None else Path(folder))}
    if name == STORIES:
        return _stories(folder)
    if folder is None:
        return dict(named_source(name, **options))
    how = {**reading_of(name), **options}
    return {split: open_source(files, **how) for split, files in find_set(name, folder).items()}


def _stories(folder: Where | None) -> dict[str, Source]:
    if folder is None:
        raise FileNotFoundError(
            f"{STORIES} is read from files, not fetched; name the folder that holds {STORIES}/ "
            "with files "
            "called train and valid (`--from FOLDER`, or data=FOLDER of `tracformer reproduce`)"
        )
    files = find_set(STORIES, folder)
    if missing := [split for split in ("train", "validation") if split not in files]:
        raise FileNotFoundError(f"{Path(folder) / STORIES} has no file for {missing[0]}")
    held_out, training = tuple(files["validation"]), tuple(files["train"])
    halves = {split: HeldOutStories(held_out, training, split) for split in HALVES}
    return {"train": open_source(list(training)), **halves}


def _joined(sets: list[dict[str, Source]]) -> dict[str, Source]:
    first, *others = sets
    if not others:
        return first
    return {
        **first,
        "train": JoinedSource(tuple(each["train"] for each in sets if "train" in each)),
    }


def parse_validation(text: str) -> tuple[float, str | None]:
    """What to validate on, in a word: a fraction of the data to hold back, such as `0.05`, or a
    file, folder or glob (and then 0).
    """
    try:
        fraction = float(text)
    except ValueError:
        if text:
            return 0.0, text
        fraction = math.nan
    if not 0.0 <= fraction <= 0.5:
        raise ValueError(
            f"validation is {text!r}; it must be a fraction from 0 to 0.5 to hold back, or a file, "
            "folder or glob"
        )
    return fraction, None


def _held_out(where: Where, train: Source | None, options: Mapping[str, Any]) -> FileSource:
    if not Path(where).exists() and not glob.has_magic(str(where)):
        raise FileNotFoundError(
            f"validation is {str(where)!r}: no such file or folder; it may also be a glob, or a "
            "fraction to hold back"
        )
    source = open_source(where, **options)
    used = {file.resolve() for file in train.files} if isinstance(train, FileSource) else set()
    if both := [str(file) for file in source.files if file.resolve() in used]:
        raise ValueError(
            f"{both[0]} is given both for training and for validation; a model must be validated "
            "on other text"
        )
    return source


def _require_in_use(source: FileSource, options: Mapping[str, Any]) -> None:
    """An option of another format than the files' would be ignored."""
    for format, names in READ_WITH.items():
        for name in names:
            if format != source.format and options.get(name, getattr(Reading, name)) != getattr(
                Reading, name
            ):
                raise ValueError(
                    f"{name} is {options[name]!r}, but {source.files[0]} is read as "
                    f"{source.format}: it is for {format} alone"
                )


def fixed_part(where: Where) -> Path:
    """The folder in which a glob begins to vary; of anything else, itself."""
    path = Path(where)
    if path.exists() or not glob.has_magic(str(where)):
        return path
    return next(parent for parent in path.parents if not glob.has_magic(str(parent)))


def _outside_runs(files: Iterator[Path], root: Path) -> list[Path]:
    """In order; a run's log is no text to train on, and would grow with every step."""
    found = sorted(file for file in files if file.is_file())
    runs = {
        file.parent
        for file in found
        if file.name in OF_A_RUN and all((file.parent / name).is_file() for name in OF_A_RUN)
    } - {root}
    return [file for file in found if runs.isdisjoint(file.parents)]


def _files(where: Where, format: str | None) -> list[Path]:
    path = Path(where)
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = [
            suffix for each in ([format] if format else FORMATS) for suffix in SUFFIXES[each]
        ]
        found = [
            file
            for file in _outside_runs(path.rglob("*"), path)
            if file.name.removesuffix(".gz").lower().endswith(tuple(suffixes))
        ]
        if not found:
            raise ValueError(
                f"{path} holds no file that ends in {', '.join(suffixes)} (or these with .gz); "
                "name the files, or a glob of them"
            )
        return found
    if glob.has_magic(str(where)):
        names = map(Path, glob.glob(str(where), recursive=True))
        if found := _outside_runs(names, fixed_part(where)):
            return found
        raise FileNotFoundError(f"no file matches {str(where)!r}")
    known = ", ".join(SETS)
    raise FileNotFoundError(
        f"{str(where)!r}: no such file or folder, nor a named data set ({known}); for another of "
        f"the hub write {HUB_PREFIX}owner/name"
    )
