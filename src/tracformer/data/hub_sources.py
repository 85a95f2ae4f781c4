"""Data sets of the Hugging Face hub, and the data sets of the paper by name.

    HubSource      one split of a data set of the hub
    NAMED          the data sets of the paper: how each is read, and what its splits are called
    named_source   a data set of the paper as one source per split
    detokenizer    undoes the tokenization of WikiText, PTB, LAMBADA or 1BW

Reading from the hub needs the package `datasets` (extra `hub`).

The detokenizers let a tokenizer see natural text: these corpora are published with spaces around
punctuation and other marks. Each works line by line and leaves natural text as it is, except for
spaces at the ends of lines. `<unk>` and PTB's `N` stay: they are part of the corpora.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tracformer.data.documents import DOCUMENTS, TextPiece, as_pieces
from tracformer.data.tokenizer import EOT
from tracformer.files import optional_package

Rule = tuple[re.Pattern[str], str]


def _rules(*pairs: tuple[str, str]) -> list[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


# Patterns begin with a plain character where possible, which makes the search several times
# faster. Lines are already stripped.
SPACING = _rules(
    (r" ([,;:!?%]|\.+)(?=\s|$|[\"')\]}])", r"\1"),  # word , -> word,
    (r"([(\[{]) (?=\S)", r"\1"),  # ( word -> (word
    (r" ([)\]}])", r"\1"),  # word ) -> word)
    (r"([$£€]) (?=[\dN<])", r"\1"),  # $ 5 -> $5
    (r" # (?=[\dN<])", " #"),  # the # 1 song -> the #1 song
)
CONTRACTIONS = _rules(
    (r" n't\b", "n't"),  # do n't -> don't
    (r" '(s|S|t|m|M|re|ve|ll|d)\b(?!')", r"'\1"),  # it 's -> it's, didn 't -> didn't
    (r" ' s\b", "'s"),  # the U.S. ' s law -> the U.S.'s law
    (r"s '(?= \w)", "s'"),  # viewers ' opinions -> viewers' opinions
)
NUMBERS = _rules(
    (r" @([-,.])@ ", r"\1"),  # 0 @.@ 7 -> 0.7, well @-@ known -> well-known
    (r" (?<=\d ): (?=\d\d\b)", ":"),  # 10 : 30 -> 10:30
)
SINGLE_QUOTES = _rules((r"'(?<!\S') ([^']+?) '(?=[\s,.;:!?)]|$)", r"'\1'"))
HEADING = re.compile(r"((?:= )+)([^=\s].*?)((?: =)+)")
QUOTE = re.compile('"')
BEGUN_BEFORE = re.compile(r'[^"]*[,.!?] " [a-z]')  # It was fine , " he said .
# what may stand before and after a quote
OPENERS, CLOSERS = ("", " ", "(", "[", "{"), ("", " ", ",", ".", ";", ":", "!", "?", ")", "]", "}")


def wikitext(text: str) -> str:
    r"""Undo `@-@`, spaced punctuation, brackets and quotes, and `= = Section = =` lines.

    >>> wikitext(' = = Size = = \n It weighs 0 @.@ 7 kg ( 1 @.@ 5 lb ) , and is " red " . ')
    '== Size ==\nIt weighs 0.7 kg (1.5 lb), and is "red".'
    """
    return _by_line(text, _wikitext_line)


def ptb(text: str) -> str:
    r"""Undo spaced contractions and currency and the escaped slash; PTB has little punctuation.

    >>> ptb(" the <unk> do n't pay $ N or N \\/ N for viewers ' shows ")
    "the <unk> don't pay $N or N/N for viewers' shows"
    """
    return _by_line(
        text,
        lambda line: _apply(
            line.strip().replace(" \\/ ", "/").replace("\\/", "/"), CONTRACTIONS, SPACING
        ),
    )


def lambada(text: str) -> str:
    r"""Undo what PTB does, and its quotes; in the cased release only the curly quotes change.

    >>> lambada("`` do n't put those on me , '' i whispered .")
    '"don\'t put those on me," i whispered.'
    """
    return _by_line(text, _lambada_line)


def one_billion_words(text: str) -> str:
    r"""Undo spaced punctuation, quotes, contractions and currency.

    >>> one_billion_words('" We didn \'t pay $ 2,900 ( a lot ) , " he said .')
    '"We didn\'t pay $2,900 (a lot)," he said.'
    """
    return _by_line(
        text,
        lambda line: _pair_quotes(
            _apply(line.strip(), CONTRACTIONS, NUMBERS, SPACING, SINGLE_QUOTES)
        ),
    )


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    "wikitext": wikitext,
    "ptb": ptb,
    "lambada": lambada,
    "1bw": one_billion_words,
}


def detokenizer(name: str | None) -> Callable[[str], str]:
    """Return a function of `DETOKENIZERS` by name; None leaves text as it is."""
    if name is None:
        return str
    if name not in DETOKENIZERS:
        raise ValueError(f"detokenize is {name!r}; allowed: {', '.join(DETOKENIZERS)}, or none")
    return DETOKENIZERS[name]


def _by_line(text: str, change: Callable[[str], str]) -> str:
    return "\n".join(map(change, text.split("\n")))


def _apply(line: str, *groups: list[Rule]) -> str:
    for group in groups:
        for pattern, replacement in group:
            line = pattern.sub(replacement, line)
    return line


def _wikitext_line(line: str) -> str:
    line = line.strip()
    if heading := HEADING.fullmatch(line):
        before, title, after = heading.groups()
        return f"{before.replace(' ', '')} {_wikitext_words(title)} {after.replace(' ', '')}"
    return _wikitext_words(line)


def _wikitext_words(line: str) -> str:
    return _pair_quotes(_apply(line, NUMBERS, CONTRACTIONS, SPACING, SINGLE_QUOTES))


def _lambada_line(line: str) -> str:
    for old, new in (
        ("``", '"'),
        ("''", '"'),
        ("\u201c", '"'),
        ("\u201d", '"'),
        ("\u2018", "'"),
        ("\u2019", "'"),
    ):
        line = line.replace(old, new)
    return _pair_quotes(_apply(line.strip(), CONTRACTIONS, SPACING, SINGLE_QUOTES))


def _pair_quotes(line: str) -> str:
    """Turn `" word "` into `"word"`.

    A quote with spaces on both sides opens or closes in turn, unless an end of the line, a bracket
    or punctuation decides it.
    """
    inside = line.count('"') % 2 == 1 and BEGUN_BEFORE.match(line) is not None
    parts, done = [], 0
    for match in QUOTE.finditer(line):
        at = match.start()
        left, right = line[at - 1 : at] if at else "", line[at + 1 : at + 2]
        left_free, right_free = left in OPENERS, right in CLOSERS
        if left_free and right_free:
            surely_opens, surely_closes = left != " ", right != " "
            inside = surely_opens or (not surely_closes and not inside)
            space = at + 1 if inside else at - 1
            if line[space : space + 1] == " " and space >= done:
                parts.append(line[done:space])
                done = space + 1
        elif left_free or right_free:  # natural text already
            inside = left_free
    return "".join([*parts, line[done:]])


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
