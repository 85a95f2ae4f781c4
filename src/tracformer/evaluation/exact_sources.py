"""Sources of random sequences whose every conditional probability is known.

The task `exact` measures models against them. Here are the interface (`ExactSource`), hidden Markov
chains, noisy periodic copies, the registry of named sources (`find_source`), and sources as
training data (`parse_exact`). The grammar is in `exact_grammar.py`.

Every conditional is a distribution over the symbols at position t, computed without looking at the
symbol that stands there; a given position is answered as if it alone were unknown. Logarithms are
floored at log(1e-300) so that they stay finite. If what is known cannot occur, the answer is NaN.

Raise VERSION when a source, or the way it is sampled, changes: figures are then not comparable.
"""

import string
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tracformer.data import DataSource, TextSource, Tokenizer, char_tokenizer
from tracformer.options import did_you_mean

VERSION = 1
PURPOSES = ("train", "validation", "test")
SMALLEST = 1e-300

Floats = NDArray[np.float64]
Symbols = NDArray[np.int64]  # (B, T) symbols 0..V-1
Known = NDArray[np.bool_]  # (B, T) True where given


@dataclass(frozen=True)
class ExactSource(ABC):
    """A distribution over sequences of one length whose conditionals can be computed."""

    name: str
    length: int

    @property
    @abstractmethod
    def symbols(self) -> int:
        """The number V of symbols."""

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> Symbols:
        """Return sampled sequences (count, length)."""

    @abstractmethod
    def log_conditionals(self, tokens: Symbols, left: Known, right: Known) -> Floats:
        """Return log p(x_t | tokens before t where `left`, tokens after t where `right`).

        The result is (B, T, V).
        """

    def log_next(self, tokens: Symbols, context: Known) -> Floats:
        """Return log p(x_t = v | x_C, x_<t), (B, T, V): the right answer in mode `car`."""
        return self.log_conditionals(tokens, np.ones_like(context), context)

    def log_marginal(self, tokens: Symbols, context: Known) -> Floats:
        """Return log p(x_t = v | x_C), (B, T, V): the right answer in mode `ac`."""
        return self.log_conditionals(tokens, context, context)

    def log_left(self, tokens: Symbols) -> Floats:
        """Return log p(x_t = v | x_<t), (B, T, V): the right answer in mode `ar`."""
        known = np.ones(tokens.shape, np.bool_)
        return self.log_conditionals(tokens, known, ~known)


def floored_log(probabilities: Floats) -> Floats:
    """Return logarithms that are at least log(SMALLEST)."""
    return np.log(np.maximum(probabilities, SMALLEST))


def log_joint(source: ExactSource, tokens: Symbols, context: Known) -> Floats:
    """Return log p(x_R | x_C), (B,), by the chain rule over the targets R."""
    return np.where(context, 0.0, picked(source.log_next(tokens, context), tokens)).sum(1)


def picked(log_probs: Floats, tokens: Symbols) -> Floats:
    """Return the log-probability (B, T) of the symbol that stands at each position."""
    return np.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]


# ---- Hidden Markov chains


@dataclass(frozen=True)
class HiddenMarkov:
    """A hidden Markov chain with S states and V symbols."""

    initial: Floats  # (S,) p(z_1)
    transition: Floats  # (S, S) p(z_t | z_{t-1}), one row for each z_{t-1}
    emission: Floats  # (S, V) p(x_t | z_t)

    @classmethod
    def random(cls, states: int, symbols: int, seed: int, sharpness: float = 0.3) -> Self:
        """Return a chain with rows from a symmetric Dirichlet distribution.

        The lower `sharpness`, the more a symbol tells about its neighbours.
        """
        rng = np.random.default_rng(seed)
        return cls(
            rng.dirichlet(np.ones(states)),
            rng.dirichlet(np.full(states, sharpness), size=states),
            rng.dirichlet(np.full(symbols, sharpness), size=states),
        )

    def sample(self, count: int, length: int, rng: np.random.Generator) -> Symbols:
        """Return sampled sequences (count, length)."""
        tokens = np.empty((count, length), dtype=np.int64)
        state = _draw_rows(np.broadcast_to(self.initial, (count, len(self.initial))), rng)
        for t in range(length):
            if t:
                state = _draw_rows(self.transition[state], rng)
            tokens[:, t] = _draw_rows(self.emission[state], rng)
        return tokens

    def conditionals(self, tokens: Symbols, left: Known, right: Known) -> Floats:
        """Return p(x_t | tokens before t where `left`, tokens after t where `right`), (B, T, V).

        Forward messages carry the left side, backward messages the right side:
        p(x_t) is proportional to the sum over z of before_t(z) after_t(z) p(x_t | z).
        """
        # (B, T, S) each
        known_left, known_right = self._likelihood(tokens, left), self._likelihood(tokens, right)
        before, after = np.empty(known_left.shape), np.ones(known_left.shape)
        T = tokens.shape[1]
        before[:, 0] = self.initial
        for t in range(1, T):
            message = (before[:, t - 1] * known_left[:, t - 1]) @ self.transition
            before[:, t] = message / message.sum(1, keepdims=True)
            s = T - 1 - t
            message = (after[:, s + 1] * known_right[:, s + 1]) @ self.transition.T
            after[:, s] = message / message.sum(1, keepdims=True)
        belief = before * after
        return (belief / belief.sum(2, keepdims=True)) @ self.emission

    def _likelihood(self, tokens: Symbols, known: Known) -> Floats:
        """Return p(x_t | z_t), (B, T, S), where x_t is known, and 1 elsewhere."""
        return np.where(known[..., None], self.emission.T[tokens], 1.0)


