"""Evaluate one model or several on the same sequences and contexts.

    tracformer eval runs/stories --task ratios:mean=10 --task ranges --data stories/ --length 128
    tracformer eval ours=runs/a theirs=runs/b ratios:mean=10 --data held-out.txt --mode car
    tracformer eval runs/a@car runs/a@ac prefixes --data wikitext103
    tracformer eval runs/a unconditional --data held-out.txt --weights float32,bfloat16,int8
    torchrun --nproc-per-node 2 -m tracformer eval runs/a ranges --data stories/

A model is [NAME=]FOLDER[@MODE]: its folder, a run's, or an id of the hub. A task is NAME or
NAME:KEY=VALUE,...; --tasks lists them with their options. Each pair of a model and a task becomes a
JSON file in --out; the same command goes on after an interruption, and does nothing twice. Figures
are marked exact, marginal or bound: these are different things.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracformer.cli import arguments as sampling
from tracformer.cli import output as show

if TYPE_CHECKING:
    from tracformer.evaluation.task import Task

DTYPES = ("float32", "float64", "bfloat16")
OPTIONS = (
    "data",
    "split",
    "length",
    "sequences",
    "seed",
    "draws",
    "detokenize",
    "documents",
    "count_eos",
)  # that every task which has them takes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="MODEL | TASK", help="models as [NAME=]FOLDER[@MODE], and tasks"
    )
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="TASK",
        help="NAME or NAME:KEY=VALUE,...; may be repeated",
    )
    parser.add_argument(
        "--tasks", action="store_true", help="list the tasks with their options and leave"
    )
    parser.add_argument(
        "--data",
        metavar="WHERE",
        help="a prepared folder, text files, a data set of the paper by name, or hf:OWNER/NAME",
    )
    parser.add_argument("--split", help="of prepared or named data (default: validation)")
    parser.add_argument(
        "--documents", help="what ends a document in text files: separator, line, blank-line, ..."
    )
    parser.add_argument(
        "--detokenize", help="undo the tokenisation of wikitext, ptb, lambada or 1bw"
    )
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of a sequence")
    parser.add_argument("--sequences", type=int, metavar="N", help="how many; 0: all")
    parser.add_argument(
        "--count-eos",
        action="store_true",
        default=None,
        help="count end of text as a token to predict",
    )
    parser.add_argument(
        "--mode",
        default="",
        help=(
            "car, ac, ar or diffusion; of several, separated by commas, the first that a model has"
        ),
    )
    parser.add_argument(
        "--draws",
        type=int,
        metavar="N",
        help="of noise for each sequence, where the answer is a bound",
    )
    parser.add_argument("--seed", type=int, help="of contexts and noise (default: 0)")
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        metavar="N",
        help="sequences at once; changes no figure (default: 32)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument(
        "--weights",
        default="float32",
        metavar="KIND,...",
        help="float32, bfloat16, int8: each model with weights rounded to each of them",
    )
    parser.add_argument(
        "--out",
        default="results",
        metavar="FOLDER",
        help="where results go, and are found again (default: results)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a result")


def run(arguments: argparse.Namespace) -> int:
    from tracformer.evaluation.task import parse_task, task_class, task_names

    if arguments.tasks:
        for name in task_names():
            options = ", ".join(
                f"{part.name}={_shown(part.default)}"
                for part in dataclasses.fields(task_class(name))
            )
            print(f"{name:<14} {options}")
        return 0
    models, named = sort_words(arguments.words, task_names())
    if not models:
        raise ValueError(
            "no model named; write tracformer eval FOLDER --task TASK, FOLDER being a model's or a "
            "run's"
        )
    defaults = {key: value for key in OPTIONS if (value := getattr(arguments, key)) is not None}
    tasks = [parse_task(text, defaults) for text in [*named, *arguments.task]]
    if not tasks:
        taken = ", ".join(models)
        raise ValueError(
            f"no task named ({taken} {'is' if len(models) == 1 else 'are'} taken for models); "
            f"tasks: {', '.join(task_names())}"
        )
    for key in defaults:
        if not any(key in task.options for task in tasks):
            asked = ", ".join(dict.fromkeys(task.name for task in tasks))
            raise ValueError(
                f"{sampling.option(key)} means nothing to what is asked, {asked}; leave it out "
                "(--tasks lists what each task takes)"
            )
    return _evaluate(models, tasks, arguments)


def sort_words(words: Sequence[str], known: Sequence[str]) -> tuple[list[str], list[str]]:
    """Models and tasks: a word that begins with a task's name is one, unless a
    folder is called so.
    """
    tasks = [word for word in words if word.partition(":")[0] in known and not Path(word).exists()]
    return [word for word in words if word not in tasks], tasks


def _evaluate(models: Sequence[str], tasks: "Sequence[Task]", arguments: argparse.Namespace) -> int:
    import torch

    from tracformer.devices import keep_freed_memory
    from tracformer.distributed import join_ranks
    from tracformer.evaluation.runner import evaluate, load_subjects
    from tracformer.model.fast_step import KINDS
    from tracformer.report import printed_tables
    from tracformer.report.tables import print_tables

    modes, kinds = (
        [word.strip() for word in words.split(",") if word.strip()]
        for words in (arguments.mode, arguments.weights)
    )
    if not kinds:
        raise ValueError(
            f"--weights is {arguments.weights!r} and names no kind; allowed, separated by commas: "
            f"{', '.join(KINDS)}"
        )
    if arguments.mode and not modes:
        raise ValueError(
            f"--mode is {arguments.mode!r} and names no mode; leave it out for each model's own"
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
            ranks=ranks,
        )
        results = []
        meter = Meter(
            len(subjects) * len(tasks), shown=ranks.first and show.is_terminal(sys.stderr)
        )
        try:
            for result in evaluate(subjects, tasks, arguments.out, meter):
                meter.finish()
                results.append(result)
                if arguments.json and ranks.first:
                    show.put(json.dumps({**result.to_dict(), "details": {}}, ensure_ascii=False))
        except KeyboardInterrupt:
            meter.close()
            if ranks.first:
                print(
                    f"tracformer eval: interrupted; what is done is in {arguments.out}, and the "
                    "same command goes on from there",
                    file=sys.stderr,
                )
            raise
        if not arguments.json and ranks.first:
            # what rounding costs is too little to be seen in perplexity
            print_tables(printed_tables(results, per_byte=len(kinds) > 1), turned=True)
    return 0


class Meter:
    """Progress and time left on a terminal, one line for the task at hand."""

    def __init__(self, tasks: int, shown: bool) -> None:
        self.tasks, self.shown = tasks, shown
        self.finished = 0
        self.bar: Any = None

    def start(self, what: str, total: int) -> None:
        from tqdm import tqdm

        self.close()
        place = f"[{self.finished + 1}/{self.tasks}] " if self.tasks > 1 else ""
        self.bar = tqdm(
            total=total, desc=f"{place}{what}", file=sys.stderr, disable=not self.shown, leave=False
        )

    def step(self, done: int = 1) -> None:
        self.bar.update(done)

    def finish(self) -> None:
        self.close()
        self.finished += 1

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
