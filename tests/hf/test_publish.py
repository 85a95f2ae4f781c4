"""Model cards, uploads to the hub, and the guide in docs/huggingface.md."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import transformers
import yaml

import tracformer.hf as hf
from tests.toys import small_model
from tracformer import Tracformer
from tracformer.data import Tokenizer, build_tokenizer
from tracformer.publish import evaluation_table

GUIDE = Path(__file__).parents[2] / "docs" / "huggingface.md"
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


def test_the_guide_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer("byte", [])
    small_model(vocab_size=tokenizer.vocab_size, max_length=32, n_layer=5).float().save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save(tmp_path / "model")
    uploads: list[object] = []
    hub = SimpleNamespace(
        create_repo=lambda repo_id, **_: SimpleNamespace(repo_id=repo_id),
        upload_folder=lambda **options: (
            uploads.append(options) or SimpleNamespace(commit_url="here")
        ),
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token=None: hub)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    assert len(uploads) == 1
    assert "41.2" in (tmp_path / "tuned" / "README.md").read_text()
