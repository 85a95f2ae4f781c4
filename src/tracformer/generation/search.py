"""Search for the most probable fills of one sequence, by the chain rule.

- `search`: best-first search, which is exact, or beam search, which is approximate.

Log-probabilities are never positive, so the log-probability of a partial fill is an upper bound for
all of its completions. Best-first search expands the partial fills with the highest bounds. Once no
open bound exceeds a complete fill, that fill is proven to be the most probable.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from tracformer.generation import scheduler
from tracformer.generation.scheduler import Session
from tracformer.model.base import EXACT, ConditionalModel, check_batch
from tracformer.model.batch import Batch

METHODS = ("best-first", "beam")
# children kept of an expanded node; if the search needs more, the node is expanded again
SIBLINGS = 64


@dataclass(frozen=True)
class Found:
    """A fill that a search found."""

    tokens: Tensor  # (T,)
    log_prob: float  # the model's own, of all targets given the rest
    log_probs: Tensor  # (T,) float64, of each target; zero where given
    proven: bool  # no fill except those before it in the list is more probable
    expanded: int  # nodes that the whole search expanded


@torch.no_grad()
def search(
    model: ConditionalModel,
    batch: Batch,
    mode: str = "car",
    *,
    method: str = "best-first",
    width: int = 16,
    budget: int = 2000,
    n: int = 1,
    banned: Sequence[int] = (),
    only: Callable[[int, int], Sequence[int] | None] | None = None,
    cached: bool = True,
    open_session: Callable[[Batch, str], Session] | None = None,
) -> list[Found]:
    """Return the most probable fills of one sequence, most probable first.

    Args:
        model: The model.
        batch: One sequence; the tokens at targets are ignored.
        mode: A mode whose joint probability is exact.
        method: "best-first" is exact. "beam" keeps the `width` best partial fills of each length;
            its fills are proven only if it never dropped one.
        width: Number of partial fills expanded in one pass.
        budget: Best-first search gives up after expanding this many nodes. It then returns what is
            complete or, if nothing is, the best open nodes completed greedily, with `proven=False`.
        n: Maximum number of fills to return; all differ.
        banned: Token ids that are never used.
        only: The tokens allowed at (0, position), or None for all.
        cached: Use the model's cache where it has one for the mode.
        open_session: Opens the session that runs the model; by default in the calling thread.

    Raises:
        ValueError: The batch does not fit, the mode is not exact, or an option is wrong.
    """
    if len(batch) != 1:
        raise ValueError(
            f"tokens has shape {tuple(batch.tokens.shape)}; search takes one sequence at a time, "
            "(1, T)"
        )
    batch = batch.without_targets()
    check_batch(model.config, batch, mode)
    require_exact(model, mode)
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(METHODS)}")
    for name, value in (("width", width), ("budget", budget), ("n", n)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    positions: list[int] = batch.targets()[0].nonzero()[:, 0].tolist()
    choices = [
        _choices(p, model.config.vocab_size, banned, only).to(batch.device) for p in positions
    ]
    ask = (
        partial(scheduler.open_session, model, cached=cached)
        if open_session is None
        else open_session
    )
    session = ask(batch, mode)
    tree = _Tree(session, positions, choices)
    if not positions:
        leaves = [(_Node(), True)]
    else:
        leaves = (
            _best_first(tree, n, width, budget) if method == "best-first" else _beam(tree, n, width)
        )
    return [_found(batch.tokens[0], tree, leaf, proven) for leaf, proven in leaves]


def require_exact(model: ConditionalModel, mode: str) -> None:
    """Raise a ValueError unless the mode has an exact joint probability."""
    if model.answers.get(mode) != EXACT:
        exact = ", ".join(name for name in model.config.modes if model.answers.get(name) == EXACT)
        raise ValueError(
            f"mode is {mode!r}; search needs an exact joint probability, which this model has in: "
            f"{exact or 'no mode'}"
        )


class _Node(NamedTuple):
    """A partial fill: tokens of the first few targets."""

    prefix: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()  # log-probability of each token
    bound: float = 0.0  # their sum; no completion exceeds it


@dataclass(frozen=True)
class _Opened:
    """An expanded node and its most likely children, best first."""

    node: _Node
    children: list[tuple[int, float]]  # token, log-probability
    tried: frozenset[int] = frozenset()  # tokens of more likely children, returned earlier
    more: bool = False  # whether there are other children, all less likely

    def child(self, rank: int) -> _Node:
        token, value = self.children[rank]
        node = self.node
        return _Node((*node.prefix, token), (*node.shares, value), node.bound + value)

    def bound(self, rank: int) -> float | None:
        """Return the bound of the children from `rank` on; None if there are none."""
        if rank < len(self.children):
            return self.node.bound + self.children[rank][1]
        return self.node.bound + self.children[-1][1] if self.more else None


class _Tree:
    """The tree of all fills, target by target from left to right."""

    def __init__(self, session: Session, positions: list[int], choices: list[Tensor]) -> None:
        self.session, self.positions, self.choices = session, positions, choices
        self.expanded = 0

    def complete(self, node: _Node) -> bool:
        return len(node.prefix) == len(self.positions)

    def open(self, asked: Sequence[_Opened], most: int) -> list[_Opened]:
        """Expand nodes in one pass: return the next best `most` children of each."""
        device = self.choices[0].device
        session = self.session.select([0] * len(asked))
        known = [
            (row, self.positions[i], token)
            for row, each in enumerate(asked)
            for i, token in enumerate(each.node.prefix)
        ]
        if known:
            session.reveal(*torch.tensor(known, device=device).unbind(1))
        nexts = torch.tensor(
            [self.positions[len(each.node.prefix)] for each in asked], device=device
        )
        logits = session.logits(torch.arange(len(asked), device=device), nexts)
        self.expanded += len(asked)
        return [
            self.children(row, each, most)
            for row, each in zip(logits.double().log_softmax(1), asked, strict=True)
        ]

    def children(self, log_probs: Tensor, asked: _Opened, most: int) -> _Opened:
        """Return a node's best children from log-probabilities (V,) of the whole vocabulary."""
        ids = self.choices[len(asked.node.prefix)]
        if asked.tried:
            ids = ids[~torch.isin(ids, torch.tensor(sorted(asked.tried), device=ids.device))]
        best = log_probs[ids].topk(min(most, len(ids)))
        children = list(zip(ids[best.indices].tolist(), best.values.tolist(), strict=True))
        return replace(asked, children=children, more=len(ids) > most)


