"""From logits to a token: temperature, truncation, penalties, constraints, a uniform number.

- `choose`: draw one token for each row of logits, in compiled code where there is some.
- `adjusted`, `truncated`, `permitted`: the steps from logits to the distribution that is sampled.

A token is drawn by inverting the cumulative distribution, in order of ids, at the uniform number of
its row and position; so it does not depend on the rest of the batch. Everything is computed in
float64: the batch changes a choice only where numbers are almost equal.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tracformer import native
from tracformer.generation.request_options import PLAIN, Sampler
from tracformer.rng import inverse_cdf

__all__ = ["PLAIN", "Chosen", "Pick", "Sampler", "adjusted", "choose", "permitted", "truncated"]

NUCLEUS_FIRST = 1024  # number of tokens sorted first; all are sorted only if these do not suffice
NOTHING_LEFT = (
    "no token is left to choose from: the banned, allowed and required tokens and no_repeat_ngram "
    "contradict each other here"
)


class Pick(NamedTuple):
    """How the token of one row is drawn from its logits."""

    sampler: Sampler
    uniform: float
    left: Sequence[int] = ()  # the known tokens right before the position
    seen: Sequence[int] = ()  # all known tokens of the sequence
    # the tokens allowed at this position: by the caller, or required tokens that must come here
    only: Sequence[int] | None = None
    never: int | None = None  # not allowed here: an end while required tokens are missing


class Chosen(NamedTuple):
    """The drawn tokens and their log-probabilities."""

    tokens: Tensor  # (N,)
    drawn: Tensor  # (N,) float64, under the sampler's distribution
    own: Tensor  # (N,) float64, under the model's own distribution


def choose(logits: Tensor, picks: Sequence[Pick]) -> Chosen:
    """Draw one token for each row of logits (N, V).

    Rows whose distribution depends on earlier tokens are drawn by plain code, others by compiled
    code if it is available.
    """
    compiled = logits.device.type == "cpu" and logits.dtype == torch.float32 and native.ready()
    slow = [row for row, pick in enumerate(picks) if pick.sampler.needs_history or not compiled]
    if not slow:
        return _compiled(logits, picks)
    if len(slow) == len(picks):
        return _plain(logits, picks)
    fast = sorted(set(range(len(picks))) - set(slow))
    parts = (
        _plain(logits[slow], [picks[row] for row in slow]),
        _compiled(logits[fast], [picks[row] for row in fast]),
    )
    places = torch.tensor(slow + fast).argsort()
    return Chosen(*(torch.cat(each)[places] for each in zip(*parts, strict=True)))


def _plain(logits: Tensor, picks: Sequence[Pick]) -> Chosen:
    """Draw tokens in plain PyTorch; rows that share a sampler are computed together."""
    chosen = torch.empty(len(picks), dtype=torch.int64, device=logits.device)
    # greedy rows keep zero: the most likely token is certain
    drawn, own = (
        torch.zeros(len(picks), dtype=torch.float64, device=logits.device) for _ in range(2)
    )
    groups: dict[Sampler, list[int]] = {}
    for row, pick in enumerate(picks):
        groups.setdefault(pick.sampler, []).append(row)
    for sampler, rows in groups.items():
        mine = logits[rows] if len(groups) > 1 else logits
        scores = adjusted(mine, sampler, [picks[row] for row in rows])
        if sampler.temperature == 0:
            chosen[rows] = scores.argmax(1)
        else:
            odds = scores.softmax(1)
            chosen[rows] = inverse_cdf(
                odds, torch.tensor([picks[row].uniform for row in rows], dtype=torch.float64)
            )
            drawn[rows] = odds.gather(1, chosen[rows, None])[:, 0].log()
        own[rows] = mine.double().log_softmax(1).gather(1, chosen[rows, None])[:, 0]
    return Chosen(chosen, drawn, own)


def _compiled(logits: Tensor, picks: Sequence[Pick]) -> Chosen:
    V = logits.shape[1]
    masks: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None], int] = {}
    which, rules = [], []
    for sampler in {id(pick.sampler): pick.sampler for pick in picks}.values():
        _check_ids(sampler, V)
    for pick in picks:
        sampler = pick.sampler
        banned = sampler.banned if pick.never is None else (*sampler.banned, pick.never)
        restricted = banned or sampler.allowed or pick.only is not None
        limits = (banned, sampler.allowed, None if pick.only is None else tuple(pick.only))
        which.append(masks.setdefault(limits, len(masks)) if restricted else -1)
        rules.append(
            (sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p, pick.uniform)
        )
    forbidden = (
        torch.stack([_forbidden(*limits, V) for limits in masks])
        if masks
        else torch.empty(0, V, dtype=torch.bool)
    )
    chosen = Chosen(
        *torch.ops.tracformer.choose(
            logits.contiguous(),
            forbidden,
            torch.tensor(which),
            torch.tensor(rules, dtype=torch.float64),
        )
    )
    if min(chosen.tokens.tolist()) < 0:
        raise ValueError(NOTHING_LEFT)
    return chosen


def adjusted(logits: Tensor, sampler: Sampler, picks: Sequence[Pick]) -> Tensor:
    """Return float64 logits (N, V) of the sampled distribution; -inf for excluded tokens."""
    scores = logits.to(torch.float64, copy=True)
    V = scores.shape[1]
    _check_ids(sampler, V)
    _penalise(scores, sampler, picks)
    scores = permitted(scores, sampler)
    for row, pick in enumerate(picks):
        if pick.only is not None:
            scores[row].masked_fill_(_all_but(tuple(pick.only), V, scores.device), -torch.inf)
        if pick.never is not None:
            scores[row, pick.never] = -torch.inf
    best = scores.amax(1, keepdim=True)
    if best.isneginf().any():
        raise ValueError(NOTHING_LEFT)
    if sampler.temperature == 0:
        return scores
    # subtract the maximum, so that no temperature is too low for float64
    return truncated((scores - best) / sampler.temperature, sampler)


def permitted(scores: Tensor, sampler: Sampler) -> Tensor:
    """Set scores (N, V) of tokens that the sampler excludes to -inf, in place; return them."""
    if sampler.banned:
        scores[:, list(sampler.banned)] = -torch.inf
    if sampler.allowed:
        scores.masked_fill_(_all_but(sampler.allowed, scores.shape[1], scores.device), -torch.inf)
    return scores


def truncated(scores: Tensor, sampler: Sampler) -> Tensor:
    """Return scores truncated by top-k, then top-p, then min-p; the most likely token is kept."""
    if 0 < sampler.top_k < scores.shape[1]:
        least = scores.topk(sampler.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampler.top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_floor(scores, sampler.top_p), -torch.inf)
    if sampler.min_p > 0:
        log_probs = scores.log_softmax(1)
        floor = log_probs.amax(1, keepdim=True) + torch.tensor(
            sampler.min_p, dtype=torch.float64
        ).log().to(scores.device)
        scores = scores.masked_fill(log_probs < floor, -torch.inf)
    return scores


def _nucleus_floor(scores: Tensor, top_p: float) -> Tensor:
    """Return (N, 1), the lowest score of the most likely tokens with total probability top_p."""
    total = scores.logsumexp(1, keepdim=True)
    count = min(NUCLEUS_FIRST, scores.shape[1])
    while True:
        best = scores.topk(count, dim=1).values
        reached = (best - total).exp().cumsum(1)
        if count == scores.shape[1] or bool((reached[:, -1] >= top_p).all()):
            last = (reached < top_p).sum(1, keepdim=True).clamp(max=count - 1)
            return best.gather(1, last)
        count = scores.shape[1]


def _penalise(scores: Tensor, sampler: Sampler, picks: Sequence[Pick]) -> None:
    if not sampler.needs_history:
        return
    for row, pick in zip(scores, picks, strict=True):
        if sampler.repetition_penalty != 1.0 and pick.seen:
            ids = torch.tensor(sorted(set(pick.seen)), device=scores.device)
            values = row[ids]
            row[ids] = torch.where(
                values > 0, values / sampler.repetition_penalty, values * sampler.repetition_penalty
            )
        for token in _would_repeat(pick.left, sampler.no_repeat_ngram):
            row[token] = -torch.inf


def _would_repeat(left: Sequence[int], n: int) -> set[int]:
    """Return the tokens that would complete an n-gram that `left` already contains."""
    if n == 0 or len(left) < n - 1:
        return set()
    ending = tuple(left[len(left) - (n - 1) :])
    return {
        left[i + n - 1] for i in range(len(left) - n + 1) if tuple(left[i : i + n - 1]) == ending
    }


@lru_cache(maxsize=64)
def _all_but(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> Tensor:
    index = torch.tensor(list(ids), dtype=torch.int64, device=device)
    if wrong := index[(index < 0) | (index >= vocab_size)].tolist():
        raise ValueError(f"allowed token {wrong[0]} is out of range; ids are 0..{vocab_size - 1}")
    mask = torch.ones(vocab_size, dtype=torch.bool, device=device)
    mask[index] = False
    return mask


@lru_cache(maxsize=64)
def _forbidden(
    banned: tuple[int, ...], allowed: tuple[int, ...], only: tuple[int, ...] | None, vocab_size: int
) -> Tensor:
    """Return (V,) bool, True for tokens that these rules exclude."""
    here = torch.device("cpu")
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[list(banned)] = True
    for ids in (allowed or None, only):
        if ids is not None:
            mask |= _all_but(ids, vocab_size, here)
    return mask


@lru_cache(maxsize=64)
def _check_ids(sampler: Sampler, vocab_size: int) -> None:
    for name in ("banned", "allowed", "required"):
        if wrong := [i for i in getattr(sampler, name) if not 0 <= i < vocab_size]:
            raise ValueError(
                f"{name} token {wrong[0]} is out of range; ids are 0..{vocab_size - 1}"
            )
