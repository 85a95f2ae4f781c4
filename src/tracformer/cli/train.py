"""Train a model, or continue an interrupted run.

    tracformer train my.txt --minutes 10                 plans everything else and ends on time
    tracformer train laptop data=my.txt steps=3000       a preset, with changes
    tracformer train wikitext103-car                     the paper's run
    tracformer train my.yaml optimizer.lr=1e-3           your own preset file
    tracformer train data=mine.txt init=runs/stories/model          fine-tuning
    torchrun --nproc-per-node 8 -m tracformer train wikitext103-car

A word that is an existing file or folder is the data; any other is the name of a preset. Without
a preset, steps= or --minutes, a run takes ten minutes. The same command resumes a run from its
newest complete checkpoint. SIGTERM and Ctrl-C save a checkpoint and exit with code 128 + signal; a
run with a budget first lowers its learning rate to zero, which takes some seconds.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracformer.cli import FAILED, USAGE_ERRORS, Command
from tracformer.cli import arguments as shared
from tracformer.options import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracformer.training.train_config import TrainConfig

ADAPT_DESCRIPTION = """Teach a causal language model of Hugging Face to fill blanks.

    tracformer adapt smollm2 --data articles.txt --out english
    tracformer infill -m english 'The capital of France is [[1-2]], a city on the Seine.'
    tracformer adapt smollm2 --data articles.txt --out english steps=8000 model.rank=8

The model gets an adapter of a few million numbers (LoRA). ADAPTER holds these numbers and the
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
        metavar="DATA|PRESET|KEY=VALUE",
        help="file or folder with data, name or YAML file of a preset, and options that replace "
        "its values",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="train for N minutes, preparation and summary included (default: 10, unless a preset "
        "or steps= says otherwise)",
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
    shared.add_no_verify(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer train`."""
    began = time.monotonic()
    from tracformer.training import train_config as configs

    if arguments.presets:
        names = configs.preset_names()
        print(json.dumps(names) if arguments.json else "\n".join(names))
        return 0
    presets, changes = _sorted_words(arguments.words)
    if arguments.minutes is not None:
        if not (0 < arguments.minutes < math.inf):
            raise ValueError(
                f"--minutes is {arguments.minutes:g}; it must be more than 0, such as --minutes 10"
            )
        changes.append(f"minutes={arguments.minutes}")
    if arguments.threads is not None:
        changes.append(f"threads={arguments.threads}")
    config = configs.load_config(changes, presets[0] if presets else None)
    if arguments.keys:
        from tracformer.options import to_yaml

        keys = {**config.to_dict(), **_model_keys(config)}
        print(json.dumps(keys) if arguments.json else to_yaml(keys, configs.TrainConfig))
        return 0

    if not (presets or config.steps or config.minutes):
        from tracformer.training.plan import DEFAULT_MINUTES

        changes.append(f"minutes={DEFAULT_MINUTES}")
        config = configs.load_config(changes)
        print(
            f"no --minutes or steps= given: training for {DEFAULT_MINUTES:g} minutes",
            file=sys.stderr if arguments.json else sys.stdout,
            flush=True,
        )
    base = None if presets else lambda values: configs.load_config(changes, values)
    return _train("train", arguments, config, base, began)


def _train(
    verb: str,
    arguments: argparse.Namespace,
    config: "TrainConfig",
    base: "Callable[[str | Mapping[str, Any]], TrainConfig] | None" = None,
    began: float | None = None,
) -> int:
    """Run the training loop and return the exit code; see `training.start.start`."""
    from tracformer.devices import keep_freed_memory
    from tracformer.training.loop import TrainingError
    from tracformer.training.start import start

    keep_freed_memory()
    try:
        with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
            outcome = start(config, base, began, arguments.verify)
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


def _sorted_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that name a preset (at most one), and those of the form KEY=VALUE.

    A word that is an existing file or folder becomes `data=`; YAML files are presets.
    """
    from tracformer.training.train_config import preset_names

    presets, changes, data = [], [], []
    for word in words:
        path = Path(word)
        if path.exists() and path.suffix not in (".yaml", ".yml"):
            data.append(word)
        elif "=" in word:
            changes.append(word)
        elif path.suffix in (".yaml", ".yml") or word in preset_names():
            presets.append(word)
        else:
            raise ValueError(
                f"{word!r} is no file or folder here, no preset, and not of the form KEY=VALUE"
                f"{did_you_mean(word, preset_names())}"
            )
    if len(presets) > 1:
        raise ValueError(
            f"{presets[1]!r} is not of the form KEY=VALUE, and {presets[0]!r} already names the "
            "preset"
        )
    if len(data) > 1:
        raise ValueError(
            f"two places with data, {data[0]} and {data[1]}; write a glob as data='*.txt', or run "
            "`tracformer prepare A B --out FOLDER` first"
        )
    return presets, [*(f"data={place}" for place in data), *changes]


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
    shared.add_no_verify(parser)


def run_adapt(arguments: argparse.Namespace) -> int:
    """Run `tracformer adapt`."""
    from tracformer.devices import cpu_has_bfloat16, pick_device
    from tracformer.files import optional_package
    from tracformer.training.train_config import load_config

    optional_package("transformers", "tracformer adapt", "adapt")
    fixed = {"init": arguments.model, "data": arguments.data, "run": arguments.out}
    words = [f"{key}={value}" for key, value in fixed.items()]
    words += ["model.rank=0"] if arguments.full else []
    config = load_config([*words, *arguments.words], "adapt")
    if config.precision == "auto" and pick_device(config.device) == "cpu" and cpu_has_bfloat16():
        config = dataclasses.replace(config, precision="bfloat16")
    return _train("adapt", arguments, config)


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
