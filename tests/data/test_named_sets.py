"""Data sets with their own rules: Wikipedia 2006, TinyStories, and the toy stories of the examples."""

import gzip
import random
import zipfile
from pathlib import Path

import pytest
from examples import toy_stories

from tracformer.data import PreparedData, corpora, open_sources, prepare, whole_documents
from tracformer.data.corpora import (
    SHARED,
    Wikipedia2006,
    articles,
    clean,
    clean_dump,
    is_article,
    prose,
    split_stories,
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


def test_pages_of_a_dump_are_found() -> None:
    dump = (
        page("One", "first\nsecond")
        + page("Two", "")
        + '<title>Cut</title>\n<text xml:space="preserve">it ends'
    )
    assert list(articles(lines(dump))) == [("One", "first\nsecond"), ("Two", "")]
    without = '<title>No text</title>\n<text xml:space="preserve" />\n' + page("Next", "x")
    # a mistake that the recorded text has
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
def test_redirects_and_special_pages_are_no_articles(title: str, markup: str, kept: bool) -> None:
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
def test_markup_is_removed(markup: str, text: str) -> None:
    assert without_markup(markup) == text


def test_paragraphs_are_kept() -> None:
    above = ["short", f"  {LONG}", "== Empty ==", "== Full ==", f"{LONG}  Two  blanks."]
    below = [f"* {LONG}", f"| {LONG}", f"{LONG} || cell", LONG, "==See also==", LONG]
    text = "\n".join([*above, *below])
    assert prose(text) == [LONG, "== Full ==", f"{LONG} Two blanks.", LONG]
    assert prose(f"{LONG}\n{LONG}") == []  # a short article


def test_articles_of_a_dump_are_cleaned() -> None:
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
    with pytest.raises(ValueError, match="is not the expected dump"):
        list(Wikipedia2006(shelf).pieces())
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(dump.encode()))
    with pytest.raises(ValueError, match="gives a cleaned text with SHA-256"):
        clean_dump(tmp_path / "enwik8.gz", tmp_path / "out.txt")
    assert not (tmp_path / "out.txt").exists()

    expected = "".join(f"{article}\n" for article in clean(lines(dump))).encode()
    monkeypatch.setattr(corpora, "DUMP_SHA256", corpora.hashlib.sha256(dump.encode()).hexdigest())
    monkeypatch.setattr(corpora, "TEXT_SHA256", corpora.hashlib.sha256(expected).hexdigest())
    found = list(whole_documents(Wikipedia2006(shelf)))
    assert found == list(clean(lines(dump)))
    assert (tmp_path / "cache" / "tracformer" / "wikipedia-2006.txt").read_bytes() == expected
    (shelf / "enwik8.zip").unlink()
    assert list(whole_documents(Wikipedia2006())) == found  # from the cache
    (shelf / "wikipedia-2006.txt").write_bytes(b"other")
    with pytest.raises(ValueError, match="is not the expected cleaned text"):
        list(Wikipedia2006(shelf).pieces())


def test_a_missing_dump_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"has neither wikipedia-2006\.txt nor enwik8"):
        list(Wikipedia2006(tmp_path).pieces())
    monkeypatch.setattr(corpora, "SITE", (tmp_path / "nothing.zip").as_uri())
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        list(Wikipedia2006().pieces())


FAMILIAR = "once there was a fox who saw the very old moon above his small den"
TRAIN = (
    f"{FAMILIAR.capitalize()}.\nIt was red.\n<|endoftext|>\nOne day, a hen ran.\n<|endoftext|>\n"
)


def story(name: str, words: str = "") -> str:
    return f"Once upon a time, {name} sat still.\n\nThen {name} ran home. {words}"


def write_files(folder: Path, held_out: list[str]) -> Path:
    place = folder / "tinystories"
    place.mkdir(parents=True)
    (place / "real-train.txt").write_text(TRAIN)
    (place / "made-train.txt").write_text("Tom and Sue are here.\n<|endoftext|>\n")
    (place / "real-valid.txt").write_text("\n\n".join(held_out))
    return folder


def test_a_text_without_separators_is_cut_where_stories_open() -> None:
    text = f"and left.\n\n{story('Ann')}\n\n{story('Bob')}\n\nTom and Sue were friends.\n"
    found = split_stories(text)
    first = "Once upon a time, Ann sat still.\nThen Ann ran home."
    assert [each for _, each in found][::2] == [first, "Tom and Sue were friends."]
    assert [text[start:].startswith(each.split("\n")[0]) for start, each in found] == [True] * 3
    assert [each for _, each in split_stories("a\n\nb<|endoftext|>\nc\n<|endoftext|>\n")] == [
        "a\nb",
        "c",
    ]


def test_stories_that_share_text_with_training_are_removed(tmp_path: Path) -> None:
    """Twelve shared words remove a story, whatever their case and punctuation; eleven do not."""
    words = FAMILIAR.upper().split()[2:]
    seen, unseen = ("! ".join(words[:count]) for count in (SHARED, SHARED - 1))
    held_out = [
        "the end of one.",
        story("Ann"),
        story("Bob", seen),
        story("Cat", unseen),
        story("Dan"),
    ]
    sources = open_sources("tinystories", folder=write_files(tmp_path, held_out))
    halves = {split: list(whole_documents(source)) for split, source in sources.items()}
    assert [text.split()[4] for text in halves["validation"] + halves["test"]] == [
        "Ann",
        "Cat",
        "Dan",
    ]
    assert len(halves["train"]) == 3
    assert halves["test"][-1] == "Once upon a time, Dan sat still.\nThen Dan ran home."
    data = prepare(tmp_path / "out", sources, "byte", quiet=True)
    assert set(PreparedData.open(data.folder).manifest.splits) == {"train", "validation", "test"}


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tinystories is read from files, not downloaded"):
        open_sources("tinystories")
    folder = write_files(tmp_path, [FAMILIAR.capitalize(), FAMILIAR.capitalize()])
    sources = open_sources("tinystories", folder=folder)
    with pytest.raises(
        ValueError, match="only 0 and 0 stories of its halves share no 12 consecutive"
    ):
        list(whole_documents(sources["test"]))
    (folder / "tinystories" / "real-valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match="has no file for validation"):
        open_sources("tinystories", folder=folder)


def test_stories_follow_the_rules_and_stay_in_the_vocabulary() -> None:
    rng = random.Random(0)
    known = set(toy_stories.vocabulary())
    for _ in range(200):
        words = toy_stories.write_story(rng)
        assert set(words) <= known
        assert toy_stories.follows_the_rules(words)


def test_broken_agreement_is_found() -> None:
    words = toy_stories.write_story(random.Random(1))
    for far in ("she", "he", "her", "him", *toy_stories.COLOURS, *toy_stories.THINGS):
        if far in words:
            last = len(words) - 1 - words[::-1].index(far)
            swapped = {"she": "he", "he": "she", "her": "him", "him": "her"}.get(far)
            other = swapped or next(
                w
                for group in (toy_stories.COLOURS, toy_stories.THINGS)
                if far in group
                for w in group
                if w != far
            )
            assert not toy_stories.follows_the_rules([*words[:last], other, *words[last + 1 :]])
