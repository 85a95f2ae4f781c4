"""Wikipedia of March 2006: enwik8, the first 10^8 bytes of its dump, fetched and cleaned to
paragraphs of plain English.

    # downloads 36 MB, once
    tracformer prepare wikipedia-2006 --out data/wikipedia-2006
    # FOLDER holds enwik8, enwik8.zip or enwik8.gz
    tracformer prepare wikipedia-2006 --from FOLDER --out data/wikipedia-2006

What is kept of an article: its title, its section titles and its paragraphs of 80 characters or
more, without tables, lists, templates, pictures and references. Both the dump and the cleaned text
are checked by their SHA-256.
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
from pathlib import Path
from typing import Any

from tracformer.data.readers import Piece, as_pieces, lines_of, read_text
from tracformer.files import cache_folder, sha256_of, write_atomically

NAME = "wikipedia-2006"
SITE = "http://mattmahoney.net/dc/enwik8.zip"
DUMP, DUMPS = "enwik8", ("enwik8", "enwik8.zip", "enwik8.gz")
DUMP_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
TEXT = "wikipedia-2006.txt"
TEXT_SHA256 = "d90db40aa9928c55d2224d712e3f21b32065565c300bb2f5ca6fe130e7725f1f"

SHORTEST_PARAGRAPH, SHORTEST_ARTICLE = 80, 300  # characters
TEMPLATE_DEPTH = 4  # templates inside templates: what is deeper stays, and falls with its lines
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
NOT_PROSE = tuple("*#:;|!{}<")  # how lists, indents, tables and stray markup begin
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
    """Titles and wiki markup, as the dump's XML has them; a page that the dump's end cuts off is
    left out.

    A page without text hands its title on to the next one. That is a slip, and it stays: enwik8 has
    one such article ("Floor Leader", which is about Fabio Taglioni), and the recorded text has it
    too.
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
    """Neither a page about Wikipedia itself nor one that only points to another."""
    return not markup[:12].lower().startswith("#redirect") and not NOT_ARTICLES.match(title)


def without_markup(markup: str) -> str:
    """The text that a reader sees, line for line; what is no prose is taken out as a whole."""
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
    """Paragraphs, and the headings that have one right below; nothing from the closing sections on,
    nothing of an article that is short.
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
    """One string an article: `= Title =`, then its headings and paragraphs, a line each.

    `dump` is the XML, line by line.
    """
    for title, markup in articles(dump):
        if is_article(title, markup) and (lines := prose(without_markup(markup))):
            yield "\n".join([f"= {html.unescape(title)} =", *lines]) + "\n"


@dataclass(frozen=True)
class Wikipedia2006:
    """The cleaned text as a source of documents, an article each.

    `folder`: where the text or the dump lies, instead of a download.
    """

    folder: Path | None = None

    def pieces(self) -> Iterator[Piece]:
        path = cleaned_text(self.folder)
        article: list[str] = []
        for number, line in enumerate(lines_of(read_text(path)), 1):
            if line.strip():
                article.append(line)
            else:
                yield from as_pieces("".join(article), f"{path}, line {number - len(article)}")
                article = []

    def describe(self) -> dict[str, Any]:
        return {"name": NAME, "sha256": TEXT_SHA256}

    def size(self) -> int | None:
        return None


def cleaned_text(folder: Path | None = None) -> Path:
    """The file of the cleaned text: found in `folder` or in the cache, or made there from the dump,
    which is fetched if need be.
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
            f"{folder} holds neither {TEXT} nor {', '.join(DUMPS)}; {SITE} is where the dump comes "
            "from"
        )
    cached.parent.mkdir(parents=True, exist_ok=True)
    clean_dump(dump if dump is not None else _fetch(cached.parent), cached)
    return cached


def clean_dump(dump: Path, out: Path) -> None:
    """From enwik8, as it is, zipped or gzipped, to the cleaned text; another dump or another
    outcome than the recorded ones is an error.
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
                    f"{dump} cleans to a text with SHA-256 {digest.hexdigest()} where "
                    f"{TEXT_SHA256} is recorded; is it enwik8?"
                )

        write_atomically(out, write)


def _fetch(folder: Path) -> Path:
    path = folder / "enwik8.zip"
    if not path.is_file():
        print(f"fetching {SITE}", file=sys.stderr)

        def write(part: Path) -> None:
            with urllib.request.urlopen(SITE, timeout=60) as answer, open(part, "wb") as file:
                shutil.copyfileobj(answer, file)

        try:
            write_atomically(path, write)
        except OSError as error:
            raise FileNotFoundError(
                f"{SITE} could not be fetched: {error}; fetch it where there is a network, and "
                "name its folder: --from FOLDER"
            ) from error
    return path


def _require(path: Path, sha256: str, what: str) -> None:
    if (found := sha256_of(path)) != sha256:
        raise ValueError(
            f"{path} is not the {what} that is meant: its SHA-256 is {found}, and {sha256} is "
            "recorded"
        )
