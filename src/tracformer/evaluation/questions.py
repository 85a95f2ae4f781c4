"""Put questions to a model in blocks that survive an interruption.

Numbers for each sequence, asked block by block: blocks are shared among ranks, and a finished
one outlives an interruption.

Put many contexts of many sequences to a model, and add up what it answers for each.

Sequences are asked in blocks (see `by_sequence`), all contexts of one side by side: in mode `car` a
Tracformer then encodes the text before the targets once for all of them, and in mode `ar`, where
what is given does not matter, one pass answers every context.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from tracformer.evaluation.result_files import plain
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Integers, Sequences
from tracformer.files import write_atomically
from tracformer.model.base import BOUND
from tracformer.model.batch import Batch
from tracformer.rng import derived_seed

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
    """Each figure (count,), the same on every rank. `ask` is given at most `at_once` sequences, and
    answers with all figures for them.

    A sequence's numbers must not depend on its neighbours. `label` tells the parts of one task
    apart in its scratch folder.
    """
    found = np.zeros((len(figures), count))
    for start in range(0, count, block_size)[subject.ranks.rank :: subject.ranks.world]:
        block = range(start, min(start + block_size, count))
        found[:, start : block.stop] = _kept(
            subject, ask, figures, block, label, at_once or subject.batch
        )
        progress.step(len(block))
    if subject.ranks.world > 1:  # each number is one rank's, plus zeros
        found = np.array(subject.ranks.total(found.flatten().tolist())).reshape(found.shape)
    return dict(zip(figures, found, strict=True))


def _kept(
    subject: Subject, ask: Ask, figures: Sequence[str], block: range, label: str, at_once: int
) -> Floats:
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


SHARED_NOISE = 16  # neighbouring sequences whose bound is estimated with the same noise
TOKENS_A_BLOCK = 2**17  # about as much work as a killed evaluation loses


@dataclass(frozen=True)
class Answers:
    nll: Floats  # (contexts, sequences), summed over targets
    targets: Floats
    errors: Floats  # standard error of each nll; zero where it is no estimate
    sizes: Floats | None  # bytes of the targets
    kind: str

    def of(self, context: int) -> dict[str, Any]:
        """One context's sums, a number for each sequence."""
        sums: dict[str, Any] = {
            "nll": self.nll[context].tolist(),
            "targets": self.targets[context].astype(int).tolist(),
            "bytes": None if self.sizes is None else self.sizes[context].astype(int).tolist(),
        }
        return (
            sums
            if self.kind != BOUND
            else {**sums, "standard_error": self.errors[context].tolist()}
        )

    def summed(self, repeats: int) -> "Answers":
        """Add up each `repeats` neighbouring contexts, which are draws of one strategy."""

        def sums(values: Floats) -> Floats:
            return values.reshape(-1, repeats, values.shape[1]).sum(1)

        sizes = None if self.sizes is None else sums(self.sizes)
        errors = sums(self.errors)  # draws share their noise: their errors add
        return Answers(sums(self.nll), sums(self.targets), errors, sizes, self.kind)

    def standard_error(self, context: int) -> float:
        """Of nll per target."""
        return standard_error(self.nll[context], self.errors[context], self.targets[context])


def noise_groups(values: ArrayLike) -> Floats:
    """Sums over the sequences that share noise: of a bound these, and not sequences, are what is
    drawn independently.
    """
    each = np.asarray(values, np.float64)
    return np.add.reduceat(each, np.arange(0, len(each), SHARED_NOISE))


def standard_error(nll: Floats, errors: Floats, targets: Floats) -> float:
    """Of r = sum of nll / sum of targets, by how far the groups that share noise lie apart: noise
    and choice of sequences together.

        sqrt(G / (G - 1) * sum over groups of (nll_g - r targets_g)^2) / sum of targets

    Of a single group only the sequences' own errors are known; they may err together, so these add.
    """
    above, below = noise_groups(nll), noise_groups(targets)
    if len(above) == 1:
        return float(errors.sum() / targets.sum())
    off = above - above.sum() / below.sum() * below
    return float(np.sqrt(len(off) / (len(off) - 1) * np.square(off).sum()) / below.sum())


