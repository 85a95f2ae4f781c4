import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tracformer.hf as hf
from tests.toys import small_model
from tracformer import Tracformer, TracformerConfig


def load(folder: Path, **options: object) -> hf.TracformerForMaskedLM:
    return transformers.AutoModelForMaskedLM.from_pretrained(folder, attention="blocked", **options)


def test_core_to_transformers_to_core_is_bit_identical(
    folder: Path, core: Tracformer, tmp_path: Path
) -> None:
    load(folder).save_pretrained(tmp_path / "there")
    assert (tmp_path / "there" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    back = Tracformer.from_pretrained(tmp_path / "there")
    assert back.config == core.config
    back.save_pretrained(tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_transformers_to_core_to_transformers_is_bit_identical(tmp_path: Path) -> None:
    config = hf.TracformerPretrainedConfig(**small_model(modes=("ac",), n_max=4).config.to_dict())
    model = transformers.AutoModelForMaskedLM.from_config(config, attention="blocked")
    model.save_pretrained(tmp_path / "here")
    Tracformer.from_pretrained(tmp_path / "here").save_pretrained(tmp_path / "there")
    again = load(tmp_path / "there")
    assert again.config.to_core() == config.to_core()
    assert list(again.state_dict()) == list(model.state_dict())
    assert all(
        torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items()
    )


def test_fresh_weights_are_the_cores(core: Tracformer) -> None:
    torch.manual_seed(3)
    expected = Tracformer(core.config).state_dict()
    torch.manual_seed(3)
    drawn = hf.TracformerForMaskedLM(
        hf.TracformerPretrainedConfig(**core.config.to_dict())
    ).state_dict()
    assert list(drawn) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in drawn.items())


def test_half_precision_is_kept(folder: Path, core: Tracformer) -> None:
    core.save_pretrained(folder, dtype=torch.bfloat16)
    assert load(folder).dtype == torch.bfloat16
    assert load(folder, dtype=torch.float32).dtype == torch.float32


def test_auto_classes_find_their_models(folder: Path) -> None:
    assert type(transformers.AutoConfig.from_pretrained(folder)) is hf.TracformerPretrainedConfig
    assert (
        type(transformers.AutoModel.from_pretrained(folder, attention="blocked"))
        is hf.TracformerModel
    )
    assert type(load(folder)) is hf.TracformerForMaskedLM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.1.qkv.bias": None}, "encoder.1.qkv.bias is missing"),
        ({"head.weight": torch.zeros(2)}, "head.weight is unexpected"),
        (
            {"norm.weight": torch.zeros(9)},
            r"norm.weight has shape \(9,\) where the configuration calls for \(8,\)",
        ),
    ],
)
@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForMaskedLM"])
def test_strict_loading_names_what_is_wrong(
    folder: Path, change: dict[str, torch.Tensor | None], message: str, auto: str
) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match=message):
        getattr(transformers, auto).from_pretrained(folder, attention="blocked")
    with pytest.raises(ValueError, match=message):
        getattr(transformers, auto).from_pretrained(
            folder, attention="blocked", ignore_mismatched_sizes=True
        )


def test_a_pickle_is_not_read(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 3}, "unknown configuration keys: n_layers"),
        ({"n_max": 1}, "n_max is 1"),
        ({"modes": ["cra"]}, "modes is"),
    ],
)
def test_bad_config_files(folder: Path, change: dict[str, object], message: str) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(ValueError, match=message):
        transformers.AutoConfig.from_pretrained(folder)


def test_config_speaks_both_dialects() -> None:
    config = hf.TracformerPretrainedConfig(
        hidden_size=8, num_attention_heads=2, n_layer=4, max_length=16
    )
    assert (config.d_model, config.num_hidden_layers, config.max_position_embeddings) == (8, 4, 16)
    assert config.to_core() == TracformerConfig(d_model=8, n_head=2, n_layer=4, max_length=16)
    assert config.get_text_config() is config
    config.n_max = 1
    with pytest.raises(ValueError, match="n_max is 1"):
        config.to_core()


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention", "my_attention"])
def test_foreign_attentions_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"attn_implementation is '{name}'.*blocked"):
        load(folder, attn_implementation=name)
    with pytest.raises(ValueError, match=f"attn_implementation is '{name}'"):
        load(folder).set_attn_implementation(name)


def test_a_copy_is_a_model_of_its_own(folder: Path) -> None:
    model = load(folder)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.norm.weight.zero_()
    assert torch.equal(twin.core.norm.weight, torch.zeros(8))
    assert not torch.equal(model.core.norm.weight, torch.zeros(8))


def test_the_vocabulary_is_not_resized(folder: Path) -> None:
    model = load(folder)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(ValueError, match="new_num_tokens is 12"):
        model.resize_token_embeddings(12)


def test_transformers_stays_optional() -> None:
    code = """
import sys, importlib.abc
import tracformer
tracformer.Tracformer
assert "transformers" not in sys.modules

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
try:
    import tracformer.hf
except ImportError as error:
    assert "pip install 'tracformer[hf]'" in str(error), error
else:
    raise SystemExit("tracformer.hf came up without transformers")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
