import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.toys import random_batch, small_model
from tracformer import Tracformer
from tracformer.model import storage
from tracformer.model.batch import Batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_round_trip_is_bit_identical(folder: Path) -> None:
    model, loaded = (
        small_model(),
        Tracformer.from_pretrained(folder, dtype=torch.float64, attention="blocked"),
    )
    assert loaded.config == model.config
    assert not loaded.training
    tokens, context, lengths = random_batch(model, 2, 9)
    assert torch.equal(
        loaded(Batch(tokens, context, lengths), "car"),
        model(Batch(tokens, context, lengths), "car"),
    )


def test_loading_and_scoring_do_not_import_torch_compiler(folder: Path) -> None:
    """Its import takes longer than all else that a command does before its first answer."""
    script = f"""if True:
        import sys, torch, tracformer
        model = tracformer.Tracformer.from_pretrained({str(folder)!r}, attention="blocked")
        with torch.no_grad():
            given = torch.tensor([[True, False, False, True]])
            model.log_prob(tracformer.Batch(torch.zeros(1, 4, dtype=torch.int64), given))
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_folder_holds_readable_files(folder: Path) -> None:
    assert sorted(os.listdir(folder)) == [
        "checksums.json",
        "config.json",
        "model.safetensors",
        "modeling_tracformer.py",
    ]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "tracformer"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_have_the_permissions_of_the_umask(folder: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        small_model().save_pretrained(folder)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}


def test_half_precision(folder: Path) -> None:
    small_model().save_pretrained(folder, dtype=torch.float16)
    assert all(
        tensor.dtype == torch.float16 for tensor in load_file(folder / "model.safetensors").values()
    )
    assert Tracformer.from_pretrained(folder).embedding.weight.dtype == torch.float32


def test_other_files_of_the_folder_stay(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    small_model(seed=1).save_pretrained(folder)
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_failed_save_leaves_the_old_model_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "model.safetensors").read_bytes()

    def half_written(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "save_file", half_written)
    with pytest.raises(OSError, match="No space left"):
        small_model(seed=1).save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(folder)) == [
        "checksums.json",
        "config.json",
        "model.safetensors",
        "modeling_tracformer.py",
    ]


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        folder / "model.safetensors",
    )


def test_strict_loading_names_what_is_wrong(folder: Path) -> None:
    edit_weights(
        folder,
        **{
            "encoder.1.qkv.bias": None,
            "head.weight": torch.zeros(2),
            "norm.weight": torch.zeros(9),
        },
    )
    with pytest.raises(ValueError, match="does not match") as caught:
        Tracformer.from_pretrained(folder)
    assert "encoder.1.qkv.bias is missing" in str(caught.value)
    assert "head.weight is unexpected" in str(caught.value)
    assert "norm.weight has shape (9,) where the configuration calls for (8,)" in str(caught.value)


def test_folders_without_a_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        Tracformer.from_pretrained(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        Tracformer.from_pretrained(folder)


def test_damaged_files(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        Tracformer.from_pretrained(folder)
    for raw in (b"{", b"\xff\xfe{}"):
        (folder / "config.json").write_bytes(raw)
        with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
            Tracformer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model of type 'bert'"),
        ({"n_layers": 3}, "unknown configuration keys: n_layers"),
        ({"n_max": 1}, "n_max is 1"),
    ],
)
def test_bad_config_files(folder: Path, change: dict[str, object], message: str) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(ValueError, match=message):
        Tracformer.from_pretrained(folder)
