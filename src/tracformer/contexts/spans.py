"""Algorithm 1 of the paper: targets in spans that do not overlap, in bounded time.

The paper proposes a start and a length and rejects what overlaps, which hardly ever ends once every hole is shorter than the usual span.
Here proposals come in blocks, and a block proposes only what fits between the spans that stood when it began.
What fits now also fitted then, so the accepted proposals follow the paper's law; and the first proposal of each block is always accepted.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tracformer.contexts.lengths import LengthLaw, log_cdf_table

Span = tuple[int, int]  # start and end, zero-based, end excluded


def target_count(length: int, p: float) -> int:
    """max(1, round(p T)), by Python's `round`: a half goes to the even neighbour."""
    return max(1, round(p * length))


def draw_spans(
    length: int, count: int, law: LengthLaw, rng: np.random.Generator, block: int | None = None
) -> tuple[list[Span], NDArray[np.bool_]]:
    """Algorithm 1: the spans in the order drawn, and (T,) bool, True in a span: exactly `count` times.

    `block` is how many proposals are made at once: a matter of speed, not of law.
    """
    log_cdf = log_cdf_table(law, length)
    masked = bytearray(length)  # whose find() tests a whole span at once
    as_array = np.frombuffer(masked, np.bool_)  # (T,), the same memory
    ones = b"\1" * length
    if block is None:
        block = max(64, length // 32, round(count / law.mean))
    spans: list[Span] = []
    missing = count
    while missing > 0:
        for start, end in propose(as_array, log_cdf, block, rng):
            if masked.find(1, start, end) >= 0:  # it overlaps a span of this block
                continue
            masked[start:end] = ones[start:end]
            spans.append((start, end))
            missing -= end - start
            if missing <= 0:
                break
    if missing < 0:  # trim the last span to the exact count
        start, end = spans[-1]
        spans[-1] = (start, end + missing)
        as_array[end + missing : end] = False
    return spans, as_array


def propose(masked: NDArray[np.bool_], log_cdf: NDArray[np.float64], count: int, rng: np.random.Generator) -> Iterator[Span]:
    """`count` independent (start, end): a uniform start and a length by the law, given that they meet no masked position."""
    free, log_fits = free_starts(masked, log_cdf)
    cumulative = np.cumsum(np.exp(log_fits - log_fits.max()))
    chosen = cumulative.searchsorted(rng.random(count) * cumulative[-1], side="right")
    chosen = np.minimum(chosen, len(free) - 1)  # a product may round up to the sum
    starts = free[chosen]
    # P(n) / F(r) for n <= r, by the inverse cdf with log u = -Exponential.
    lengths = 1 + log_cdf.searchsorted(log_fits[chosen] - rng.standard_exponential(count))
    ends = np.minimum(starts + lengths, len(masked))
    return zip(starts.tolist(), ends.tolist(), strict=True)


def free_starts(masked: NDArray[np.bool_], log_cdf: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The free positions, and for each the log of the chance that a span starting there fits.

    With r free cells up to the next span that is log F(r). After the last span end = min(start + n, T) lets every length fit.
    """
    length = len(masked)
    nowhere = 2 * length
    next_masked = np.minimum.accumulate(np.where(masked, np.arange(length), nowhere)[::-1])[::-1]
    free = np.flatnonzero(~masked)
    room = next_masked[free] - free
    return free, np.where(room <= length, log_cdf[np.minimum(room, length) - 1], 0.0)
