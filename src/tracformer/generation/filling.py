"""The one loop that fills holes: ask the sessions, pick tokens, reveal them. It holds sequences of many jobs, which come and go.

CAR and AR go from left to right, each token conditioned on all before it; AC goes in any order. A sample depends on its own seed,
never on its neighbours: same seed, same sample, alone or in any company, cached or not.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tracformer.generation.job import Answer, Job, Likely, Revealed, Row
from tracformer.generation.randomness import uniforms
from tracformer.generation.samplers import choose, permitted
from tracformer.generation.sessions import Session, empty_session
from tracformer.model.base import ConditionalModel

A = TypeVar("A")


class Filling:
    """At most `capacity` sequences at a time, of at most `length` tokens; others wait, in the order of their coming.

    What goes wrong for one job (rules that contradict each other, a callback that fails) ends that job alone.
    """

    def __init__(self, model: ConditionalModel, capacity: int, length: int, *, cached: bool = True) -> None:
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
        """Let in who waits; then every sequence gets its next token, or as many as its order takes at once. Returns the jobs that ended."""
        coming = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.capacity - len(self.rows)))]
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
                self.sessions[mode] = empty_session(self.model, mode, self.capacity, self.length, cached=self.cached)
            width = max(row.length for row in mine)
            tokens = torch.tensor([row.tokens[: row.length] + [0] * (width - row.length) for row in mine], device=device)
            unknown = torch.zeros(len(mine), width, dtype=torch.bool, device=device)
            at = [(number, position) for number, row in enumerate(mine) for position in row.open]
            unknown[tuple(torch.tensor(at, device=device).T)] = True
            slots = self.sessions[mode].admit(tokens, ~unknown, torch.tensor([row.length for row in mine], device=device))
            for row, slot in zip(mine, slots.tolist(), strict=True):
                row.slot = slot
        return []

    def _answers(self, rows: Sequence[Row]) -> list[Answer]:
        """What comes next in each row. Nothing is changed but what sessions know of tokens already revealed."""
        turns: list[tuple[Row, int]] = []
        drafts: dict[Row, list[Revealed]] = {}
        parts: list[Tensor] = []
        for mode, mine in _by_mode(rows).items():
            some, logits = self._turns(self.sessions[mode], sorted(mine, key=lambda row: row.slot), drafts)
            turns += some
            parts.append(logits)
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)  # (N, V)
        draws = uniforms([row.seed for row, _ in turns], [position for _, position in turns]).tolist()
        chosen, drawn, own = choose(logits, [row.pick(position, u) for (row, position), u in zip(turns, draws, strict=True)])
        for mode, session in self.sessions.items():
            self._reveal(session, [i for i, (row, _) in enumerate(turns) if row.job.mode == mode], turns, chosen)
        likely = _likely([row.job.top for row, _ in turns], logits)
        found = zip(turns, chosen.tolist(), own.tolist(), drawn.tolist(), likely, strict=True)
        return [Answer(row, at, token, value, odds, top, drafts.pop(row, [])) for (row, at), token, value, odds, top in found]

    def _turns(self, session: Session, rows: Sequence[Row], drafts: dict[Row, list[Revealed]]) -> tuple[list[tuple[Row, int]], Tensor]:
        """The positions that are filled in this step, and their logits (N, V). rows: ascending by slot."""
        asked = [(row, row.open if row.order.looks else [row.open[i] for i in row.turn(None)]) for row in rows]
        device = self.model.head.device
        slots, places = zip(*((row.slot, position) for row, positions in asked for position in positions), strict=True)
        logits = session.logits(torch.tensor(slots, device=device), torch.tensor(places, device=device))
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

    def _reveal(self, session: Session, mine: list[int], turns: list[tuple[Row, int]], tokens: Tensor) -> None:
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
    return [Revealed(row.number, position, token, value, draft=True) for position, token, value in found]


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
