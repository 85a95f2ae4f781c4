"""Runs that are killed, starved, interrupted or shared by several processes."""

import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.training.helpers import (
    command,
    environment,
    losses,
    newest_state,
    story_data,
    train,
    train_on_ranks,
    weights_of,
)
from tracformer.files import lock_folder
from tracformer.model import Tracformer

STEPS = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story_data(tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(data, run, f"steps={STEPS}", "save_every=1", "ema=0.9")
    return run


def kill_at_random(data: Path, run: Path, rng: random.Random) -> tuple[bool, bool]:
    """Start, wait for progress, then SIGKILL at a random moment.

    Returns whether it was still running, and whether a checkpoint was being written.
    """
    process = subprocess.Popen(
        command(data, run, f"steps={STEPS}", "save_every=1", "ema=0.9"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    before = (
        {entry.name for entry in (run / "checkpoints").glob("step-*")} if run.exists() else set()
    )
    for _ in range(600):
        if (
            process.poll() is not None
            or {entry.name for entry in (run / "checkpoints").glob("step-*")} - before
        ):
            break
        time.sleep(0.05)
    time.sleep(rng.random() * 0.4)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running, any((run / "checkpoints").glob(".step-*.part"))


def check_kills(data: Path, undisturbed: Path, run: Path, kills: int) -> tuple[int, int]:
    """Return the number of kills of a running process, and of those during a save."""
    rng = random.Random(str(run.name))
    met, inside = 0, 0
    for _ in range(kills):
        running, saving = kill_at_random(data, run, rng)
        met += running
        inside += running and saving
        if not running:
            break
    train(data, run, f"steps={STEPS}", "save_every=1", "ema=0.9")
    assert weights_of(run) == weights_of(undisturbed)
    assert losses(run) == losses(undisturbed)
    return met, inside


def test_killed_three_times_ends_bit_identical(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    met, _ = check_kills(data, undisturbed, tmp_path / "run", kills=3)
    assert met > 0


@pytest.mark.soak
def test_killed_twenty_times_ends_bit_identical(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The twenty kills are spread over several short runs; some must hit a save."""
    met, inside = 0, 0
    for attempt in range(12):
        more_met, more_inside = check_kills(data, undisturbed, tmp_path / f"run{attempt}", kills=5)
        met, inside = met + more_met, inside + more_inside
        if met >= 20 and inside:
            break
    assert met >= 20
    assert inside > 0


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(data, run, "steps=20", "save_every=10", "optimizer.final_lr=3e-3", "ema=0.9")
    newest = run / "checkpoints" / "step-00000020"
    file = next(newest.glob("optimizer-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    output = train(data, run, "steps=20", "save_every=10", "optimizer.final_lr=3e-3", "ema=0.9")
    assert (
        "skipped a damaged checkpoint: step-00000020/optimizer-00000-of-00001.safetensors" in output
    )
    assert "step-00000010 (step 10)" in output
    assert len(losses(run)) == 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_stop(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(data, run, "steps=100000", "save_every=100000"),
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    for _ in range(600):
        if (run / "log.jsonl").exists() and len((run / "log.jsonl").read_text().splitlines()) >= 3:
            break
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert f"{number.name}: saving after this step" in output
    assert newest_state(run)["step"] == len(losses(run))
    Tracformer.from_pretrained(run / "model")


def test_a_non_finite_loss_stops_before_the_step(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    output = train(
        data,
        run,
        "steps=30",
        "save_every=5",
        "optimizer.lr=1e30",
        "optimizer.warmup=0",
        "optimizer.clip=1e30",
        code=1,
    )
    assert "is not finite" in output
    assert "rows" in output
    step = newest_state(run)["step"]
    assert f"The state after step {step} was saved" in output
    assert len(losses(run)) == step


def test_a_full_disk_is_a_clear_error(data: Path, tmp_path: Path) -> None:
    """A limit on the size of files simulates the full disk: the write fails halfway."""
    run = tmp_path / "run"
    train(data, run, "steps=4", "save_every=2")
    before = {
        path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()
    }
    done = subprocess.run(
        command(data, run, "steps=8", "save_every=6"),
        capture_output=True,
        text=True,
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
        check=False,
    )
    assert done.returncode == 1
    assert "the checkpoint of step 6 could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert {
        path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()
    } == before
    train(data, run, "steps=8", "save_every=6")  # continues once there is space
    assert newest_state(run)["step"] == 8


def test_another_model_size_is_refused(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(data, run, "steps=2")
    before = weights_of(run)
    output = train(data, run, "steps=4", "model.d_model=64", code=2)
    assert "another model: d_model was 32 and is now 64" in output
    assert weights_of(run) == before


def test_other_data_are_refused(data: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", story_data(tmp_path, stories=60)
    train(data, run, "steps=4", "until=2")
    before = weights_of(run)
    output = train(other, run, "steps=4", code=2)
    assert "was trained on other data" in output
    assert f"init={run / 'model'}" in output
    assert weights_of(run) == before
    train(data, run, "steps=4")


def test_a_folder_has_one_run_at_a_time(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lock_folder(run):
        assert f"another process is training in {run}" in train(data, run, "steps=2", code=2)
        assert not list(run.iterdir())
    train(data, run, "steps=2")


def test_checkpoints_contain_no_pickle(undisturbed: Path) -> None:
    files = [
        path
        for path in undisturbed.rglob("*")
        if path.is_file() and "tensorboard" not in path.parts
    ]
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".py", ".safetensors"}
    assert len(list((undisturbed / "checkpoints").iterdir())) == 2


def test_fine_tuning_starts_from_the_old_weights(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "tuned"
    output = train(data, run, f"init={undisturbed / 'model'}", "steps=3", "optimizer.lr=1e-5")
    assert "starting from" in output
    assert losses(run)[0] < losses(undisturbed)[0] - 0.5
    old, new = (
        Tracformer.from_pretrained(folder / "model").state_dict() for folder in (undisturbed, run)
    )
    assert max(float((old[name] - new[name]).abs().max()) for name in old) < 1e-3


WORDS = ["steps=8", "save_every=4", "model.dropout=0.0", "batch=6", "micro_batch=2"]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("alone") / "run"
    train(data, run, *WORDS)
    return losses(run)


def remove_step_8(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000008")


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def on_two_ranks(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run = tmp_path_factory.mktemp(request.param) / "run"
    train_on_ranks(data, run, *WORDS, f"parallel={request.param}")
    return run


def test_two_ranks_give_the_losses_of_one(alone: list[float], on_two_ranks: Path) -> None:
    assert losses(on_two_ranks) == pytest.approx(alone, rel=1e-4)
    assert not [
        path
        for path in (on_two_ranks / "checkpoints").rglob("*")
        if path.is_file() and path.suffix not in (".json", ".safetensors")
    ]


@pytest.mark.soak
@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp", 3)])
def test_muon_on_several_ranks_gives_the_losses_of_one(
    data: Path, tmp_path: Path, parallel: str, ranks: int
) -> None:
    """Three ranks cut the matrices unevenly.

    Muon rounds to bfloat16 inside, so the curves agree to fewer digits.
    """
    alone, run = tmp_path / "alone", tmp_path / "run"
    words = [*WORDS, "optimizer.name=muon"]
    train(data, alone, *words)
    train_on_ranks(data, run, *words, f"parallel={parallel}", ranks=ranks)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-3)
    remove_step_8(run)
    train(data, run, *words)  # from step 4, one rank
    assert losses(run) == pytest.approx(losses(alone), rel=1e-3)


@pytest.mark.parametrize("on_two_ranks", ["fsdp"], indirect=True)
def test_a_sharded_run_resumes_on_one_rank(
    data: Path, alone: list[float], on_two_ranks: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(on_two_ranks, tmp_path / "run")
    assert len(list((run / "checkpoints" / "step-00000008").glob("weights-*.safetensors"))) == 2
    remove_step_8(run)
    train(data, run, *WORDS)  # from step 4, one rank
    assert losses(run) == pytest.approx(alone, rel=1e-4)
