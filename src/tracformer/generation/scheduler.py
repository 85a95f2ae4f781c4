"""Continuous batching: rows of many requests, advanced together one step at a time.

`Scheduler.step` admits queued rows into sessions, asks the sessions for logits, draws tokens and
hands them to the rows' requests. In modes `car` and `ar` a row gets one token per step, from left
to right; in mode `ac` as many as its order takes, in any order.

A sample depends on its own seed, never on other rows: the same seed gives the same sample alone and
in any batch, with a cache and without.

A session holds a fixed number of sequences and gives the logits of some positions, given all tokens
known so far. If a model has a cache for the mode, the cache is the session; `WholePasses` serves
any other model.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from tracformer.generation.fill_request import FillRequest, Row, RowStep
from tracformer.generation.results import Candidate, Token
from tracformer.generation.samplers import choose, permitted
from tracformer.model.base import EXACT, ConditionalModel
from tracformer.model.batch import Batch

AT_ONCE = 16  # sequences per whole pass


class Session(Protocol):
    """What the scheduler and the search need of a model."""

    def admit(self, batch: Batch) -> Tensor:
        """Take in sequences and return the rows (N,) that hold them, ascending."""
        ...

    def release(self, rows: Tensor | Sequence[int]) -> None:
        """Free these rows."""
        ...

    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return logits (N, vocab_size) at N pairs of a row and a position, ascending."""
        ...

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Make tokens known at N pairs of a row and a position."""
        ...

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return an independent session of some of the sequences, which may be repeated."""
        ...

    def rearrange(self, sources: Sequence[int], since: int) -> None:
        """Let row i continue row sources[i], for rows that differ only from position `since` on.

        Rows beyond `sources` are left as they are or dropped.
        """
        ...


class WholePasses:
    """A session that runs the whole model for each question; for any model and mode.

    Where a mode is not a chain rule itself, tokens that become known count as given.
    """

    def __init__(self, model: ConditionalModel, mode: str, rows: int, length: int) -> None:
        self.model, self.mode = model, mode
        device = model.head.device
        self.free = list(range(rows))  # ascending
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.context = torch.zeros(rows, length, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)

    def admit(self, batch: Batch) -> Tensor:
        N, T = batch.tokens.shape
        if N > len(self.free):
            raise ValueError(f"{N} sequences do not fit: {len(self.free)} rows are free")
        rows = torch.tensor(self.free[:N], device=batch.device)
        given = batch.given()
        # zero unknown tokens, so that they cannot matter
        self.tokens[rows, :T] = batch.tokens.masked_fill(~given, 0).to(self.tokens.dtype)
        self.context[rows, :T], self.lengths[rows] = given, batch.lengths
        self.free = self.free[N:]
        return rows

    def release(self, rows: Tensor | Sequence[int]) -> None:
        self.free = sorted([*self.free, *torch.as_tensor(rows).tolist()])

    @torch.no_grad()
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        asked, which = rows.unique(return_inverse=True)  # ascending, as rows are
        parts = []
        for start in range(0, len(asked), AT_ONCE):
            some = asked[start : start + AT_ONCE]
            mine = (which >= start) & (which < start + AT_ONCE)
            width = int(self.lengths[some].max())
            wanted = torch.zeros(len(some), width, dtype=torch.bool, device=rows.device)
            wanted[which[mine] - start, positions[mine]] = True
            tokens, context = self.tokens[some, :width], self.context[some, :width]
            batch = Batch(tokens, context, self.lengths[some])
            parts.append(self.model.logits_at(batch, self.mode, wanted))
        return torch.cat(parts)

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self.tokens[rows, positions] = tokens.to(self.tokens.dtype)
        if self.model.answers.get(self.mode) != EXACT:
            self.context[rows, positions] = True

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        index = torch.as_tensor(rows, device=self.tokens.device)
        chosen = type(self)(self.model, self.mode, 0, 0)
        chosen.tokens, chosen.context, chosen.lengths = (
            x[index] for x in (self.tokens, self.context, self.lengths)
        )
        return chosen

    def rearrange(self, sources: Sequence[int], since: int) -> None:
        vars(self).update(vars(self.select(sources)))


def empty_session(
    model: ConditionalModel, mode: str, rows: int, length: int, *, cached: bool = True
) -> Session:
    """Return an empty session: the model's cache, if it has one for the mode, or whole passes.

    The caller checks that the weights were trained for the mode.
    """
    session: Session | None = model.empty_cache(mode, rows, length) if cached else None
    return session or WholePasses(model, mode, rows, length)


