"""Continuous batching: the rows in flight, their rules, and the loop that advances them.

Tokens that must come somewhere: is there a place left for each?

One call of `fill`: its sequences, its rules, and what has come of them so far.

Bookkeeping is in plain lists and numbers: a step asks little of each sequence, and tensors of one
element are slow.

The one loop that fills holes: ask the sessions, pick tokens, reveal them. It holds sequences of
many jobs, which come and go.

CAR and AR go from left to right, each token conditioned on all before it; AC goes in any order. A
sample depends on its own seed, never on its neighbours: same seed, same sample, alone or in any
company, cached or not.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple, Self, TypedDict, TypeVar

import torch
from torch import Tensor

from tracformer.generation.orders import LeftToRight, Order, orders_in
from tracformer.generation.samplers import PLAIN, Pick, Sampler, choose, permitted
from tracformer.generation.sessions import Session, empty_session
from tracformer.generation.stopping import StopStrings
from tracformer.model.base import ConditionalModel, check_batch
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig
from tracformer.rng import uniforms


def fit(tokens: Collection[int], free: int, limited: Sequence[Collection[int]]) -> bool:
    """A place for each token, among `free` ones that hold any and `limited` ones that hold only
    those named: a matching of both.
    """
    if len(tokens) <= free:
        return True
    taken: dict[int, int] = {}  # which limited place a token has

    def seat(place: int, tried: set[int]) -> bool:
        for token in limited[place]:
            if token in tokens and token not in tried:
                tried.add(token)
                if token not in taken or seat(taken[token], tried):
                    taken[token] = place
                    return True
        return False

    return free + sum(seat(place, set()) for place in range(len(limited))) >= len(tokens)


# (row, position) -> the tokens that may stand there, or None for all
Only = Callable[[int, int], Sequence[int] | None]
# (row, position, token) -> does the sequence end with this token?
Stop = Callable[[int, int, int], bool]
Likely = tuple[tuple[int, float], ...]  # tokens and their log-probabilities, likeliest first


class Revealed(NamedTuple):
    """One token, as it comes; or a draft: what the model thinks likeliest at a
    position that is still open.
    """

    row: int
    position: int
    token: int
    log_prob: float
    candidates: Likely = ()
    draft: bool = False


Watch = Callable[[list[Revealed]], object]  # one that returns False wants to hear no more


class Rules(TypedDict, total=False):
    """The options of `fill.fill`, which explains them, for those who pass them on."""

    sampler: Sampler | Sequence[Sampler]
    seed: int | Sequence[int]
    order: Order | Sequence[Order] | None
    only: Only | None
    stop: int | Stop | None
    watch: Watch | None
    top: int
    drafts: bool


class Top(NamedTuple):
    """The likeliest tokens where one was filled, likeliest first; token -1 elsewhere, and where the
    vocabulary has fewer.
    """

    tokens: Tensor  # (B, T, top)
    log_probs: Tensor  # (B, T, top) float64

    @classmethod
    def of_none(cls, shape: Sequence[int]) -> Self:
        return cls(torch.full(shape, -1), torch.zeros(*shape, dtype=torch.float64))


@dataclass(frozen=True)
class Filled:
    tokens: Tensor  # (B, T)
    # (B, T) the model's own, before any sampler's change; zero where given. float64
    log_probs: Tensor
    lengths: Tensor  # (B,) shorter than asked where the stop token came
    steps: Tensor  # (B, T) in which step of its sequence a token was revealed; -1 where given
    # (B, T) with which log-probability each came: the sampler's, constraints included. Not of
    # diffusion
    drawn: Tensor | None = None
    top: Top | None = None  # where candidates were asked for

    @property
    def log_prob(self) -> Tensor:
        """(B,): of all that was filled, given the rest.

        Exact under `car` and `ar`; under `ac` exact given the order, one token a step.
        """
        return self.log_probs.sum(1)


class Answer(NamedTuple):
    """What comes next in a row: a token, and drafts of all that was open before it."""

    row: "Row"
    position: int
    token: int
    log_prob: float
    drawn: float
    candidates: Likely = ()
    drafts: list[Revealed] = []  # noqa: RUF012


class Arrived(NamedTuple):
    """One token of one row, for good."""

    position: int
    token: int
    log_prob: float
    drawn: float
    step: int
    candidates: Likely


class Row:
    """One sequence on its way."""

    def __init__(
        self,
        job: "Job",
        number: int,
        tokens: list[int],
        opened: list[int],
        length: int,
        sampler: Sampler,
        seed: int,
        order: Order,
    ):
        self.job, self.number, self.length, self.sampler, self.seed, self.order = (
            job,
            number,
            length,
            sampler,
            seed,
            order,
        )
        self.tokens = tokens  # known where not open
        self.open = opened  # positions, ascending
        self.slot = -1  # its row of the session
        self.step = 0
        self.arrived: list[Arrived] = []
        self.drafts: dict[int, int] = {}  # what the watcher was last told of open positions
        self.missing = set(sampler.required)
        if len(self.missing) > len(self.open):
            raise ValueError(
                f"{len(self.missing)} tokens are required, but sequence {number} has only "
                f"{len(self.open)} to fill"
            )

    def turn(self, logits: Tensor | None) -> list[int]:
        """Which of the open positions are filled now, as indices into them.

        logits (M, V): of all of them, where the order looks.
        """
        turn = self._turn(max(1, len(self.open) - len(self.missing)), logits)
        while (
            len(turn) > 1
            and self.missing
            and not fit(self.missing, *self._others({self.open[i] for i in turn}))
        ):
            # what stays open must hold every required token
            turn = self._turn(len(turn) - 1, logits)
        return turn

    def _turn(self, most: int, logits: Tensor | None) -> list[int]:
        if type(self.order) is LeftToRight:
            return list(range(min(self.order.k, most, len(self.open))))
        turn: list[int] = self.order.turn(torch.tensor(self.open), logits, self.seed, most).tolist()
        return turn

    def pick(self, position: int, uniform: float) -> Pick:
        allowed = self._only(position)
        if self.missing and not fit(self.missing, *(others := self._others({position}))):
            due = self.missing if allowed is None else self.missing.intersection(allowed)
            allowed = sorted(token for token in due if fit(self.missing - {token}, *others))
        end = self.job.end
        early = self.lacking(position) - {end} and (allowed is None or list(allowed[:2]) != [end])
        never = end if early else None
        if not self.sampler.needs_history:
            return Pick(self.sampler, uniform, only=allowed, never=never)
        place = bisect_left(self.open, position)
        first = self.open[place - 1] + 1 if place else 0
        unknown = set(self.open)
        seen = [token for at, token in enumerate(self.tokens[: self.length]) if at not in unknown]
        return Pick(self.sampler, uniform, self.tokens[first:position], seen, allowed, never)

    def lacking(self, position: int) -> set[int]:
        """The required tokens that the sequence would not have, did it end with this position."""
        if not self.sampler.required:
            return set()
        return set(self.sampler.required) - {
            each.token for each in self.arrived if each.position <= position
        }

    def _only(self, position: int) -> Sequence[int] | None:
        return None if self.job.only is None else self.job.only(self.number, position)

    def _others(self, but: Collection[int]) -> tuple[int, list[set[int]]]:
        """Of the open positions besides these: how many hold any token, counted no further than it
        matters; and which of the missing tokens each of the others holds.
        """
        free, limited = 0, []
        for position in self.open:
            if free == len(self.missing):
                break
            if position not in but:
                if (allowed := self._only(position)) is None:
                    free += 1
                else:
                    limited.append(self.missing.intersection(allowed))
        return free, limited

    def reveal(self, answer: Answer) -> None:
        del self.open[bisect_left(self.open, answer.position)]
        self.tokens[answer.position] = answer.token
        self.missing.discard(answer.token)
        self.drafts.pop(answer.position, None)
        self.arrived.append(
            Arrived(
                answer.position,
                answer.token,
                answer.log_prob,
                answer.drawn,
                self.step,
                answer.candidates,
            )
        )

    def changed(self, drafts: Sequence[Revealed]) -> list[Revealed]:
        """Those of open positions that are not what was drafted last."""
        still = set(self.open)
        new = [
            each
            for each in drafts
            if each.position in still and self.drafts.get(each.position) != each.token
        ]
        self.drafts.update((each.position, each.token) for each in new)
        return new

    def end(self, position: int) -> None:
        """The sequence ends with this position; what lies before it may still be open."""
        self.length = position + 1
        self.open = self.open[: bisect_left(self.open, position)]


class Job:
    """Checked when it is made, in whatever thread; from then on only the filling loop changes it,
    until it is done.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: Batch,
        mode: str = "car",
        *,
        sampler: Sampler | Sequence[Sampler] = PLAIN,
        seed: int | Sequence[int] = 0,
        order: Order | Sequence[Order] | None = None,
        only: Only | None = None,
        stop: int | Stop | None = None,
        watch: Watch | None = None,
        top: int = 0,
        drafts: bool = False,
    ) -> None:
        batch = batch.without_targets()
        check_batch(config, batch, mode)
        if top < 0:
            raise ValueError(f"top is {top}; it must be zero (none) or more")
        self.batch, self.mode = batch, mode
        self.samplers, self.seeds = _one_each(sampler, seed, len(batch))
        self.order, self.only, self.stop, self.watch, self.top, self.drafts = (
            order,
            only,
            stop,
            watch,
            min(top, config.vocab_size),
            drafts,
        )
        # not picked too early
        self.end = (
            stop if not callable(stop) else stop.end if isinstance(stop, StopStrings) else None
        )
        self.error: BaseException | None = None
        self.rows: list[Row] = []
        if mode != "diffusion":
            orders = orders_in(mode, order, len(batch))
            opens = batch.targets().cpu().numpy()
            each = zip(
                batch.tokens.tolist(),
                opens,
                batch.lengths.tolist(),
                self.samplers,
                self.seeds,
                orders,
                strict=True,
            )
            self.rows = [
                Row(
                    self,
                    number,
                    ids,
                    opened.nonzero()[0].tolist(),
                    length,
                    rules,
                    own_seed,
                    own_order,
                )
                for number, (ids, opened, length, rules, own_seed, own_order) in enumerate(each)
            ]
        self.left = sum(bool(row.open) for row in self.rows)  # rows that are not filled yet

    @property
    def begun(self) -> bool:
        return any(row.slot >= 0 for row in self.rows)

    @property
    def done(self) -> bool:
        return self.left == 0 or self.error is not None

    def take(self, answers: Sequence[Answer]) -> int:
        """What one step answered for some of its rows.

        Returns how many tokens that is. What its own callbacks raise comes through.
        """
        revealed: list[Revealed] = []
        for answer in answers:
            row, position, token = answer.row, answer.position, answer.token
            if position >= row.length:  # it ended with another token of this step
                continue
            row.reveal(answer)
            revealed.append(
                Revealed(row.number, position, token, answer.log_prob, answer.candidates)
            )
            stops = (
                self.stop(row.number, position, token)
                if callable(self.stop)
                else token == self.stop
            )
            if stops and not row.lacking(position):
                row.end(position)
        for row in {answer.row for answer in answers}:
            row.step += 1
            self.left -= not row.open
        if (watch := self.watch) is not None:  # another thread may take it away
            drafts = [
                draft
                for answer in answers
                if answer.drafts
                for draft in answer.row.changed(answer.drafts)
            ]
            if watch(sorted(revealed) + drafts if drafts else sorted(revealed)) is False:
                self.watch = None
        return len(revealed)

    def result(self) -> Filled:
        """What came, or the error that ended it."""
        if self.error is not None:
            raise self.error
        filled, shape = self.batch.tokens.cpu().clone(), self.batch.tokens.shape
        log_probs, drawn, steps = (
            torch.zeros(shape, dtype=torch.float64),
            torch.zeros(shape, dtype=torch.float64),
            torch.full(shape, -1),
        )
        arrived = [
            (row.number, each)
            for row in self.rows
            for each in row.arrived
            if each.position < row.length
        ]
        at = (
            torch.tensor([number for number, _ in arrived], dtype=torch.int64),
            torch.tensor([each.position for _, each in arrived], dtype=torch.int64),
        )
        filled[at] = torch.tensor([each.token for _, each in arrived], dtype=filled.dtype)
        log_probs[at] = torch.tensor([each.log_prob for _, each in arrived], dtype=torch.float64)
        drawn[at] = torch.tensor([each.drawn for _, each in arrived], dtype=torch.float64)
        steps[at] = torch.tensor([each.step for _, each in arrived], dtype=torch.int64)
        lengths = torch.tensor([row.length for row in self.rows])
        return Filled(
            filled.to(self.batch.device),
            log_probs,
            lengths,
            steps,
            drawn,
            self._candidates(arrived, at),
        )

    def _candidates(
        self, arrived: list[tuple[int, Arrived]], at: tuple[Tensor, Tensor]
    ) -> Top | None:
        if not self.top:
            return None
        found = Top.of_none((*self.batch.tokens.shape, self.top))
        if arrived:
            # (N, top, 2); ids are exact in float64
            likely = torch.tensor([each.candidates for _, each in arrived], dtype=torch.float64)
            found.tokens[at], found.log_probs[at] = likely[..., 0].long(), likely[..., 1]
        return found


