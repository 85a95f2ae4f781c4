"""Train a model, or go on with an interrupted run.

    tracformer train data=my.txt                         everything else is chosen, and said aloud
    tracformer train laptop data=my.txt steps=3000       a preset, with changes
    tracformer train wikitext103-car                     the paper's run
    tracformer train my.yaml optimizer.lr=1e-3           a preset file of your own
    tracformer train data=mine.txt init=runs/stories/model          fine-tuning
    torchrun --nproc-per-node 8 -m tracformer train wikitext103-car

The same command resumes a run from its newest whole checkpoint. SIGTERM and Ctrl-C save and leave
with code 128 + signal.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracformer.training.train_config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PRESET | KEY=VALUE",
        help="a preset's name or file, and changes to it",
    )
    parser.add_argument("--presets", action="store_true", help="list the bundled presets and leave")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print how the run ended, or what is listed, as JSON; everything else goes to stderr",
    )
    parser.add_argument(
        "--keys",
        action="store_true",
        help="list every key with its value under this preset and leave",
    )


def _listed(config: "TrainConfig") -> dict[str, Any]:
    """`model` with every key of its family; those that the data and the objective
    decide are left out.
    """
    shape = {
        key: value
        for key, value in config.model_config(vocab_size=256).to_dict().items()
        if key not in ("vocab_size", "modes")
    }
    from tracformer.training.train_config import DEFAULT_PRESET

    model = {"family": "tracformer", "preset": DEFAULT_PRESET, **config.model, **shape}
    return {"model": model, "eval_contexts": list(config.eval_contexts)}


def run(arguments: argparse.Namespace) -> int:
    from tracformer.training import train_config as configs

    if arguments.presets:
        names = configs.preset_names()
        print(json.dumps(names) if arguments.json else "\n".join(names))
        return 0
    presets = [word for word in arguments.words if "=" not in word]
    if len(presets) > 1:
        raise ValueError(
            f"{presets[1]!r} is not of the form key=value, and {presets[0]!r} already names the "
            "preset"
        )
    changes = [word for word in arguments.words if "=" in word]
    config = configs.load_config(changes, presets[0] if presets else None)
    if arguments.keys:
        from tracformer.options import to_yaml

        keys = {**config.to_dict(), **_listed(config)}
        print(json.dumps(keys) if arguments.json else to_yaml(keys, configs.TrainConfig))
        return 0

    from tracformer.cli import MISTAKES
    from tracformer.devices import keep_freed_memory
    from tracformer.training.loop import TrainingError
    from tracformer.training.start import start

    keep_freed_memory()
    try:
        with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
            outcome = start(
                config, None if presets else lambda name: configs.load_config(changes, name)
            )
    except TrainingError as stopped:
        print(f"tracformer train: {stopped}", file=sys.stderr)
        return 1
    except OSError as error:
        if isinstance(error, MISTAKES):
            raise
        print(
            f"tracformer train: {error}. What was saved before is whole; the same command goes on "
            "from there.",
            file=sys.stderr,
        )
        return 1
    if arguments.json:
        print(json.dumps(dataclasses.asdict(outcome)))
    return 128 + outcome.signal if outcome.signal is not None else 0