def open_session(
    model: ConditionalModel, batch: Batch, mode: str, *, cached: bool = True
) -> Session:
    """Return a session that holds these sequences, in their order."""
    session = empty_session(model, mode, *batch.tokens.shape, cached=cached)
    session.admit(batch)
    return session


A = TypeVar("A")
Places = tuple[Tensor, Tensor]  # (N,) rows of a session, (N,) positions


class Scheduler:
    """Rows in flight on one model.

    An error that belongs to one request (rules that contradict each other, a callback that fails)
    ends that request alone.

    Args:
        model: Model to run.
        capacity: Maximum number of rows in flight. Further rows wait in first-in, first-out order.
        length: Maximum length of a row.
        cached: Use the model's cache where it has one for the mode.
    """

    def __init__(
        self, model: ConditionalModel, capacity: int, length: int, *, cached: bool = True
    ) -> None:
        self.model, self.capacity, self.length, self.cached = model, capacity, length, cached
        self.device = model.head.device
        self.sessions: dict[str, Session] = {}  # by mode
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []  # in flight
        self.steps = self.tokens = 0  # totals

    def add(self, request: FillRequest) -> None:
        """Queue a request's rows."""
        self.waiting.extend(row for row in request.rows if row.open)

    def drop(self, requests: Collection[FillRequest]) -> None:
        """Remove the rows of these requests; their places are free at once."""
        if requests:
            self.waiting = deque(row for row in self.waiting if row.request not in requests)
            self._release([row for row in self.rows if row.request in requests])

    def reset(self) -> None:
        """Forget all rows and sessions."""
        self.rows, self.waiting, self.sessions = [], deque(), {}

    @torch.no_grad()
    def step(self) -> list[FillRequest]:
        """Admit queued rows, then advance each row by one step.

        Returns:
            The requests that ended.
        """
        free = self.capacity - len(self.rows)
        admitted = [self.waiting.popleft() for _ in range(min(len(self.waiting), free))]
        self.rows += admitted
        _together(admitted, self._admit)
        going = [row for row in self.rows if row.request.error is None]
        by_request: dict[FillRequest, list[RowStep]] = {}
        for step in _together(going, self._advance):
            by_request.setdefault(step.row.request, []).append(step)
        for request, steps in by_request.items():
            try:
                self.tokens += request.take(steps)
            except Exception as error:  # raised by a callback of the request
                request.error = error
        self.steps += 1
        requests = _requests(self.rows)
        self._release([row for row in self.rows if not row.open])
        self.drop([request for request in requests if request.error is not None])
        return [request for request in requests if request.done]

    def _admit(self, rows: Sequence[Row]) -> list[None]:
        """Give rows their places in the sessions of their modes."""
        device = self.device
        for mode, mine in _by_mode(row for row in rows if row.slot < 0).items():
            if mode not in self.sessions:
                self.sessions[mode] = empty_session(
                    self.model, mode, self.capacity, self.length, cached=self.cached
                )
            width = max(row.length for row in mine)
            tokens = torch.tensor(
                [row.tokens[: row.length] + [0] * (width - row.length) for row in mine],
                device=device,
            )  # (N, T)
            unknown = torch.zeros(len(mine), width, dtype=torch.bool, device=device)
            at = [(number, position) for number, row in enumerate(mine) for position in row.open]
            unknown[tuple(torch.tensor(at, device=device).T)] = True
            lengths = torch.tensor([row.length for row in mine], device=device)
            slots = self.sessions[mode].admit(Batch(tokens, ~unknown, lengths))
            for row, slot in zip(mine, slots.tolist(), strict=True):
                row.slot = slot
        return []

    def _advance(self, rows: Sequence[Row]) -> list[RowStep]:
        """Draw the next tokens of each row.

        This changes nothing but what the sessions know of the drawn tokens.
        """
        turns: list[tuple[Row, int]] = []  # (row, position), N of them
        drafts: dict[Row, list[Token]] = {}
        parts: list[tuple[Session, Places, Tensor]] = []
        for mode, mine in _by_mode(rows).items():
            mine.sort(key=lambda row: row.slot)
            session = self.sessions[mode]
            some, places, part = self._turns(session, mine, drafts)
            turns += some
            parts.append((session, places, part))
        # (N, V)
        logits = parts[0][2] if len(parts) == 1 else torch.cat([part for _, _, part in parts])
        chosen, drawn, own = choose(logits, [row.pick(position) for row, position in turns])
        start = 0
        for session, places, part in parts:
            session.reveal(*places, chosen[start : start + len(part)])
            start += len(part)
        likely = _likely([row.request.top for row, _ in turns], logits)
        steps: dict[Row, RowStep] = {}
        found = zip(turns, chosen.tolist(), own.tolist(), drawn.tolist(), likely, strict=True)
        for (row, at), token_id, log_prob, odds, candidates in found:
            if (step := steps.get(row)) is None:
                step = steps[row] = RowStep(row, [], [], drafts.get(row, []))
            step.tokens.append(Token(row.number, at, token_id, log_prob, candidates))
            step.drawn.append(odds)
        return list(steps.values())

    def _turns(
        self, session: Session, rows: Sequence[Row], drafts: dict[Row, list[Token]]
    ) -> tuple[list[tuple[Row, int]], Places, Tensor]:
        """Return what is filled in this step: rows and positions, in the session; logits (N, V).

        Args:
            session: Session of the rows' mode.
            rows: Rows of one mode, ascending by slot.
            drafts: Filled with the drafts of rows that want them.
        """
        asked = [
            (row, position)
            for row in rows
            for position in (row.open if row.order.looks else [row.open[i] for i in row.turn(None)])
        ]
        places = (
            torch.tensor([row.slot for row, _ in asked], device=self.device),
            torch.tensor([position for _, position in asked], device=self.device),
        )
        logits = session.logits(*places)
        if not any(row.order.looks for row in rows):
            return asked, places, logits
        kept: list[int] = []
        start = 0
        for row, group in groupby(asked, key=itemgetter(0)):
            end = start + len(list(group))
            if row.order.looks:
                seen = logits[start:end]
                kept += [start + i for i in row.turn(seen)]
                if row.request.drafts and row.request.callback is not None:
                    drafts[row] = _drafts(row, seen)
            else:
                kept += range(start, end)
            start = end
        index = torch.tensor(kept, device=self.device)
        return [asked[i] for i in kept], (places[0][index], places[1][index]), logits[index]

    def _release(self, rows: Sequence[Row]) -> None:
        for mode, gone in _by_mode(rows).items():
            if held := [row.slot for row in gone if row.slot >= 0]:
                self.sessions[mode].release(held)
        if rows:
            free = set(rows)
            self.rows = [row for row in self.rows if row not in free]


