"""Checkpoints in exactly the published layouts give the model back; anything else is refused with the reason."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tracformer
from tests.peers.test_dit import question, small_diffusion
from tracformer.data import build_tokenizer
from tracformer.peers.diffusion import DiffusionModel
from tracformer.peers.dit_checkpoints import load_mdlm, load_sedd

SEDD_CONFIG: dict[str, Any] = {
    "ngpus": 1,
    "tokens": 7,
    "training": {"batch_size": 512, "ema": 0.9999},
    "graph": {"type": "absorb", "file": "data", "report_all": False},
    "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20},
    "model": {
        "name": "small",
        "type": "ddit",
        "hidden_size": 8,
        "cond_dim": 6,
        "length": 12,
        "n_blocks": 2,
        "n_heads": 2,
        "scale_by_sigma": True,
        "dropout": 0.1,
    },
}
MDLM_CONFIG: dict[str, Any] = {
    "architectures": ["MDLM"],
    "model_type": "mdlm",
    "vocab_size": 8,
    "model_length": 12,
    "hidden_dim": 8,
    "cond_dim": 6,
    "n_blocks": 2,
    "n_heads": 2,
    "dropout": 0.1,
    "time_conditioning": False,
    "torch_dtype": "float32",
}


def published(model: DiffusionModel, prefix: str = "") -> dict[str, Tensor]:
    """Weights in float32 and the published order, with the buffer that stands before the blocks."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.backbone.state_dict().items():
        if name == "blocks.0.norm1.weight":
            weights[prefix + "rotary_emb.inv_freq"] = 1.0 / 10000 ** (torch.arange(0, 4, 2).float() / 4)
        weights[prefix + name] = tensor.detach().float()
    return weights


