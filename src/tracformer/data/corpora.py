"""Two corpora that are cleaned here: Wikipedia of March 2006, and TinyStories.

**Wikipedia 2006** is enwik8, the first 10^8 bytes of a dump, as paragraphs of plain English.

    # downloads 36 MB, once
    tracformer prepare wikipedia-2006 --out data/wikipedia-2006
    # FOLDER has enwik8, enwik8.zip or enwik8.gz
    tracformer prepare wikipedia-2006 --from FOLDER --out data/wikipedia-2006

An article keeps its title, its section titles and its paragraphs of at least 80 characters, without
tables, lists, templates, pictures and references. Both the dump and the cleaned text are checked by
their SHA-256. `Wikipedia2006` is the source of documents; `clean` turns the XML of a dump into
articles of plain text.

**TinyStories** (Eldan and Li, 2023) has short stories in simple words. `HeldOutStories` is the
source of its held-out stories.

    tracformer prepare tinystories --from FOLDER --tokenizer bpe:2048 --out data/stories

FOLDER/tinystories has text files whose names contain `train` (stories that end in <|endoftext|>;
machine-written stories may be among them), and one or more whose names contain `valid`. The latter
give two splits, `validation` and `test`:

1. The text is cut into stories, at <|endoftext|> if it has any. A text without separators is cut
   before each paragraph that looks like the beginning of a story (`OPENING`); text before the first
   is left out. Of the 7,040 stories of the published training text 88% begin like this, and 8% of
   such paragraphs do not begin a story.
2. Paragraphs are joined by one newline, as in the training text.
3. A story that begins before the middle of the text is for `validation`, others for `test`.
4. Stories that share SHARED consecutive words with the training text, ignoring case and
   punctuation, are removed. Many share only an opening ("Once upon a time there was a little girl
   named Lily. She"); they are removed too.
"""

import hashlib
import html
import re
import shutil
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tracformer.data.documents import TextPiece, as_pieces, by_separator
from tracformer.data.input_files import lines_of, read_text
from tracformer.data.tokenizer import EOT
from tracformer.files import cache_folder, sha256_of, write_atomically

WIKIPEDIA = "wikipedia-2006"
SITE = "http://mattmahoney.net/dc/enwik8.zip"
DUMP, DUMPS = "enwik8", ("enwik8", "enwik8.zip", "enwik8.gz")
DUMP_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
TEXT = "wikipedia-2006.txt"
TEXT_SHA256 = "d90db40aa9928c55d2224d712e3f21b32065565c300bb2f5ca6fe130e7725f1f"

SHORTEST_PARAGRAPH, SHORTEST_ARTICLE = 80, 300  # characters
TEMPLATE_DEPTH = 4  # templates inside templates; lines with deeper ones are removed later
NOT_ARTICLES = re.compile(
    r"(?:Wikipedia|Template|Image|Category|Portal|Help|MediaWiki|Talk|User)[^:]*:"
)
CLOSING_SECTIONS = (
    "see also",
    "external links",
    "references",
    "further reading",
    "notes",
    "bibliography",
    "sources",
)
NOT_PROSE = tuple("*#:;|!{}<")  # first characters of lists, indents, tables and stray markup
HEADING = re.compile(r"(=+)\s*(.*?)\s*=+")
BLANKS = re.compile(r"\s+")

COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
REFERENCE = re.compile(r"<ref[^>/]*/>|<ref.*?</ref>", re.DOTALL)
ELEMENT = re.compile(
    r"<(math|gallery|table|timeline|pre|nowiki|code|imagemap|div)\b.*?</\1>",
    re.DOTALL | re.IGNORECASE,
)
TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")  # without another one inside
TABLE = re.compile(r"\{\|.*?\|\}", re.DOTALL)
PICTURE_OR_LANGUAGE = re.compile(
    # [[Image:x.png|a [[link]] within]], [[fr:Page]]
    r"""\[\[ (?: image | file | category | media | simple | [a-z]{2,3} (?:-[a-z]+)* ) :
    [^\[\]]* (?: \[\[ [^\[\]]* \]\] [^\[\]]* )* \]\]""",
    re.VERBOSE | re.IGNORECASE,
)
LINK = re.compile(r"\[\[(?:[^|\[\]]*\|)?([^\[\]]*)\]\]")  # [[page|words]] -> words
EXTERNAL_LINK = re.compile(r"\[https?:[^\s\]]*\s?([^\]]*)\]")
TAG = re.compile(r"<[^>]+>")

TITLE = re.compile(r"<title>(.*?)</title>")
MARKUP_BEGINS, MARKUP_ENDS = '<text xml:space="preserve">', "</text>"


