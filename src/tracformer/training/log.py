"""The log of a training run: a JSONL file, TensorBoard if installed, progress on the terminal.

- `RunLog` writes and `read_log` reads `log.jsonl`.
- `describe_training` says how weights were trained; a model's folder holds it as `training.json`,
  which `read_training` reads.
- `LiveLine` shows the progress.
- `plot_runs` draws loss and held-out perplexities over the steps.
"""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tracformer.devices import Ranks, processor_name
from tracformer.files import optional_package, write_atomically
from tracformer.progress import ProgressBar
from tracformer.training.clock import Clock
from tracformer.training.train_config import TrainConfig

TRAINING_FILE = "training.json"  # in a model's folder

OF_VALIDATION = ("eval", "sample")  # kinds of records
NOT_PERPLEXITIES = ("kind", "step", "time", "cpu_seconds")  # the other entries of an `eval` record


class RunLog:
    """Writes `log.jsonl`, one record per line, with `kind` (train, eval or sample) and `step`.

    Args:
        folder: Folder of the run.
        resumed_at: Step from which the run continues; later records are removed.
        tensorboard: Also write TensorBoard files, if it is installed.
        validates_again: Whether the validation of this step is repeated.
    """

    def __init__(
        self, folder: Path, resumed_at: int, tensorboard: bool = True, validates_again: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        keep_until(self.path, resumed_at, validates_again)
        self._file = open(self.path, "a")  # noqa: SIM115
        self._board = _tensorboard(folder / "tensorboard", resumed_at) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record."""
        self._file.write(
            json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values}) + "\n"
        )
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
                elif isinstance(value, str):
                    self._board.add_text(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def keep_until(path: Path, step: int, validates_again: bool = False) -> None:
    """Remove records of steps that a resumed run repeats, and a last line cut short by a crash."""
    if not path.exists():
        return

    def stays(record: dict[str, Any]) -> bool:
        repeated = (
            record["step"] == step and validates_again and record.get("kind") in OF_VALIDATION
        )
        return record["step"] <= step and not repeated

    kept = [
        line
        for line in path.read_text().splitlines()
        if (record := _record(line)) is not None and stays(record)
    ]
    write_atomically(path, "".join(line + "\n" for line in kept))


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log; lines that are not records are skipped."""
    return [
        record for line in path.read_text().splitlines() if (record := _record(line)) is not None
    ]


def perplexities(record: dict[str, Any]) -> dict[str, float]:
    """Return the held-out perplexities of an `eval` record by "MODE CONTEXTS"."""
    return {key: value for key, value in record.items() if key not in NOT_PERPLEXITIES}


def describe_training(
    config: TrainConfig, step: int, tokens: float, seconds: float, ranks: Ranks
) -> dict[str, Any]:
    """Return how the weights after a step were trained.

    Args:
        config: Final configuration of the run.
        step: Number of steps taken.
        tokens: Number of tokens of their rows, without padding.
        seconds: Time of the run so far, over all its parts.
        ranks: Ranks of the run.
    """
    source = config.data.source
    parts = [processor_name(ranks.device)]
    if ranks.device.type == "cpu":
        parts.append(f"{torch.get_num_threads()} threads")
    if ranks.world > 1:
        parts.append(f"{ranks.world} processes")
    return {
        "step": step,
        "planned_steps": config.steps,
        "planned_minutes": config.minutes,
        "tokens": round(tokens),
        "seconds": round(seconds, 1),
        "machine": ", ".join(parts),
        "data": Path(source).name if Path(source).exists() else source,
        "init": "/".join(Path(config.init).parts[-2:]),
        **{key: getattr(config, key) for key in ("objective", "contexts", "batch", "length")},
    }


def training_sentence(config: TrainConfig, facts: Mapping[str, Any]) -> str:
    """Return a sentence on what `describe_training` returned, for a model card."""
    return (
        f"Trained on {config.data.source}: {facts['step']:,} steps of {config.batch} x "
        f"{config.length} tokens, objective {config.objective}"
        + (f" with contexts {config.contexts}" if config.contexts else "")
        + f", peak learning rate {config.optimizer.lr:g}."
    )


def read_training(folder: Path) -> dict[str, Any] | None:
    """Return what `describe_training` said of the weights in a model's folder, if it is there."""
    path = folder / TRAINING_FILE
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}; remove it") from error


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def _tensorboard(folder: Path, resumed_at: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=resumed_at + 1 if resumed_at else None)


