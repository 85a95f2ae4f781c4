"""One batch to fill: its rows, its rules, and its result.

- `FillRequest`: the sequences of one call of `fill`, checked when it is made.
- `Row`: one of its sequences: what is known, what is open, and what may come next.
- `Filled`, `TopTokens`: the result.

Bookkeeping is in plain lists and numbers, since tensors of one element are slow.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple, Self, TypedDict

import torch
from torch import Tensor

from tracformer.generation.orders import LeftToRight, Order, orders_in
from tracformer.generation.request_options import PLAIN, Sampler
from tracformer.generation.results import Token, TokenCallback
from tracformer.generation.samplers import Pick
from tracformer.model.base import check_batch
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig
from tracformer.rng import uniforms

# (row, position) -> the tokens that are allowed there, or None for all
Only = Callable[[int, int], Sequence[int] | None]
# (row, position, token) -> whether the sequence ends with this token
Stop = Callable[[int, int, int], bool]


class FillRules(TypedDict, total=False):
    """The keyword arguments of `decode.fill`, for functions that pass them on."""

    sampler: Sampler | Sequence[Sampler]
    seed: int | Sequence[int]
    order: Order | Sequence[Order] | None
    only: Only | None
    stop: int | Stop | None
    callback: TokenCallback | None
    top: int
    drafts: bool


class TopTokens(NamedTuple):
    """The most likely tokens at each filled position, most likely first; id -1 elsewhere."""

    tokens: Tensor  # (B, T, top)
    log_probs: Tensor  # (B, T, top) float64

    @classmethod
    def empty(cls, shape: Sequence[int]) -> Self:
        """Return one without any token."""
        return cls(torch.full(shape, -1), torch.zeros(*shape, dtype=torch.float64))


@dataclass(frozen=True)
class Filled:
    """The result of `fill`.

    Args:
        tokens: (B, T) token ids, given and filled.
        log_probs: (B, T) float64, the model's own log-probabilities, before any change by the
            sampler; zero where given.
        lengths: (B,) lengths, shorter than asked where a sequence was stopped.
        steps: (B, T) the step of its sequence in which a token was filled; -1 where given.
        drawn: (B, T) float64, the log-probabilities with which tokens were drawn: the sampler's,
            constraints included. None for diffusion.
        top: The most likely tokens at each filled position, if asked for.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    steps: Tensor
    drawn: Tensor | None = None
    top: TopTokens | None = None

    @property
    def log_prob(self) -> Tensor:
        """(B,) log-probability of all filled tokens given the rest.

        Exact under `car` and `ar`; under `ac` exact given the order, one token per step.
        """
        return self.log_probs.sum(1)


class RowStep(NamedTuple):
    """What one step gives a row."""

    row: "Row"
    tokens: list[Token]
    drawn: list[float]  # log-probability with which each was drawn
    drafts: list[Token]  # most likely tokens of all positions that were open before the step


def have_places(tokens: Collection[int], free: int, limited: Sequence[Collection[int]]) -> bool:
    """Return whether positions are left for all required tokens.

    Positions that allow only some tokens are counted as if each allowed what any of them does. So
    the answer is exact where they all allow the same tokens, as word starts do; otherwise True may
    be too optimistic.

    Args:
        tokens: The tokens, each required once.
        free: Number of positions that allow any token.
        limited: The required tokens that each other position allows.
    """
    if len(tokens) <= free:
        return True
    limited = [allowed for allowed in limited if not set(tokens).isdisjoint(allowed)]
    useful = set(tokens).intersection(set().union(*limited))
    return free + min(len(limited), len(useful)) >= len(tokens)


