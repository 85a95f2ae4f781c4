"""Runs with a budget of minutes: the plan, the clock, the decay, and what the user is left with."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.toy_stories import write_story
from tests.training.helpers import environment, weights_of
from tracformer.cli import main
from tracformer.data import PreparedData, open_examples
from tracformer.data.prepare import prepare
from tracformer.training.clock import Clock, Decay, parse_decays, share_at
from tracformer.training.log import read_log
from tracformer.training.optimizer import learning_rate
from tracformer.training.plan import effective_tokens, expected_loss, planned_rows, shape_of
from tracformer.training.start import start
from tracformer.training.summary import KneserNey, SiteProfile, fit_yardstick
from tracformer.training.train_config import OptimizerConfig, load_config

SHORT = ["data.tokenizer=byte", "length=32", "batch=4", "log_every=1", "threads=1"]


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    rng = random.Random(0)
    text = tmp_path / "my.txt"
    text.write_text("<|endoftext|>".join(" ".join(write_story(rng)) for _ in range(60)))
    return text


class SteppedClock(Clock):
    """A clock on which every step takes a second, and everything after the last one two."""

    ticks = 0
    reserve = property(lambda self: 2.0, lambda self, seconds: None)  # type: ignore[assignment]

    @property
    def spent(self) -> float:
        return self.before + self.ticks

    def tick(self, step: int, seconds: float) -> int:
        self.ticks += 1
        return super().tick(step, 1.0)


def one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan with the smallest width only, so that a test needs few timed steps."""
    monkeypatch.setattr("tracformer.training.plan.WIDTHS", (32,))
    monkeypatch.setattr("tracformer.training.plan.MEASURED_TOKENS", 256)


# ---- the clock


def test_the_decay_begins_when_its_share_of_the_time_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock, step = Clock(100.0), 0
    while step < clock.end:
        pace = 1.0 if now < 80 else 2.0  # another program starts
        now, step = now + pace, step + 1
        clock.tick(step, pace)
    assert clock.decays[0].start == 65
    assert 95 <= now <= 101
    assert len(clock.decays) > 1  # aimed again when the pace changed
    assert share_at(clock.decays, step) == 0.0
    shares = [share_at(clock.decays, each) for each in range(step)]
    assert shares == sorted(shares, reverse=True)
    # the same text of decays gives the same rates, bit for bit
    config = OptimizerConfig(
        schedule="wsd", warmup=5, decays=",".join(map(str, clock.decays)), lr=1e-3
    )
    plain = OptimizerConfig(schedule="wsd", warmup=5, lr=1e-3)
    for each in range(step):
        begun = [decay for decay in clock.decays if decay.start <= each]
        assert learning_rate(each, step, config) == (
            learning_rate(each, 10**9, plain, begun)
            if begun
            else 1e-3 * (each + 1) / 5
            if each < 5
            else 1e-3
        )


def test_a_stopped_clock_decays_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock, step = Clock(600.0), 0
    while step < clock.end:
        now, step = now + 1.0, step + 1
        if step == 60:
            clock.stop()
        clock.tick(step, 1.0)
    assert 65 <= step <= 75


def test_a_resumed_clock_counts_both_parts() -> None:
    clock = Clock(100.0)
    clock.restore({"seconds": 40.0, "decays": "7-9:0.5"}, seconds=55.0)
    assert 55.0 <= clock.spent < 60.0
    assert clock.decays == [Decay(7, 9, 0.5)]


@pytest.mark.parametrize("text", ["5", "9-5:1.0", "5-9", "20-30:1.0,10-20:1.0"])
def test_wrong_decays_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.decays is"):
        parse_decays(text)


# ---- the plan


def test_repeated_passes_count_less() -> None:
    assert effective_tokens(900, 1000) == 900
    assert 3000 < effective_tokens(4000, 1000) < 4000
    assert effective_tokens(10**9, 1000) == pytest.approx(16400)
    # of an amount of computation, neither the smallest nor the largest model makes the most
    small, middle, large = (expected_loss(n, 1e13 / n) for n in (1e4, 1e6, 1e9))
    assert middle < min(small, large)


