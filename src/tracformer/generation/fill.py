"""The one loop that fills holes: ask the session, pick tokens, reveal them, until nothing is open.

CAR and AR go from left to right, each token conditioned on all before it; AC goes in any order. A sample depends on its own seed,
never on its neighbours: same seed, same sample, alone or in any batch, cached or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tracformer.generation.orders import Ancestral, LeftToRight, Order, orders_for
from tracformer.generation.randomness import uniforms
from tracformer.generation.samplers import PLAIN, Pick, Sampler, choose
from tracformer.generation.sessions import open_session, without_targets
from tracformer.model.base import ConditionalModel, targets_of
from tracformer.model.check import check_batch


class Revealed(NamedTuple):
    """One token, as it comes."""

    row: int
    position: int
    token: int
    log_prob: float


@dataclass(frozen=True)
class Filled:
    tokens: Tensor  # (B, T)
    log_probs: Tensor  # (B, T) the model's own, before any sampler's change; zero where given. float64
    lengths: Tensor  # (B,) shorter than asked where the stop token came
    steps: Tensor  # (B, T) in which step a token was revealed; -1 where given
    drawn: Tensor | None = None  # (B, T) with which log-probability each came: the sampler's, constraints included. Not of diffusion

    @property
    def log_prob(self) -> Tensor:
        """(B,): of all that was filled, given the rest. Exact under `car` and `ar`; under `ac` exact given the order, one token a step."""
        return self.log_probs.sum(1)


@torch.no_grad()
def fill(
    model: ConditionalModel,
    tokens: Tensor,
    context: Tensor,
    mode: str = "car",
    lengths: Tensor | None = None,
    *,
    sampler: Sampler | Sequence[Sampler] = PLAIN,
    seed: int | Sequence[int] = 0,
    order: Order | Sequence[Order] | None = None,
    only: Callable[[int, int], Sequence[int] | None] | None = None,
    stop: int | None = None,
    cached: bool = True,
    insist: bool = False,
    watch: Callable[[list[Revealed]], None] | None = None,
) -> Filled:
    """Fill every target of the batch.

    `sampler` and `order`: one for all or one a sequence. `seed`: one number means the same number for each sequence, so that it gets what
    it would get alone. `only(row, position)` restricts a position to some tokens. `stop` ends a sequence (`ar`: end of text).
    `watch` is told of tokens as they come. What stands at targets in `tokens` is ignored.
    """
    tokens = without_targets(tokens, context)
    lengths = check_batch(model.config, tokens, context, mode, lengths, insist)
    B, T = tokens.shape
    samplers = [sampler] * B if isinstance(sampler, Sampler) else list(sampler)
    seeds = [seed] * B if isinstance(seed, int) else [int(s) for s in seed]
    for name, given in (("samplers", samplers), ("seeds", seeds)):
        if len(given) != B:
            raise ValueError(f"{len(given)} {name} were given for {B} sequences")
    if mode == "diffusion":
        return _reverse_process(model, tokens, context, lengths, samplers, seeds, order, only is not None or stop is not None, watch)
    orders = _orders(order, mode, B)

    session = open_session(model, tokens, context, mode, lengths, cached=cached, insist=insist)
    state = _State(tokens, targets_of(context, lengths), lengths.clone(), samplers)
    log_probs = torch.zeros(B, T, dtype=torch.float64)
    drawn, steps = torch.zeros_like(log_probs), torch.full((B, T), -1)
    step = 0
    while active := state.active():
        rows, positions, logits = _turns(session.logits, state, active, orders, seeds)
        draws = uniforms([seeds[row] for row in rows.tolist()], positions)
        picks = [
            state.pick(row, position, float(u), only)
            for row, position, u in zip(rows.tolist(), positions.tolist(), draws.tolist(), strict=True)
        ]
        chosen, odds = choose(logits, picks)
        at = rows.to(tokens.device), positions.to(tokens.device)
        values = logits.double().log_softmax(1).gather(1, chosen[:, None])[:, 0]
        session.reveal(*at, chosen)
        log_probs[rows, positions], drawn[rows, positions], steps[rows, positions] = values.cpu(), odds.cpu(), step
        revealed = [Revealed(*each) for each in zip(rows.tolist(), positions.tolist(), chosen.tolist(), values.tolist(), strict=True)]
        state.reveal(revealed, stop)
        if watch is not None:
            watch(revealed)
        step += 1
    return Filled(state.tokens.to(tokens.device), log_probs, state.lengths, steps, drawn)


def _orders(order: Order | Sequence[Order] | None, mode: str, batch: int) -> list[Order]:
    orders = orders_for(LeftToRight() if order is None else order, batch)
    if mode != "ac" and any(each != LeftToRight() for each in orders):
        raise ValueError(f"mode {mode!r} goes from left to right, one token at a time; other orders are for mode 'ac'")
    return orders


def _reverse_process(
    model: ConditionalModel,
    tokens: Tensor,
    context: Tensor,
    lengths: Tensor,
    samplers: list[Sampler],
    seeds: list[int],
    order: Order | Sequence[Order] | None,
    constrained: bool,
    watch: Callable[[list[Revealed]], None] | None,
) -> Filled:
    """A diffusion model's own sampler, which decides itself when a token is revealed."""
    temperature = samplers[0].temperature
    if constrained or any(sampler != Sampler(temperature=temperature) for sampler in samplers):
        raise ValueError("mode 'diffusion' samples by the model's reverse process: of a sampler it takes one temperature and nothing else")
    if order is not None and not isinstance(order, Ancestral):
        raise ValueError("mode 'diffusion' takes the order Ancestral(steps) alone; for other orders ask the same model in mode 'ac'")
    steps = None if order is None else order.steps
    filled, log_probs = model.ancestral(tokens, context, lengths, steps, torch.tensor(seeds), temperature)  # type: ignore[operator]
    targets = targets_of(context, lengths)
    if watch is not None:
        places = targets.nonzero().tolist()
        watch([Revealed(b, t, int(filled[b, t]), float(log_probs[b, t])) for b, t in places])
    return Filled(filled, log_probs.double().cpu(), lengths.cpu(), torch.where(targets, 0, -1).cpu())


