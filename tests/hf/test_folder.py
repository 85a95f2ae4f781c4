"""Folders that transformers reads, and their publication on the hub."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import tracformer.hf as hf
from tests.helpers import ROOT, script
from tests.toys import small_model
from tracformer import Tracformer, TracformerConfig
from tracformer.data import Tokenizer
from tracformer.publish import evaluation_table


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


# ---- model cards, uploads, and the guide docs/huggingface.md

GUIDE = ROOT / "docs" / "huggingface.md"
EVALUATION = {
    "wikitext103, span:p=0.5,mean=10": {"answer": "exact", "perplexity": 29.38},
    "a|b": {"answer": "marginal", "perplexity": 31.0},
}


class Hub:
    """Records uploads instead of sending them."""

    def __init__(self) -> None:
        self.repositories: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}
        self.upload: dict[str, Any] = {}

    def create_repo(self, repo_id: str, **options: Any) -> SimpleNamespace:
        self.repositories.append({"repo_id": repo_id, **options})
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(
        self, *, folder_path: Path, allow_patterns: list[str], **options: Any
    ) -> SimpleNamespace:
        from huggingface_hub.utils import filter_repo_objects

        names = [
            str(path.relative_to(folder_path))
            for path in Path(folder_path).rglob("*")
            if path.is_file()
        ]
        kept = list(filter_repo_objects(names, allow_patterns=allow_patterns))
        self.files = {name: (Path(folder_path) / name).read_text(errors="replace") for name in kept}
        self.upload = options
        return SimpleNamespace(commit_url="https://hub/commit/1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token=None: hub)
    return hub


def test_card_has_front_matter_and_evaluation(tokenizer: Tokenizer) -> None:
    model = small_model(modes=("car", "ar"))
    card = hf.model_card(
        model.config,
        tokenizer,
        EVALUATION,
        name="me/mine",
        license="mit",
        tags=["dna"],
        language="en",
    )
    _, front, text = card.split("---\n", 2)
    values = yaml.safe_load(front)
    assert values["license"] == "mit"
    assert values["library_name"] == "tracformer"
    assert values["pipeline_tag"] == "fill-mask"
    assert values["tags"] == ["tracformer", "infilling", "fill-mask", "dna"]
    assert evaluation_table(EVALUATION) in text
    assert f"{model.num_parameters():,} parameters" in text
    assert tokenizer.fingerprint in text
    assert "- `car`" in text
    assert "- `ac`" not in text


def test_table_escapes_column_separators() -> None:
    assert evaluation_table(EVALUATION).splitlines()[-1] == r"| a\|b | marginal | 31 |"


def test_a_card_says_that_there_is_no_evaluation() -> None:
    assert "None was recorded." in hf.model_card(small_model().config)


def test_saving_with_an_evaluation_writes_a_card(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, attention="blocked")
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "README.md").exists()
    model.save_pretrained(tmp_path / "with", evaluation=EVALUATION)
    assert evaluation_table(EVALUATION) in (tmp_path / "with" / "README.md").read_text()


def test_push_uploads_the_model_and_nothing_else(folder: Path, hub: Hub) -> None:
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "model.safetensors").write_text("state")
    (folder / "training_args.bin").write_text("pickle")
    assert (
        hf.push_folder(folder, "me/mine", evaluation=EVALUATION, private=True, create_pr=True)
        == "https://hub/commit/1"
    )
    assert hub.repositories == [{"repo_id": "me/mine", "private": True, "exist_ok": True}]
    assert hub.upload["create_pr"]
    assert sorted(hub.files) == [
        "README.md",
        "checksums.json",
        "config.json",
        "model.safetensors",
        "modeling_tracformer.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert evaluation_table(EVALUATION) in hub.files["README.md"]
    assert 'tracformer.load("me/mine")' in hub.files["README.md"]
    assert 'from_pretrained("me/mine", trust_remote_code=True)' in hub.files["README.md"]


def test_push_keeps_an_existing_card(folder: Path, hub: Hub) -> None:
    (folder / "README.md").write_text("mine")
    hf.push_folder(folder, "me/mine")
    assert hub.files["README.md"] == "mine"


def test_push_of_an_empty_folder_creates_nothing(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        hf.push_folder(tmp_path, "me/mine")
    assert not hub.repositories


@pytest.mark.parametrize("by", ["core", "transformers"])
def test_push_to_hub_of_a_model(folder: Path, tokenizer: Tokenizer, hub: Hub, by: str) -> None:
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, attention="blocked")
    given = tokenizer if by == "core" else transformers.AutoTokenizer.from_pretrained(folder)
    model.push_to_hub("me/mine", tokenizer=given, evaluation=EVALUATION, commit_message="first")
    assert {
        "README.md",
        "checksums.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(hub.files)
    assert evaluation_table(EVALUATION) in hub.files["README.md"]
    assert hub.upload["commit_message"] == "first"


def test_saving_with_push_to_hub(folder: Path, tmp_path: Path, hub: Hub) -> None:
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, attention="blocked")
    model.save_pretrained(
        tmp_path / "mine", push_to_hub=True, repo_id="me/mine", evaluation=EVALUATION
    )
    assert evaluation_table(EVALUATION) in hub.files["README.md"]
    assert Tracformer.from_pretrained(tmp_path / "mine").config.vocab_size == 7


def test_the_guide_shows_what_its_code_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[dict[str, Any]] = []

    def upload(**options: Any) -> SimpleNamespace:
        uploads.append(
            {**options, "card": (Path(options["folder_path"]) / "README.md").read_text()}
        )
        return SimpleNamespace(commit_url="here")

    hub = SimpleNamespace(
        create_repo=lambda repo_id, **_: SimpleNamespace(repo_id=repo_id), upload_folder=upload
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token=None: hub)
    ran = script("tools/run_pages.py").run_page(GUIDE)
    assert ran.text == ran.expected
    assert len(uploads) == 1
    assert "41.2" in uploads[0]["card"]
