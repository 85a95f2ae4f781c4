"""Which keys each layer reads, as integers: no weights and no device.

Positions count from 1 and layers from 1, as in the paper. The prefix encoder looks back from its
query; the suffix encoder is its mirror image, so one list of distances describes both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

KEY_SETS = ("stepped", "rounded")


def reach(layer: int) -> int:
    """Return w = 2^(l-1), the distance from a query of encoder layer l to its farthest key."""
    return 2 ** (layer - 1)


def scope_size(layer: int) -> int:
    """Return the number of inputs that a feature of encoder layer l depends on (Eq. 3), 2^l.

    They are the positions at distances less than 2^l. Layer 0 is the embedding.
    """
    return 2**layer


def encoder_offsets(layer: int, n_max: int, key_set: str = "stepped") -> tuple[int, ...]:
    """Return the distances, ascending from 0 to w, from a query of encoder layer l to its keys.

    Args:
        layer: Number of the layer, from 1.
        n_max: Sets the number of keys.
        key_set: `stepped` follows the paper's appendix: every distance while w <= n_max, else steps
            of d = floor(w / (n_max - 1)), and always w itself, so that the scope is exactly 2^l.
            `rounded` follows the paper's body: at most n_max keys, evenly spaced and rounded to the
            nearest integer (halves away from the query).

    Example:
    >>> encoder_offsets(6, 16)[:3], encoder_offsets(10, 16)[-3:]
    ((0, 2, 4), (476, 510, 512))
    """
    if n_max < 2:
        raise ValueError(
            f"n_max is {n_max}; an encoder query needs at least 2 keys, itself and the farthest"
        )
    w = reach(layer)
    if key_set == "stepped":
        if w <= n_max:
            return tuple(range(w + 1))
        step = w // (n_max - 1)
        on_grid = tuple(range(0, w + 1, step))
        return on_grid if on_grid[-1] == w else (*on_grid, w)
    if key_set == "rounded":
        if w + 1 <= n_max:
            return tuple(range(w + 1))
        gaps = n_max - 1
        return tuple((2 * i * w + gaps) // (2 * gaps) for i in range(n_max))
    raise ValueError(f"key_set is {key_set!r}; allowed: {', '.join(KEY_SETS)}")


def decoder_stride(layer: int, n_layer: int) -> int:
    """Return s = 2^(L-l+1).

    Decoder layer l reads every s-th feature of encoder layer L-l+1, whose scopes tile the text.
    """
    return 2 ** (n_layer - layer + 1)


def paired_encoder_layer(decoder_layer: int, n_layer: int) -> int:
    """Return j = L-l+1, the encoder layer that decoder layer l reads: coarse scopes first."""
    return n_layer - decoder_layer + 1


def prefix_encoder_keys(t: int, offsets: tuple[int, ...]) -> Iterator[int]:
    """Return the keys of query t in the prefix encoder; none lie before position 1."""
    return (t - o for o in offsets if t - o >= 1)


def suffix_encoder_keys(t: int, offsets: tuple[int, ...], length: int) -> Iterator[int]:
    """Return the keys of query t in the suffix encoder; none lie after the last position."""
    return (t + o for o in offsets if t + o <= length)


def prefix_decoder_keys(t: int, stride: int) -> Iterator[int]:
    """Return the keys t' < t with t' = t-1 (mod s), nearest first (Eq. 5)."""
    return iter(range(t - 1, 0, -stride))


def suffix_decoder_keys(t: int, stride: int, length: int) -> Iterator[int]:
    """Return the keys t' > t with t' = t+1 (mod s), nearest first (Eq. 6)."""
    return iter(range(t + 1, length + 1, stride))


@dataclass(frozen=True)
class KeyRun:
    """Distances split into an arithmetic run from 0 and the few that lie off it."""

    step: int  # between the distances of the run
    count: int  # of the run
    extra: tuple[int, ...]


def arithmetic_run(offsets: tuple[int, ...], length: int) -> KeyRun:
    """Split distances for a sliding window over residue classes; those >= length have no key.

    Example:
    >>> arithmetic_run(encoder_offsets(10, 16), 1024)
    KeyRun(step=34, count=16, extra=(512,))
    """
    present = [o for o in offsets if o < length]
    step = present[1] - present[0] if len(present) > 1 else 1
    count = 1
    while count < len(present) and present[count] == count * step:
        count += 1
    return KeyRun(step=step, count=count, extra=tuple(present[count:]))
