"""Data sets of the Hugging Face hub, and the data sets of the paper by name.

    HubSource      one split of a data set of the hub
    NAMED          the data sets of the paper: how each is read, and what its splits are called
    named_source   a data set of the paper as one source per split

ReadOptions from the hub needs the package `datasets` (extra `hub`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tracformer.data.detokenize import detokenizer
from tracformer.data.documents import DOCUMENTS, TextPiece, as_pieces
from tracformer.data.tokenizer import EOT
from tracformer.files import optional_package

HUB_PREFIX = "hf:"
# the hub's own copy of a data set whose main branch is still a script
PARQUET_BRANCH = "refs/convert/parquet"
ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class HubSource:
    """One split of a data set of the Hugging Face hub.

    Attributes:
        path: "owner/name", a local folder, or a builder such as "json" with `data_files`.
        config: Configuration of the data set.
        split: Its split; slices such as "train[:100]" are allowed.
        field: Column that holds the text.
        documents: "row" for one document per row, or a key of `documents.DOCUMENTS`, which then
            reads the rows as lines.
        detokenize: A key of `DETOKENIZERS`, or None.
        revision: Revision of the data set.
        data_files: Files for a builder.
        data_dir: Folder for a builder.
        streaming: Read over the network without a copy on disk.
        cache_dir: Folder of the library's cache.
        rows: Number of rows that the split must have; parquet copies of the hub may be partial.
    """

    path: str
    config: str | None = None
    split: str = "train"
    field: str = "text"
    documents: str = "row"
    detokenize: str | None = None
    revision: str | None = None
    data_files: str | list[str] | None = None
    data_dir: str | None = None
    streaming: bool = False
    cache_dir: str | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.documents != "row" and self.documents not in DOCUMENTS:
            raise ValueError(
                f"documents is {self.documents!r}; allowed: row, {', '.join(DOCUMENTS)}"
            )
        detokenizer(self.detokenize)

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the documents as pieces."""
        natural, empty = detokenizer(self.detokenize), True
        for piece in self._documents():
            empty = False
            yield piece._replace(text=natural(piece.text)) if self.detokenize else piece
        if empty:
            raise ValueError(f"{self._name()} has no text in its column {self.field!r}")

    def describe(self) -> dict[str, Any]:
        """Return the fields that identify the data, for the manifest."""
        # without data_files and data_dir, which are paths on this machine
        names = ("path", "config", "split", "field", "documents", "detokenize", "revision")
        return {name: getattr(self, name) for name in names}

    def size(self) -> int | None:
        """Return None: the size is not known."""
        return None

    def _documents(self) -> Iterator[TextPiece]:
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
                f"{self._name()} has no column {self.field!r}; it has {', '.join(columns)}: choose "
                "one with field="
            )
        if self.rows is not None and not self.streaming and len(data) != self.rows:
            raise ValueError(
                f"{self._name()} has {len(data):,} rows instead of {self.rows:,}: the copy on the "
                f"hub is partial or was changed; use another copy, as {HUB_PREFIX}owner/name"
            )
        for batch in data.select_columns([self.field]).iter(batch_size=ROWS_AT_ONCE):
            for text in batch[self.field]:
                if not isinstance(text, str):
                    raise ValueError(
                        f"{self._name()}: column {self.field!r} holds a {type(text).__name__}, not "
                        "text; choose another with field="
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
                # that branch has each configuration as a folder
                return datasets.load_dataset(
                    self.path, revision=PARQUET_BRANCH, data_dir=self.config, **options
                )
        # many kinds of error: no network, no such name, config or split, a damaged file
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(
                f"{self._name()} could not be loaded: {first}; check the name, the config, the "
                "split and the network, or download the files and read them from there"
            ) from error

    def _name(self) -> str:
        return " ".join(
            part
            for part in (f"data set {self.path!r}", self.config, f"split {self.split!r}")
            if part
        )


THREE = {"train": "train", "validation": "validation", "test": "test"}
OPENWEBTEXT = HubSource("Skylion007/openwebtext", "plain_text")

# The paper's data sets: how each is read, and its split for each of ours.
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
    ),  # "test" is the held-out section; there is no third split
    "ptb": (
        HubSource(
            "ptb-text-only/ptb_text_only", "penn_treebank", field="sentence", detokenize="ptb"
        ),
        THREE,
    ),
    # The hub has one split; the last 100,000 documents validate, as in the papers compared with.
    "openwebtext": (OPENWEBTEXT, {"train": "train[:-100000]", "validation": "train[-100000:]"}),
}
ROWS = {("openwebtext", "train"): 7_913_769, ("openwebtext", "validation"): 100_000}


def named_source(name: str, **options: Any) -> dict[str, HubSource]:
    """Return a data set of the paper as one source per split.

    Args:
        name: A key of `NAMED`.
        **options: Fields of `HubSource` to change in every split's source.
    """
    if name not in NAMED:
        raise ValueError(f"data set is {name!r}; allowed: {', '.join(NAMED)}")
    source, splits = NAMED[name]
    try:
        return {
            ours: replace(source, **{"split": theirs, "rows": ROWS.get((name, ours)), **options})
            for ours, theirs in splits.items()
        }
    except TypeError as error:
        raise ValueError(f"data set {name!r}: {error}") from error
