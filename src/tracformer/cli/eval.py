"""Evaluate one or several models on the same sequences and contexts.

    tracformer eval runs/stories --task ratios:mean=10 --task ranges --data stories/ --length 128
    tracformer eval ours=runs/a theirs=runs/b ratios:mean=10 --data held-out.txt --mode car
    tracformer eval runs/a@car runs/a@ac prefixes --data wikitext103
    tracformer eval runs/a unconditional --data held-out.txt --weights float32,bfloat16,int8
    torchrun --nproc-per-node 2 -m tracformer eval runs/a ranges --data stories/

A model is [NAME=]FOLDER[@MODE], where FOLDER is a model folder, a run folder or a hub id. A task is
NAME or NAME:KEY=VALUE,...; --tasks lists them with their options. Each model and task gives one
JSON file in --out. The same command continues an interrupted evaluation and repeats nothing.
Figures are marked exact, marginal or bound, which are different quantities.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracformer.cli import FAILED, Command, output
from tracformer.cli import arguments as shared
from tracformer.evaluation import NoiseOptions, TextTaskOptions
from tracformer.options import add_arguments as add_flags
from tracformer.options import default_of, flag_of, from_arguments, option_fields

if TYPE_CHECKING:
    from tracformer.evaluation.task import Task

DTYPES = ("float32", "float64", "bfloat16")
# Options of tasks on text that have a flag, which sets them for every task that has them.
SHARED = (
    *("data", "split", "length", "sequences", "seed", "detokenize", "documents"),
    "count_eos",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer eval`."""
    parser.add_argument(
        "words", nargs="*", metavar="MODEL|TASK", help="models as [NAME=]FOLDER[@MODE], and tasks"
    )
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="TASK",
        help="task as NAME or NAME:KEY=VALUE,...; repeatable",
    )
    parser.add_argument(
        "--tasks", action="store_true", help="list the tasks with their options and exit"
    )
    add_flags(parser, TextTaskOptions, SHARED)
    add_flags(parser, NoiseOptions)
    parser.add_argument(
        "--mode",
        default="",
        metavar="MODE,...",
        help="car, ac, ar or diffusion; of several, the first that a model has is used",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        metavar="N",
        help="sequences per batch; does not change the figures (default: 32)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=DTYPES,
        metavar="TYPE",
        help="float32, float64 or bfloat16 (default: float32)",
    )
    parser.add_argument(
        "--weights",
        default="float32",
        metavar="KIND,...",
        help="float32, bfloat16, int8: evaluate each model with its weights rounded to each kind",
    )
    shared.add_no_verify(parser)
    parser.add_argument(
        "--out", default="results", metavar="FOLDER", help="folder of results (default: results)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per result")


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer eval`."""
    from tracformer.evaluation.task import parse_task, task_names

    if arguments.tasks:
        _list_tasks()
        return 0
    models, named = sort_words(arguments.words, task_names())
    if not models:
        raise ValueError(
            "no model given; write tracformer eval FOLDER --task TASK, where FOLDER is a model or "
            "run folder"
        )
    defaults = from_arguments(TextTaskOptions, arguments, SHARED)
    defaults |= from_arguments(NoiseOptions, arguments)
    tasks = [parse_task(text, defaults) for text in [*named, *arguments.task]]
    if not tasks:
        raise ValueError(
            f"no task given (read as models: {', '.join(models)}); tasks: {', '.join(task_names())}"
        )
    for key in defaults:
        if not any(key in task.options for task in tasks):
            names = ", ".join(dict.fromkeys(task.name for task in tasks))
            raise ValueError(
                f"{flag_of(key)} has no effect on {names}; leave it out (--tasks lists the options "
                "of each task)"
            )
    return _evaluate(models, tasks, arguments)


def _list_tasks() -> None:
    """Print each task with its options, their defaults and help; its own options come first."""
    from tracformer.evaluation.task import task_class, task_names

    for name in task_names():
        kind = task_class(name)
        output.put(f"{name}: {(kind.__doc__ or '').splitlines()[0]}")
        own = vars(kind).get("__annotations__", {})
        for key, info in sorted(option_fields(kind).items(), key=lambda item: item[0] not in own):
            value = default_of(kind, key)
            shown = "/".join(map(str, value)) if isinstance(value, tuple) else value
            output.put(f"  {f'{key}={shown}':<28} {info.help}")
        output.put("")


def sort_words(words: Sequence[str], known: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return models and tasks: a word that begins with a task's name is a task.

    A folder of such a name is a model.
    """
    tasks = [word for word in words if word.partition(":")[0] in known and not Path(word).exists()]
    return [word for word in words if word not in tasks], tasks


def _evaluate(models: Sequence[str], tasks: "Sequence[Task]", arguments: argparse.Namespace) -> int:
    import torch

    from tracformer.devices import join_ranks, keep_freed_memory
    from tracformer.evaluation.task import Progress, evaluate, load_subjects
    from tracformer.model.fast_step import KINDS
    from tracformer.report import printed_tables
    from tracformer.report.tables import print_tables

    modes, kinds = (
        [word.strip() for word in words.split(",") if word.strip()]
        for words in (arguments.mode, arguments.weights)
    )
    if not kinds:
        raise ValueError(
            f"--weights is {arguments.weights!r}; it must be one or several of {', '.join(KINDS)}, "
            "separated by commas"
        )
    if arguments.mode and not modes:
        raise ValueError(
            f"--mode is {arguments.mode!r}, which names no mode; leave it out to use each model's "
            "own"
        )
    keep_freed_memory()
    with join_ranks(arguments.device) as ranks:
        subjects = load_subjects(
            models,
            modes,
            device=ranks.device,
            dtype=getattr(torch, arguments.dtype),
            weights=kinds,
            batch=arguments.batch,
            verify=arguments.verify,
            ranks=ranks,
        )
        results = []
        progress = Progress(len(subjects) * len(tasks), enabled=ranks.first)
        try:
            for result in evaluate(subjects, tasks, arguments.out, progress):
                progress.finish()
                results.append(result)
                if arguments.json and ranks.first:
                    output.put(json.dumps({**result.to_dict(), "details": {}}, ensure_ascii=False))
        except KeyboardInterrupt:
            progress.close()
            if ranks.first:
                print(
                    f"tracformer eval: interrupted; finished results are in {arguments.out}, run "
                    "the same command again to continue",
                    file=sys.stderr,
                )
            raise
        if not arguments.json and ranks.first:
            # rounding costs too little to be seen in perplexity
            print_tables(printed_tables(results, per_byte=len(kinds) > 1), turned=True)
    return 0


# ---- reproduce, report

OWN_OPTIONS = ("scale", "out", "device", "batch")
REPRODUCE_DESCRIPTION = """Reproduce a table or figure of the paper, from data to a report.

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

REPORT_DESCRIPTION = """Write an HTML page with tables and pictures of results, and a PNG, CSV and
LaTeX file for each of them.

    tracformer report results/                          writes results/report/index.html
    tracformer report results/a results/b --out page/

The page needs no network and no other file.
"""


def add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_reproduce(arguments: argparse.Namespace) -> int:
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
reproduce = Command(REPRODUCE_DESCRIPTION, add_reproduce_arguments, run_reproduce)
