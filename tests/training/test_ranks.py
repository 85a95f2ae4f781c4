"""Two processes on gloo give the curve of one with the same global batch, and a run may go on with
another number of ranks.
"""

import shutil
from pathlib import Path

import pytest

from tests.training.helpers import losses, story_data, train

WORDS = ["steps=8", "save_every=4", "model.dropout=0.0", "batch=6", "micro_batch=2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story_data(tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("alone") / "run"
    train(data, run, *WORDS)
    return losses(run)


def forget_step_8(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000008")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_follow_one(
    data: Path, alone: list[float], tmp_path: Path, parallel: str
) -> None:
    run = tmp_path / "run"
    train(data, run, *WORDS, f"parallel={parallel}", ranks=2)
    assert losses(run) == pytest.approx(alone, rel=1e-4)
    assert not [
        path
        for path in (run / "checkpoints").rglob("*")
        if path.is_file() and path.suffix not in (".json", ".safetensors")
    ]


@pytest.mark.soak
@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp", 3)])
def test_muon_on_several_ranks_follows_one(
    data: Path, tmp_path: Path, parallel: str, ranks: int
) -> None:
    """Three ranks cut the matrices unevenly.

    Muon rounds to bfloat16 inside, so the curves agree to fewer digits.
    """
    alone, run = tmp_path / "alone", tmp_path / "run"
    words = [*WORDS, "optimizer.name=muon"]
    train(data, alone, *words)
    train(data, run, *words, f"parallel={parallel}", ranks=ranks)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-3)
    forget_step_8(run)
    train(data, run, *words)  # from step 4, one rank
    assert losses(run) == pytest.approx(losses(alone), rel=1e-3)


def test_a_sharded_run_goes_on_alone(data: Path, alone: list[float], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(data, run, *WORDS, "parallel=fsdp", ranks=2)
    assert len(list((run / "checkpoints" / "step-00000008").glob("weights-*.safetensors"))) == 2
    forget_step_8(run)
    train(data, run, *WORDS)  # from step 4, one rank
    assert losses(run) == pytest.approx(alone, rel=1e-4)
