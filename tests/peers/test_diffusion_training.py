"""Each diffusion system through `tracformer train`, as a user starts it."""

import math
from pathlib import Path

import pytest
import torch

from tests.training.helpers import losses, small, story_data
from tracformer.baselines import load_model
from tracformer.cli import main
from tracformer.training.log import read_log
from tracformer.training.objectives import Questioner, parse_objective


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story_data(tmp_path_factory.mktemp("stories"), stories=40)


@pytest.mark.parametrize(
    "words",
    [
        "sedd model.n_layer=2",
        "mdlm model.n_layer=2",
        "d3pm model.n_layer=2",
        "mdlm model.backbone=tracformer model.n_layer=5 model.n_max=8",
    ],
)
def test_a_short_run(words: str, data: Path, tmp_path: Path) -> None:
    family, *others = words.split()
    run = tmp_path / "run"
    schedule = (
        "batch=12",
        "steps=20",
        "optimizer.lr=1e-2",
        "eval_every=20",
        "eval_contexts=span:p=0.5,mean=5",
        "ema=0.5",
    )
    assert (
        main(
            [
                "train",
                f"data={data}",
                f"run={run}",
                *small(f"model.family={family}", *others, *schedule),
            ]
        )
        == 0
    )
    found = losses(run)
    assert len(found) == 20
    assert sum(found[-5:]) < sum(found[:5])
    evaluation = next(record for record in read_log(run / "log.jsonl") if record["kind"] == "eval")
    for mode in ("diffusion", "ac"):
        assert 1 < evaluation[f"{mode} span:p=0.5,mean=5"] < math.inf
    model = load_model(run / "model")
    assert (model.config.model_type, model.config.modes) == (family, ("diffusion", "ac"))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_the_same_command_trains_the_same_model(data: Path, tmp_path: Path) -> None:
    """Noise is a function of the step, so a run repeats itself."""
    for name in ("a", "b"):
        words = [
            "train",
            f"data={data}",
            f"run={tmp_path / name}",
            *small("model.family=sedd", "model.n_layer=1", "steps=3"),
        ]
        assert main(words) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_every_token_is_a_target_unless_contexts_are_named() -> None:
    question = Questioner(parse_objective("denoise"), seed=0).ask(3, 10)
    assert question.mode == "diffusion"
    assert (question.count, question.context.any()) == (10, False)
    named = Questioner(parse_objective("denoise", "random:0.5"), seed=0).ask(3, 10)
    assert (named.mode, named.count) == ("diffusion", 5)
