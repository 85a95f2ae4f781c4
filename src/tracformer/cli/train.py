"""Train a model, or continue an interrupted run.

    tracformer train data=my.txt                         chooses everything else and prints it
    tracformer train laptop data=my.txt steps=3000       a preset, with changes
    tracformer train wikitext103-car                     the paper's run
    tracformer train my.yaml optimizer.lr=1e-3           your own preset file
    tracformer train data=mine.txt init=runs/stories/model          fine-tuning
    torchrun --nproc-per-node 8 -m tracformer train wikitext103-car

The same command resumes a run from its newest complete checkpoint. SIGTERM and Ctrl-C save a
checkpoint and exit with code 128 + signal.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracformer.cli import FAILED, USAGE_ERRORS, Command

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracformer.training.train_config import TrainConfig

ADAPT_DESCRIPTION = """Teach a causal language model of Hugging Face to fill blanks.

    tracformer adapt smollm2 --data articles.txt --out english
    tracformer infill -m english 'The capital of France is [[1-2]], a city on the Seine.'
    tracformer adapt smollm2 --data articles.txt --out english steps=8000 model.rank=8

The model gets an adapter of a few million numbers (LoRA), which is all that ADAPTER holds besides
checkpoints. The same command resumes an interrupted run. SIGTERM and Ctrl-C save a checkpoint.
Training is that of `tracformer train`, with preset `adapt`; options are the same.
"""

PLOT_DESCRIPTION = """Draw the training curves of one or more runs.

    tracformer plot runs/stories                 writes runs/stories/curves.png
    tracformer plot runs/a runs/b --out both.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer train`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PRESET|KEY=VALUE",
        help="name or file of a preset, and options that replace its values",
    )
    parser.add_argument("--presets", action="store_true", help="list the presets and exit")
    parser.add_argument(
        "--keys", action="store_true", help="list all options with their values and exit"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the outcome, or what is listed, as JSON; everything else goes to stderr",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer train`."""
    from tracformer.training import train_config as configs

    if arguments.presets:
        names = configs.preset_names()
        print(json.dumps(names) if arguments.json else "\n".join(names))
        return 0
    presets = [word for word in arguments.words if "=" not in word]
    if len(presets) > 1:
        raise ValueError(
            f"{presets[1]!r} is not of the form KEY=VALUE, and {presets[0]!r} already names the "
            "preset"
        )
    changes = [word for word in arguments.words if "=" in word]
    config = configs.load_config(changes, presets[0] if presets else None)
    if arguments.keys:
        from tracformer.options import to_yaml

        keys = {**config.to_dict(), **_model_keys(config)}
        print(json.dumps(keys) if arguments.json else to_yaml(keys, configs.TrainConfig))
        return 0

    with_preset = None if presets else lambda name: configs.load_config(changes, name)
    return _train("train", arguments, config, with_preset)


def _train(
    verb: str,
    arguments: argparse.Namespace,
    config: "TrainConfig",
    with_preset: "Callable[[str], TrainConfig] | None",
) -> int:
    """Run the training loop and return the exit code; see `training.start.start`."""
    from tracformer.devices import keep_freed_memory
    from tracformer.training.loop import TrainingError
    from tracformer.training.start import start

    keep_freed_memory()
    try:
        with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
            outcome = start(config, with_preset)
    except TrainingError as error:
        print(f"tracformer {verb}: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if isinstance(error, USAGE_ERRORS):
            raise
        print(
            f"tracformer {verb}: {error}. Saved checkpoints are complete; run the same command "
            "again to continue.",
            file=sys.stderr,
        )
        return FAILED
    if arguments.json:
        print(json.dumps(dataclasses.asdict(outcome)))
    return 128 + outcome.signal if outcome.signal is not None else 0


def _model_keys(config: "TrainConfig") -> dict[str, Any]:
    """Return the options of the model that a user may set, and the validation contexts.

    The vocabulary and the modes are decided by the data and the objective.
    """
    from tracformer.training.train_config import DEFAULT_PRESET

    shape = config.model_config(vocab_size=256).to_dict()
    for key in ("vocab_size", "modes"):
        shape.pop(key, None)
    model = {"family": "tracformer", "preset": DEFAULT_PRESET, **config.model, **shape}
    return {"model": model, "eval_contexts": list(config.eval_contexts)}


def add_adapt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer adapt`."""
    parser.add_argument("model", metavar="MODEL", help="smollm2, a folder, or a hub id")
    parser.add_argument(
        "--data", required=True, help="file, folder or glob of text, or a named data set"
    )
    parser.add_argument("--out", required=True, metavar="ADAPTER", help="folder of the adapter")
    parser.add_argument("--full", action="store_true", help="train all weights, not an adapter")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="KEY=VALUE",
        help="options of tracformer train, such as steps=500, model.rank=8 or batch=32",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the outcome as JSON; the rest goes to stderr"
    )


def run_adapt(arguments: argparse.Namespace) -> int:
    """Run `tracformer adapt`."""
    from tracformer.devices import cpu_has_bfloat16, pick_device
    from tracformer.training.train_config import load_config

    fixed = {"init": arguments.model, "data": arguments.data, "run": arguments.out}
    words = [f"{key}={value}" for key, value in fixed.items()]
    words += ["model.rank=0"] if arguments.full else []
    config = load_config([*words, *arguments.words], "adapt")
    if config.precision == "auto" and pick_device(config.device) == "cpu" and cpu_has_bfloat16():
        config = dataclasses.replace(config, precision="bfloat16")
    return _train("adapt", arguments, config, None)


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer plot`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", help="picture to write (default: curves.png in the first run)")
    parser.add_argument("--json", action="store_true", help="print the file name and runs as JSON")


def run_plot(arguments: argparse.Namespace) -> int:
    """Run `tracformer plot`."""
    from tracformer.training.log import plot_runs

    out = Path(arguments.out) if arguments.out else Path(arguments.runs[0]) / "curves.png"
    plot_runs([Path(folder) for folder in arguments.runs], out)
    print(json.dumps({"picture": str(out), "runs": arguments.runs}) if arguments.json else out)
    return 0


plot = Command(PLOT_DESCRIPTION, add_plot_arguments, run_plot)
adapt = Command(ADAPT_DESCRIPTION, add_adapt_arguments, run_adapt)
