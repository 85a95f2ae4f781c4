"""Evaluation: any model, on the same sequences and contexts as every other, into files that say how
each figure came about.
"""

from tracformer.evaluation.result_files import Result, ResultRow, read_results
from tracformer.evaluation.task import (
    Progress,
    Subject,
    Task,
    make_task,
    parse_task,
    register_task,
    task_names,
)

__all__ = [
    "Progress",
    "Result",
    "ResultRow",
    "Subject",
    "Task",
    "make_task",
    "parse_task",
    "read_results",
    "register_task",
    "task_names",
]
