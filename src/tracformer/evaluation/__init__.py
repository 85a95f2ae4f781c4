"""Evaluation: every model on the same sequences and contexts, into files that record their origin.

- `task.py`: `Task`, `Subject` (a model in one mode) and the registry of tasks. The tasks are in
  `perplexity.py`, `fill_quality.py`, `order_consistency.py`, `calibration.py`, `exact.py`,
  `domains.py` and `speed.py`.
- `runner.py`: `evaluate`, which runs models x tasks and keeps results in a folder.
- `result_files.py`: `Result` and `ResultRow`; `provenance.py`: what identifies a result.
- `windows.py`: the sequences that all models read; `questions.py`: asking models in resumable
  blocks; `bootstrap.py`: confidence intervals.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracformer.evaluation.result_files import Result, ResultRow, read_results
    from tracformer.evaluation.runner import evaluate
    from tracformer.evaluation.task import (
        Subject,
        Task,
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
    "evaluate": "runner",
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
    """Import a name when it is first used: `task_options` must load without torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
