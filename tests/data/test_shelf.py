from pathlib import Path

import pytest

from tracformer.data import documents, named_sets, open_sources, wikipedia


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "train.txt").write_text(
        "\n = A = \n\n the cat , it sat . \n\n = B = \n\n more \n"
    )
    (tmp_path / "wikitext-2" / "valid.txt").write_text(" = C = \n\n a dog @-@ like cat . \n")
    (tmp_path / "ptb.txt").write_text(" it 's no \n do n't \n")
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada" / "test.jsonl").write_text('{"text": "“Yes,” he said"}\n')
    return tmp_path


def test_named_sets_from_files(shelf: Path) -> None:
    sources = open_sources("wikitext2", folder=shelf)
    assert {split: list(documents(source)) for split, source in sources.items()} == {
        "train": ["= A =\n\nthe cat, it sat.\n\n", "= B =\n\nmore\n"],
        "validation": ["= C =\n\na dog-like cat.\n"],
    }
    assert list(documents(open_sources("ptb", folder=shelf)["train"])) == ["it's no", "don't"]
    assert list(documents(open_sources("lambada", folder=shelf)["test"])) == ['"Yes," he said']


def test_two_sets_are_trained_on_together(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"= X =\nsome words\n\n= Y =\nothers\n\n"
    (shelf / "wikipedia-2006.txt").write_bytes(text)
    monkeypatch.setattr(wikipedia, "TEXT_SHA256", wikipedia.hashlib.sha256(text).hexdigest())
    for names in ("wikitext2+wikipedia-2006", ["wikitext2", "wikipedia-2006"]):
        sources = open_sources(names, folder=shelf)
        assert set(sources) == {"train", "validation"}
        assert [text[:5] for text in documents(sources["train"])] == [
            "= A =",
            "= B =",
            "= X =",
            "= Y =",
        ]
    assert [part.get("name") for part in sources["train"].describe()["joined"]] == [
        None,
        "wikipedia-2006",
    ]


def test_what_is_missing_is_told(shelf: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no 1bw: neither a folder 1bw or lm1b"):
        open_sources("1bw", folder=shelf)
    with pytest.raises(ValueError, match="only data sets by name are looked for in a folder"):
        open_sources("my.txt", folder=shelf)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        open_sources("ptb", folder=shelf / "nowhere")


def test_names() -> None:
    assert named_sets(["wikitext2", "my.txt"]) == ()
    assert named_sets(Path("wikitext2")) == ()
    assert named_sets("wikitext2") == ("wikitext2",)


def test_what_is_read_in_one_way_alone_takes_no_options() -> None:
    with pytest.raises(
        ValueError, match="field is given for wikipedia-2006, which is one text of known hash"
    ):
        open_sources("wikipedia-2006", field="body")
