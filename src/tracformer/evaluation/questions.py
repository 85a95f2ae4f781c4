"""Query models about many sequences, in blocks that survive an interruption.

- `by_block`: compute arrays over sequences; blocks are shared among ranks, and finished ones are
  kept in the task's scratch folder.
- `by_sequence`: the same for figures that a model gives for a few sequences at a time.
- `answer_contexts`: negative log-likelihoods of sequences under many contexts. All contexts of a
  sequence are computed together: in mode `car` a Tracformer then encodes the text before the
  targets once for all of them, and in mode `ar`, where given tokens after a target do not matter,
  one pass answers every context.
- `noise_groups`, `standard_error`: errors of bounds, whose sequences share noise in groups.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from tracformer.evaluation.result_files import CHECKSUM, digest, plain
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Integers, Sequences
from tracformer.files import write_atomically
from tracformer.model.base import BOUND
from tracformer.model.batch import Batch
from tracformer.rng import derived_seed

BLOCK = 64  # sequences
SHARED_NOISE = 16  # neighbouring sequences whose bound is estimated with the same noise
TOKENS_PER_BLOCK = 2**17  # about as much work as an interruption loses

Floats = NDArray[np.float64]
Compute = Callable[[range], Mapping[str, NDArray[Any]]]


def by_block(
    subject: Subject,
    compute: Compute,
    shapes: Mapping[str, tuple[int, ...]],
    count: int,
    progress: Progress,
    label: str = "",
    block_size: int = BLOCK,
) -> dict[str, Floats]:
    """Return arrays over `count` sequences, the same on every rank.

    Args:
        subject: Its ranks share the blocks, and its scratch folder keeps finished ones.
        compute: Computes the arrays of a block of sequences, (len(block), *shape) each. Numbers of
            a sequence must not depend on the others in its block.
        shapes: Names of the arrays, and their shapes for one sequence.
        count: Number of sequences.
        progress: Advanced by the number of sequences after each block.
        label: Name of the arrays in the scratch folder, unique within the task. Empty: blocks are
            not kept.
        block_size: Sequences in a block.
    """
    found = {name: np.zeros((count, *shape)) for name, shape in shapes.items()}
    ranks = subject.ranks
    for start in range(0, count, block_size)[ranks.rank :: ranks.world]:
        block = range(start, min(start + block_size, count))
        computed = _resumed(subject, compute, block, label)
        for name, values in found.items():
            values[start : block.stop] = computed[name]
        progress.step(len(block))
    if ranks.world > 1:  # every entry is one rank's number plus zeros
        found = {
            name: np.array(ranks.total(values.ravel().tolist())).reshape(values.shape)
            for name, values in found.items()
        }
    return found


def _resumed(
    subject: Subject, compute: Compute, block: range, label: str
) -> Mapping[str, NDArray[Any]]:
    """Return a block from the scratch folder, or compute it and put it there."""
    if subject.scratch is None or not label:
        return compute(block)
    path = subject.scratch / f"{label}-{block.start:08d}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document[CHECKSUM] == digest(document["values"]):
            return {name: np.array(array, np.float64) for name, array in document["values"].items()}
    computed = compute(block)  # there is none, or it is damaged
    values = plain(computed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({CHECKSUM: digest(values), "values": values}))
    return computed


def by_sequence(
    subject: Subject,
    compute: Compute,
    figures: Sequence[str],
    count: int,
    progress: Progress,
    label: str,
    at_once: int | None = None,
    block_size: int = BLOCK,
) -> dict[str, Floats]:
    """Return one number for each sequence and figure, (count,) by figure; see `by_block`.

    `compute` gets at most `at_once` sequences (by default the subject's batch) and returns all
    figures of them.
    """
    step = at_once or subject.batch

    def whole(block: range) -> dict[str, Floats]:
        parts = [compute(block[start : start + step]) for start in range(0, len(block), step)]
        return {name: np.concatenate([part[name] for part in parts]) for name in figures}

    shapes = dict.fromkeys(figures, ())
    return by_block(subject, whole, shapes, count, progress, label, block_size)


@dataclass(frozen=True)
class Answers:
    """What a model answers for sequences under several contexts.

    Args:
        nll: (contexts, sequences) negative log-likelihood, summed over targets.
        targets: (contexts, sequences) number of targets.
        errors: (contexts, sequences) standard error of nll; zero if it is not estimated.
        sizes: (contexts, sequences) bytes of the targets, if known.
        kind: exact, marginal or bound.
    """

    nll: Floats
    targets: Floats
    errors: Floats
    sizes: Floats | None
    kind: str

    def sums(self, context: int) -> dict[str, Any]:
        """Return the sums of one context, lists of a number for each sequence."""
        sums: dict[str, Any] = {
            "nll": self.nll[context].tolist(),
            "targets": self.targets[context].astype(int).tolist(),
            "bytes": None if self.sizes is None else self.sizes[context].astype(int).tolist(),
        }
        if self.kind == BOUND:
            sums["standard_error"] = self.errors[context].tolist()
        return sums

    def summed(self, repeats: int) -> "Answers":
        """Return the answers with each `repeats` neighbouring contexts added up.

        Neighbours are draws of one strategy. They share noise, so their errors add.
        """

        def sums(values: Floats) -> Floats:
            return values.reshape(-1, repeats, values.shape[1]).sum(1)

        sizes = None if self.sizes is None else sums(self.sizes)
        return Answers(sums(self.nll), sums(self.targets), sums(self.errors), sizes, self.kind)

    def standard_error(self, context: int) -> float:
        """Return the standard error of one context's nll per target."""
        return standard_error(self.nll[context], self.errors[context], self.targets[context])


def noise_groups(values: ArrayLike) -> Floats:
    """Return sums over each SHARED_NOISE neighbouring sequences.

    The noise of a bound is drawn once for such a group, so that groups and not sequences are
    independent.
    """
    each = np.asarray(values, np.float64)
    return np.add.reduceat(each, np.arange(0, len(each), SHARED_NOISE))


def standard_error(nll: Floats, errors: Floats, targets: Floats) -> float:
    """Return the standard error of r = sum of nll / sum of targets.

    It covers noise and choice of sequences, by the spread of the G groups that share noise:

        sqrt(G / (G - 1) * sum over groups of (nll_g - r targets_g)^2) / sum of targets

    For a single group only the sequences' own errors are known. These may be correlated, so they
    are added.
    """
    above, below = noise_groups(nll), noise_groups(targets)
    if len(above) == 1:
        return float(errors.sum() / targets.sum())
    off = above - above.sum() / below.sum() * below
    return float(np.sqrt(len(off) / (len(off) - 1) * np.square(off).sum()) / below.sum())


def answer_contexts(
    subject: Subject,
    read: Sequences,
    contexts: Sequence[Flags],
    *,
    draws: int | None,
    seed: int,
    progress: Progress,
    what: str,
) -> Answers:
    """Return a model's answers for every sequence under every context, the same on all ranks.

    Args:
        subject: The model.
        read: The sequences.
        contexts: (N, T) each, True where given.
        draws: Draws of noise for each sequence, if the answer is a bound; None: the model's own.
        seed: Seed of the noise.
        progress: Progress bar.
        what: Name of the work in the progress bar.
    """
    T, count = read.tokens.shape[1], len(contexts)
    inside = np.arange(T) < read.lengths[:, None]
    targets = ~np.stack(contexts, axis=1) & inside[:, None]  # (N, contexts, T)

    def compute(block: range) -> dict[str, Floats]:
        return dict(
            zip(("nll", "error"), _block(subject, read, targets, block, draws, seed), strict=True)
        )

    # A multiple of SHARED_NOISE that depends on the question alone, not on batch or ranks.
    size = min(BLOCK, max(1, TOKENS_PER_BLOCK // (count * T * SHARED_NOISE)) * SHARED_NOISE)
    progress.start(f"{subject.name} {subject.mode}: {what}", -(-len(read) // subject.ranks.world))
    shapes = {"nll": (count,), "error": (count,)}
    found = by_block(subject, compute, shapes, len(read), progress, "block", size)
    sizes = (
        None
        if read.sizes is None
        else np.where(targets, read.sizes[:, None], 0).sum(2).T.astype(np.float64)
    )
    return Answers(
        found["nll"].T, targets.sum(2).T.astype(np.float64), found["error"].T, sizes, subject.kind
    )


@torch.no_grad()
def _block(
    subject: Subject, read: Sequences, targets: Flags, block: range, draws: int | None, seed: int
) -> Floats:
    """Return nll and its standard error under each context, (2, sequences, contexts)."""
    found = np.zeros((2, len(block), targets.shape[1]))
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
            # each group has noise of its own, whatever the batch
            seed=derived_seed(seed, int(numbers[0]) // SHARED_NOISE + 1),
        )
        values = -estimate.values.double().cpu().numpy()  # (B, width)
        rows = numbers - block.start
        if which is None:
            found[0, rows] = np.where(targets[numbers, :, :width], values[:, None], 0.0).sum(2)
            continue
        found[0, rows, which] = np.where(wanted, values, 0.0).sum(1)
        if estimate.standard_error is not None:
            found[1, rows, which] = estimate.standard_error.double().cpu().numpy()
    return found


def _batches(
    subject: Subject, read: Sequences, targets: Flags, block: range
) -> Iterator[tuple[Integers, Integers | None]]:
    """Yield batches of about equal length: numbers of sequences, and the context of each.

    None in place of the contexts: one pass answers all of them.
    """
    numbers = np.arange(block.start, block.stop)
    once = subject.mode == "ar"  # p(x_t | x_<t) does not depend on the context
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