def _draw_rows(probabilities: Floats, rng: np.random.Generator) -> Symbols:
    """Return one index drawn from each row."""
    edges = np.cumsum(probabilities, axis=1)
    draws = rng.random((len(probabilities), 1)) * edges[:, -1:]
    return (edges <= draws).sum(1)


@dataclass(frozen=True)
class ChainSource(ExactSource):
    """Sequences of a hidden Markov chain."""

    chain: HiddenMarkov

    @property
    def symbols(self) -> int:
        """The number of symbols."""
        return self.chain.emission.shape[1]

    def sample(self, count: int, rng: np.random.Generator) -> Symbols:
        """Return sampled sequences (count, length)."""
        return self.chain.sample(count, self.length, rng)

    def log_conditionals(self, tokens: Symbols, left: Known, right: Known) -> Floats:
        """Return the conditionals by forward and backward messages."""
        return floored_log(self.chain.conditionals(tokens, left, right))


def mixing_chain(
    states: int, symbols: int, seed: int, sharpness: float, stay: float = 0.0
) -> HiddenMarkov:
    """Return a random chain whose state does not move with probability `stay`.

    A state is then remembered for about 1 / (1 - stay) symbols.
    """
    chain = HiddenMarkov.random(states, symbols, seed, sharpness)
    transition = stay * np.eye(states) + (1.0 - stay) * chain.transition
    return HiddenMarkov(chain.initial, transition, chain.emission)


def second_order_chain(states: int, symbols: int, seed: int, sharpness: float) -> HiddenMarkov:
    """Return p(z_t | z_{t-2}, z_{t-1}) as a first-order chain over the pairs (z_{t-1}, z_t).

    Symbols are emitted by the newer state of a pair.
    """
    rng = np.random.default_rng(seed)
    # (S, S, S) p(z_t | z_{t-2}, z_{t-1})
    following = rng.dirichlet(np.full(states, sharpness), size=(states, states))
    emission = rng.dirichlet(np.full(symbols, sharpness), size=states)  # (S, V)
    transition = np.zeros((states, states, states, states))
    for newer in range(states):
        transition[:, newer, newer, :] = following[:, newer]  # (a, b) -> (b, c)
    pairs = states * states
    return HiddenMarkov(
        np.full(pairs, 1.0 / pairs),
        transition.reshape(pairs, pairs),
        np.tile(emission, (states, 1)),
    )


# ---- Periodic copies


