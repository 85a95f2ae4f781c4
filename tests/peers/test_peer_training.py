"""Each peer through `tracformer train`, as a user starts it."""

import math
from pathlib import Path

import pytest
import torch

from tests.peers.small import FAMILIES
from tests.training.helpers import SMALL, losses, small, story_data
from tracformer.cli.main import main
from tracformer.families import load_model
from tracformer.training.log import read_log

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story_data(tmp_path_factory.mktemp("stories"), stories=40)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_run(family: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    schedule = ("eval_every=12", "ema=0.5", "steps=12", "optimizer.lr=1e-2")
    assert main(["train", f"data={data}", f"run={run}", *small(f"model.family={family}", "model.n_layer=2", *schedule)]) == 0
    found = losses(run)
    assert len(found) == 12
    assert sum(found[-3:]) < sum(found[:3])
    evaluation = next(record for record in read_log(run / "log.jsonl") if record["kind"] == "eval")
    model = load_model(run / "model")
    assert model.config.model_type == family
    for mode in model.config.modes:
        figures = [value for key, value in evaluation.items() if key.split()[0] == mode]
        assert figures
        assert all(1 < value < math.inf for value in figures)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    words = [
        "train",
        f"data={data}",
        f"run={tmp_path / 'more'}",
        *SMALL[6:],
        f"model.family={family}",
        f"init={run / 'model'}",
        "steps=1",
    ]
    assert main(words) == 0
    assert losses(tmp_path / "more")[0] < found[0]