def _one_each(
    sampler: Sampler | Sequence[Sampler], seed: int | Sequence[int], batch: int
) -> tuple[list[Sampler], list[int]]:
    samplers = [sampler] * batch if isinstance(sampler, Sampler) else list(sampler)
    seeds = [int(seed)] * batch if isinstance(seed, int | Integral) else [int(s) for s in seed]
    for name, given in (("samplers", samplers), ("seeds", seeds)):
        if len(given) != batch:
            raise ValueError(f"{len(given)} {name} were given for {batch} sequences")
    return samplers, seeds


A = TypeVar("A")


class Filling:
    """At most `capacity` sequences at a time, of at most `length` tokens; others wait, in the order
    of their coming.

    What goes wrong for one job (rules that contradict each other, a callback that fails) ends that
    job alone.
    """

    def __init__(
        self, model: ConditionalModel, capacity: int, length: int, *, cached: bool = True
    ) -> None:
        self.model, self.capacity, self.length, self.cached = model, capacity, length, cached
        self.sessions: dict[str, Session] = {}  # of each mode
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []  # being filled
        self.steps = self.tokens = 0  # so far

    def add(self, job: Job) -> None:
        self.waiting.extend(row for row in job.rows if row.open)

    def drop(self, jobs: Collection[Job]) -> None:
        """These jobs' sequences make room for others at once."""
        if jobs:
            self.waiting = deque(row for row in self.waiting if row.job not in jobs)
            self._release([row for row in self.rows if row.job in jobs])

    def reset(self) -> None:
        """Forget all sequences, and what sessions know of them."""
        self.rows, self.waiting, self.sessions = [], deque(), {}

    @torch.no_grad()
    def step(self) -> list[Job]:
        """Let in who waits; then every sequence gets its next token, or as many as its order takes
        at once. Returns the jobs that ended.
        """
        coming = [
            self.waiting.popleft()
            for _ in range(min(len(self.waiting), self.capacity - len(self.rows)))
        ]
        self.rows += coming
        _together(coming, self._admit)
        answers: dict[Job, list[Answer]] = {}
        for answer in _together([row for row in self.rows if row.job.error is None], self._answers):
            answers.setdefault(answer.row.job, []).append(answer)
        for job, mine in answers.items():
            try:
                self.tokens += job.take(mine)
            except Exception as error:  # of a callback
                job.error = error
        self.steps += 1
        jobs = _jobs(self.rows)
        self._release([row for row in self.rows if not row.open])
        self.drop([job for job in jobs if job.error is not None])
        return [job for job in jobs if job.done]

    # ---- one step

    def _admit(self, rows: Sequence[Row]) -> list[None]:
        device = self.model.head.device
        for mode, mine in _by_mode(row for row in rows if row.slot < 0).items():
            if mode not in self.sessions:
                self.sessions[mode] = empty_session(
                    self.model, mode, self.capacity, self.length, cached=self.cached
                )
            width = max(row.length for row in mine)
            tokens = torch.tensor(
                [row.tokens[: row.length] + [0] * (width - row.length) for row in mine],
                device=device,
            )
            unknown = torch.zeros(len(mine), width, dtype=torch.bool, device=device)
            at = [(number, position) for number, row in enumerate(mine) for position in row.open]
            unknown[tuple(torch.tensor(at, device=device).T)] = True
            slots = self.sessions[mode].admit(
                Batch(tokens, ~unknown, torch.tensor([row.length for row in mine], device=device))
            )
            for row, slot in zip(mine, slots.tolist(), strict=True):
                row.slot = slot
        return []

    def _answers(self, rows: Sequence[Row]) -> list[Answer]:
        """What comes next in each row.

        Nothing is changed but what sessions know of tokens already revealed.
        """
        turns: list[tuple[Row, int]] = []
        drafts: dict[Row, list[Revealed]] = {}
        parts: list[Tensor] = []
        for mode, mine in _by_mode(rows).items():
            some, logits = self._turns(
                self.sessions[mode], sorted(mine, key=lambda row: row.slot), drafts
            )
            turns += some
            parts.append(logits)
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)  # (N, V)
        draws = uniforms(
            [row.seed for row, _ in turns], [position for _, position in turns]
        ).tolist()
        chosen, drawn, own = choose(
            logits, [row.pick(position, u) for (row, position), u in zip(turns, draws, strict=True)]
        )
        for mode, session in self.sessions.items():
            self._reveal(
                session,
                [i for i, (row, _) in enumerate(turns) if row.job.mode == mode],
                turns,
                chosen,
            )
        likely = _likely([row.job.top for row, _ in turns], logits)
        found = zip(turns, chosen.tolist(), own.tolist(), drawn.tolist(), likely, strict=True)
        return [
            Answer(row, at, token, value, odds, top, drafts.pop(row, []))
            for (row, at), token, value, odds, top in found
        ]

    def _turns(
        self, session: Session, rows: Sequence[Row], drafts: dict[Row, list[Revealed]]
    ) -> tuple[list[tuple[Row, int]], Tensor]:
        """The positions that are filled in this step, and their logits (N, V).

        rows: ascending by slot.
        """
        asked = [
            (row, row.open if row.order.looks else [row.open[i] for i in row.turn(None)])
            for row in rows
        ]
        device = self.model.head.device
        slots, places = zip(
            *((row.slot, position) for row, positions in asked for position in positions),
            strict=True,
        )
        logits = session.logits(
            torch.tensor(slots, device=device), torch.tensor(places, device=device)
        )
        if not any(row.order.looks for row in rows):
            return [(row, position) for row, positions in asked for position in positions], logits
        turns: list[tuple[Row, int]] = []
        kept: list[int] = []
        start = 0
        for row, positions in asked:
            chosen: Iterable[int] = range(len(positions))
            if row.order.looks:
                seen = logits[start : start + len(positions)]
                chosen = row.turn(seen)
                if row.job.drafts and row.job.watch is not None:
                    drafts[row] = _drafts(row, seen)
            turns += [(row, positions[i]) for i in chosen]
            kept += [start + i for i in chosen]
            start += len(positions)
        return turns, logits[kept]

    def _reveal(
        self, session: Session, mine: list[int], turns: list[tuple[Row, int]], tokens: Tensor
    ) -> None:
        if mine:
            at = torch.tensor([(turns[i][0].slot, turns[i][1]) for i in mine], device=tokens.device)
            session.reveal(at[:, 0], at[:, 1], tokens if len(mine) == len(turns) else tokens[mine])

    def _release(self, rows: Sequence[Row]) -> None:
        for mode, gone in _by_mode(rows).items():
            if held := [row.slot for row in gone if row.slot >= 0]:
                self.sessions[mode].release(held)
        if rows:
            free = set(rows)
            self.rows = [row for row in self.rows if row not in free]


