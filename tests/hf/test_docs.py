import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from tests.helpers import small_model
from tracformer.data import build_tokenizer

GUIDE = Path(__file__).parents[2] / "docs" / "huggingface.md"


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
