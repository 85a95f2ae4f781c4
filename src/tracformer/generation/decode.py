"""Fill batches of token ids.

- `fill`: fill every target of a batch, by the scheduler or a reverse process.
- `reverse_process`: the sampler of a diffusion model, one pass at a time.
- `Runner`: what text-level code uses to run a model; `engine.Request` is one for shared models.
- `search`: the most probable fills of one sequence, by best-first search, which is exact, or beam
  search, which is approximate.

Log-probabilities are never positive, so the log-probability of a partial fill is an upper bound for
all of its completions. Best-first search expands the partial fills with the highest bounds. Once no
open bound exceeds a complete fill, that fill is proven to be the most probable.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor

from tracformer.generation import scheduler
from tracformer.generation.fill_request import Filled, FillRequest, FillRules, TopTokens
from tracformer.generation.orders import Ancestral, Order
from tracformer.generation.request_options import PLAIN, Sampler
from tracformer.generation.results import Candidate, Token
from tracformer.generation.samplers import Pick, adjusted
from tracformer.generation.scheduler import Scheduler, Session, candidates_of, open_session
from tracformer.model.base import EXACT, ConditionalModel, Passes, check_batch, finish
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig

A = TypeVar("A")


def fill(
    model: ConditionalModel,
    batch: Batch,
    mode: str = "car",
    *,
    cached: bool = True,
    **rules: Unpack[FillRules],
) -> Filled:
    """Fill every target of a batch.

    Args:
        model: Any registered model.
        batch: Sequences; the tokens at targets are ignored.
        mode: One of the modes that the weights were trained in.
        cached: Use the model's cache where it has one for the mode.
        **rules: `sampler`, `seed` and `order` (one for all sequences, or one for each), `only`,
            `stop`, `callback`, `top` and `drafts`: see `FillRequest`. One seed for all means that
            each sequence gets what it would get alone.

    Returns:
        The filled tokens with their log-probabilities.

    Raises:
        ValueError: The batch does not fit the model, or the rules contradict each other.

    Example:
        >>> import torch, tracformer
        >>> model = tracformer.load("stories").model
        >>> tokens = torch.tensor([[5, 0, 7]])
        >>> batch = tracformer.Batch(tokens, torch.tensor([[True, False, True]]))
        >>> tracformer.fill(model, batch, seed=1).tokens.shape
        torch.Size([1, 3])
    """
    request = FillRequest(model.config, batch, mode, **rules)
    if mode == "diffusion":
        return finish(reverse_process(model, request))
    scheduler = Scheduler(model, *batch.tokens.shape, cached=cached)
    scheduler.add(request)
    while not request.done:
        scheduler.step()
    return request.result()


class Runner:
    """Runs a model for one caller, in the calling thread."""

    def __init__(self, model: ConditionalModel) -> None:
        self.model = model

    def fill(self, batch: Batch, mode: str = "car", **rules: Unpack[FillRules]) -> Filled:
        """Fill a batch, see `fill`."""
        return fill(self.model, batch, mode, **rules)

    def open_session(self, batch: Batch, mode: str) -> Session:
        """Return a session that holds these sequences."""
        return open_session(self.model, batch, mode)

    def call(self, f: Callable[[], A]) -> A:
        """Return f(), which may run the model. Gradients are off."""
        with torch.no_grad():
            return f()


@torch.no_grad()
def reverse_process(model: ConditionalModel, request: FillRequest) -> Passes[Filled]:
    """Fill a request by a diffusion model's own sampler, which chooses the order of tokens.

    Tokens after the first one that ends a sequence are dropped.
    """
    steps = check_reverse(model.config, request.samplers, request.order)
    # 64-bit seeds as signed integers
    seeds = torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in request.seeds])
    batch = request.batch
    top = TopTokens.empty((*batch.tokens.shape, request.top)) if request.top else None
    filled, log_probs = yield from model.ancestral_passes(
        batch, steps, seeds, restrict=_restriction(request, top)
    )  # type: ignore[operator]
    lengths = _stopped(request, filled)
    targets = Batch(filled, batch.context, lengths).targets()
    if request.callback is not None:
        request.callback(
            [
                Token(b, t, int(filled[b, t]), float(log_probs[b, t]), _candidates(top, b, t))
                for b, t in targets.nonzero().tolist()
            ]
        )
    log_probs = torch.where(targets, log_probs.double(), 0.0)
    if top is not None:
        dropped = ~targets.cpu()
        top.tokens[dropped], top.log_probs[dropped] = -1, 0.0
    return Filled(
        filled, log_probs.cpu(), lengths.cpu(), torch.where(targets, 0, -1).cpu(), top=top
    )


def check_reverse(
    config: ModelConfig, samplers: Sequence[Sampler], order: Order | Sequence[Order] | None
) -> int | None:
    """Return the number of steps of a reverse process; None: the model's default.

    Raises:
        ValueError: The samplers or the order have no meaning for a reverse process.
    """
    if any(sampler.needs_history or sampler.required for sampler in samplers):
        raise ValueError(
            "mode 'diffusion' chooses the order of tokens itself: repetition_penalty, "
            "no_repeat_ngram and required have no meaning there; leave them out"
        )
    if order is None:
        return None
    if isinstance(order, Ancestral):
        return order.steps
    advice = "; for other orders use the model in mode 'ac'" if "ac" in config.modes else ""
    raise ValueError(f"mode 'diffusion' takes only the order Ancestral(steps){advice}")


def _restriction(
    request: FillRequest, top: TopTokens | None
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a function that applies the samplers to logits (N, V) at `where` (B, T).

    None if there is nothing to apply. The function also records the most likely tokens in `top`.
    """
    free = request.only is None and all(sampler == PLAIN for sampler in request.samplers)
    if free and top is None:
        return None

    def restrict(where: Tensor, logits: Tensor) -> Tensor:
        if top is not None:
            best, at = logits.double().log_softmax(1).topk(request.top, dim=1), where.cpu()
            top.tokens[at], top.log_probs[at] = best.indices.cpu(), best.values.cpu()
        if free:
            return logits
        rows = []
        for number, (row, position) in enumerate(where.nonzero().tolist()):
            sampler = request.samplers[row]
            only = None if request.only is None else request.only(row, position)
            scores = adjusted(logits[number : number + 1], sampler, [Pick(sampler, 0.0, only=only)])
            if sampler.temperature == 0:  # the most likely token alone
                scores = torch.full_like(scores, -torch.inf).scatter(
                    1, scores.argmax(1, keepdim=True), 0.0
                )
            rows.append(scores)
        return torch.cat(rows) if rows else logits

    return restrict