def _together(rows: Sequence[Row], do: Callable[[Sequence[Row]], list[A]]) -> list[A]:
    """All rows at once; and if that fails, each job alone, to tell whose fault it is."""
    if not rows:
        return []
    try:
        return do(rows)
    except Exception:
        results: list[A] = []
        for job in _jobs(rows):
            try:
                results += do([row for row in rows if row.job is job])
            except Exception as error:
                job.error = error
        return results


def _drafts(row: Row, logits: Tensor) -> list[Revealed]:
    """The likeliest token of each open position; logits (M, V) are of all of them."""
    best = permitted(logits.double().log_softmax(1), row.sampler).max(1)
    found = zip(row.open, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Revealed(row.number, position, token, value, draft=True) for position, token, value in found
    ]


def _likely(tops: Sequence[int], logits: Tensor) -> list[Likely]:
    """The `tops[i]` likeliest tokens of row i of logits (N, V)."""
    found: list[Likely] = [()] * len(tops)
    if asked := [i for i, top in enumerate(tops) if top]:
        best = logits[asked].double().log_softmax(1).topk(max(tops), dim=1)
        for i, ids, values in zip(asked, best.indices.tolist(), best.values.tolist(), strict=True):
            found[i] = tuple(zip(ids, values, strict=True))[: tops[i]]
    return found


def _by_mode(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.job.mode, []).append(row)
    return groups


def _jobs(rows: Iterable[Row]) -> list[Job]:
    return list(dict.fromkeys(row.job for row in rows))
