"""Numbers for each sequence, asked block by block: blocks are shared among ranks, and a finished one outlives an interruption."""

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tracformer.evaluation.results import plain
from tracformer.evaluation.tasks import Progress, Subject
from tracformer.files import write_atomically

BLOCK = 64  # sequences

Floats = NDArray[np.float64]
Ask = Callable[[range], Mapping[str, Floats]]


def by_sequence(
    subject: Subject,
    ask: Ask,
    figures: Sequence[str],
    count: int,
    progress: Progress,
    label: str,
    at_once: int | None = None,
    block_size: int = BLOCK,
) -> dict[str, Floats]:
    """Each figure (count,), the same on every rank. `ask` is given at most `at_once` sequences, and answers with all figures for them.

    A sequence's numbers must not depend on its neighbours. `label` tells the parts of one task apart in its scratch folder.
    """
    found = np.zeros((len(figures), count))
    for start in range(0, count, block_size)[subject.ranks.rank :: subject.ranks.world]:
        block = range(start, min(start + block_size, count))
        found[:, start : block.stop] = _kept(subject, ask, figures, block, label, at_once or subject.batch)
        progress.step(len(block))
    if subject.ranks.world > 1:  # each number is one rank's, plus zeros
        found = np.array(subject.ranks.total(found.flatten().tolist())).reshape(found.shape)
    return dict(zip(figures, found, strict=True))


def _kept(subject: Subject, ask: Ask, figures: Sequence[str], block: range, label: str, at_once: int) -> Floats:
    """(figures, block) from the scratch folder, or asked and put there."""
    path = None if subject.scratch is None else subject.scratch / f"{label}-{block.start:08d}.json"
    if path is not None and path.is_file():
        return np.array(json.loads(path.read_text(encoding="utf-8")), np.float64)
    parts = [ask(block[start : start + at_once]) for start in range(0, len(block), at_once)]
    found = np.stack([np.concatenate([part[name] for part in parts]) for name in figures])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(plain(found)))
    return found
