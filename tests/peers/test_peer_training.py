"""Each peer through `tracformer train`, as a user starts it."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.peers.small import FAMILIES, OWN
from tests.training.helpers import SMALL, losses, small, story_data
from tracformer.baselines import load_model
from tracformer.cli import main
from tracformer.training.log import read_log

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story_data(tmp_path_factory.mktemp("stories"), stories=40)


@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_a_short_run(family: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    schedule = ("eval_every=12", "ema=0.5", "steps=12", "optimizer.lr=1e-2")
    assert (
        main(
            [
                "train",
                f"data={data}",
                f"run={run}",
                *small(f"model.family={family}", "model.n_layer=2", *schedule),
            ]
        )
        == 0
    )
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


@pytest.mark.parametrize("family", OWN)
def test_every_verb(
    family: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert (
        main(
            [
                "train",
                f"data={data}",
                f"run={run}",
                *small(f"model.family={family}", "model.n_layer=2", "steps=2"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["infill", "--model", str(run), "to the [[4]] and", "--json"]) == 0
    filled = json.loads(capsys.readouterr().out.splitlines()[0])
    assert filled["log_prob"] < 0
    marked = (
        filled["text"][: filled["spans"][0]["start"]]
        + f"[[{filled['spans'][0]['text']}]]"
        + filled["text"][filled["spans"][0]["stop"] :]
    )
    assert main(["score", "--model", str(run), marked, "--json"]) == 0
    scored = json.loads(capsys.readouterr().out.splitlines()[0])
    # bytes of half a character may be spelled otherwise
    if scored["kind"] == "exact" and scored["tokens"] == 4:
        assert scored["log_prob"] == pytest.approx(filled["log_prob"], abs=1e-3)
    tasks = ["--task", f"ratios:data={data},ratios=0.5,length=32,sequences=4"]
    assert main(["eval", f"m={run}", *tasks, "--out", str(tmp_path / "results")]) == 0
    assert len(list((tmp_path / "results").glob("*.json"))) == 1