@dataclass(frozen=True)
class CopySource(ExactSource):
    """A hidden block of random symbols, repeated again and again with noise.

        period P   uniform over `periods`
        block      h_0 .. h_{P-1}, each uniform over the V symbols
        x_t        h_{t mod P} with probability 1 - noise, else uniform over the V symbols

    Given the period, positions of one phase (t mod P) depend on each other and on nothing else,
    however far apart they are. If a phase has n known symbols, c_v of them equal to v, then the
    block's symbol is v with a probability proportional to

        w_v = same^c_v other^(n - c_v),    other = noise / V,    same = 1 - noise + other.
    """

    alphabet: int  # V
    periods: tuple[int, ...]
    noise: float

    def __post_init__(self) -> None:
        if not self.periods or min(self.periods) < 1:
            raise ValueError(
                f"periods is {self.periods!r}; it must hold at least one positive integer"
            )
        if not 0.0 < self.noise < 1.0:
            raise ValueError(f"noise is {self.noise!r}; it must lie between 0 and 1")

    @property
    def symbols(self) -> int:
        """The number of symbols."""
        return self.alphabet

    def sample(self, count: int, rng: np.random.Generator) -> Symbols:
        """Return sampled sequences (count, length)."""
        periods = np.array(self.periods)[rng.integers(len(self.periods), size=count)]
        blocks = rng.integers(self.symbols, size=(count, max(self.periods)))
        copies = np.take_along_axis(blocks, np.arange(self.length) % periods[:, None], axis=1)
        noisy = rng.random((count, self.length)) < self.noise
        return np.where(noisy, rng.integers(self.symbols, size=copies.shape), copies)

    def log_conditionals(self, tokens: Symbols, left: Known, right: Known) -> Floats:
        """Return the mean of the conditionals over the periods, weighted by their evidence."""
        evidence, answers = zip(
            *(self._given_period(period, tokens, left, right) for period in self.periods),
            strict=True,
        )
        joint = np.stack(evidence)  # (periods, B, T)
        weights = np.exp(joint - joint.max(0))
        weights /= weights.sum(0)
        return floored_log((weights[..., None] * np.stack(answers)).sum(0))

    def _given_period(
        self, period: int, tokens: Symbols, left: Known, right: Known
    ) -> tuple[Floats, Floats]:
        """Return log p(what is known except x_t), (B, T), and p(x_t | it), (B, T, V).

        With t = copy * period + phase, the phases before that of t have their first copy + 1
        symbols to the left of t, the others have `copy`.
        """
        B, T = tokens.shape
        copies = -(-T // period)
        # one-hot where known, zero elsewhere
        symbols = np.zeros((2, B, copies * period, self.symbols))
        for which, known in enumerate((left, right)):
            symbols[which, :, :T] = np.eye(self.symbols)[tokens] * known[..., None]
        before, after = symbols.reshape(2, B, copies, period, self.symbols)
        nothing = np.zeros((B, 1, period, self.symbols))
        # (B, copies + 1, period, V): counts in the first k copies, and in the copies from k on
        passed = np.concatenate((nothing, before.cumsum(1)), axis=1)
        coming = np.concatenate((after[:, ::-1].cumsum(1)[:, ::-1], nothing), axis=1)
        # (B, copies + 1, period): evidence of a phase of which k symbols are passed
        phases = self._log_evidence(passed + coming)
        own = passed[:, :-1] + coming[:, 1:]  # (B, copies, period, V): the phase of t without t
        # (B, copies, period): evidence of all phases before that of t, and of all after it
        lower = phases[:, 1:].cumsum(2) - phases[:, 1:]
        higher = phases[:, :-1, ::-1].cumsum(2)[:, :, ::-1] - phases[:, :-1]
        evidence = (lower + higher + self._log_evidence(own)).reshape(B, -1)
        answer = self._answer(own).reshape(B, copies * period, -1)
        return evidence[:, :T], answer[:, :T]

    def _log_weights(self, counts: Floats) -> Floats:
        """Return log w_v, (..., V)."""
        other = self.noise / self.symbols
        all_other = counts.sum(-1, keepdims=True) * np.log(other)
        return counts * np.log1p((1.0 - self.noise) / other) + all_other

    def _log_evidence(self, counts: Floats) -> Floats:
        """Return log of the mean of w_v over v, (...): the probability of a phase's symbols."""
        logs = self._log_weights(counts)
        top = logs.max(-1)
        return np.asarray(top + np.log(np.exp(logs - top[..., None]).mean(-1)))

    def _answer(self, counts: Floats) -> Floats:
        """Return (1 - noise) p(h = v | known) + noise / V, (..., V): a phase's next symbol."""
        logs = self._log_weights(counts)
        block = np.exp(logs - logs.max(-1, keepdims=True))
        return (1.0 - self.noise) * block / block.sum(-1, keepdims=True) + self.noise / self.symbols


# ---- The named sources


def _grammar(name: str) -> ExactSource:
    from tracformer.evaluation.exact_grammar import GrammarSource, bracket_grammar

    return GrammarSource(name, 24, bracket_grammar())


# description, and a function that makes the source of this name
_SOURCES: dict[str, tuple[str, Callable[[str], ExactSource]]] = {
    "hmm-4": (
        "4 hidden states, 8 symbols",
        lambda name: ChainSource(name, 48, mixing_chain(4, 8, 2, 0.2)),
    ),
    "hmm-16": (
        "16 hidden states, 16 symbols",
        lambda name: ChainSource(name, 48, mixing_chain(16, 16, 2, 0.1)),
    ),
    "hmm-64": (
        "64 hidden states, 32 symbols",
        lambda name: ChainSource(name, 48, mixing_chain(64, 32, 3, 0.05)),
    ),
    "hmm-16-slow": (
        "16 hidden states that stay for about 16 symbols",
        lambda name: ChainSource(name, 48, mixing_chain(16, 16, 4, 0.3, stay=15 / 16)),
    ),
    "hmm-8-second": (
        "8 hidden states, each drawn from the two before",
        lambda name: ChainSource(name, 48, second_order_chain(8, 12, 5, 0.1)),
    ),
    "grammar": ("nested clauses that close as they opened", _grammar),
    "copies": (
        "a noisy block that comes back every 24 symbols",
        lambda name: CopySource(name, 72, 16, (24,), 0.1),
    ),
    "copies-mixed": (
        "a noisy block that comes back every 17, 20 or 23 symbols",
        lambda name: CopySource(name, 72, 16, (17, 20, 23), 0.1),
    ),
}


def source_names() -> tuple[str, ...]:
    """Return the names of all sources."""
    return tuple(_SOURCES)


def describe_source(name: str) -> str:
    """Return the description of a source in a few words."""
    return _SOURCES[name][0]


@cache
def find_source(name: str) -> ExactSource:
    """Return a source by name; ValueError if there is none."""
    if name not in _SOURCES:
        raise ValueError(f"unknown exact source {name!r}{did_you_mean(name, _SOURCES)}")
    return _SOURCES[name][1](name)


def draw_sequences(source: ExactSource, purpose: str, count: int, seed: int) -> Symbols:
    """Return sequences (count, length) for one of PURPOSES.

    Sequences of different purposes or seeds are independent. They are the same on every machine.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose is {purpose!r}; it must be one of {', '.join(PURPOSES)}")
    key = (seed, zlib.crc32(source.name.encode()), PURPOSES.index(purpose), VERSION)
    return source.sample(count, np.random.default_rng(key))


# ---- Sources as training data

PREFIX = "exact:"
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
SHARE_HELD = 20  # validation is 1/20 of the training data


@dataclass(frozen=True)
class ExactData:
    """Sequences of a source as documents of letters, one letter for each symbol.

        tracformer prepare exact:hmm-16 --out data/hmm-16
        tracformer prepare exact:hmm-16,sequences=50000,seed=1 --out data/hmm-16

    A document and its end of text fill length + 1 tokens: training with `length=49` makes each
    packed row one sequence of hmm-16. The task `exact` appends the same end of text, as given.
    """

    source: ExactSource
    sequences: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"sequences is {self.sequences}; it must be at least 1")

    @property
    def tokenizer(self) -> Tokenizer:
        """A character tokenizer with one letter for each symbol."""
        return char_tokenizer(LETTERS[: self.source.symbols])

    @property
    def sizes(self) -> dict[str, int]:
        """The number of sequences in each split."""
        return {"train": self.sequences, "validation": max(1, self.sequences // SHARE_HELD)}

    def splits(self) -> dict[str, DataSource]:
        """Return training and validation data, independent of each other and of the test data."""
        return {purpose: self._texts(purpose, count) for purpose, count in self.sizes.items()}

    def _texts(self, purpose: str, count: int) -> TextSource:
        tokens = draw_sequences(self.source, purpose, count, self.seed)
        texts = ["".join(LETTERS[symbol] for symbol in row) for row in tokens.tolist()]
        name = f"{PREFIX}{self.source.name}, version {VERSION}, {purpose}, seed {self.seed}"
        return TextSource(texts, name)


def parse_exact(text: str) -> ExactData:
    """Return the data that a text such as `exact:hmm-16,sequences=50000,seed=1` names."""
    name, *words = (part.strip() for part in text.removeprefix(PREFIX).split(","))
    options: dict[str, int] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in ("sequences", "seed") or not equals or not value.isdecimal():
            raise ValueError(f"{text!r}: {word!r} is not sequences=NUMBER or seed=NUMBER")
        options[key] = int(value)
    return ExactData(find_source(name), **options)