def _candidates(top: TopTokens | None, row: int, position: int) -> tuple[Candidate, ...]:
    if top is None:
        return ()
    ids, values = top.tokens[row, position].tolist(), top.log_probs[row, position].tolist()
    return candidates_of(zip(ids, values, strict=True))


def _stopped(request: FillRequest, filled: Tensor) -> Tensor:
    """Return the length (B,) of each sequence, read from left to right."""
    lengths = request.batch.lengths.clone()
    if request.stop is None:
        return lengths
    for row, (tokens, targets) in enumerate(
        zip(filled.tolist(), request.batch.targets().tolist(), strict=True)
    ):
        for position, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            if target and request.ends_with(row, position, token):
                lengths[row] = position + 1
                break
    return lengths


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
        session = self.session.select([0] * len(asked))
        known = [
            (row, self.positions[i], token)
            for row, each in enumerate(asked)
            for i, token in enumerate(each.node.prefix)
        ]
        if known:
            session.reveal(*self.tensor(known).unbind(1))
        nexts = self.tensor([self.positions[len(each.node.prefix)] for each in asked])
        return self.expand(session.logits(self.tensor(range(len(asked))), nexts), asked, most)

    def expand(self, logits: Tensor, asked: Sequence[_Opened], most: int) -> list[_Opened]:
        """Return the next best `most` children of each node from its logits (N, V)."""
        self.expanded += len(asked)
        log_probs = logits.double().log_softmax(1)
        return [self.children(row, each, most) for row, each in zip(log_probs, asked, strict=True)]

    def pairs(self, rows: int, target: int) -> tuple[Tensor, Tensor]:
        """Return the rows 0, 1, ... and for each the position of a target."""
        return self.tensor(range(rows)), self.tensor([self.positions[target]] * rows)

    def tensor(self, values: Sequence[Any]) -> Tensor:
        """Return integers as a tensor on the model's device."""
        return torch.tensor(values, device=self.choices[0].device)

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
    """Search level by level. What is dropped at the last level does not affect the proof.

    The session has one row for each beam, which continues the row of the beam that it extends. So
    each token is read once.
    """
    beams, dropped = [_Node()], False
    session, parents = tree.session.select([0] * width), [0]
    while not tree.complete(beams[0]):
        depth = len(beams[0].prefix)
        last = depth + 1 == len(tree.positions)
        keep = n if last else width
        if depth:
            session.rearrange(parents, tree.positions[0])
            newest = [each.prefix[-1] for each in beams]
            session.reveal(*tree.pairs(len(beams), depth - 1), tree.tensor(newest))
        logits = session.logits(*tree.pairs(len(beams), depth))
        opened = tree.expand(logits, [_Opened(node, []) for node in beams], keep)
        children = [
            (each.child(rank), row)
            for row, each in enumerate(opened)
            for rank in range(len(each.children))
        ]
        dropped |= not last and (len(children) > keep or any(each.more for each in opened))
        best = heapq.nsmallest(keep, children, key=lambda child: -child[0].bound)
        beams, parents = [node for node, _ in best], [row for _, row in best]
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
