"""Holes filled by a model, several times each, and the texts that come out.

Sample s of sequence i has a seed of its own, so that neither the batch nor the number of processes changes a fill. Sequences go in blocks:
blocks are shared among ranks, and a finished one is kept in the subject's scratch folder, to resume from.
"""

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tracformer.data.tokenizer import Tokenizer
from tracformer.evaluation.results import plain
from tracformer.evaluation.sequences import Flags, Integers, Sequences
from tracformer.evaluation.tasks import Subject
from tracformer.files import write_atomically
from tracformer.generation.fill import fill
from tracformer.generation.orders import Order
from tracformer.generation.randomness import derived_seed
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.training.distributed import Ranks

BLOCK = 32  # sequences

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fills:
    tokens: Integers  # (sequences, samples, T)
    log_probs: Floats  # (sequences, samples): the model's own, of what it filled in


@dataclass(frozen=True)
class Ask:
    """How a model is to fill."""

    samples: int = 5
    seed: int = 0
    sampler: Sampler = PLAIN
    order: Order | None = None

    def seed_of(self, sequence: int, sample: int) -> int:
        return derived_seed(derived_seed(self.seed, sequence + 1), sample + 1)


def blocks(count: int, ranks: Ranks) -> list[slice]:
    """This rank's blocks of the sequences 0..count-1: the same cuts for any number of ranks."""
    return [slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)[ranks.rank :: ranks.world]]


def kept_fills(subject: Subject, read: Sequences, given: Flags, block: slice, ask: Ask, name: str) -> Fills:
    """A block's fills: read from the scratch folder, or drawn and put there. `name` tells one set of contexts from another."""
    path = None if subject.scratch is None else subject.scratch / f"{name}-{block.start:08d}.json"
    if path is not None and path.is_file():
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Fills(np.array(document["tokens"], np.int64), np.array(document["log_probs"], np.float64))
    fills = draw_fills(subject, read, given, block, ask)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(plain({"tokens": fills.tokens, "log_probs": fills.log_probs})))
    return fills


def draw_fills(subject: Subject, read: Sequences, given: Flags, block: slice, ask: Ask) -> Fills:
    """Every sequence of the block, `ask.samples` times; `given` is (N, T)."""
    pairs = [(i, s) for i in range(block.start, block.stop) for s in range(ask.samples)]
    tokens = np.empty((len(pairs), read.tokens.shape[1]), np.int64)
    log_probs = np.empty(len(pairs))
    for start in range(0, len(pairs), subject.batch):
        some = pairs[start : start + subject.batch]
        numbers = [i for i, _ in some]
        filled = fill(
            subject.model,
            torch.from_numpy(read.tokens[numbers]).to(subject.device),
            torch.from_numpy(given[numbers]).to(subject.device),
            subject.mode,
            torch.from_numpy(read.lengths[numbers]).to(subject.device),
            sampler=ask.sampler,
            seed=[ask.seed_of(i, s) for i, s in some],
            order=ask.order,
        )
        tokens[start : start + len(some)] = filled.tokens.cpu().numpy()
        log_probs[start : start + len(some)] = filled.log_prob.cpu().numpy()
    shape = block.stop - block.start, ask.samples
    return Fills(tokens.reshape(*shape, -1), log_probs.reshape(shape))


def gathered(values: NDArray[Any], ranks: Ranks) -> NDArray[Any]:
    """An array of which each rank has filled its own blocks, the rest being zero: whole, on all of them."""
    if ranks.world == 1:
        return values
    tensor = torch.from_numpy(values).to(ranks.device)
    dist.all_reduce(tensor)
    return tensor.cpu().numpy()


@dataclass(frozen=True)
class Reading:
    """A sequence as text, with its holes."""

    whole: str
    holes: tuple[str, ...]  # each hole's own text, from left to right

    @property
    def filled(self) -> str:
        """The holes alone, as one text."""
        return " ".join(hole.strip() for hole in self.holes).strip()


def reading(tokenizer: Tokenizer, tokens: Integers, given: Flags) -> Reading:
    """Of one sequence (n,), without padding. An end of text reads as a new line."""
    return Reading(as_text(tokenizer, tokens), tuple(as_text(tokenizer, tokens[start:stop]) for start, stop in holes_of(given)))


def shown_spans(tokenizer: Tokenizer, tokens: Integers, given: Flags) -> list[tuple[int, int]]:
    """Which characters of the whole text the holes are."""
    ends = [(len(as_text(tokenizer, tokens[:start])), len(as_text(tokenizer, tokens[:stop]))) for start, stop in holes_of(given)]
    return [(start, stop) for start, stop in ends if start < stop]


def holes_of(given: Flags) -> list[tuple[int, int]]:
    """The runs of targets, as positions [start, stop).

    >>> holes_of(np.array([False, True, False, False]))
    [(0, 1), (2, 4)]
    """
    runs = [(known, len(list(run))) for known, run in groupby(given.tolist())]
    edges = np.cumsum([0, *(length for _, length in runs)]).tolist()
    return [(edges[i], edges[i + 1]) for i, (known, _) in enumerate(runs) if not known]


def as_text(tokenizer: Tokenizer, tokens: Integers) -> str:
    return tokenizer.decode(tokens.tolist()).replace(tokenizer.eot, "\n")
