"""Evaluation: every model on the same sequences and contexts, into files that record their origin.

- `task.py`: `Task`, `Subject` (a model in one mode), the registry of tasks, and `evaluate`, which
  runs models x tasks and keeps results in a folder. The tasks are in
  `perplexity.py`, `fill_quality.py`, `consistency.py`, `exact.py`, `domains.py` and `speed.py`;
  `TextTaskOptions` and `NoiseOptions` are the options that tasks on text have in common.
- `result_files.py`: `Result` and `ResultRow`, and what identifies a result.
- `windows.py`: the sequences that all models read; `questions.py`: asking models in resumable
  blocks; `bootstrap.py`: confidence intervals.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracformer.options import option

if TYPE_CHECKING:
    from tracformer.evaluation.result_files import Result, ResultRow, read_results
    from tracformer.evaluation.task import (
        Subject,
        Task,
        evaluate,
        make_task,
        parse_task,
        register_task,
        task_names,
    )

_HOMES = {
    "Result": "result_files",
    "ResultRow": "result_files",
    "Subject": "task",
    "Task": "task",
    "evaluate": "task",
    "make_task": "task",
    "parse_task": "task",
    "read_results": "result_files",
    "register_task": "task",
    "task_names": "task",
}
__all__ = [
    "Result",
    "ResultRow",
    "Subject",
    "Task",
    "evaluate",
    "make_task",
    "parse_task",
    "read_results",
    "register_task",
    "task_names",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: `tracformer eval --help` needs the options only."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


ROWS = ("packed", "documents")


@dataclass(frozen=True)
class TextTaskOptions:
    """Which text is read, how it is cut into windows, and the seed of contexts and noise."""

    data: str = option(
        "",
        "folder of `tracformer prepare`, text files, a named data set, or hf:OWNER/NAME",
        metavar="WHERE",
        raw=True,
    )
    split: str = option("validation", "split of prepared or named data; files are read whole")
    length: int = option(
        128, "tokens of each sequence (default: the task's)", low=1, metavar="TOKENS"
    )
    sequences: int = option(
        1000,
        "number of sequences, spread evenly over the text; 0 takes all (default: the task's)",
        low=0,
        metavar="N",
    )
    rows: str = option(
        "packed",
        "packed cuts the running text; documents takes the beginning of each long enough document",
        choices=ROWS,
    )
    documents: str = option(
        "separator", "what ends a document in text files, as in `tracformer prepare`"
    )
    detokenize: str | None = option(
        None, "undo the tokenization of wikitext, ptb, lambada or 1bw", metavar="SET"
    )
    seed: int = option(0, "random seed of contexts and noise", metavar="N")
    count_eos: bool = option(
        False, "count end-of-text tokens as targets; otherwise they are always given"
    )


@dataclass(frozen=True)
class NoiseOptions:
    """How often noise is drawn where a model answers with a bound."""

    draws: int | None = option(
        None,
        "draws of noise for each sequence, if the model's answer is a bound (default: the model's)",
        low=1,
        metavar="N",
    )
