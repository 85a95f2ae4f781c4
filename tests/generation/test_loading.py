"""Where a model is looked for, and what is said where there is none."""

from pathlib import Path

import pytest
import torch

from tests.generation.texts import TEXT
from tracformer import LanguageModel, load
from tracformer.data import char_tokenizer
from tracformer.loading import find_folder


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
    )  # sums may run in another order where the weights lie otherwise in memory


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
