"""One seed, one stream of contexts: sequence i of the stream has its own randomness, whoever draws it and beside whichever others."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tracformer.contexts.strategies import Context, Strategy

# Other uses of the same seed and index, elsewhere, must not see the same numbers.
_PURPOSE = int.from_bytes(b"contexts")
_WORDS = 2**64


def sequence_rng(seed: int, index: int) -> np.random.Generator:
    """The generator of sequence `index`: Philox keyed by (seed, index) itself, which is cheaper than hashing the two by SeedSequence."""
    for what, value in (("seed", seed), ("index", index)):
        if not 0 <= value < _WORDS:
            raise ValueError(f"{what} is {value!r}; it must lie in 0..2^64-1")
    key = np.array((seed, index), np.uint64)
    counter = np.array((0, 0, 0, _PURPOSE), np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_contexts(
    strategy: Strategy,
    lengths: Sequence[int] | NDArray[np.integer],
    seed: int,
    indices: Sequence[int] | NDArray[np.integer],
    width: int | None = None,
) -> Context:
    """(B, T) bool, True where given: row b is for sequence `indices[b]` of the stream, of `lengths[b]` tokens.

    T is the longest length, or `width`. Padding counts as given: it is never a target.
    To see a sequence under a new context each epoch, count the index on instead of starting again from 0.
    """
    lengths, indices = [int(n) for n in lengths], [int(i) for i in indices]
    if not lengths or len(lengths) != len(indices):
        raise ValueError(
            f"there are {len(lengths)} lengths and {len(indices)} indices; give one of each to a sequence, at least one sequence"
        )
    longest = max(lengths)
    width = longest if width is None else width
    if width < longest:
        raise ValueError(f"width is {width}, less than the longest sequence of {longest} tokens")
    contexts = np.ones((len(lengths), width), np.bool_)
    for row, length, index in zip(contexts, lengths, indices, strict=True):
        row[:length] = strategy.draw(length, sequence_rng(seed, index))
    return contexts
