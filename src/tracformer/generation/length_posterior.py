"""Choose the length of a blank whose length is not given.

The probability of a fill given its blank falls with every token, so lengths cannot be compared
by it. What can be compared is the mass of a length: all that the model, read from left to right,
gives to the texts with k tokens in the blank,

    M_k = sum over fills f in F_k of p(prefix, f, suffix, end of text),

p being mode `ar`, which knows no length beforehand, and F_k the fills of k tokens that are
allowed: no end of text in a blank, a word start where a space moved into the blank, the caller's
banned and allowed tokens. Texts of different length are different documents, so the masses add up;
times a prior over k they give, normalised, the posterior of k. (Without the end of text, for a
fragment, M_k is the probability that after the prefix come k allowed tokens and then the suffix,
whatever follows. These events do not exclude each other, and where there is no suffix they are
nested: M_k is then the probability of going on for at least k tokens, which never rises with k.)

The sum is estimated by importance sampling, with mode `car`, which sees both sides, as the
proposal. Each target t has a set A_t of allowed tokens, the same whatever the other tokens are, so
F_k is their product. A fill is drawn token by token from

    q'(f) = product over t of  q(f_t | given, f_<t) / Z_t(f_<t),
    Z_t(f_<t) = sum over v in A_t of q(v | given, f_<t),

which is a distribution over F_k (each factor sums to one over A_t) and positive on all of it, as
every softmax is. Hence

    E_q'[p(f) / q'(f)] = sum over F_k of q'(f) p(f) / q'(f) = M_k:

the mean of these ratios over independent draws is unbiased. With the model's own q(f) in place of
q'(f) it would not be: that mean tends to the sum of p(f) / (Z_1 Z_2 ...), too large, and more so
for longer blanks.

If `car` and `ar` agreed perfectly the ratio would be M_k for every draw; how far they differ is
what the standard errors show.

Several blanks have too many combinations of lengths to weigh them all; `explore` then finds likely
ones, blank by blank, with few draws each, and only these are weighed with more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.generation.decode import Runner
from tracformer.generation.ranking import left_to_right
from tracformer.generation.request_options import LENGTHS, Prior, Sampler
from tracformer.generation.results import LengthChoice
from tracformer.generation.template import BlankLayout, to_batch
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.rng import LENGTH, derived_seed, inverse_cdf, uniforms

# (layout, position) -> the tokens that are allowed there, or None for all
Only = Callable[[int, int], Sequence[int] | None]
Range = tuple[int, int]

MOST = 256  # maximum number of vectors that are all weighed
# of the search blank by blank: rounds, lengths tried of each blank, and the length it starts with
ROUNDS, TRIED, FIRST_LENGTH = 3, 10, 4
PROPOSALS = 2**40  # index of a family of seeds, beyond any number of samples


class LengthVectors(NamedTuple):
    """K candidate choices of lengths; each vector has one length per blank."""

    vectors: list[tuple[int, ...]]
    log_prior: Tensor  # (K,) float64


class Masses(NamedTuple):
    """Estimated probability of each vector of lengths."""

    log_masses: Tensor  # (K,) float64: log of the unbiased estimate
    # (K,) of the logarithms, by the delta method: the relative standard error of the mass
    standard_errors: Tensor


def can_weigh(model: ConditionalModel) -> bool:
    """Return whether a model has the modes that weighing lengths needs."""
    return {"car", "ar"} <= set(model.config.modes)


def candidates(
    ranges: Sequence[Range], room: int, prior: Prior | None = None, most: int = MOST
) -> LengthVectors | None:
    """Return all choices of lengths; None if there are more than `most`.

    Args:
        ranges: Smallest and largest length of each blank.
        room: Maximum number of tokens in all.
        prior: Weight of each length; None: all alike.
        most: Maximum number of vectors.

    Raises:
        ValueError: The prior gives no weight to any length that fits.
    """
    weights = [_prior_weights(prior, low, high) for low, high in ranges]
    lengths = [_weighty(w, low) for w, (low, _) in zip(weights, ranges, strict=True)]
    if not all(lengths) or sum(each[0] for each in lengths) > room:
        raise ValueError(
            f"the prior gives no weight to any length that fits: the ranges are {_shown(ranges)}, "
            f"of {room} tokens in all"
        )
    vectors = list(islice(_grid(lengths, room), most + 1))
    return None if len(vectors) > most else _with_prior(vectors, weights, ranges)


def explore(
    ranges: Sequence[Range],
    room: int,
    prior: Prior | None,
    log_weights: Callable[[LengthVectors], Sequence[float]],
    keep: int,
) -> LengthVectors:
    """Return the most likely choices of lengths among those that a search blank by blank meets.

    In each of a few rounds, each blank in turn tries lengths over its whole range while the others
    keep theirs, and takes the most likely one. The number of vectors that are weighed grows with
    the number of blanks only.

    Args:
        ranges: Smallest and largest length of each blank.
        room: Maximum number of tokens in all.
        prior: Weight of each length; None: all alike.
        log_weights: Returns a rough estimate of the weight of each vector, prior included.
        keep: Number of vectors to return, most likely first.
    """
    weights = [_prior_weights(prior, low, high) for low, high in ranges]
    lengths = [_weighty(w, low) for w, (low, _) in zip(weights, ranges, strict=True)]
    vector = [each[0] for each in lengths]
    for blank, each in enumerate(lengths):
        most = min(FIRST_LENGTH, room - sum(vector) + vector[blank])
        vector[blank] = max((length for length in each if length <= most), default=each[0])
    known: dict[tuple[int, ...], float] = {}
    for turn in range(ROUNDS):
        for blank, each in enumerate(lengths):
            most = room - sum(vector) + vector[blank]
            own = vector[blank]
            fit = [length for length in each if length <= most]
            near = [length for length in fit if abs(length - own) <= 1]
            tried = sorted({*near, *(_spread(fit) if turn == 0 else ())})
            vectors: list[tuple[int, ...]] = [
                (*vector[:blank], length, *vector[blank + 1 :]) for length in tried
            ]
            new = _with_prior([v for v in vectors if v not in known], weights, ranges)
            if new.vectors:
                known |= zip(new.vectors, log_weights(new), strict=True)
            likeliest: tuple[int, ...] = max(vectors, key=lambda v: known[v])
            vector = list(likeliest)
    best = sorted(known, key=lambda v: -known[v])[:keep]
    return _with_prior(best, weights, ranges)


def log_prior(ranges: Sequence[Range], prior: Prior | None, vector: Sequence[int]) -> float:
    """Return the logarithm of the prior of one choice of lengths; 0 if there is no prior."""
    if prior is None:
        return 0.0
    weights = [_prior_weights(prior, low, high) for low, high in ranges]
    return _log_prior(vector, weights, ranges)


def _spread(lengths: Sequence[int]) -> list[int]:
    """Return at most TRIED of the ascending lengths, denser where they are short."""
    count = len(lengths)
    if count <= TRIED:
        return list(lengths)
    return [lengths[round(count ** (i / (TRIED - 1))) - 1] for i in range(TRIED)]


def _weighty(weights: NDArray[np.float64], low: int) -> list[int]:
    """Return the lengths that have any weight, ascending."""
    return [low + i for i in np.flatnonzero(weights).tolist()]


def _with_prior(
    vectors: Sequence[tuple[int, ...]],
    weights: Sequence[NDArray[np.float64]],
    ranges: Sequence[Range],
) -> LengthVectors:
    log_prior = [_log_prior(vector, weights, ranges) for vector in vectors]
    return LengthVectors(list(vectors), torch.tensor(log_prior, dtype=torch.float64))


def middle(ranges: Sequence[Range], room: int) -> tuple[int, ...]:
    """Return the middle of each range, shortened until all fit; for models that cannot weigh."""
    lengths = [(low + high) // 2 for low, high in ranges]
    while sum(lengths) > room:
        spare = [length - low for length, (low, _) in zip(lengths, ranges, strict=True)]
        lengths[spare.index(max(spare))] -= 1
    return tuple(lengths)


def missing_mode(model: ConditionalModel) -> str:
    """Return a note for fills of a model that cannot weigh lengths."""
    missing = " and ".join(mode for mode in ("car", "ar") if mode not in model.config.modes)
    return (
        f"lengths are the middle of their ranges: weighing them needs mode {missing}, "
        "which this model was not trained in"
    )


@torch.no_grad()
def masses(
    runner: Runner,
    layouts: Sequence[BlankLayout],
    *,
    draws: int,
    seed: int,
    rules: Sampler,
    only: Only | None = None,
    batch: int = 16,
) -> Masses:
    """Return the mass of each layout's blanks.

    Args:
        runner: Runs the model.
        layouts: One sequence for each choice of lengths.
        draws: Number of fills per layout.
        seed: Random seed.
        rules: Banned and allowed tokens; a sampler that changes nothing else.
        only: The tokens that are allowed at a position of a layout, or None for all.
        batch: Number of sequences per pass.
    """
    if draws < 2:
        raise ValueError(f"length_draws is {draws}; a standard error needs at least 2")
    if rules != Sampler(banned=rules.banned, allowed=rules.allowed):
        raise ValueError(
            "lengths are weighed with the model's own probabilities; the rules may only ban and "
            f"allow tokens, not {rules}"
        )
    base = derived_seed(seed, PROPOSALS)
    jobs = [
        (layout, derived_seed(base, 1 + layout * draws + draw))
        for layout in range(len(layouts))
        for draw in range(draws)
    ]
    ratios: list[Tensor] = []
    for start in range(0, len(jobs), batch):
        numbers, seeds = zip(*jobs[start : start + batch], strict=True)
        ratios.append(
            _log_ratios(
                runner,
                to_batch([layouts[i] for i in numbers], runner.model.head.device),
                seeds,
                rules,
                _renumbered(only, numbers),
            )
        )
    return summarise(torch.cat(ratios).unflatten(0, (len(layouts), draws)))


def summarise(log_ratios: Tensor) -> Masses:
    """Return the log of the mean of exp(log_ratios) (K, draws), and its standard error."""
    draws = log_ratios.shape[1]
    # a fill that is impossible under the model has ratio zero
    top = log_ratios.amax(1, keepdim=True).clamp(min=-1e300)
    ratios = (log_ratios - top).exp()
    mean = ratios.mean(1)
    return Masses(mean.log() + top[:, 0], ratios.std(1) / draws**0.5 / mean)


def choose(
    found: LengthVectors, weighed: Masses, how: str, seeds: Sequence[int]
) -> list[LengthChoice]:
    """Choose one vector of lengths per seed.

    Args:
        found: The candidates.
        weighed: Their estimated probabilities.
        how: "sample" draws from the posterior with each seed; "rank" gives seed i the i-th most
            likely vector.
        seeds: Seeds of the samples.

    Raises:
        ValueError: No candidate has any probability under the model.
    """
    if how not in LENGTHS:
        raise ValueError(f"lengths is {how!r}; allowed: {', '.join(LENGTHS)}")
    log_weights = weighed.log_masses + found.log_prior
    if not log_weights.max() > -torch.inf:
        raise ValueError(
            "no length of the blanks has any probability under the model; write other lengths or "
            "other text around them"
        )
    if how == "rank":
        ranked = log_weights.argsort(descending=True, stable=True).tolist()
        chosen = [ranked[i % len(ranked)] for i in range(len(seeds))]
    else:
        u = uniforms(seeds, [0] * len(seeds), LENGTH)
        shares = log_weights.softmax(0)
        chosen = inverse_cdf(shares.expand(len(seeds), -1), u).tolist()
    vectors, values, errors = (
        tuple(found.vectors),
        tuple(log_weights.tolist()),
        tuple(weighed.standard_errors.tolist()),
    )
    return [LengthChoice(vectors, values, errors, found.vectors[i]) for i in chosen]


def _log_ratios(
    runner: Runner, batch: Batch, seeds: Sequence[int], rules: Sampler, only: Only | None
) -> Tensor:
    """Return (B,) float64 log p(text) - log q'(fill), for one fill of each sequence."""
    filled = runner.fill(batch, "car", sampler=rules, seed=seeds, only=only)
    assert filled.drawn is not None
    texts = [row[:end] for row, end in zip(filled.tokens.tolist(), batch.lengths, strict=True)]
    log_p = torch.tensor(left_to_right(runner, texts, len(texts)), dtype=torch.float64)
    return log_p - filled.drawn.sum(1)


