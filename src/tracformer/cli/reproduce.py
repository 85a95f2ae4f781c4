"""Reproduce a table or figure of the paper: prepare data, train what is missing, evaluate, write
the report.

    tracformer reproduce --list
    tracformer reproduce fig5 scale=mini --dry-run               the plan and its cost
    tracformer reproduce fig5 scale=mini out=runs/reproduce
    tracformer reproduce fig5 scale=mini data=FOLDER             the files of all data sets
    tracformer reproduce fig5 scale=mini data.wikitext=FOLDER    your own text or prepared folder
    tracformer reproduce fig5 scale=mini only=tracformer-car,bart seeds=0
    tracformer reproduce table2 scale=paper models.sedd=FOLDER   your own weights
    tracformer reproduce my.yaml scale=mine.yaml seeds=0,1,2
    torchrun --nproc-per-node 8 -m tracformer reproduce fig5 scale=paper

The same command goes on after an interruption. Experiments at one scale and out= share what they
train; several processes may run the same command at once, each with OMP_NUM_THREADS=1, and divide
the work.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

OWN_KEYS = ("scale", "out", "device", "batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="EXPERIMENT | KEY=VALUE",
        help="an experiment, and scale=, out=, data.NAME=, ...",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the experiments with their cost, and the scales, and exit",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every run, its cost and what is done already, and exit",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print what came of it as JSON; everything else goes to stderr",
    )


def run(arguments: argparse.Namespace) -> int:
    from tracformer.reproduce.experiment import experiment_names, read_experiment, scale_names

    if arguments.list:
        from tracformer.reproduce import summary

        experiments = {name: read_experiment(name) for name in experiment_names()}
        costs = {name: summary(experiment) for name, experiment in experiments.items()}
        if arguments.json:
            titles = {name: experiment.title for name, experiment in experiments.items()}
            print(
                json.dumps({"experiments": titles, "costs": costs, "scales": list(scale_names())})
            )
            return 0
        for name, experiment in experiments.items():
            print(f"{name:<14} {experiment.title} (scale {experiment.scale}: {costs[name]})")
        print(f"scales: {', '.join(scale_names())}")
        return 0
    names = [word for word in arguments.words if "=" not in word]
    if len(names) != 1:
        told = f"{', '.join(names)} are named; one at a time" if names else "no experiment named"
        raise ValueError(
            f"{told}: write tracformer reproduce NAME scale=mini, NAME being one of "
            f"{', '.join(experiment_names())}"
        )
    words: dict[str, str] = {}
    for key, _, value in (word.partition("=") for word in arguments.words if "=" in word):
        if key in words:
            raise ValueError(f"{key} is given twice, as {words[key]!r} and {value!r}; give it once")
        words[key] = value
    own = {key: words.pop(key) for key in OWN_KEYS if key in words}
    experiment = read_experiment(names[0], own.get("scale", ""), words)

    from tracformer.cli.eval import Meter
    from tracformer.cli.output import is_terminal
    from tracformer.devices import keep_freed_memory
    from tracformer.reproduce import Reproduction
    from tracformer.training.loop import TrainingError

    first = _is_first_rank()
    batch = own.get("batch", "32")
    if not batch.isdigit() or int(batch) < 1:
        raise ValueError(f"batch is {batch!r}; it must be a number of sequences")
    work = Reproduction(
        experiment=experiment,
        out=Path(own.get("out", "runs/reproduce")),
        progress=Meter(1, shown=first and is_terminal(sys.stderr)),
        say=(lambda text: print(text, flush=True)) if first else (lambda text: None),
        device=own.get("device", "auto"),
        batch=int(batch),
    )
    if arguments.dry_run:
        from tracformer.reproduce import plan

        lines = list(plan(work))
        print(json.dumps({"plan": lines}) if arguments.json else "\n".join(lines))
        return 0
    keep_freed_memory()
    try:
        with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
            code = work.run()
    except TrainingError as stopped:
        print(f"tracformer reproduce: {stopped}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if first:
            print(
                f"tracformer reproduce: interrupted; what is done is in {work.root}, and the same "
                "command goes on from there",
                file=sys.stderr,
            )
        raise
    if arguments.json and first:
        print(
            json.dumps(
                {
                    "experiment": experiment.name,
                    "folder": str(work.root),
                    "report": str(work.page),
                    "finished": code == 0,
                }
            )
        )
    return code


def _is_first_rank() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"