def _turns(
    ask: Callable[[Tensor, Tensor], Tensor], state: "_State", active: list[int], orders: list[Order], seeds: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs (row, position) that are filled in this step, and their logits."""
    device = state.device
    opens = {row: state.open[row].nonzero()[:, 0] for row in active}
    looking = [row for row in active if orders[row].looks]
    seen: dict[int, Tensor] = {}
    if looking:
        rows = torch.cat([torch.full_like(opens[row], row) for row in looking])
        logits = ask(rows.to(device), torch.cat([opens[row] for row in looking]).to(device))
        seen = dict(zip(looking, logits.split([len(opens[row]) for row in looking]), strict=True))
    turns = {row: orders[row].turn(opens[row], seen.get(row), seeds[row])[: state.room(row)] for row in active}
    rows = torch.cat([torch.full_like(turns[row], row) for row in active])
    positions = torch.cat([opens[row][turns[row]] for row in active])
    if len(looking) == len(active):
        return rows, positions, torch.cat([seen[row][turns[row]] for row in active])
    blind = torch.tensor([row not in seen for row in rows.tolist()])
    logits = ask(rows[blind].to(device), positions[blind].to(device))
    if looking:
        merged = logits.new_empty(len(rows), logits.shape[1])
        merged[blind] = logits
        merged[~blind] = torch.cat([seen[row][turns[row]] for row in active if row in seen])
        logits = merged
    return rows, positions, logits


class _State:
    """The sequences so far, on the CPU: what is open, and what a sampler may want to know. `device` is the model's."""

    def __init__(self, tokens: Tensor, targets: Tensor, lengths: Tensor, samplers: list[Sampler]) -> None:
        self.device = tokens.device
        self.tokens, self.open, self.lengths, self.samplers = tokens.cpu().clone(), targets.cpu().clone(), lengths.cpu(), samplers
        self.known = torch.arange(tokens.shape[1]) < self.lengths[:, None]
        self.known &= ~self.open
        self.missing = [set(sampler.required) for sampler in samplers]
        for row, missing in enumerate(self.missing):
            if len(missing) > int(self.open[row].sum()):
                raise ValueError(f"{len(missing)} tokens are required, but sequence {row} has only {int(self.open[row].sum())} to fill")

    def active(self) -> list[int]:
        rows: list[int] = self.open.any(1).nonzero()[:, 0].tolist()
        return rows

    def room(self, row: int) -> int:
        """How many tokens may come at once: what stays open must hold every required token; when it just does, one token a step."""
        return max(1, int(self.open[row].sum()) - len(self.missing[row]))

    def pick(self, row: int, position: int, uniform: float, only: Callable[[int, int], Sequence[int] | None] | None) -> Pick:
        sampler = self.samplers[row]
        allowed = only(row, position) if only is not None else None
        if self.missing[row] and len(self.missing[row]) == int(self.open[row].sum()):
            must = self.missing[row] if allowed is None else self.missing[row] & set(allowed)
            allowed = sorted(must)
        if not sampler.needs_history:
            return Pick(sampler, uniform, only=allowed)
        known = self.known[row]
        gap = (~known[:position]).nonzero()
        first = int(gap[-1]) + 1 if len(gap) else 0
        return Pick(sampler, uniform, self.tokens[row, first:position].tolist(), self.tokens[row, known].tolist(), allowed)

    def reveal(self, revealed: list[Revealed], stop: int | None) -> None:
        for row, position, token, _ in revealed:
            self.tokens[row, position] = token
            self.open[row, position] = False
            self.known[row, position] = True
            self.missing[row].discard(token)
            if token == stop:
                self.open[row, position:] = False
                self.lengths[row] = min(int(self.lengths[row]), position + 1)  # several may come at once