def write_sedd(folder: Path, weights: dict[str, Tensor], config: dict[str, Any] = SEDD_CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def write_mdlm(folder: Path, weights: dict[str, Tensor], config: dict[str, Any] = MDLM_CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def same(found: DiffusionModel, expected: DiffusionModel) -> bool:
    tokens, context, lengths = question(2, 6)
    first, second = (model.double().log_prob(tokens, context, "diffusion", lengths, draws=3) for model in (found, expected))
    return torch.allclose(first, second, atol=1e-5)


def test_published_folders(tmp_path: Path) -> None:
    sedd, mdlm = small_diffusion("sedd"), small_diffusion("mdlm")
    found = load_sedd(write_sedd(tmp_path / "sedd", published(sedd)))
    assert same(found, sedd)
    assert (found.config.vocab_size, found.config.max_length, found.config.dropout) == (7, 12, 0.1)
    again = load_mdlm(write_mdlm(tmp_path / "mdlm", published(mdlm, "backbone.")), dtype=torch.float64)
    assert same(again, mdlm)
    assert again.config.modes == ("diffusion", "ac")
    again.save_pretrained(tmp_path / "ours")  # and from then on it is a folder like any other
    assert same(type(again).from_pretrained(tmp_path / "ours"), mdlm)


def test_text_level_loading_of_published_folders(tmp_path: Path) -> None:
    """Weights without a tokeniser beside them; the vocabulary is seven tokens: six letters and the end of text."""
    build_tokenizer("char:abcdef").save(tmp_path / "letters")
    sedd, mdlm = small_diffusion("sedd"), small_diffusion("mdlm")
    for folder, model in (
        (write_sedd(tmp_path / "sedd", published(sedd)), sedd),
        (write_mdlm(tmp_path / "mdlm", published(mdlm, "backbone.")), mdlm),
    ):
        lm = tracformer.load(folder, tokenizer=tmp_path / "letters")
        assert same(lm.model, model)  # type: ignore[arg-type]
        assert len(lm.infill("ab[[3]]cd")[0].text) == 7
        assert lm.score("ab[[fed]]c", mode="diffusion").kind == "bound"
        with pytest.raises(FileNotFoundError, match="holds no tokeniser"):
            tracformer.load(folder)


def test_training_files_prefer_averaged_weights(tmp_path: Path) -> None:
    raw, averaged = small_diffusion("sedd", seed=1), small_diffusion("sedd", seed=2)
    ema = {"decay": 0.9999, "num_updates": 5, "shadow_params": [p.detach().float() for p in averaged.backbone.parameters()]}
    folder = write_sedd(tmp_path, published(raw))
    file = folder / "checkpoint.pth"
    torch.save({"optimizer": {"state": {}}, "model": published(raw), "ema": ema, "step": 5}, file)
    said: list[str] = []
    assert same(load_sedd(file, say=said.append), averaged)
    assert same(load_sedd(file, averaged=False, say=said.append), raw)
    assert ["averaged" in said[0], "raw" in said[1]] == [True, True]
    ema["shadow_params"] = ema["shadow_params"][:-1]
    torch.save({"optimizer": {}, "model": published(raw), "ema": ema, "step": 5}, file)
    with pytest.raises(ValueError, match="averaged=False"):
        load_sedd(file)


def test_lightning_files(tmp_path: Path) -> None:
    raw, averaged = small_diffusion("mdlm", seed=1), small_diffusion("mdlm", seed=2)
    ema = {"decay": 0.9999, "num_updates": 5, "shadow_params": [p.detach().float() for p in averaged.backbone.parameters()]}
    file = tmp_path / "last.ckpt"
    torch.save({"epoch": 0, "global_step": 5, "state_dict": published(raw, "backbone."), "ema": ema}, file)
    with pytest.raises(ValueError, match="pass config="):
        load_mdlm(file)
    assert same(load_mdlm(file, config=raw.config), averaged)
    assert same(load_mdlm(file, config=raw.config, averaged=False), raw)


def test_another_family_is_refused(tmp_path: Path) -> None:
    sedd = write_sedd(tmp_path / "sedd", published(small_diffusion("sedd")))
    mdlm = write_mdlm(tmp_path / "mdlm", published(small_diffusion("mdlm"), "backbone."))
    with pytest.raises(ValueError, match="is MDLM's; expected SEDD's"):
        load_sedd(mdlm)
    with pytest.raises(ValueError, match="is SEDD's; expected MDLM's"):
        load_mdlm(sedd)
    small_diffusion("sedd").save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="of type 'sedd'; expected SEDD's"):
        load_sedd(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"another family: expected names without 'backbone\.'"):
        load_sedd(write_sedd(tmp_path / "a", published(small_diffusion("sedd"), "backbone.")))
    with pytest.raises(ValueError, match=r"another family: expected names under 'backbone\.'"):
        load_mdlm(write_mdlm(tmp_path / "b", published(small_diffusion("mdlm"))))


@pytest.mark.parametrize(
    ("group", "key", "value"), [("graph", "type", "uniform"), ("noise", "type", "geometric"), ("model", "scale_by_sigma", False)]
)
def test_another_process_is_refused(group: str, key: str, value: object, tmp_path: Path) -> None:
    config = {**SEDD_CONFIG, group: {**SEDD_CONFIG[group], key: value}}
    with pytest.raises(ValueError, match=f"{group}.{key} is {value!r}; only"):
        load_sedd(write_sedd(tmp_path, published(small_diffusion("sedd")), config))


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    weights = published(small_diffusion("sedd"))
    with pytest.raises(ValueError, match=r"has 8 rows in vocab_embed\.embedding; the configuration calls for 10: 9 tokens and the mask"):
        load_sedd(write_sedd(tmp_path, weights, {**SEDD_CONFIG, "tokens": 9}))
    with pytest.raises(ValueError, match=r"output_layer\.extra is unknown"):
        load_sedd(write_sedd(tmp_path, {**weights, "output_layer.extra": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"blocks\.1\.attn_out\.weight is missing"):
        load_sedd(write_sedd(tmp_path, {name: tensor for name, tensor in weights.items() if name != "blocks.1.attn_out.weight"}))
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.0\.bias has shape \(3,\) where"):
        load_sedd(write_sedd(tmp_path, {**weights, "blocks.0.mlp.0.bias": torch.ones(3)}))
    with pytest.raises(ValueError, match="is n_heads right"):
        load_sedd(write_sedd(tmp_path, weights, {**SEDD_CONFIG, "model": {**SEDD_CONFIG["model"], "n_heads": 4}}))
    with pytest.raises(ValueError, match=r"has no model\.n_heads"):
        load_sedd(write_sedd(tmp_path, weights, {**SEDD_CONFIG, "model": {"scale_by_sigma": True, "length": 12, "n_blocks": 2}}))


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("sprung"),))


def test_a_pickle_that_holds_more_than_tensors_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = published(small_diffusion("sedd"))
    folder = write_sedd(tmp_path / "model", weights)
    torch.save({"model": weights, "hyper_parameters": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="save its tensors again"):
        load_sedd(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(ValueError, match="save its tensors again"):
        load_sedd(folder)
    assert not (tmp_path / "sprung").exists()


def test_a_damaged_pickle_is_told_by_its_name(tmp_path: Path) -> None:
    """Cut short as a download may be, spoilt, or no pickle at all: torch raises an exception of its own for each."""
    file = write_sedd(tmp_path / "model", published(small_diffusion("sedd"))) / "pytorch_model.bin"
    whole = file.read_bytes()
    spoilt = [whole.replace(b"ctorch", what, 1) for what in (b"c\xdd\xfforch", b"h\x02orch")]
    for raw in (b"", b"hello world", whole[:10], whole[: len(whole) // 2], whole[:-5], *spoilt):
        file.write_bytes(raw)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read as tensors alone: it is damaged.*Reason: \w"):
            load_sedd(file.parent)


@pytest.mark.parametrize(
    "trouble", [MemoryError(), OSError(5, "Input/output error"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_machine_in_trouble_is_not_blamed_on_the_file(trouble: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_sedd(tmp_path / "model", published(small_diffusion("sedd")))

    def load(*arguments: object, **options: object) -> None:
        raise trouble

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(type(trouble)) as raised:
        load_sedd(folder)
    assert raised.value is trouble


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    weights = published(small_diffusion("sedd"))
    folder = write_sedd(tmp_path, weights)
    for averages in ([1, 2], ["a"] * len(weights), "none", [torch.zeros(1)]):
        torch.save({"model": weights, "ema": {"shadow_params": averages}}, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match="pass averaged=False"):
            load_sedd(folder)
    torch.save({1: torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds neither named tensors"):
        load_sedd(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", "8", "vocab_size is '8'; it must be an integer"),
        ("vocab_size", None, "vocab_size is None"),
        ("vocab_size", 1, "vocab_size is 1; it must be an integer, that of the tokens and the mask"),
        ("dropout", "x", "dropout is 'x'; it must be a number"),
        ("time_conditioning", "no", "time_conditioning is 'no'; it must be true or false"),
        ("hidden_dim", 8.5, "d_model is 8.5"),
    ],
)
def test_values_that_make_no_sense_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    folder = write_mdlm(tmp_path, published(small_diffusion("mdlm"), "backbone."), {**MDLM_CONFIG, key: value})
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        load_mdlm(folder)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no"):
        load_sedd(tmp_path / "nowhere")
    folder = write_mdlm(tmp_path / "mdlm", published(small_diffusion("mdlm"), "backbone."))
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        load_mdlm(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        load_mdlm(folder)
