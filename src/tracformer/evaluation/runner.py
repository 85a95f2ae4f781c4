"""Several models on several tasks into a folder of results; what is there already is
not done again.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from os import PathLike
from pathlib import Path

import torch

from tracformer import loading
from tracformer.data.tokenizer import Tokenizer
from tracformer.distributed import Ranks
from tracformer.evaluation.result_files import Result, file_name
from tracformer.evaluation.task import ALONE, Progress, Silent, Subject, Task
from tracformer.model.base import ConditionalModel, check_mode, preferred_mode
from tracformer.model.fast_step import check_kind

PARTIAL = ".partial"  # in the folder of results: what an unfinished task has so far


def evaluate(
    subjects: Sequence[Subject],
    tasks: Sequence[Task],
    out: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Each subject's result on each task, as they are finished, and written to `out`. Modes are
    checked before any work.

    A result in `out` of the same model name, mode, options, data, contexts, weights, tokeniser,
    schemas and dtype is read instead, unless the task measures the machine. A task that was
    interrupted goes on from its last finished block.
    """
    for task in tasks:
        for subject in subjects:
            task.check(subject)
    for task in tasks:
        for subject in subjects:
            yield _evaluated(
                subject,
                task.asked_of(subject),
                None if out is None else Path(out),
                progress or Silent(),
            )


def _evaluated(subject: Subject, task: Task, out: Path | None, progress: Progress) -> Result:
    if out is None:
        return task.run(subject, progress)
    name = file_name(subject.name, subject.mode, task.name, task.options, task.manifest(subject))
    if task.lasting and (out / name).is_file():
        return Result.load(out / name)
    scratch = out / PARTIAL / name.removesuffix(".json")
    result = task.run(dataclasses.replace(subject, scratch=scratch), progress)
    if subject.ranks.first:
        result.save(out)
        shutil.rmtree(scratch, ignore_errors=True)
        # not empty: another task, or another process, is under way
        with contextlib.suppress(OSError):
            (out / PARTIAL).rmdir()
    subject.ranks.barrier()
    return result


def load_subjects(
    models: Iterable[str],
    modes: Sequence[str] = (),
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: Sequence[str] = ("float32",),
    batch: int = 32,
    ranks: Ranks = ALONE,
) -> list[Subject]:
    """Models written as [NAME=]FOLDER[@MODE]: a folder, a run or an id of the hub. The first one's
    tokeniser cuts the windows for all.

    Without @MODE a model answers in the first of `modes` that it has, or if none is named in the
    first of car, ac, ar that it has. Each stands there once for each kind of `weights` (see
    `model.fast_step`), under its name and the kind.
    """
    for kind in weights:
        check_kind(kind)
    subjects: list[Subject] = []
    loaded: dict[tuple[Path, str], tuple[ConditionalModel, Tokenizer]] = {}
    for text, kind in product(models, weights):
        name, where, mode = parse_model(text)
        name = name if kind == "float32" else f"{name}-{kind}"
        folder = loading.find_folder(where)
        if (folder, kind) not in loaded:
            model, tokenizer = loading.read(folder, device, dtype)
            loaded[folder, kind] = model.lean(kind), tokenizer
        model, tokenizer = loaded[folder, kind]
        subject = Subject(
            model=model.eval(),
            tokenizer=tokenizer,
            name=name,
            mode=choose_mode(model, [mode] if mode else modes, name),
            batch=batch,
            ranks=ranks,
            reference=subjects[0].tokenizer if subjects else tokenizer,
        )
        if any((other.name, other.mode) == (subject.name, subject.mode) for other in subjects):
            raise ValueError(
                f"two models are called {name!r} in mode {subject.mode}; name them apart: "
                "NAME=FOLDER"
            )
        subjects.append(subject)
    return subjects


def parse_model(text: str) -> tuple[str, str, str | None]:
    """Name, place and mode of [NAME=]FOLDER[@MODE]; the name is the folder's unless it is given."""
    name, equals, place = text.partition("=")
    if not equals or any(
        Path(folder).exists() for folder in (text, text.rpartition("@")[0]) if folder
    ):
        name, place = "", text
    mode = None
    if "@" in place and not Path(place).exists():
        place, _, mode = place.rpartition("@")
    if not place:
        raise ValueError(f"{text!r} names no model; write FOLDER, NAME=FOLDER or NAME=FOLDER@MODE")
    folder = Path(place)
    if not name and folder.name in loading.PLACES:
        folder = folder.parent  # a run's own folder says more than `best` or `model`
    return name or folder.resolve().name or place, place, mode


def choose_mode(model: ConditionalModel, modes: Sequence[str], name: str) -> str:
    trained = model.config.modes
    if not modes:
        return preferred_mode(model.config)
    if (found := next((mode for mode in modes if mode in trained), None)) is not None:
        return found
    try:
        check_mode(model.config, modes[0])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    raise AssertionError("a mode that was trained is always found")
