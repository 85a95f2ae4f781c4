"""Random numbers that are a function of (seed, position, stream).

There is no state, so no batch, cache or order can change them.
Each number is the splitmix64 finaliser applied to its coordinates in turn.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.splitmix import mix

Integers = Tensor | NDArray[np.integer] | Sequence[int]

# streams: tokens, turns of positions, times at which diffusion reveals tokens, lengths of blanks
SAMPLE, ORDER, TIME, LENGTH = range(4)


def uniforms(seeds: Integers, positions: Integers, stream: int = SAMPLE) -> Tensor:
    """Return (N,) float64 in [0, 1), one for each pair of a seed and a position."""
    bits = mix(mix(mix(_words(seeds)) + _words(positions)) + np.uint64(stream))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def derived_seed(seed: int, index: int) -> int:
    """Return seed number `index` of a family of unrelated seeds; number 0 is the seed itself."""
    if index == 0:
        return int(seed)
    return int(mix(mix(_words([seed])) ^ _words([index]))[0] >> np.uint64(1))


def _words(values: Integers) -> NDArray[np.uint64]:
    array = (
        values.cpu().numpy()
        if isinstance(values, Tensor)
        else np.array([int(v) % 2**64 for v in values], np.uint64)
    )
    return array.astype(np.uint64)


def inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token (N,) whose cumulative probability exceeds u.

    Args:
        probabilities: (N, V) float64; they need not sum to 1.
        uniforms: (N,) numbers u in [0, 1).
    """
    cumulative = probabilities.cumsum(1)
    total = cumulative[:, -1:]
    at = torch.searchsorted(cumulative, uniforms.to(cumulative.device)[:, None] * total, right=True)
    # so that rounding cannot select a token after the last possible one
    last = (cumulative >= total).to(torch.uint8).argmax(1, keepdim=True)
    return torch.minimum(at, last)[:, 0]
