import json
import random
from pathlib import Path

import pytest
import torch

from tests.helpers import small_model
from tests.training.helpers import SMALL
from tracformer import Tracformer
from tracformer.training.config import TrainConfig, load_config
from tracformer.training.start import default_run, grown_weights, start


def test_a_grown_vocabulary_keeps_what_was_learnt() -> None:
    old = small_model(vocab_size=4)
    new = small_model(vocab_size=6)
    new.load_state_dict(grown_weights(old, [0, 1, -1, 2, -1, 3]))  # ids 2 and 4 are new
    tokens, context = torch.tensor([[1, 2, 3, 0]]), torch.tensor([[True, False, True, False]])
    moved = torch.tensor([0, 1, 3, 5])
    expected = old(tokens, context)
    torch.testing.assert_close(new(moved[tokens], context)[..., moved], expected, atol=1e-12, rtol=0)


def test_fine_tuning_with_a_grown_alphabet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, more = tmp_path / "run", tmp_path / "more"
    for letters, name in (("ab", "first"), ("abc", "second")):
        (tmp_path / f"{name}.txt").write_text("".join(random.Random(0).choices(letters, k=2000)))
    words = [*SMALL, "steps=2", "data.tokenizer=char"]
    start(load_config([f"data={tmp_path / 'first.txt'}", f"run={run}", *words]))
    start(load_config([f"data={tmp_path / 'second.txt'}", f"run={more}", f"init={run / 'model'}", *words]))
    assert "vocabulary grown from 3 to 4 tokens" in capsys.readouterr().out  # two letters and end of text; three
    old, new = (Tracformer.from_pretrained(folder / "model") for folder in (run, more))
    distance = (old.embedding.weight[[0, 1, 2, 3]] - new.embedding.weight[[0, 1, 3, 4]]).abs().max()
    assert distance < 0.05  # a, b, end of text and mask found their rows; two steps moved them a little


def test_run_folders_are_named_after_the_data() -> None:
    for source, run in (
        ("a/my.txt", "runs/my"),
        ("books.jsonl.gz", "runs/books"),
        ("hf:owner/name", "runs/name"),
        ("prepared/", "runs/prepared"),
    ):
        assert default_run(load_config([f"data={source}"])) == run


def test_defaults_are_valid() -> None:
    assert TrainConfig().steps == 0


def test_words_stay_under_the_preset_that_fits_the_data(tmp_path: Path) -> None:
    """Also a word that repeats a default: 6e-4 was asked for, though the preset says otherwise."""
    (tmp_path / "a.txt").write_text("some text " * 300)
    words = [f"data={tmp_path / 'a.txt'}", f"run={tmp_path / 'run'}", *SMALL, "steps=1", "optimizer.lr=6e-4"]
    start(load_config(words), lambda name: load_config(words, name))
    assert json.loads((tmp_path / "run" / "train.json").read_text())["optimizer"]["lr"] == 6e-4