class Row:
    """One sequence while it is filled."""

    def __init__(
        self,
        request: "FillRequest",
        number: int,
        tokens: list[int],
        draws: dict[int, float],
        length: int,
        sampler: Sampler,
        seed: int,
        order: Order,
    ):
        self.request, self.number, self.length = request, number, length
        self.sampler, self.seed, self.order = sampler, seed, order
        self.tokens = tokens  # valid where not open
        self.draws = draws  # the uniform number of each open position
        self.open = list(draws)  # ascending
        self.slot = -1  # its row of the session, once admitted
        self.step = 0
        self.filled: list[Token] = []
        self.drawn: list[float] = []  # of each filled token
        self.steps: list[int] = []  # of each filled token
        self.drafts: dict[int, int] = {}  # last draft of each open position
        self.missing = set(sampler.required)
        if len(self.missing) > len(self.open):
            raise ValueError(
                f"{len(self.missing)} tokens are required, but sequence {number} has only "
                f"{len(self.open)} to fill"
            )

    def turn(self, logits: Tensor | None) -> list[int]:
        """Return which open positions are filled in this step, as indices into `open`.

        Args:
            logits: (M, V) of all open positions, if the order looks at them.
        """
        turn = self._turn(max(1, len(self.open) - len(self.missing)), logits)
        while (
            len(turn) > 1
            and self.missing
            and not have_places(self.missing, *self._others({self.open[i] for i in turn}))
        ):
            # the positions that stay open must have places for every missing token
            turn = self._turn(len(turn) - 1, logits)
        return turn

    def _turn(self, most: int, logits: Tensor | None) -> list[int]:
        if type(self.order) is LeftToRight:
            return list(range(min(self.order.k, most, len(self.open))))
        turn: list[int] = self.order.turn(torch.tensor(self.open), logits, self.seed, most).tolist()
        return turn

    def pick(self, position: int) -> Pick:
        """Return how the token of a position is to be drawn."""
        uniform, allowed, never = self.draws[position], self._only(position), None
        if self.missing and not have_places(self.missing, *(others := self._others({position}))):
            # a missing token must come here
            due = self.missing if allowed is None else self.missing.intersection(allowed)
            allowed = sorted(token for token in due if have_places(self.missing - {token}, *others))
        if self.sampler.required:
            end = self.request.end
            if self.lacking(position) - {end} and (allowed is None or list(allowed[:2]) != [end]):
                never = end
        if not self.sampler.needs_history:
            return Pick(self.sampler, uniform, only=allowed, never=never)
        place = bisect_left(self.open, position)
        first = self.open[place - 1] + 1 if place else 0
        unknown = set(self.open)
        seen = [token for at, token in enumerate(self.tokens[: self.length]) if at not in unknown]
        return Pick(self.sampler, uniform, self.tokens[first:position], seen, allowed, never)

    def lacking(self, position: int) -> set[int]:
        """Return the required tokens that are missing if the sequence ends at this position."""
        if not self.sampler.required:
            return set()
        return set(self.sampler.required) - {
            token.token_id for token in self.filled if token.position <= position
        }

    def _only(self, position: int) -> Sequence[int] | None:
        return None if self.request.only is None else self.request.only(self.number, position)

    def _others(self, but: Collection[int]) -> tuple[int, list[set[int]]]:
        """Return the places for missing tokens at open positions other than `but`.

        Returns:
            The number of positions that allow any token, counted up to the number needed; and the
            missing tokens that each of the others allows.
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

    def reveal(self, token: Token, drawn: float) -> None:
        """Fill an open position."""
        del self.open[bisect_left(self.open, token.position)]
        self.tokens[token.position] = token.token_id
        self.missing.discard(token.token_id)
        self.drafts.pop(token.position, None)
        self.filled.append(token)
        self.drawn.append(drawn)
        self.steps.append(self.step)

    def changed(self, drafts: Sequence[Token]) -> list[Token]:
        """Return the drafts of open positions that differ from the last ones, and remember them."""
        still = set(self.open)
        new = [
            draft
            for draft in drafts
            if draft.position in still and self.drafts.get(draft.position) != draft.token_id
        ]
        self.drafts.update((draft.position, draft.token_id) for draft in new)
        return new

    def end(self, position: int) -> None:
        """End the sequence with this position; positions before it may still be open."""
        self.length = position + 1
        self.open = self.open[: bisect_left(self.open, position)]


class FillRequest:
    """One batch to fill, checked when it is made.

    It may be made in any thread. From then on only the scheduler changes it, until it is done; but
    any thread may set `callback` to None.

    Args:
        config: Configuration of the model.
        batch: Sequences; the tokens at targets are ignored.
        mode: One of the modes that the weights were trained in.
        sampler: How tokens are drawn: one for all sequences, or one for each.
        seed: Random seed: one for all sequences, or one for each.
        order: Order of filling: one for all sequences, or one for each. None: left to right.
        only: The tokens that are allowed at a position of a row, or None for all.
        stop: Token that ends a sequence, or a function of row, position and token.
        callback: Called with the tokens of each step.
        top: Number of most likely tokens to return for each position.
        drafts: Also call back with drafts, where the order looks at all open positions.

    Raises:
        ValueError: The batch does not fit the model, or the rules do not fit batch and mode.
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
        callback: TokenCallback | None = None,
        top: int = 0,
        drafts: bool = False,
    ) -> None:
        batch = batch.without_targets()
        check_batch(config, batch, mode)
        if top < 0:
            raise ValueError(f"top is {top}; it must be zero (none) or more")
        self.batch, self.mode = batch, mode
        self.samplers, self.seeds = _one_each(sampler, seed, len(batch))
        self.order, self.only, self.stop, self.callback = order, only, stop, callback
        self.top, self.drafts = min(top, config.vocab_size), drafts
        # the token that ends a sequence is not drawn while required tokens are missing
        self.end: int | None = getattr(stop, "end", None) if callable(stop) else stop
        self.error: BaseException | None = None
        self.rows: list[Row] = []
        if mode != "diffusion":
            orders = orders_in(mode, order, len(batch))
            opens = [is_open.nonzero()[0].tolist() for is_open in batch.targets().cpu().numpy()]
            seeds = [seed for seed, opened in zip(self.seeds, opens, strict=True) for _ in opened]
            draws = iter(uniforms(seeds, [at for opened in opens for at in opened]).tolist())
            each = zip(
                batch.tokens.tolist(),
                [{at: next(draws) for at in opened} for opened in opens],
                batch.lengths.tolist(),
                self.samplers,
                self.seeds,
                orders,
                strict=True,
            )
            self.rows = [Row(self, number, *values) for number, values in enumerate(each)]
        self.left = sum(bool(row.open) for row in self.rows)  # rows that are not filled yet

    @property
    def begun(self) -> bool:
        """Whether a row has been admitted."""
        return any(row.slot >= 0 for row in self.rows)

    @property
    def done(self) -> bool:
        """Whether all rows are filled, or an error ended the request."""
        return self.left == 0 or self.error is not None

    def ends_with(self, row: int, position: int, token: int) -> bool:
        """Return whether a sequence ends with this token."""
        return self.stop(row, position, token) if callable(self.stop) else token == self.stop

    def take(self, steps: Sequence[RowStep]) -> int:
        """Take the results of one step for some of the rows, and call back.

        Returns:
            The number of tokens taken. Exceptions of the request's callbacks are passed on.
        """
        taken: list[Token] = []
        for row, tokens, drawn, _ in steps:
            for token, odds in zip(tokens, drawn, strict=True):
                if token.position >= row.length:  # the row ended earlier in this step
                    continue
                row.reveal(token, odds)
                taken.append(token)
                stopped = self.stop is not None and self.ends_with(
                    row.number, token.position, token.token_id
                )
                if stopped and not row.lacking(token.position):
                    row.end(token.position)
            row.step += 1
            self.left -= not row.open
        if (callback := self.callback) is not None:  # another thread may detach it
            taken.sort(key=lambda token: (token.sample, token.position))
            drafts = [draft for step in steps for draft in step.row.changed(step.drafts)]
            if callback(taken + drafts if drafts else taken) is False:
                self.callback = None
        return len(taken)

    def result(self) -> Filled:
        """Return the result, or raise the error that ended the request."""
        if self.error is not None:
            raise self.error
        shape, device = self.batch.tokens.shape, self.batch.device
        filled = self.batch.tokens.cpu().clone()
        log_probs, drawn = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        steps = torch.full(shape, -1)
        kept = [
            (token, odds, step)
            for row in self.rows
            for token, odds, step in zip(row.filled, row.drawn, row.steps, strict=True)
            if token.position < row.length
        ]
        tokens = [token for token, _, _ in kept]
        at = (
            torch.tensor([token.sample for token in tokens], dtype=torch.int64),
            torch.tensor([token.position for token in tokens], dtype=torch.int64),
        )
        filled[at] = torch.tensor([token.token_id for token in tokens], dtype=filled.dtype)
        log_probs[at] = torch.tensor([token.log_prob for token in tokens], dtype=torch.float64)
        drawn[at] = torch.tensor([odds for _, odds, _ in kept], dtype=torch.float64)
        steps[at] = torch.tensor([step for _, _, step in kept], dtype=torch.int64)
        lengths = torch.tensor([row.length for row in self.rows])
        top = self._top(tokens, at) if self.top else None
        return Filled(filled.to(device), log_probs, lengths, steps, drawn, top)

    def _top(self, tokens: list[Token], at: tuple[Tensor, Tensor]) -> TopTokens:
        found = TopTokens.empty((*self.batch.tokens.shape, self.top))
        if tokens:
            # (N, top, 2); ids are exact in float64
            likely = torch.tensor(
                [[(c.token_id, c.log_prob) for c in token.candidates] for token in tokens],
                dtype=torch.float64,
            )
            found.tokens[at], found.log_probs[at] = likely[..., 0].long(), likely[..., 1]
        return found


def _one_each(
    sampler: Sampler | Sequence[Sampler], seed: int | Sequence[int], batch: int
) -> tuple[list[Sampler], list[int]]:
    """Return one sampler and one seed for each sequence."""
    samplers = [sampler] * batch if isinstance(sampler, Sampler) else list(sampler)
    seeds = [int(seed)] * batch if isinstance(seed, int | Integral) else [int(s) for s in seed]
    for name, given in (("samplers", samplers), ("seeds", seeds)):
        if len(given) != batch:
            raise ValueError(f"{len(given)} {name} were given for {batch} sequences")
    return samplers, seeds