def test_rows_follow_the_lengths_of_the_data(tmp_path: Path) -> None:
    rng = random.Random(0)
    family = "".join(f">{i}\n{''.join(rng.choices('ACDEFGHIK', k=40))}\n" for i in range(200))
    (tmp_path / "family.fasta").write_text(family)
    data = prepare(tmp_path / "family", tmp_path / "family.fasta", quiet=True)
    assert planned_rows(data) == {"length": 40, "data": {"rows": "records"}}
    (tmp_path / "long.txt").write_text(" ".join(rng.choices(["some", "long", "text"], k=200_000)))
    data = prepare(tmp_path / "text", tmp_path / "long.txt", "byte", quiet=True)
    assert planned_rows(data) == {"length": 256, "data": {"rows": "packed"}}
    assert 2 ** shape_of(96, 256)["n_layer"] >= 256


# ---- simple models to compare with


def test_trigrams_are_a_distribution_that_knows_its_text() -> None:
    rng, size = np.random.default_rng(0), 7
    text = rng.integers(0, 3, 500) + np.arange(500) % 2 * 3  # a token of 0..2, then of 3..5
    model = KneserNey(text, size)
    for before in ([0, 3], [6, 6], [3, 0], [5, 6]):
        rows = np.array([[*before, word] for word in range(size)])
        last = model.log_probs(rows, np.full(size, 3))[:, 2]
        assert np.exp(last).sum() == pytest.approx(1.0)
    first = model.log_probs(np.arange(size)[:, None], np.ones(size, int))
    assert np.exp(first).sum() == pytest.approx(1.0)
    row = text[None, :50]
    mean = -model.log_probs(row, np.array([50])).sum() / 50
    assert mean == pytest.approx(math.log(3), abs=0.15)
    assert model.log_probs(row, np.array([10]))[0, 10:].sum() == 0


def test_a_site_profile_gives_the_frequencies_of_each_column(tmp_path: Path) -> None:
    rows = np.array([[0, 1], [0, 2], [0, 1], [0, 1]])
    profile = SiteProfile(rows, 4)
    every = np.exp(profile.table)
    assert every.sum(1) == pytest.approx([1.0, 1.0])
    assert every[1, 1] > every[1, 2] > every[1, 3] > 0
    (tmp_path / "a.fasta").write_text("".join(f">{i}\nAC-{'DE'[i % 2]}\n" for i in range(40)))
    data = prepare(tmp_path / "data", tmp_path / "a.fasta", "protein-aligned", quiet=True)
    found = fit_yardstick(data, open_examples(data.split("train"), 4, "records"))
    assert isinstance(found, SiteProfile)


# ---- whole runs


