"""Every system through `tracformer train`, as a user starts it."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.toys import FAMILIES, OWN
from tests.training.helpers import SMALL, losses, small, story_data
from tracformer.baselines import find_family, load_model
from tracformer.cli import main
from tracformer.training.log import read_log
from tracformer.training.objectives import MaskSampler, parse_objective

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


@pytest.mark.parametrize(
    "words",
    [
        "sedd model.n_layer=2",
        "mdlm model.n_layer=2",
        "d3pm model.n_layer=2",
        "mdlm model.backbone=tracformer model.n_layer=5 model.n_max=8",
    ],
)
def test_a_short_run_of_masked_diffusion(words: str, data: Path, tmp_path: Path) -> None:
    family, *others = words.split()
    run = tmp_path / "run"
    schedule = (
        "batch=12",
        "steps=20",
        "optimizer.lr=1e-2",
        "eval_every=20",
        "eval_sequences=4",
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


def test_all_tokens_are_targets_unless_contexts_are_given() -> None:
    question = MaskSampler(parse_objective("denoise"), seed=0).draw(3, 10)
    assert question.mode == "diffusion"
    assert (question.count, question.context.any()) == (10, False)
    named = MaskSampler(parse_objective("denoise", "random:0.5"), seed=0).draw(3, 10)
    assert (named.mode, named.count) == ("diffusion", 5)


def test_a_short_run_of_plaid(tmp_path: Path) -> None:
    data, run = story_data(tmp_path, stories=40), tmp_path / "run"
    words = small(
        "model.family=plaid",
        "model.n_layer=2",
        "batch=16",
        "steps=40",
        "optimizer.lr=1e-2",
        "eval_every=40",
        "ema=0.5",
    )
    assert (
        main(["train", f"data={data}", f"run={run}", *words, "eval_contexts=span:p=0.5,mean=5"])
        == 0
    )
    found = losses(run)
    assert len(found) == 40
    assert sum(found[-10:]) < 0.9 * sum(found[:10])
    evaluation = next(record for record in read_log(run / "log.jsonl") if record["kind"] == "eval")
    assert 1 < evaluation["diffusion span:p=0.5,mean=5"] < 256
    model = load_model(run / "model")
    assert (model.config.model_type, model.config.modes, find_family("plaid").objective) == (
        "plaid",
        ("diffusion",),
        "denoise",
    )
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    # the ends are learned
    assert not torch.equal(model.schedule.bounds, torch.tensor([-3.0, 6.0]) / 7)
