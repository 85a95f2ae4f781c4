"""What a source with exact answers offers: samples, and the three conditionals that the three kinds of model should give.

Each conditional is a distribution over the symbols at every position t; the symbol that stands at t itself is never looked at, so a given
position is answered as if it alone were unknown. Logarithms are floored at log(1e-300), so that they stay finite.
Where what is known cannot happen there is no answer: nan.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]  # (B, T) symbols 0..V-1
Known = NDArray[np.bool_]  # (B, T) True where given

SMALLEST = 1e-300


class Source(Protocol):
    """A law of sequences of one length."""

    @property
    def name(self) -> str: ...

    @property
    def symbols(self) -> int: ...

    @property
    def length(self) -> int: ...

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """(count, length)"""
        ...

    def log_next(self, tokens: Tokens, context: Known) -> Floats:
        """(B, T, V) log p(x_t = v | x_C, x_<t): what CAR should say."""
        ...

    def log_marginal(self, tokens: Tokens, context: Known) -> Floats:
        """(B, T, V) log p(x_t = v | x_C): what AC should say."""
        ...

    def log_left(self, tokens: Tokens) -> Floats:
        """(B, T, V) log p(x_t = v | x_<t): what AR should say."""
        ...


def floored_log(probabilities: Floats) -> Floats:
    return np.log(np.maximum(probabilities, SMALLEST))


def log_joint(source: Source, tokens: Tokens, context: Known) -> Floats:
    """(B,) log p(x_R | x_C), by the chain rule over the targets."""
    return np.where(context, 0.0, picked(source.log_next(tokens, context), tokens)).sum(1)


def picked(log_probs: Floats, tokens: Tokens) -> Floats:
    """(B, T) the entry of the symbol that stands there."""
    return np.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]
