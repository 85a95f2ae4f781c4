"""Reproduce a table or figure of the paper: prepare data, train, evaluate, write a report.

    tracformer reproduce --list
    tracformer reproduce fig5 scale=mini --dry-run               print the plan and its cost
    tracformer reproduce fig5 scale=mini out=runs/reproduce
    tracformer reproduce fig5 scale=mini data=FOLDER             folder with all data sets
    tracformer reproduce fig5 scale=mini data.wikitext=FOLDER    your own text or prepared folder
    tracformer reproduce fig5 scale=mini only=tracformer-car,bart seeds=0
    tracformer reproduce table2 scale=paper models.sedd=FOLDER   your own weights
    tracformer reproduce my.yaml scale=mine.yaml seeds=0,1,2
    torchrun --nproc-per-node 8 -m tracformer reproduce fig5 scale=paper

The same command continues an interrupted run. Experiments with the same scale and out= share
trained models. Several processes may run the same command at once, each with OMP_NUM_THREADS=1, and
divide the work.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from tracformer.cli import FAILED, Command

OWN_OPTIONS = ("scale", "out", "device", "batch")
REPORT_DESCRIPTION = """Write an HTML page with tables and pictures of results, and a PNG, CSV and
LaTeX file for each of them.

    tracformer report results/                          writes results/report/index.html
    tracformer report results/a results/b --out page/

The page needs no network and no other file.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer reproduce`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="EXPERIMENT|KEY=VALUE",
        help="name or file of an experiment, and options: scale=, out=, data.NAME=, ...",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the experiments with their cost and exit"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every run, its cost and whether it is done, and exit",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the outcome as JSON; everything else goes to stderr",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer reproduce`."""
    from tracformer.reproduce.experiment import experiment_names, read_experiment, scale_names

    if arguments.list:
        from tracformer.reproduce.steps import summary

        experiments = {name: read_experiment(name) for name in experiment_names()}
        costs = {name: summary(experiment) for name, experiment in experiments.items()}
        if arguments.json:
            titles = {name: experiment.title for name, experiment in experiments.items()}
            found = {"experiments": titles, "costs": costs, "scales": list(scale_names())}
            print(json.dumps(found))
            return 0
        for name, experiment in experiments.items():
            print(f"{name:<14} {experiment.title} (scale {experiment.scale}: {costs[name]})")
        print(f"scales: {', '.join(scale_names())}")
        return 0
    names = [word for word in arguments.words if "=" not in word]
    if len(names) != 1:
        given = ", ".join(names)
        problem = f"several experiments given: {given}" if names else "no experiment given"
        raise ValueError(
            f"{problem}; write tracformer reproduce NAME scale=mini, where NAME is one of "
            f"{', '.join(experiment_names())}"
        )
    words = _words(arguments.words)
    own = {key: words.pop(key) for key in OWN_OPTIONS if key in words}
    experiment = read_experiment(names[0], own.get("scale", ""), words)

    from tracformer.devices import keep_freed_memory
    from tracformer.evaluation.task import Progress
    from tracformer.reproduce import Reproduction
    from tracformer.training.loop import TrainingError

    first = os.environ.get("RANK", "0") == "0"
    batch = own.get("batch", "32")
    if not batch.isdigit() or int(batch) < 1:
        raise ValueError(f"batch is {batch!r}; it must be a positive number of sequences")
    work = Reproduction(
        experiment=experiment,
        out=Path(own.get("out", "runs/reproduce")),
        progress=Progress(enabled=first),
        say=(lambda text: print(text, flush=True)) if first else (lambda text: None),
        device=own.get("device", "auto"),
        batch=int(batch),
    )
    if arguments.dry_run:
        from tracformer.reproduce.steps import describe_plan

        lines = list(describe_plan(work))
        print(json.dumps({"plan": lines}) if arguments.json else "\n".join(lines))
        return 0
    keep_freed_memory()
    try:
        with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
            code = work.run()
    except TrainingError as error:
        print(f"tracformer reproduce: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        if first:
            print(
                f"tracformer reproduce: interrupted; finished work is in {work.root}, run the same "
                "command again to continue",
                file=sys.stderr,
            )
        raise
    if arguments.json and first:
        outcome = {
            "experiment": experiment.name,
            "folder": str(work.root),
            "report": str(work.page),
            "finished": code == 0,
        }
        print(json.dumps(outcome))
    return code


def _words(words: list[str]) -> dict[str, str]:
    """Return the `KEY=VALUE` words as a mapping, with values as written."""
    found: dict[str, str] = {}
    for key, equals, value in (word.partition("=") for word in words):
        if equals and key in found:
            raise ValueError(f"{key} is given twice, as {found[key]!r} and {value!r}; give it once")
        if equals:
            found[key] = value
    return found


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer report`."""
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="folders of results, or single result files"
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="output folder (default: `report` in the first folder of results)",
    )
    parser.add_argument(
        "--title", default="Evaluation", help="title of the page (default: Evaluation)"
    )
    parser.add_argument("--json", action="store_true", help="print the page's file name as JSON")


def run_report(arguments: argparse.Namespace) -> int:
    """Run `tracformer report`."""
    from tracformer.report import write_report

    first = Path(arguments.folders[0])
    out = arguments.out or (first if first.is_dir() else first.parent) / "report"
    path = write_report(arguments.folders, out, title=arguments.title)
    print(json.dumps({"page": str(path)}) if arguments.json else path)
    return 0


report = Command(REPORT_DESCRIPTION, add_report_arguments, run_report)
