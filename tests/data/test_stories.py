"""Held-out stories: cut where stories open, apart from the training text, halved in text order."""

from pathlib import Path

import pytest

from tracformer.data import PreparedData, documents, open_sources, prepare
from tracformer.data.stories import SHARED, split_stories

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


def test_stories_that_the_training_text_gives_away_are_removed(tmp_path: Path) -> None:
    """Twelve words in a row, whatever their case and punctuation; eleven are no reason."""
    words = FAMILIAR.upper().split()[2:]
    seen, unseen = ("! ".join(words[:count]) for count in (SHARED, SHARED - 1))
    told = ["the end of one.", story("Ann"), story("Bob", seen), story("Cat", unseen), story("Dan")]
    sources = open_sources("tinystories", folder=write_files(tmp_path, told))
    halves = {split: list(documents(source)) for split, source in sources.items()}
    assert [text.split()[4] for text in halves["validation"] + halves["test"]] == [
        "Ann",
        "Cat",
        "Dan",
    ]
    assert len(halves["train"]) == 3
    assert halves["test"][-1] == "Once upon a time, Dan sat still.\nThen Dan ran home."
    data = prepare(tmp_path / "out", sources, "byte", quiet=True)
    assert set(PreparedData.open(data.folder).manifest.splits) == {"train", "validation", "test"}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tinystories is read from files, not fetched"):
        open_sources("tinystories")
    folder = write_files(tmp_path, [FAMILIAR.capitalize(), FAMILIAR.capitalize()])
    sources = open_sources("tinystories", folder=folder)
    with pytest.raises(ValueError, match="0 and 0 stories of its halves share no 12 words"):
        list(documents(sources["test"]))
    (folder / "tinystories" / "real-valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match="has no file for validation"):
        open_sources("tinystories", folder=folder)
