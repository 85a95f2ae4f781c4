"""Named data sets, and data sets of the Hugging Face hub."""

import gzip
import json
import random
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import toy_stories
from tracformer.data import PreparedData, corpora, open_sources, whole_documents
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
from tracformer.data.hub_sources import NAMED, PARQUET_BRANCH, HubSource, named_source
from tracformer.data.prepare import prepare

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


# ---- data sets of the hub

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(
        "".join(json.dumps({"text": f"row {i} , yes .", "n": i}) + "\n" for i in range(2500))
    )
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_json_files_through_the_library(jsonl: Path, tmp_path: Path, streaming: bool) -> None:
    source = HubSource(
        "json",
        data_files=str(jsonl),
        cache_dir=str(tmp_path / "cache"),
        streaming=streaming,
        detokenize="1bw",
    )
    assert list(whole_documents(source)) == [f"row {i}, yes." for i in range(2500)]
    assert list(whole_documents(source)) == [f"row {i}, yes." for i in range(2500)]  # and again
    assert next(source.pieces()).origin == "data set 'json' split 'train', row 1"


def test_a_local_folder_and_split_slices(jsonl: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    assert list(
        whole_documents(HubSource(str(jsonl.parent), split="train[-2:]", cache_dir=cache))
    ) == [
        "row 2498 , yes .",
        "row 2499 , yes .",
    ]
    assert (
        len(list(whole_documents(HubSource("json", data_dir=str(jsonl.parent), cache_dir=cache))))
        == 2500
    )
    (source,) = open_sources(f"hf:{jsonl.parent}", cache_dir=cache, split="train[:3]").values()
    assert len(list(whole_documents(source))) == 3


def test_rows_may_be_lines_of_articles(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text("\n = One = \n\n a @-@ b \n\n = Two = \n\n c \n")
    source = HubSource(
        "text",
        data_files=str(path),
        cache_dir=str(tmp_path / "cache"),
        documents="article",
        detokenize="wikitext",
    )
    assert list(whole_documents(source)) == ["= One =\n\na-b\n\n", "= Two =\n\nc\n"]


def test_errors_name_the_data_set(jsonl: Path, tmp_path: Path) -> None:
    def read(**changes: Any) -> list[str]:
        options: dict[str, Any] = {
            "path": "json",
            "data_files": str(jsonl),
            "cache_dir": str(tmp_path / "cache"),
            **changes,
        }
        return list(whole_documents(HubSource(**options)))

    with pytest.raises(
        ValueError, match="data set 'json' split 'train' has no column 'body'; it has text, n"
    ):
        read(field="body")
    with pytest.raises(ValueError, match="column 'n' holds a int, not text"):
        read(field="n")
    with pytest.raises(ValueError, match=r"split 'nope' could not be loaded: .*nope"):
        read(split="nope")
    with pytest.raises(
        ValueError, match="has 2,500 rows instead of 3,000: the copy on the hub is partial"
    ):
        read(rows=3000)
    with pytest.raises(ValueError, match="documents is 'page'; allowed: row, separator"):
        read(documents="page")
    with pytest.raises(ValueError, match="'/no/such/folder' split 'train' could not be loaded"):
        read(path="/no/such/folder", data_files=None)


class FakeHub:
    """Stand in for the library: record the calls, and refuse scripts as it does."""

    def __init__(self, script: bool) -> None:
        self.script, self.calls = script, list[tuple[Any, ...]]()

    def load_dataset(self, path: str, config: str | None = None, **options: Any) -> Any:
        self.calls.append(
            (path, config, options["split"], options["revision"], options["data_dir"])
        )
        if self.script and options["revision"] is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found x.py")
        rows = {"text": ["a , b"], "sentence": ["a 's b"]}
        chosen = SimpleNamespace(iter=lambda batch_size: iter([rows]))
        return SimpleNamespace(
            column_names=list(rows), select_columns=lambda names: chosen, __len__=lambda: 1
        )


@pytest.mark.parametrize("name", sorted(set(NAMED) - {"openwebtext"}))
def test_data_sets_of_the_paper_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(script=False)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    sources = open_sources(name)
    assert {"train", "validation"} <= set(sources)
    for source in sources.values():
        assert list(whole_documents(source)) in (["a, b"], ["a's b"], ["a, b\n"])
    assert [row[2] for row in hub.calls] == list(NAMED[name][1].values())


def test_openwebtext_is_divided_as_in_the_papers_compared_with() -> None:
    sources = named_source("openwebtext", streaming=False)
    assert (sources["train"].split, sources["train"].rows) == (
        "train[:-100000]",
        8_013_769 - 100_000,
    )
    assert (sources["validation"].split, sources["validation"].rows) == ("train[-100000:]", 100_000)


def test_a_data_set_that_is_still_a_script_is_read_from_its_parquet_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = FakeHub(script=True)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert list(whole_documents(named_source("ptb")["test"])) == ["a's b"]
    assert hub.calls == [
        ("ptb-text-only/ptb_text_only", "penn_treebank", "test", None, None),
        ("ptb-text-only/ptb_text_only", None, "test", PARQUET_BRANCH, "penn_treebank"),
    ]


def test_unknown_names_and_options_are_errors() -> None:
    with pytest.raises(ValueError, match="data set is 'wiki'; allowed: wikitext2"):
        named_source("wiki")
    with pytest.raises(ValueError, match=r"data set 'ptb': .*'colour'"):
        named_source("ptb", colour="red")


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'cimec/lambada'.*pip install 'tracformer\[hub\]'"):
        list(whole_documents(named_source("lambada")["test"]))
