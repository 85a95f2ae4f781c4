"""The models in the package: whole, small, documented, and good for what their cards say."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import tracformer
from tests.scripts import example
from tracformer import bundled
from tracformer.cli import main
from tracformer.loading import find_folder

MEGABYTES = {"stories": 25, "proteins": 5}


@pytest.mark.parametrize("name", bundled.names())
def test_a_bundled_model_is_small_at_half_precision_and_has_a_card(name: str) -> None:
    folder = bundled.folder(name)
    assert folder is not None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MEGABYTES[name] * 10**6
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(tensor).dtype for tensor in file.keys()} == {torch.float16}  # noqa: SIM118
    card = (folder / "README.md").read_text()
    for part in ("## Data", "## Recipe", "## Evaluation", "## Limits", "licence"):
        assert part in card
    assert tracformer.load(name).model.config.modes == ("car", "ac", "ar")


def test_a_folder_of_the_same_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    assert find_folder("stories") == bundled.folder("stories")  # there is no model in it
    (tmp_path / "stories" / "best").mkdir()
    (tmp_path / "stories" / "best" / "config.json").touch()
    assert find_folder("stories") == Path("stories/best")


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match="stories"):
        tracformer.load("storeys")


CHOICES = [
    ("Lily saw a big ", "dog", ". It barked at her all day and wagged its tail.", "fish"),
    (
        "Once upon a time, there was a little ",
        "bird",
        " who had a nest in a tall tree. She could fly very high.",
        "boy",
    ),
    ("Tom was very ", "sad", ". He lost his toy and he cried and cried.", "happy"),
    ("Lily was so ", "sad", ". She cried and cried. Her mom gave her a hug.", "happy"),
    ("Mia went to the ", "park", " to play on the swings and the slide.", "store"),
    (
        "The sky was dark and it began to ",
        "rain",
        ". They opened their umbrella and ran home.",
        "snow",
    ),
]


def test_the_suffix_decides() -> None:
    """With the text behind the hole the right word gains on the other, against the model's own
    left-to-right reading; and it leads.
    """
    lm = tracformer.load("stories")

    def lead(mode: str, before: str, word: str, after: str, other: str) -> float:
        right, wrong = (
            lm.score(f"{before}[[{each}]]{after}", mode=mode).log_prob for each in (word, other)
        )
        return right - wrong

    assert all(lead("car", *each) > lead("ar", *each) for each in CHOICES)
    assert sum(lead("car", *each) > 0 for each in CHOICES) >= len(CHOICES) - 1


def test_commands_use_it_when_no_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "config.json").touch()  # whatever is called so here
    assert (
        main(["infill", "Once upon a time there was a [[2]] who lived in a wood.", "--seed", "3"])
        == 0
    )
    filled = capsys.readouterr().out
    assert filled.startswith("Once upon a time there was a")
    assert "who lived in a wood." in filled
    assert main(["score", "The [[dog]] barked."]) == 0
    assert main(["sample", "--prompt", "One day", "--max-tokens", "5"]) == 0


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    example("fill_stories").main([])
    out = capsys.readouterr().out
    assert out.count("log p =") == 3 * 3 + 2
    played, slept = (
        float(line.rsplit("=", 1)[1])
        for line in out.splitlines()
        if "good friends" in line and "log p" in line
    )
    assert played > slept
    assert math.isfinite(slept)
