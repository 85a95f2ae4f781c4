"""Simple models that a trained one should beat: a trigram model, or a profile of an aligned family.

`fit_yardstick` chooses one by the data; both give the log-probability of every token of a row,
left to right, as the mode `ar` does.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tracformer.data import PreparedData, name_of
from tracformer.data.examples import Examples

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_TOKENS = 20_000_000  # that a trigram model counts; more would take minutes


class Yardstick(Protocol):
    """A model that is fitted in seconds."""

    name: str

    def log_probs(self, tokens: Ints, lengths: Ints) -> Floats:
        """Return the log-probability of each token given those before it, (B, T); 0 in padding."""
        ...


def fit_yardstick(data: PreparedData, rows: Examples) -> Yardstick:
    """Return a site profile if the rows are an aligned family, else a trigram model.

    Args:
        data: Prepared data; the split `train` is used.
        rows: Its training rows.
    """
    split = data.split("train")
    if name_of(data.tokenizer).endswith("-aligned") and len(rows) < 200_000:
        tokens, lengths = rows.get(np.arange(len(rows)))
        if (lengths == lengths[0]).all():
            return SiteProfile(tokens[:, : lengths[0]], data.tokenizer.vocab_size)
    count = min(len(split.tokens), MOST_TOKENS)
    return KneserNey(split.tokens.read(0, count).astype(np.int64), data.tokenizer.vocab_size)


class SiteProfile:
    """The frequency of each token at each position, with one pseudocount per position.

    Args:
        tokens: Rows of an alignment, (N, T).
        vocab_size: Number of tokens.
    """

    name = "site profile"

    def __init__(self, tokens: Ints, vocab_size: int) -> None:
        background = np.bincount(tokens.ravel(), minlength=vocab_size) + 1.0
        background /= background.sum()
        counts = np.stack([np.bincount(column, minlength=vocab_size) for column in tokens.T])
        # (T, V); the pseudocount is divided as the whole alignment's tokens are
        self.table = np.log((counts + background) / (len(tokens) + 1.0))

    def log_probs(self, tokens: Ints, lengths: Ints) -> Floats:
        """Return the log-probability of each token at its position, (B, T); 0 in padding."""
        sites = np.arange(tokens.shape[1]).clip(max=len(self.table) - 1)
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
        return np.where(inside, self.table[sites, tokens], 0.0)


class KneserNey:
    """Interpolated Kneser-Ney trigrams (Chen and Goodman 1998), one discount per order.

    With counts c and a discount D,
    p(w | u v) = (c(u v w) - D)+ / c(u v) + D n(u v) / c(u v) p(w | v), where n(u v) is the number
    of different words after u v; the lower orders count different words before, not occurrences.

    Args:
        tokens: Training text, one array with an end of text between documents.
        vocab_size: Number of tokens.
    """

    name = "Kneser-Ney trigram"

    def __init__(self, tokens: Ints, vocab_size: int) -> None:
        self.size = vocab_size
        pairs = tokens[:-1] * vocab_size + tokens[1:]
        triples, counts = np.unique(pairs[:-1] * vocab_size + tokens[2:], return_counts=True)
        self.three = _Order(triples, counts, vocab_size)
        # different words before each pair: the number of different triples that end in it
        twos, counts = np.unique(triples % vocab_size**2, return_counts=True)
        self.two = _Order(twos, counts, vocab_size)
        ones, counts = np.unique(twos % vocab_size, return_counts=True)
        self.one = _Order(ones, counts, vocab_size)

    def log_probs(self, tokens: Ints, lengths: Ints) -> Floats:
        """Return the log-probability of each token given up to two before it, (B, T)."""
        wide = np.pad(tokens, ((0, 0), (2, 0)), constant_values=-1)  # -1: no token
        first, second = wide[:, :-2], wide[:, 1:-1]
        found = self.one.share(np.zeros_like(tokens), tokens, np.full(tokens.shape, 1 / self.size))
        found = np.where(second >= 0, self.two.share(second, tokens, found), found)
        pair = first * self.size + second
        found = np.where(first >= 0, self.three.share(pair, tokens, found), found)
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
        return np.where(inside, np.log(found), 0.0)


class _Order:
    """Discounted counts of n-grams.

    Args:
        keys: n-grams as numbers, sorted: history * vocab_size + word.
        counts: How often each occurs.
        vocab_size: Number of tokens.
    """

    def __init__(self, keys: Ints, counts: Ints, vocab_size: int) -> None:
        self.keys, self.counts, self.size = keys, counts, vocab_size
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        self.discount = once / (once + 2 * twice) if once else 0.5
        self.histories, starts = np.unique(keys // vocab_size, return_index=True)
        self.totals = np.add.reduceat(counts, starts) if len(keys) else counts
        self.different = np.diff(np.append(starts, len(keys)))

    def share(self, history: Ints, word: Ints, lower: Floats) -> Floats:
        """Return the probability of words after histories; `lower` is that of the lower order."""
        if len(self.keys) == 0:
            return lower
        where, known = _find(self.histories, history)
        place, seen = _find(self.keys, history * self.size + word)
        count = np.where(seen, self.counts[place], 0)
        total = self.totals[where]
        own = np.maximum(count - self.discount, 0.0) * (count > 0)
        mixed = (own + self.discount * self.different[where] * lower) / total
        return np.where(known, mixed, lower)


def _find(table: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return places in a sorted table, and which values are there."""
    places = np.searchsorted(table, wanted).clip(max=len(table) - 1)
    return places, table[places] == wanted