def test_a_run_with_a_budget_ends_on_time_and_repeats_bit_for_bit(
    stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one_width(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tracformer.training.start.Clock", SteppedClock)
    assert main(["train", "my.txt", "--minutes", "0.75", *SHORT]) == 0
    out = capsys.readouterr().out
    for words in ("bits per byte", "Kneser-Ney trigram", "both sides (car)", "infill -m runs/my"):
        assert words in out
    run = tmp_path / "runs" / "my"
    rates = [record["lr"] for record in read_log(run / "log.jsonl") if record["kind"] == "train"]
    constant = sum(rate == max(rates) for rate in rates)
    assert constant > 0.4 * len(rates)
    assert rates[-1] < 0.1 * max(rates)
    facts = json.loads((run / "summary.json").read_text())
    assert (facts["unit"], facts["step"]) == ("bits per byte", len(rates))
    assert 0.9 * 45 < facts["seconds"] <= 45
    assert 0 < facts["ar"] < 8  # better than the same probability for every byte
    assert main(["train", "runs/my/plan.yaml", "run=again"]) == 0
    assert json.loads((tmp_path / "again" / "train.json").read_text())["steps"] == facts["step"]
    assert weights_of(run) == weights_of(tmp_path / "again")
    # the same command finds the run finished
    capsys.readouterr()
    assert main(["train", "my.txt", "--minutes", "0.75", *SHORT]) == 0
    assert f"finished at step {facts['step']}" in capsys.readouterr().err


def test_a_killed_run_resumes_with_its_plan_and_ends_decayed(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_width(monkeypatch)
    monkeypatch.setattr("tracformer.training.start.Clock", SteppedClock)
    run = tmp_path / "run"
    words = [f"data={stories}", f"run={run}", *SHORT, "minutes=0.75"]
    killed = [*words, "until=20"]  # the state of a run that was killed in the stable phase
    outcome = start(load_config(killed), lambda values: load_config(killed, values))
    assert (outcome.finished, outcome.step) == (False, 20)
    state = json.loads(next((run / "checkpoints").glob("*20/state.json")).read_text())
    assert state["clock"] == {"seconds": 20.0, "decays": ""}
    planned = json.loads((run / "train.json").read_text())
    words.append("until=0")
    outcome = start(load_config(words), lambda values: load_config(words, values))
    assert outcome.finished
    assert 0.9 * 45 < outcome.step <= 45  # a second a step, over both parts
    assert json.loads((run / "train.json").read_text()) == {**planned, "until": 0}
    rates = [r["lr"] for r in read_log(run / "log.jsonl") if r["kind"] == "train"]
    assert rates[-1] < 0.1 * max(rates)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_makes_the_rate_decay(stories: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "tracformer", "train", str(stories), "--minutes", "5"]
    process = subprocess.Popen(
        [*command, f"run={tmp_path / 'run'}", *SHORT], env=environment(), cwd=tmp_path
    )
    log = tmp_path / "run" / "log.jsonl"
    while not log.exists() or len(read_log(log)) < 20:
        assert process.poll() is None
        time.sleep(0.2)
    os.kill(process.pid, number)
    assert process.wait(timeout=120) == 128 + number
    rates = [record["lr"] for record in read_log(log) if record["kind"] == "train"]
    assert rates[-1] < 0.2 * max(rates)
    assert PreparedData.open(tmp_path / "run" / "data")
    assert (tmp_path / "run" / "plan.yaml").is_file()


# ---- wrong input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my.txt", "--minutes", "0"], "--minutes is 0; it must be more than 0"),
        (["my.txt", "--minutes", "-3"], "--minutes is -3"),
        (["my.txt", "--minutes", "1", "steps=5"], "give one of them"),
        (["my.txt", "--minutes", "0.01", *SHORT], "too short to train and validate once"),
        (["my.txt", "--minutes", "1", "optimizer.schedule=cosine", *SHORT], "minutes needs wsd"),
        (["tiny.txt", "--minutes", "1"], "at least 1,000 are needed"),
        (["empty.txt", "--minutes", "1"], "there is no text in it"),
        (["binary.txt", "--minutes", "1"], "UTF-8"),
        (["mixed.fasta", "--minutes", "1"], "both nucleotide and protein"),
        (["nothere.txt"], "no file or folder here"),
        (["my.txt", "tiny.txt"], "two places with data"),
    ],
)
def test_wrong_input_is_one_clear_line(
    words: list[str],
    message: str,
    stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one_width(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("tiny.txt").write_text("one. two. three. four. five. six. " * 3)
    Path("empty.txt").write_text("")
    Path("binary.txt").write_bytes(bytes(range(128, 256)) * 20)
    rng = random.Random(0)
    records = [rng.choices("ACGT" if i % 2 else "DEFGHIKLMN", k=60) for i in range(60)]
    Path("mixed.fasta").write_text("".join(f">{i}\n{''.join(r)}\n" for i, r in enumerate(records)))
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert len(error) == 1