class LiveLine:
    """Shows the progress of a run: a bar on a terminal, otherwise a line twice a minute.

    Args:
        steps: Last step of the run.
        start: Step from which the run continues.
        clock: Time of the run; if it is limited, the bar shows the time instead of the steps.
    """

    def __init__(self, steps: int, start: int, clock: Clock | None = None) -> None:
        self.steps, self.start = steps, start
        self.clock = clock if clock is not None and clock.limited else None
        self.began = self.shown = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.held_out = ""  # the last validation
        self._drawn = self.clock.spent if self.clock is not None else 0.0
        total = steps - start if self.clock is None else self.clock.seconds - self._drawn
        self._bar = ProgressBar("training", total=round(total))

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show a step; `loss` is the mean since the last log record."""
        perplexity = math.exp(min(loss, 30))
        text = f"loss {loss:.4f}  ppl {perplexity:.2f}  {tokens_per_second:,.0f} tokens/s"
        text += self.held_out
        if self.clock is not None:
            advance, self._drawn = self.clock.spent - self._drawn, self.clock.spent
            self._bar.update(advance, note=f"step {step}  {text}")
        else:
            self._bar.update(note=text)
        now, done = time.monotonic(), step - self.start
        last = self.clock is None and step >= self.steps
        if self.terminal or (not last and now - self.shown < 30.0 and done > 1):
            return
        self.shown = now
        if self.clock is not None:
            left = max(0.0, self.clock.seconds - self.clock.spent)
            self.say(f"step {step}  {text}  {duration(left)} left")
            return
        left = (now - self.began) / max(1, done) * (self.steps - step)
        self.say(f"step {step}/{self.steps}  {text}  {duration(left)} left")

    def validated(self, step: int, results: dict[str, float]) -> None:
        """Print held-out perplexities, and show the first of them from now on."""
        self.held_out = f"  held-out ppl {next(iter(results.values())):.2f}"
        shown = ", ".join(f"{name}: {value:.2f}" for name, value in results.items())
        self.say(f"step {step}: perplexity {shown}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def duration(seconds: float) -> str:
    """Return a duration as h:mm:ss.

    >>> duration(3661)
    '1:01:01'
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def plot_runs(runs: list[Path], out: Path) -> None:
    """Write a figure with the training curves of one or more runs."""
    names = [folder.name for folder in runs]
    records = {}
    for folder, name in zip(runs, names, strict=True):
        if not (folder / "log.jsonl").is_file():
            raise FileNotFoundError(
                f"{folder} is not the folder of a training run: it has no log.jsonl"
            )
        records[name if names.count(name) == 1 else str(folder)] = read_log(folder / "log.jsonl")
    optional_package("matplotlib", "a plot", "plot").use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, lines in records.items():
        train = [line for line in lines if line["kind"] == "train"]
        left.plot(
            [line["step"] for line in train],
            [line["loss"] for line in train],
            label=name,
            linewidth=1,
        )
        held_out = [line for line in lines if line["kind"] == "eval"]
        for key in dict.fromkeys(key for line in held_out for key in perplexities(line)):
            label = f"{name}: {key}" if len(records) > 1 else key
            # the contexts of the validation may change during a run
            lines_with = [line for line in held_out if key in line]
            right.plot(
                [line["step"] for line in lines_with],
                [line[key] for line in lines_with],
                label=label,
                marker=".",
            )
    left.set(title="training", xlabel="step", ylabel="nats per target")
    right.set(title="held out", xlabel="step", ylabel="conditional perplexity", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
