"""The mixing function of splitmix64, for random numbers and shuffled orders without state."""

import numpy as np
from numpy.typing import NDArray


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64: add the golden ratio, then two rounds of xor-shift and multiply.

    Arithmetic is modulo 2^64.
    """
    with np.errstate(over="ignore"):
        return scramble(x + np.uint64(0x9E3779B97F4A7C15))


def scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of splitmix64, a bijection in which each bit affects all others."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
