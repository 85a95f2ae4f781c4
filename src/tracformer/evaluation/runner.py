"""Run models on tasks, and keep the results in a folder.

`evaluate` runs them, reusing results that the folder has; `load_subjects` loads models that are
written as [NAME=]FOLDER[@MODE].
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
from tracformer.devices import Ranks
from tracformer.evaluation.result_files import Result, file_name
from tracformer.evaluation.task import ONE_RANK, Progress, Subject, Task
from tracformer.model.base import ConditionalModel, check_mode, preferred_mode
from tracformer.model.fast_step import check_kind

PARTIAL = ".partial"  # folder inside that of the results, for blocks of unfinished tasks


def evaluate(
    subjects: Sequence[Subject],
    tasks: Sequence[Task],
    out: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """Yield the result of each model on each task, as they finish.

    Args:
        subjects: Models.
        tasks: Tasks.
        out: Folder for the results. A result that it has already is read instead of computed again,
            if model name, mode, options, data, contexts, weights, tokenizer, schemas and dtype are
            the same and the task does not measure the machine. An interrupted task continues after
            its last finished block. None: keep nothing.
        progress: Progress bars; None: none.

    Raises:
        ValueError: A task does not work for a model; checked before any work.

    Example:
        >>> tasks = [make_task("ratios", {"data": "held-out.txt"})]  # doctest: +SKIP
        >>> results = list(evaluate(load_subjects(["runs/a"]), tasks, "results"))  # doctest: +SKIP
    """
    for task in tasks:
        for subject in subjects:
            task.check(subject)
    for task in tasks:
        for subject in subjects:
            yield _evaluated(
                subject,
                task.canonical(subject),
                None if out is None else Path(out),
                progress or Progress(),
            )


def _evaluated(subject: Subject, task: Task, out: Path | None, progress: Progress) -> Result:
    """Return a result from the folder, or run the task and save it there."""
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
        # fails if another task or process keeps blocks there
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
    verify: bool = True,
    ranks: Ranks = ONE_RANK,
) -> list[Subject]:
    """Load models for `evaluate`; the tokenizer of the first cuts the text windows for all.

    Args:
        models: Models as [NAME=]FOLDER[@MODE], FOLDER being a folder, a run or an id of the hub.
        modes: For models without @MODE: the first of these modes that the model has is used. If
            empty, the first of car, ac, ar that it has.
        device: Device of the models.
        dtype: Type of the weights and of the computation.
        weights: Kinds of rounded weights (see `model.fast_step`). Each model is loaded once for
            each kind, which becomes part of its name.
        batch: Sequences at once.
        verify: Check each model's files against its `checksums.json`.
        ranks: Processes that share the work.

    Raises:
        ValueError: Two models have the same name and mode, or a model lacks the mode.
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
            model, tokenizer = loading.read(folder, device, dtype, verify=verify)
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
                f"two models are called {name!r} in mode {subject.mode}; give them different "
                "names by NAME=FOLDER"
            )
        subjects.append(subject)
    return subjects


def parse_model(text: str) -> tuple[str, str, str | None]:
    """Return name, place and mode of [NAME=]FOLDER[@MODE]; the name defaults to the folder's."""
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
        folder = folder.parent  # name a run by its folder, not by `best` or `model` in it
    return name or folder.resolve().name or place, place, mode


def choose_mode(model: ConditionalModel, modes: Sequence[str], name: str) -> str:
    """Return the first of `modes` that a model has, or its preferred mode if `modes` is empty.

    Raises:
        ValueError: The model has none of them; the message begins with `name`.
    """
    trained = model.config.modes
    if not modes:
        return preferred_mode(model.config)
    if (found := next((mode for mode in modes if mode in trained), None)) is not None:
        return found
    try:
        check_mode(model.config, modes[0])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    raise AssertionError("unreachable: check_mode raises for modes that were not trained")