def _renumbered(only: Only | None, numbers: Sequence[int]) -> Only | None:
    return None if only is None else lambda row, position: only(numbers[row], position)


def _prior_weights(prior: Prior | None, low: int, high: int) -> NDArray[np.float64]:
    """Return normalized weights (high - low + 1,); a fixed length ignores the prior."""
    if prior is None or low == high:
        values = [1.0] * (high - low + 1)
    elif isinstance(prior, Mapping):
        values = [float(prior.get(length, 0.0)) for length in range(low, high + 1)]
    else:
        values = [float(prior(length)) for length in range(low, high + 1)]
    weights = np.array(values)
    if not np.isfinite(weights).all() or weights.min() < 0:
        wrong = next(i for i, value in enumerate(values) if not (np.isfinite(value) and value >= 0))
        raise ValueError(
            f"the prior gives length {low + wrong} the weight {values[wrong]}; weights are finite "
            "and not negative"
        )
    return weights / weights.sum() if weights.sum() > 0 else weights


def _log_prior(
    vector: Sequence[int], weights: Sequence[NDArray[np.float64]], ranges: Sequence[Range]
) -> float:
    factors = np.array(
        [w[length - low] for length, w, (low, _) in zip(vector, weights, ranges, strict=True)]
    )
    with np.errstate(divide="ignore"):
        return float(np.log(factors).sum())


def _grid(lengths: Sequence[Sequence[int]], room: int) -> Iterator[tuple[int, ...]]:
    """Yield every vector with one of the ascending lengths per blank and at most `room` in all."""
    if not lengths:
        yield ()
        return
    own, rest = lengths[0], lengths[1:]
    most = room - sum(each[0] for each in rest)
    for length in takewhile(lambda length: length <= most, own):
        yield from ((length, *others) for others in _grid(rest, room - length))


def _shown(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{low}-{high}" for low, high in ranges)