def articles(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the title and the wiki markup of each page of a dump, still escaped for XML.

    A page that the end of the dump cuts off is left out. The title of a page without text is used
    for the next page. This mistake is kept on purpose: enwik8 has one such article ("Floor Leader",
    which is about Fabio Taglioni), and the recorded hash is of the text with it.
    """
    title: str | None = None
    markup: list[str] | None = None
    for line in lines:
        if markup is None:
            if title is None and (found := TITLE.search(line)):
                title = found[1]
            _, begins, line = line.partition(MARKUP_BEGINS)
            if not begins or title is None:
                continue
            markup = []
        text, ends, _ = line.partition(MARKUP_ENDS)
        markup.append(text)
        if ends:
            if title is not None:
                yield title, "".join(markup)
            title, markup = None, None


def is_article(title: str, markup: str) -> bool:
    """Return whether a page is an article: no redirect, and not about Wikipedia itself."""
    return not markup[:12].lower().startswith("#redirect") and not NOT_ARTICLES.match(title)


def without_markup(markup: str) -> str:
    """Return the text that a reader sees, line by line, without tables, pictures and the like."""
    text = html.unescape(html.unescape(markup))  # once for XML, once for what editors wrote
    for pattern in (COMMENT, REFERENCE, ELEMENT):
        text = pattern.sub("", text)
    for _ in range(TEMPLATE_DEPTH):
        text = TEMPLATE.sub("", text)
    for pattern in (TABLE, PICTURE_OR_LANGUAGE):
        text = pattern.sub("", text)
    for pattern in (LINK, EXTERNAL_LINK):
        text = pattern.sub(r"\1", text)
    text = TAG.sub("", text)
    return text.replace("'''", "").replace("''", "").replace("\xa0", " ")


def prose(text: str) -> list[str]:
    """Return the paragraphs of an article, and the headings that have a paragraph right below.

    The closing sections ("See also", "References", ...) are left out. Short articles give nothing.
    """
    kept: list[str] = []
    for line in map(str.strip, text.split("\n")):
        if heading := HEADING.fullmatch(line):
            signs, name = heading.groups()
            if name.lower() in CLOSING_SECTIONS:
                break
            kept.append(f"{signs} {name} {signs}")
        elif (
            len(line) >= SHORTEST_PARAGRAPH and not line.startswith(NOT_PROSE) and "||" not in line
        ):
            kept.append(BLANKS.sub(" ", line))
    if sum(len(line) for line in kept if not line.startswith("=")) < SHORTEST_ARTICLE:
        return []
    following = [*kept[1:], "="]
    return [
        line
        for line, below in zip(kept, following, strict=True)
        if not (line.startswith("=") and below.startswith("="))
    ]


def clean(dump: Iterable[str]) -> Iterator[str]:
    """Yield each article as text: `= Title =`, then its headings and paragraphs, one per line.

    Args:
        dump: Lines of the XML.
    """
    for title, markup in articles(dump):
        if is_article(title, markup) and (lines := prose(without_markup(markup))):
            yield "\n".join([f"= {html.unescape(title)} =", *lines]) + "\n"


@dataclass(frozen=True)
class Wikipedia2006:
    """The cleaned text as a source with one document per article.

    Attributes:
        folder: Folder with the text or the dump; None downloads the dump.
    """

    folder: Path | None = None

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the articles."""
        path = cleaned_text(self.folder)
        article: list[str] = []
        for number, line in enumerate(lines_of(read_text(path)), 1):
            if line.strip():
                article.append(line)
            else:
                yield from as_pieces("".join(article), f"{path}, line {number - len(article)}")
                article = []

    def describe(self) -> dict[str, Any]:
        """Return the name and the hash of the text."""
        return {"name": WIKIPEDIA, "sha256": TEXT_SHA256}

    def size(self) -> int | None:
        """Return None: the text may not exist yet."""
        return None


def cleaned_text(folder: Path | None = None) -> Path:
    """Return the file of the cleaned text.

    If it is neither in `folder` nor in the cache, it is made in the cache from the dump, which is
    downloaded if there is no folder.
    """
    cached = cache_folder() / TEXT
    places = [cached] if folder is None else [folder / TEXT, cached]
    if found := next((place for place in places if place.is_file()), None):
        _require(found, TEXT_SHA256, "cleaned text")
        return found
    dump = (
        None
        if folder is None
        else next((folder / name for name in DUMPS if (folder / name).is_file()), None)
    )
    if folder is not None and dump is None:
        raise FileNotFoundError(
            f"{folder} has neither {TEXT} nor {', '.join(DUMPS)}; download the dump from {SITE}"
        )
    cached.parent.mkdir(parents=True, exist_ok=True)
    clean_dump(dump if dump is not None else _fetch(cached.parent), cached)
    return cached


def clean_dump(dump: Path, out: Path) -> None:
    """Write the cleaned text of enwik8, which may be zipped or gzipped.

    Raises:
        ValueError: The dump or the cleaned text does not have the recorded hash.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if dump.suffix == ".zip":
            with (
                zipfile.ZipFile(dump) as packed,
                packed.open(DUMP) as inside,
                open(Path(temporary) / DUMP, "wb") as unpacked,
            ):
                shutil.copyfileobj(inside, unpacked)
            dump = Path(temporary) / DUMP
        if dump.suffix != ".gz":
            _require(dump, DUMP_SHA256, "dump")

        def write(path: Path) -> None:
            digest = hashlib.sha256()
            with open(path, "wb") as file:
                for article in clean(lines_of(read_text(dump))):
                    text = f"{article}\n".encode()
                    digest.update(text)
                    file.write(text)
            if digest.hexdigest() != TEXT_SHA256:
                raise ValueError(
                    f"{dump} gives a cleaned text with SHA-256 {digest.hexdigest()} instead of "
                    f"{TEXT_SHA256}; check that it is enwik8"
                )

        write_atomically(out, write)


def _fetch(folder: Path) -> Path:
    path = folder / "enwik8.zip"
    if not path.is_file():
        print(f"downloading {SITE}", file=sys.stderr)

        def write(part: Path) -> None:
            with urllib.request.urlopen(SITE, timeout=60) as answer, open(part, "wb") as file:
                shutil.copyfileobj(answer, file)

        try:
            write_atomically(path, write)
        except OSError as error:
            raise FileNotFoundError(
                f"{SITE} could not be downloaded: {error}; download it elsewhere and give its "
                "folder: --from FOLDER"
            ) from error
    return path


def _require(path: Path, sha256: str, what: str) -> None:
    if (found := sha256_of(path)) != sha256:
        raise ValueError(
            f"{path} is not the expected {what}: its SHA-256 is {found} instead of {sha256}"
        )


STORIES = "tinystories"
SHARED = 12  # words
HALVES = {"validation": 0, "test": 1}
OPENING = re.compile(
    r"""Once\b
    | One\ (?:sunny\ |bright\ )?(?:day|morning|night),?\ (?:a|an|there|two|three)\b
    | [A-Z]\w+\ and\ [A-Z]?\w+\ (?:are|were|like|liked|love|loved)\b""",
    re.VERBOSE,
)
WORD = re.compile(r"[\w']+")


@dataclass(frozen=True)
class HeldOutStories:
    """One half of the held-out stories, without those that share text with the training stories.

    Attributes:
        held_out: Files of held-out stories.
        training: Files of training stories.
        split: "validation" or "test".
    """

    held_out: tuple[Path, ...]
    training: tuple[Path, ...]
    split: str

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the content of the split depends on."""
        return (*self.held_out, *self.training)

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the stories."""
        halves = unseen_stories(self.held_out, self.training)
        for number, story in enumerate(halves[HALVES[self.split]], 1):
            yield from as_pieces(story, f"{self.held_out[0]}, {self.split} story {number}")

    def describe(self) -> dict[str, Any]:
        """Return the files and the rules, for the manifest."""
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.files]
        return {"files": files, "half": HALVES[self.split], "shared_words": SHARED, "rule": 1}

    def size(self) -> int | None:
        """Return None: the size is not known."""
        return None


@lru_cache(maxsize=1)
def unseen_stories(
    held_out: tuple[Path, ...], training: tuple[Path, ...]
) -> tuple[list[str], list[str]]:
    """Return the stories of both halves that share no SHARED consecutive words with training."""
    text = "\n".join("".join(read_text(path)) for path in held_out)
    halves: tuple[list[str], list[str]] = ([], [])
    for start, story in split_stories(text):
        halves[start >= len(text) / 2].append(story)
    known = {run for half in halves for story in half for run in _runs(words_of(story))}
    seen: set[tuple[str, ...]] = set()
    for path in training:
        for story in _documents(path):
            seen.update(run for run in _runs(words_of(story)) if run in known)
    first, second = (
        [story for story in half if seen.isdisjoint(_runs(words_of(story)))] for half in halves
    )
    if not first or not second:
        raise ValueError(
            f"{held_out[0]}: only {len(first)} and {len(second)} stories of its halves share no "
            f"{SHARED} consecutive words with the training text; use held-out stories that are not "
            "in the training text"
        )
    return first, second


def split_stories(text: str) -> list[tuple[int, str]]:
    r"""Return the stories of a text, each with the offset at which it begins.

    >>> text = "left it.\n\nOnce upon a time, a cat ran.\n\nIt sat.\n\nOne day, a dog ran."
    >>> [story for _, story in split_stories(text)]
    ['Once upon a time, a cat ran.\nIt sat.', 'One day, a dog ran.']
    """
    places = [0]
    if EOT in text:
        places += [found.end() for found in re.finditer(re.escape(EOT), text)]
    else:
        lines = re.finditer(r"^.*\S.*$", text, re.MULTILINE)
        places = [line.start() for line in lines if OPENING.match(line[0].strip())]
    stories = []
    for start, stop in pairwise([*places, len(text)]):
        paragraphs = (line.strip() for line in text[start:stop].replace(EOT, "").splitlines())
        if story := "\n".join(filter(None, paragraphs)):
            stories.append((start, story))
    return stories


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return WORD.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(SHARED)), strict=False)


def _documents(path: Path) -> Iterator[str]:
    parts: list[str] = []
    for piece in by_separator(read_text(path), str(path), EOT):
        parts.append(piece.text)
        if piece.end:
            yield "".join(parts)
            parts.clear()