def _best_first(tree: _Tree, n: int, width: int, budget: int) -> list[tuple[_Node, bool]]:
    """Return complete fills, each with whether it is proven."""
    tick = count()  # of equal bounds the deeper node comes first, then the earlier
    # (-bound, -depth, tick, opened, rank) stands for all children from `rank` on
    queue: list[tuple[float, int, int, _Opened, int]] = []
    best: list[_Node] = []  # the n best complete fills so far

    def promising(bound: float) -> bool:
        return len(best) < n or bound > best[-1].bound

    def push(opened: _Opened, rank: int) -> None:
        bound = opened.bound(rank)
        if bound is not None and promising(bound):
            heapq.heappush(queue, (-bound, -len(opened.node.prefix), next(tick), opened, rank))

    def take() -> _Opened:
        """Take the best open node; its next sibling takes its place in the queue."""
        *_, opened, rank = heapq.heappop(queue)
        if rank == len(opened.children):
            return _again(opened)
        push(opened, rank + 1)
        return _Opened(opened.child(rank), [])

    asked = [_Opened(_Node(), [])]
    while asked:
        for opened in tree.open(asked, max(n, SIBLINGS)):
            if len(opened.node.prefix) + 1 < len(tree.positions):
                push(opened, 0)
            else:  # only the n best complete children of a node can matter
                leaves = [opened.child(rank) for rank in range(min(n, len(opened.children)))]
                best = sorted([*best, *leaves], key=lambda leaf: -leaf.bound)[:n]
        asked = []
        while queue and promising(-queue[0][0]) and len(asked) < min(width, budget - tree.expanded):
            asked.append(take())
    if not best:
        open_nodes = [take() for _ in range(min(n, len(queue)))]
        return [(leaf, False) for leaf in _greedily(tree, open_nodes)]
    highest = -queue[0][0] if queue else -torch.inf
    return [(leaf, leaf.bound >= highest) for leaf in best]


def _again(opened: _Opened) -> _Opened:
    """Return a node that is to be expanded again, for the children after these."""
    return replace(
        opened, tried=opened.tried | {token for token, _ in opened.children}, children=[]
    )


def _greedily(tree: _Tree, asked: list[_Opened]) -> list[_Node]:
    """Return nodes completed with the most likely token at each target."""
    done: list[_Node] = []
    while asked:
        nodes = [opened.child(0) for opened in tree.open(asked, 1)]
        done += [node for node in nodes if tree.complete(node)]
        asked = [_Opened(node, []) for node in nodes if not tree.complete(node)]
    return sorted(done, key=lambda node: -node.bound)


def _beam(tree: _Tree, n: int, width: int) -> list[tuple[_Node, bool]]:
    """Search level by level. What is dropped at the last level does not affect the proof."""
    beams, dropped = [_Node()], False
    while not tree.complete(beams[0]):
        last = len(beams[0].prefix) + 1 == len(tree.positions)
        keep = n if last else width
        opened = tree.open([_Opened(node, []) for node in beams], keep)
        children = [each.child(rank) for each in opened for rank in range(len(each.children))]
        dropped |= not last and (len(children) > keep or any(each.more for each in opened))
        beams = heapq.nsmallest(keep, children, key=lambda node: -node.bound)
    return [(node, not dropped) for node in beams]


def _choices(
    position: int,
    vocab_size: int,
    banned: Sequence[int],
    only: Callable[[int, int], Sequence[int] | None] | None,
) -> Tensor:
    """Return the token ids allowed at a position, ascending."""
    named = only(0, position) if only is not None else None
    for what, ids in (("banned", banned), ("allowed", named or ())):
        if wrong := [i for i in ids if not 0 <= i < vocab_size]:
            raise ValueError(
                f"{what} token {wrong[0]} is out of range; ids are 0..{vocab_size - 1}"
            )
    mask = torch.full((vocab_size,), named is None)
    mask[torch.tensor([] if named is None else list(named), dtype=torch.int64)] = True
    mask[torch.tensor(list(banned), dtype=torch.int64)] = False
    if not mask.any():
        raise ValueError(
            f"no token is left to choose from at position {position}: the banned and allowed "
            "tokens contradict each other"
        )
    return mask.nonzero()[:, 0]


def _found(tokens: Tensor, tree: _Tree, leaf: _Node, proven: bool) -> Found:
    filled, log_probs = tokens.clone(), torch.zeros(len(tokens), dtype=torch.float64)
    filled[tree.positions] = torch.tensor(leaf.prefix, dtype=filled.dtype, device=filled.device)
    log_probs[tree.positions] = torch.tensor(leaf.shares, dtype=torch.float64)
    return Found(filled, leaf.bound, log_probs, proven, tree.expanded)
