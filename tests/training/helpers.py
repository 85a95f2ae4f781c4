"""Small training runs, started from the command line or by the same words in this process."""

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch

from tests.toy_stories import write_story
from tracformer.cli import main
from tracformer.data.prepare import prepare
from tracformer.training.log import read_log

SMALL = [
    "model.preset=tiny",
    "model.d_model=32",
    "model.n_head=2",
    "model.max_length=32",
    "model.n_layer=5",
    "model.dropout=0.1",
    "length=32",
    "batch=6",
    "optimizer.warmup=3",
    "optimizer.lr=3e-3",
    "log_every=1",
    "eval_every=1000",
    "eval_sequences=8",
]


def small(*words: str) -> list[str]:
    """Return SMALL with some words replaced or added."""
    keys = {word.partition("=")[0] for word in words}
    return [*(word for word in SMALL if word.partition("=")[0] not in keys), *words]


def story_data(folder: Path, stories: int = 120) -> Path:
    """Prepare a folder of generated stories with the byte tokenizer."""
    text = folder / "stories.txt"
    rng = random.Random(0)
    text.write_text("<|endoftext|>".join(" ".join(write_story(rng)) for _ in range(stories)))
    prepare(folder / "data", text, "byte", quiet=True)
    return folder / "data"


def command(data: Path, run: Path, *words: str, ranks: int = 1) -> list[str]:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return [*launcher, "tracformer", "train", f"data={data}", f"run={run}", *small(*words)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train(data: Path, run: Path, *words: str, code: int = 0) -> str:
    """Run `tracformer train` in this process, on one thread; return everything it prints."""
    output, threads = io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            found = main(["train", f"data={data}", f"run={run}", *small(*words)])
    finally:
        torch.set_num_threads(threads)
    assert found == code, output.getvalue()
    return output.getvalue()


def train_on_ranks(data: Path, run: Path, *words: str, ranks: int = 2) -> None:
    """Run `tracformer train` under torchrun."""
    done = subprocess.run(
        command(data, run, *words, ranks=ranks),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_log(run / "log.jsonl") if record["kind"] == "train"]


def weights_of(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def newest_state(run: Path) -> dict[str, object]:
    newest = max(
        entry for entry in (run / "checkpoints").iterdir() if entry.name.startswith("step-")
    )
    return json.loads((newest / "state.json").read_text())
