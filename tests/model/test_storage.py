"""Configurations, batches, initial weights and model folders."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.toys import random_batch, small_model
from tracformer import Tracformer, TracformerConfig
from tracformer.model import MODES, PRESETS, storage
from tracformer.model.batch import Batch


def test_paper_sizes() -> None:
    """Table 3 says 109M and 79M; a literal build has 108.7M and 79.8M."""
    with torch.device("meta"):
        model = Tracformer(TracformerConfig.preset("paper-small"))
    assert model.num_parameters() == 108_737_280
    assert model.num_parameters(embeddings=False) == 79_788_672
    small, owt = TracformerConfig.preset("paper-small"), TracformerConfig.preset("paper-owt")
    assert (small.n_max, small.dropout) == (16, 0.1)
    assert (owt.n_max, owt.dropout) == (32, 0.0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build(name: str) -> None:
    config = TracformerConfig.preset(name, vocab_size=11)
    assert config.vocab_size == 11
    assert TracformerConfig.from_dict(config.to_dict()) == config


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = Tracformer(TracformerConfig.preset("tiny", init_std=0.02))
    layer = model.encoder[0]
    assert abs(layer.qkv.weight.std().item() - 0.02) < 0.001
    assert abs(layer.feedforward.out.weight.std().item() - 0.02 / 14**0.5) < 0.0005
    assert not layer.qkv.bias.any()
    assert bool((layer.norm_attention.weight == 1).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_layer": 9, "max_length": 1024},
            r"n_layer is 9.*scope is 512.*max_length 1024; use n_layer >= 10",
        ),
        ({"d_model": 577}, "d_model is 577, not divisible by n_head 9"),
        ({"d_model": 63}, "head size 7; rotary"),
        ({"n_max": 1}, "n_max is 1"),
        ({"n_max": 2.5}, "n_max is 2.5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"n_head": True}, "n_head is True"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": "much"}, "dropout is 'much'; it must be a number"),
        ({"init_std": True}, "init_std is True; it must be a number"),
        ({"rotary_base": None}, "rotary_base is None; it must be a number"),
        ({"encoder": "sparse"}, "encoder is 'sparse'; allowed: multiscope, full"),
        ({"decoder": "sparse"}, "decoder is 'sparse'"),
        ({"key_set": "even"}, "key_set is 'even'"),
        ({"modes": ["cra"]}, r"modes is \('cra',\)"),
        ({"rotary_base": 0.0}, "rotary_base is 0.0"),
        ({"init_std": -0.02}, "init_std is -0.02"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TracformerConfig(**changes)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"'paper-large'; available: paper-small"):
        TracformerConfig.preset("paper-large")
    with pytest.raises(ValueError, match=r"n_layers; known: .*n_layer"):
        TracformerConfig.from_dict({"n_layers": 3})


TOKENS = torch.zeros(2, 4, dtype=torch.int64)
CONTEXT = torch.zeros(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tokens": torch.zeros(1, 17).long(), "context": torch.zeros(1, 17).bool()},
            "17 tokens long.*max_length = 16",
        ),
        ({"tokens": TOKENS + 7}, r"token id 7 is out of range; ids must lie in 0\.\.6"),
        ({"tokens": TOKENS - 1}, "token id -1 is out of range"),
        (
            {"tokens": TOKENS.to(torch.uint8)},
            r"tokens is uint8 of shape \(2, 4\); it must be a \(B, T\) tensor of int64 or int32",
        ),
        ({"tokens": TOKENS.float()}, r"tokens is float32 of shape \(2, 4\)"),
        ({"tokens": TOKENS[0]}, r"tokens is int64 of shape \(4,\)"),
        ({"tokens": TOKENS[:0]}, r"shape \(0, 4\): an empty batch"),
        ({"tokens": TOKENS[:, :0]}, r"shape \(2, 0\): an empty batch"),
        ({"context": CONTEXT[:, :3]}, r"context is bool of shape \(2, 3\).*shape \(2, 4\)"),
        ({"context": CONTEXT.long()}, r"context is int64"),
        ({"lengths": torch.tensor([4, 5])}, r"lengths range from 4 to 5; each must lie in 1\.\.4"),
        ({"lengths": torch.tensor([0, 4])}, "lengths range from 0 to 4"),
        ({"lengths": torch.tensor([4])}, r"lengths is int64 of shape \(1,\)"),
        ({"lengths": torch.tensor([4.0, 4.0])}, "lengths is float32"),
    ],
)
def test_bad_batches(arguments: dict[str, Any], message: str) -> None:
    model = small_model()
    for call in (model, model.log_prob, model.loss, model.candidates):
        with pytest.raises(ValueError, match=message):
            call(Batch(**{"tokens": TOKENS, "context": CONTEXT, **arguments}), "car")


def test_three_tensors_are_not_a_batch() -> None:
    with pytest.raises(TypeError, match=r"is a Tensor; it must be a Batch: Batch\(tokens, context"):
        small_model().log_prob(TOKENS, "car")  # type: ignore[arg-type]


def test_a_mode_the_model_does_not_have() -> None:
    with pytest.raises(ValueError, match="mode is 'mlm'; allowed for tracformer: car, ac, ar"):
        small_model().log_prob(Batch(TOKENS, CONTEXT), "mlm")


def test_a_mode_the_weights_were_not_trained_in() -> None:
    model = small_model(modes=("car",))
    with pytest.raises(ValueError, match=r"mode is 'ac', but these weights were trained for: car$"):
        model(Batch(TOKENS, CONTEXT), "ac")
    model(Batch(TOKENS, CONTEXT), "car")


# ---- initial weights


def deep_model(seed: int = 0) -> Tracformer:
    """As deep as any preset, and narrow."""
    torch.manual_seed(seed)
    return Tracformer(
        TracformerConfig.preset("laptop-32k", vocab_size=50, d_model=16, n_head=2), "blocked"
    )


def gradient_norm(model: Tracformer, mode: str, length: int) -> float:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (8, length), generator=generator)
    gradients = torch.autograd.grad(
        model.loss(Batch(tokens, torch.zeros(8, length, dtype=torch.bool)), mode),
        list(model.parameters()),
    )
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


@pytest.mark.parametrize("mode", MODES)
def test_a_target_without_keys_has_gradients_of_the_usual_size(mode: str) -> None:
    """Position 0 in mode `ar`, and the only position of a row in any mode."""
    model = deep_model()
    usual = gradient_norm(model, "ac", 16)
    assert 0.1 * usual < gradient_norm(model, mode, 16) < 10 * usual
    assert 0.1 * usual < gradient_norm(model, mode, 1) < 10 * usual


def test_matrices_are_drawn_before_the_one_bias() -> None:
    model = deep_model()
    torch.manual_seed(1)
    model.reset_parameters()
    torch.manual_seed(1)
    std = model.config.init_std
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            drawn = nn.init.normal_(
                torch.empty_like(parameter),
                std=std / 30**0.5 if name.endswith("out.weight") else std,
            )
            assert torch.equal(parameter, drawn)
    assert torch.equal(model.decoder[0].out.bias, nn.init.normal_(torch.empty(16), std=std))
    zero = [
        name
        for name, parameter in model.named_parameters()
        if name.endswith("bias") and not parameter.any()
    ]
    assert len(zero) == sum(name.endswith("bias") for name, _ in model.named_parameters()) - 1


# ---- model folders


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
