import gzip
import zipfile
from pathlib import Path

import pytest

from tracformer.data import documents, wikipedia
from tracformer.data.wikipedia import (
    Wikipedia2006,
    articles,
    clean,
    clean_dump,
    is_article,
    prose,
    without_markup,
)

LONG = (
    "A paragraph that is long enough to be kept, for it goes on and on until it has more than "
    "eighty characters."
)


def page(title: str, text: str) -> str:
    return f'  <page>\n    <title>{title}</title>\n    <id>1</id>\n      <text xml:space="preserve">{text}</text>\n  </page>\n'


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def test_pages_of_a_dump() -> None:
    dump = (
        page("One", "first\nsecond")
        + page("Two", "")
        + '<title>Cut</title>\n<text xml:space="preserve">it ends'
    )
    assert list(articles(lines(dump))) == [("One", "first\nsecond"), ("Two", "")]
    without = '<title>No text</title>\n<text xml:space="preserve" />\n' + page("Next", "x")
    # the slip that the recorded text has
    assert list(articles(lines(without))) == [("No text", "x")]


@pytest.mark.parametrize(
    ("title", "markup", "kept"),
    [
        ("Cat", "A cat", True),
        ("Cat", "#REDIRECT [[Dog]]", False),
        ("Template:Cat", "x", False),
        ("User talk:Me", "x", False),
        ("Star Trek: Voyager", "x", True),
    ],
)
def test_what_is_an_article(title: str, markup: str, kept: bool) -> None:
    assert is_article(title, markup) == kept


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Cats''' are ''animals''", "Cats are animals"),
        ("a [[cat]] and [[dog|some dogs]]", "a cat and some dogs"),
        ("[[Image:x.png|thumb|with a [[link]] inside]]seen", "seen"),
        ("[[fr:Chat]][[zh-min-nan:X]][[Category:Cats]]left", "left"),
        ("see [http://x.org this page] and [http://y.org]", "see this page and "),
        ("a {{box|{{inner}}|{{in {{deeper}}}}}}b", "a b"),
        ("x {| class=wikitable\n| cell\n|} y", "x  y"),
        ("fact&lt;ref name=a&gt;book&lt;/ref&gt;, fact&lt;ref name=b /&gt;.", "fact, fact."),
        ("&lt;!-- hidden --&gt;a &amp;amp; b&amp;nbsp;c &lt;math&gt;x^2&lt;/math&gt;", "a & b c "),
        ("&lt;br&gt;line&lt;/br&gt;", "line"),
    ],
)
def test_markup(markup: str, text: str) -> None:
    assert without_markup(markup) == text


def test_prose() -> None:
    above = ["short", f"  {LONG}", "== Empty ==", "== Full ==", f"{LONG}  Two  blanks."]
    below = [f"* {LONG}", f"| {LONG}", f"{LONG} || cell", LONG, "==See also==", LONG]
    text = "\n".join([*above, *below])
    assert prose(text) == [LONG, "== Full ==", f"{LONG} Two blanks.", LONG]
    assert prose(f"{LONG}\n{LONG}") == []  # a short article


def test_clean() -> None:
    dump = (
        page("Cats &amp; dogs", f"{LONG}\n{LONG}\n{LONG}")
        + page("Help:Cats", LONG * 5)
        + page("Stub", LONG)
    )
    assert list(clean(lines(dump))) == [f"= Cats & dogs =\n{LONG}\n{LONG}\n{LONG}\n"]


def test_dumps_are_checked_and_cleaned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    dump = page("A", "\n".join([LONG] * 3)) + page("B", "\n".join([LONG] * 4))
    with zipfile.ZipFile(shelf / "enwik8.zip", "w") as packed:
        packed.writestr("enwik8", dump)
    with pytest.raises(ValueError, match="is not the dump that is meant"):
        list(Wikipedia2006(shelf).pieces())
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(dump.encode()))
    with pytest.raises(ValueError, match="cleans to a text with SHA-256"):
        clean_dump(tmp_path / "enwik8.gz", tmp_path / "out.txt")
    assert not (tmp_path / "out.txt").exists()

    expected = "".join(f"{article}\n" for article in clean(lines(dump))).encode()
    monkeypatch.setattr(
        wikipedia, "DUMP_SHA256", wikipedia.hashlib.sha256(dump.encode()).hexdigest()
    )
    monkeypatch.setattr(wikipedia, "TEXT_SHA256", wikipedia.hashlib.sha256(expected).hexdigest())
    found = list(documents(Wikipedia2006(shelf)))
    assert found == list(clean(lines(dump)))
    assert (tmp_path / "cache" / "tracformer" / "wikipedia-2006.txt").read_bytes() == expected
    (shelf / "enwik8.zip").unlink()
    assert list(documents(Wikipedia2006())) == found  # from the cache
    (shelf / "wikipedia-2006.txt").write_bytes(b"other")
    with pytest.raises(ValueError, match="is not the cleaned text that is meant"):
        list(Wikipedia2006(shelf).pieces())


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"holds neither wikipedia-2006\.txt nor enwik8"):
        list(Wikipedia2006(tmp_path).pieces())
    monkeypatch.setattr(wikipedia, "SITE", (tmp_path / "nothing.zip").as_uri())
    with pytest.raises(FileNotFoundError, match="could not be fetched"):
        list(Wikipedia2006().pieces())