def ask(
    subject: Subject,
    read: Sequences,
    contexts: Sequence[Flags],
    *,
    draws: int | None,
    seed: int,
    progress: Progress,
    what: str,
) -> Answers:
    """Every sequence under every context (N, T); all ranks return the same."""
    T, count = read.tokens.shape[1], len(contexts)
    inside = np.arange(T) < read.lengths[:, None]
    targets = ~np.stack(contexts, axis=1) & inside[:, None]  # (N, contexts, T)
    names = [f"{figure} {number}" for figure in ("nll", "error") for number in range(count)]

    def answered(block: range) -> dict[str, Floats]:
        return dict(zip(names, _block(subject, read, targets, block, draws, seed), strict=True))

    # A multiple of the sequences that share noise, and a function of the question alone.
    size = min(BLOCK, max(1, TOKENS_A_BLOCK // (count * T * SHARED_NOISE)) * SHARED_NOISE)
    progress.start(f"{subject.name} {subject.mode}: {what}", -(-len(read) // subject.ranks.world))
    found = by_sequence(
        subject, answered, names, len(read), progress, "block", at_once=size, block_size=size
    )
    nll, errors = np.array([found[name] for name in names]).reshape(2, count, len(read))
    sizes = (
        None
        if read.sizes is None
        else np.where(targets, read.sizes[:, None], 0).sum(2).T.astype(np.float64)
    )
    return Answers(nll, targets.sum(2).T.astype(np.float64), errors, sizes, subject.kind)


@torch.no_grad()
def _block(
    subject: Subject, read: Sequences, targets: Flags, block: range, draws: int | None, seed: int
) -> Floats:
    """(2 * contexts, sequences): nll under each context, then its standard error under each."""
    found = np.zeros((2, targets.shape[1], len(block)))
    for numbers, which in _batches(subject, read, targets, block):
        width = int(read.lengths[numbers].max())
        # (B, width)
        wanted = (
            targets[numbers, :, :width].any(1) if which is None else targets[numbers, which, :width]
        )
        estimate = subject.model.estimate(
            Batch(
                torch.from_numpy(read.tokens[numbers, :width]),
                torch.from_numpy(~wanted),
                torch.from_numpy(read.lengths[numbers]),
            ).to(subject.device),
            subject.mode,
            draws=draws,
            # draws are numbered from 0, under this seed
            seed=derived_seed(seed, int(numbers[0]) // SHARED_NOISE + 1),
        )
        values = -estimate.values.double().cpu().numpy()  # (B, width)
        rows = numbers - block.start
        if which is None:
            found[0, :, rows] = np.where(targets[numbers, :, :width], values[:, None], 0.0).sum(2)
            continue
        found[0, which, rows] = np.where(wanted, values, 0.0).sum(1)
        if estimate.standard_error is not None:
            found[1, which, rows] = estimate.standard_error.double().cpu().numpy()
    return found.reshape(-1, len(block))


def _batches(
    subject: Subject, read: Sequences, targets: Flags, block: range
) -> Iterator[tuple[Integers, Integers | None]]:
    """Batches of questions of about equal length: sequences, and which context each is asked under;
    None: under all of them at once.
    """
    numbers = np.arange(block.start, block.stop)
    once = subject.mode == "ar"  # p(x_t | x_<t), whatever is given
    alive = targets[numbers].sum(2) > 0  # (sequences, contexts)
    pairs = np.argwhere(alive.sum(1)[:, None] if once else alive)  # by sequence, then context
    group = pairs[:, 0] // SHARED_NOISE if subject.kind == BOUND else np.zeros(len(pairs), np.int64)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0], read.lengths[numbers[pairs[:, 0]]], group))]
    group.sort()
    budget = subject.batch * read.tokens.shape[1]
    start = 0
    while start < len(pairs):
        stop = start + 1
        while (
            stop < len(pairs)
            and group[stop] == group[start]
            and (stop + 1 - start) * read.lengths[numbers[pairs[stop, 0]]] <= budget
        ):
            stop += 1
        chosen = pairs[start:stop]
        yield numbers[chosen[:, 0]], None if once else chosen[:, 1]
        start = stop