def _together(rows: Sequence[Row], do: Callable[[Sequence[Row]], list[A]]) -> list[A]:
    """Do something for all rows at once; if that fails, for each request alone.

    The second attempt finds the requests that the error belongs to.
    """
    if not rows:
        return []
    try:
        return do(rows)
    except Exception:
        results: list[A] = []
        for request in _requests(rows):
            try:
                results += do([row for row in rows if row.request is request])
            except Exception as error:
                request.error = error
        return results


def _drafts(row: Row, logits: Tensor) -> list[Token]:
    """Return the most likely token of each open position; `logits` (M, V) are of all of them."""
    best = permitted(logits.double().log_softmax(1), row.sampler).max(1)
    found = zip(row.open, best.indices.tolist(), best.values.tolist(), strict=True)
    return [Token(row.number, at, token_id, value, draft=True) for at, token_id, value in found]


def _likely(tops: Sequence[int], logits: Tensor) -> list[tuple[Candidate, ...]]:
    """Return the `tops[i]` most likely tokens of row i of logits (N, V)."""
    found: list[tuple[Candidate, ...]] = [()] * len(tops)
    if asked := [i for i, top in enumerate(tops) if top]:
        best = logits[asked].double().log_softmax(1).topk(max(tops), dim=1)
        for i, ids, values in zip(asked, best.indices.tolist(), best.values.tolist(), strict=True):
            found[i] = candidates_of(zip(ids[: tops[i]], values, strict=False))
    return found


def candidates_of(likely: Iterable[tuple[int, float]]) -> tuple[Candidate, ...]:
    """Return candidates from token ids and log-probabilities; their texts are not known here."""
    return tuple(Candidate(token_id, "", math.exp(value), value) for token_id, value in likely)


def _by_mode(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.request.mode, []).append(row)
    return groups


def _requests(rows: Iterable[Row]) -> list[FillRequest]:
    return list(dict.fromkeys(row.request for row in rows))
