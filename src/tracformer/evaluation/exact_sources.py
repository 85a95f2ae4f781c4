"""Sources whose every conditional is known: hidden Markov chains, copies, a grammar.

Hidden Markov chains: a source whose every conditional is known exactly, so that a model can be
measured against the truth.

What a source with exact answers offers: samples, and the three conditionals that the three kinds of
model should give.

Each conditional is a distribution over the symbols at every position t; the symbol that stands at t
itself is never looked at, so a given position is answered as if it alone were unknown. Logarithms
are floored at log(1e-300), so that they stay finite. Where what is known cannot happen there is no
answer: nan.

Hidden Markov chains of several sizes and memories, behind the protocol of a source.

Periodic copies across long gaps: a hidden block of random symbols comes again and again, each time
with noise.

    period P   uniform over `periods`
    block      h_0 .. h_{P-1}, each uniform over the V symbols
    x_t        h_{t mod P} with probability 1 - noise, else uniform over the V symbols

Given the period, the positions of one phase know of each other and of nothing else, however far
apart they are; which period it is must be told from all phases together. With n known symbols in a
phase, c_v of them equal to v, the block's symbol has the weight w_v = same^c_v other^(n - c_v),
where other = noise / V and same = 1 - noise + other.

A probabilistic grammar in Chomsky normal form, conditioned on the length of the sentence, with
exact conditionals.

    inside_ij(a)    p(a yields what is known at i..j-1), unknown leaves summed over all symbols
    outside_ij(a)   p(what is known outside i..j-1, and a spans i..j-1)

    inside_ij(a)  = sum over k, b, c of rule(a, b, c) inside_ik(b) inside_kj(c)
    outside_ij(b) = sum over k > j, a, c of rule(a, b, c) outside_ik(a) inside_jk(c)  b: left child
                  + sum over h < i, a, c of rule(a, c, b) outside_hj(a) inside_hi(c)  b: right child

The sibling in the first line lies wholly to the right of the span and that in the second wholly to
its left. So one outside pass answers p(x_t | x_C, x_<t) at every t: right siblings read the inside
table of the given tokens, left siblings that of the true ones. Probabilities are not scaled: a
sentence of n symbols has about V^-n, far above the smallest float64 for the lengths used here.

The benchmark's sources by name. Whoever changes one of them, or how it is drawn from, counts
VERSION on: figures then don't compare.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]  # (B, T) symbols 0..V-1
Known = NDArray[np.bool_]  # (B, T) True where given


@dataclass(frozen=True)
class HiddenMarkov:
    initial: Floats  # (S,) p(z_1)
    transition: Floats  # (S, S) p(z_t | z_{t-1}), a row for each z_{t-1}
    emission: Floats  # (S, V) p(x_t | z_t)

    @classmethod
    def random(cls, states: int, symbols: int, seed: int, sharpness: float = 0.3) -> Self:
        """Rows from a symmetric Dirichlet; the lower `sharpness`, the more a symbol
        says about its neighbours.
        """
        rng = np.random.default_rng(seed)
        return cls(
            rng.dirichlet(np.ones(states)),
            rng.dirichlet(np.full(states, sharpness), size=states),
            rng.dirichlet(np.full(symbols, sharpness), size=states),
        )

    @property
    def symbols(self) -> int:
        return self.emission.shape[1]

    def sample(self, count: int, length: int, rng: np.random.Generator) -> Tokens:
        """(count, length)"""
        tokens = np.empty((count, length), dtype=np.int64)
        state = _pick(np.broadcast_to(self.initial, (count, len(self.initial))), rng)
        for t in range(length):
            if t:
                state = _pick(self.transition[state], rng)
            tokens[:, t] = _pick(self.emission[state], rng)
        return tokens

    def log_next(self, tokens: Tokens, known: Known) -> Floats:
        """(B, T) log p(x_t | known x_<t) where x_t is known, zero elsewhere: the forward algorithm.

        With all known, what AR should say.
        """
        likelihood = self._likelihood(tokens, known)
        logs = np.empty(tokens.shape)
        belief = np.broadcast_to(self.initial, likelihood[:, 0].shape)
        for t in range(tokens.shape[1]):
            belief = (belief if t == 0 else belief @ self.transition) * likelihood[:, t]
            scale = belief.sum(1, keepdims=True)
            logs[:, t] = np.log(scale[:, 0])
            belief = belief / scale
        return logs

    def log_evidence(self, tokens: Tokens, known: Known) -> Floats:
        """(B,) log p of the known tokens, everything else summed out."""
        return self.log_next(tokens, known).sum(1)

    def log_conditional(self, tokens: Tokens, context: Known) -> Floats:
        """(B,) log p(x_R | x_C): what CAR log-probabilities should sum to."""
        return self.log_evidence(tokens, np.ones_like(context)) - self.log_evidence(tokens, context)

    def marginals(self, tokens: Tokens, context: Known) -> Floats:
        """(B, T, V) p(x_t | x_C) at every position, a given one read as if it alone were unknown:
        what AC should say.
        """
        return self.conditionals(tokens, context, context)

    def conditionals(self, tokens: Tokens, left: Known, right: Known) -> Floats:
        """(B, T, V) p(x_t | the tokens before t that `left` names, those behind t that `right`
        names).

        Forward messages carry the one, backward messages the other: p(x_t) ~ sum over z of
        before_t(z) after_t(z) p(x_t | z).
        """
        # (B, T, S)
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

    def _likelihood(self, tokens: Tokens, known: Known) -> Floats:
        """(B, T, S) p(x_t | z_t) where x_t is known, 1 where it is not."""
        return np.where(known[..., None], self.emission.T[tokens], 1.0)


def _pick(probabilities: Floats, rng: np.random.Generator) -> Tokens:
    """One index a row."""
    edges = np.cumsum(probabilities, axis=1)
    draws = rng.random((len(probabilities), 1)) * edges[:, -1:]
    return (edges <= draws).sum(1)


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


@dataclass(frozen=True)
class ChainSource:
    """The CAR conditional joins forward messages over the true prefix with backward messages over
    the given suffix.
    """

    name: str
    chain: HiddenMarkov
    length: int

    @property
    def symbols(self) -> int:
        return self.chain.symbols

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        return self.chain.sample(count, self.length, rng)

    def log_next(self, tokens: Tokens, context: Known) -> Floats:
        return floored_log(self.chain.conditionals(tokens, np.ones_like(context), context))

    def log_marginal(self, tokens: Tokens, context: Known) -> Floats:
        return floored_log(self.chain.conditionals(tokens, context, context))

    def log_left(self, tokens: Tokens) -> Floats:
        known = np.ones(tokens.shape, np.bool_)
        return floored_log(self.chain.conditionals(tokens, known, ~known))


def mixing_chain(
    states: int, symbols: int, seed: int, sharpness: float, stay: float = 0.0
) -> HiddenMarkov:
    """Random rows; with probability `stay` the state does not move, so that it is remembered for
    about 1 / (1 - stay) symbols.
    """
    chain = HiddenMarkov.random(states, symbols, seed, sharpness)
    return HiddenMarkov(
        chain.initial, stay * np.eye(states) + (1.0 - stay) * chain.transition, chain.emission
    )


def second_order_chain(states: int, symbols: int, seed: int, sharpness: float) -> HiddenMarkov:
    """p(z_t | z_{t-2}, z_{t-1}) as a first-order chain over the pairs (z_{t-1}, z_t); only the
    newer state of a pair is heard.
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


@dataclass(frozen=True)
class CopySource:
    name: str
    symbols: int
    length: int
    periods: tuple[int, ...]
    noise: float

    def __post_init__(self) -> None:
        if not self.periods or min(self.periods) < 1:
            raise ValueError(
                f"periods is {self.periods!r}; it must hold at least one positive integer"
            )
        if not 0.0 < self.noise < 1.0:
            raise ValueError(f"noise is {self.noise!r}; it must lie between 0 and 1")

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        periods = np.array(self.periods)[rng.integers(len(self.periods), size=count)]
        blocks = rng.integers(self.symbols, size=(count, max(self.periods)))
        copies = np.take_along_axis(blocks, np.arange(self.length) % periods[:, None], axis=1)
        noisy = rng.random((count, self.length)) < self.noise
        return np.where(noisy, rng.integers(self.symbols, size=copies.shape), copies)

    def log_next(self, tokens: Tokens, context: Known) -> Floats:
        return self._conditionals(tokens, np.ones_like(context), context)

    def log_marginal(self, tokens: Tokens, context: Known) -> Floats:
        return self._conditionals(tokens, context, context)

    def log_left(self, tokens: Tokens) -> Floats:
        known = np.ones(tokens.shape, np.bool_)
        return self._conditionals(tokens, known, ~known)

    def _conditionals(self, tokens: Tokens, left: Known, right: Known) -> Floats:
        """(B, T, V) log p(x_t | the tokens before t that `left` names, those behind t that `right`
        names), a mean over periods.
        """
        evidence, answers = zip(
            *(self._under(period, tokens, left, right) for period in self.periods), strict=True
        )
        joint = np.stack(evidence)  # (periods, B, T)
        weights = np.exp(joint - joint.max(0))
        weights /= weights.sum(0)
        return floored_log((weights[..., None] * np.stack(answers)).sum(0))

    def _under(
        self, period: int, tokens: Tokens, left: Known, right: Known
    ) -> tuple[Floats, Floats]:
        """At each t, under one period: the log-probability of what is known beside x_t (B, T), and
        p(x_t | it) (B, T, V).

        With t = copy * period + phase, the phases before that of t have their first copy + 1
        symbols to the left of t, the others `copy`.
        """
        B, T = tokens.shape
        copies = -(-T // period)
        # one-hot where known, zero elsewhere
        symbols = np.zeros((2, B, copies * period, self.symbols))
        for which, known in enumerate((left, right)):
            symbols[which, :, :T] = np.eye(self.symbols)[tokens] * known[..., None]
        before, behind = symbols.reshape(2, B, copies, period, self.symbols)
        nothing = np.zeros((B, 1, period, self.symbols))
        # (B, copies + 1, period, V): counts in the first k copies
        passed = np.concatenate((nothing, before.cumsum(1)), axis=1)
        # and in those from k on
        coming = np.concatenate((behind[:, ::-1].cumsum(1)[:, ::-1], nothing), axis=1)
        # (B, copies + 1, period) of a phase of which k symbols are passed
        phases = self._log_evidence(passed + coming)
        own = passed[:, :-1] + coming[:, 1:]  # (B, copies, period, V) in the phase of t, without t
        # (B, copies, period): of all phases before that of t
        lower = phases[:, 1:].cumsum(2) - phases[:, 1:]
        higher = phases[:, :-1, ::-1].cumsum(2)[:, :, ::-1] - phases[:, :-1]
        evidence = lower + higher + self._log_evidence(own)
        return evidence.reshape(B, -1)[:, :T], self._answer(own).reshape(B, copies * period, -1)[
            :, :T
        ]

    def _log_weights(self, counts: Floats) -> Floats:
        """(..., V) log w_v"""
        other = self.noise / self.symbols
        return counts * np.log1p((1.0 - self.noise) / other) + counts.sum(
            -1, keepdims=True
        ) * np.log(other)

    def _log_evidence(self, counts: Floats) -> Floats:
        """(...) log of the mean of w_v over v: the probability of what is known in a phase."""
        logs = self._log_weights(counts)
        top = logs.max(-1)
        return np.asarray(top + np.log(np.exp(logs - top[..., None]).mean(-1)))

    def _answer(self, counts: Floats) -> Floats:
        """(..., V) the next symbol of a phase: (1 - noise) p(h = v | known) + noise / V."""
        logs = self._log_weights(counts)
        block = np.exp(logs - logs.max(-1, keepdims=True))
        return (1.0 - self.noise) * block / block.sum(-1, keepdims=True) + self.noise / self.symbols


@dataclass(frozen=True)
class Grammar:
    """Symbol 0 is the start. `rules[a].sum() + words[a].sum()` is 1 for every a."""

    rules: Floats  # (A, A, A) p(a -> b c)
    words: Floats  # (A, V) p(a -> v)

    def __post_init__(self) -> None:
        total = self.rules.sum((1, 2)) + self.words.sum(1)
        if not np.allclose(total, 1.0):
            raise ValueError(
                f"the productions of each symbol must sum to 1; here they sum to {total.tolist()}"
            )

    def leaves(self, tokens: Tokens, known: Known) -> Floats:
        """(B, n, A) p(a -> x_t) where x_t is known, p(a -> any word) where not."""
        return np.where(known[..., None], self.words.T[tokens], self.words.sum(1))

    def inside(self, leaves: Floats) -> Floats:
        """(B, n + 1, n + 1, A)"""
        B, n, A = leaves.shape
        table = np.zeros((B, n + 1, n + 1, A))
        table[:, np.arange(n), np.arange(1, n + 1)] = leaves
        flat = self.rules.reshape(A, A * A)
        for width in range(2, n + 1):
            starts = np.arange(n - width + 1)[:, None]
            splits = starts + np.arange(1, width)  # (spans, splits)
            # (B, spans, splits, A)
            left, right = table[:, starts, splits], table[:, splits, starts + width]
            pairs = left.swapaxes(2, 3) @ right  # (B, spans, A, A)
            table[:, starts[:, 0], starts[:, 0] + width] = (
                pairs.reshape(B, len(starts), A * A) @ flat.T
            )
        return table

    def outside_leaves(self, left: Floats, right: Floats) -> Floats:
        """(B, n, A) outside probabilities of the leaves, from the inside tables that left and right
        siblings read.
        """
        B, n, A = len(left), left.shape[1] - 1, left.shape[3]
        table = np.zeros((B, n + 1, n + 1, A))
        table[:, 0, n, 0] = 1.0
        as_left = self.rules.transpose(0, 2, 1).reshape(A * A, A)  # (a c, b): b is the left child
        as_right = self.rules.reshape(A * A, A)  # (a c, b): b is the right child
        for width in range(n - 1, 0, -1):
            for i in range(n - width + 1):
                j = i + width
                # (B, A of a, A of c)
                with_right = table[:, i, j + 1 :].swapaxes(1, 2) @ right[:, j, j + 1 :]
                with_left = table[:, :i, j].swapaxes(1, 2) @ left[:, :i, i]
                table[:, i, j] = (
                    with_right.reshape(B, A * A) @ as_left + with_left.reshape(B, A * A) @ as_right
                )
        leaves: Floats = table[:, np.arange(n), np.arange(1, n + 1)]
        return leaves


@dataclass(frozen=True)
class GrammarSource:
    name: str
    grammar: Grammar
    length: int

    @property
    def symbols(self) -> int:
        return self.grammar.words.shape[1]

    @cached_property
    def _spans(self) -> Floats:
        """(length + 1, A) p(a yields exactly so many words), wherever they stand."""
        grammar = self.grammar
        unknown = grammar.leaves(
            np.zeros((1, self.length), np.int64), np.zeros((1, self.length), np.bool_)
        )
        spans: Floats = grammar.inside(unknown)[0, 0]
        return spans

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """From the start symbol down, all sequences together: a node draws its split and children
        by what they can yield.
        """
        A = len(self.grammar.rules)
        tokens = np.empty((count, self.length), np.int64)
        nothing = np.zeros(count, np.int64)
        waiting: dict[int, list[tuple[Tokens, Tokens, Tokens]]] = {
            width: [] for width in range(1, self.length + 1)
        }
        # symbol, sequence, first word
        waiting[self.length].append((nothing, np.arange(count), nothing))
        for width in range(self.length, 1, -1):
            if not waiting[width]:
                continue
            symbol, row, start = (
                np.concatenate(parts) for parts in zip(*waiting.pop(width), strict=True)
            )
            splits = np.arange(1, width)
            weights = np.einsum(
                "abc,kb,kc->akbc",
                self.grammar.rules,
                self._spans[splits],
                self._spans[width - splits],
            )
            choice = _draw(weights.reshape(A, -1), symbol, rng)
            split, left, right = choice // (A * A) + 1, choice // A % A, choice % A
            for cut in splits.tolist():
                here = split == cut
                waiting[cut].append((left[here], row[here], start[here]))
                waiting[width - cut].append((right[here], row[here], start[here] + cut))
        symbol, row, start = (np.concatenate(parts) for parts in zip(*waiting[1], strict=True))
        tokens[row, start] = _draw(self.grammar.words, symbol, rng)
        return tokens

    def log_next(self, tokens: Tokens, context: Known) -> Floats:
        return self._conditionals(tokens, np.ones_like(context), context)

    def log_marginal(self, tokens: Tokens, context: Known) -> Floats:
        return self._conditionals(tokens, context, context)

    def log_left(self, tokens: Tokens) -> Floats:
        known = np.ones(tokens.shape, np.bool_)
        return self._conditionals(tokens, known, ~known)

    def _conditionals(self, tokens: Tokens, left: Known, right: Known) -> Floats:
        """(B, n, V) log p(x_t | the tokens before t that `left` names, those behind
        t that `right` names).
        """
        grammar = self.grammar
        after = grammar.inside(grammar.leaves(tokens, right))
        before = after if left is right else grammar.inside(grammar.leaves(tokens, left))
        joint = grammar.outside_leaves(before, after) @ grammar.words
        with np.errstate(invalid="ignore"):
            return floored_log(joint / joint.sum(2, keepdims=True))


def _draw(weights: Floats, rows: Tokens, rng: np.random.Generator) -> Tokens:
    """(N,) for each of `rows` an index into that row of the weights (A, K), which
    need not sum to one.
    """
    uniform, edges = rng.random(len(rows)), np.cumsum(weights, axis=1)
    drawn = np.empty(len(rows), np.int64)
    for row in np.unique(rows).tolist():
        here = rows == row
        drawn[here] = np.searchsorted(edges[row], uniform[here] * edges[row, -1], side="right")
    return drawn


def bracket_grammar(kinds: int = 3, fillers: int = 4, slip: float = 0.05) -> Grammar:
    """Nested clauses whose closing word agrees with the opening one, however much stands between.

        S -> S S | O_i C_i | O_i K_i | filler,   C_i -> S K_i,   O_i, K_i -> one of two words

    A closing word is of another kind with probability `slip`. There are 1 + 3 kinds nonterminals;
    words are openers, closers, fillers.
    """
    if kinds < 2:
        raise ValueError(
            f"kinds is {kinds!r}; it must be at least 2: with one kind there is nothing to agree on"
        )
    A, V = 1 + 3 * kinds, 4 * kinds + fillers
    rules, words = np.zeros((A, A, A)), np.zeros((A, V))
    rules[0, 0, 0] = 0.25
    # some fillers are commoner
    words[0, 4 * kinds :] = 0.35 * np.arange(fillers, 0, -1) / (fillers * (fillers + 1) / 2)
    for i in range(kinds):
        opener, clause, closer = 1 + 3 * i, 2 + 3 * i, 3 + 3 * i
        rules[0, opener, clause], rules[0, opener, closer] = 0.3 / kinds, 0.1 / kinds
        rules[clause, 0, closer] = 1.0
        words[opener, 2 * i : 2 * i + 2] = 0.7, 0.3
        kind = np.full(kinds, slip / (kinds - 1))
        kind[i] = 1.0 - slip
        words[closer, 2 * kinds : 4 * kinds] = np.outer(kind, (0.6, 0.4)).ravel()
    return Grammar(rules, words)


VERSION = 1
PURPOSES = ("train", "validation", "test")

_BUILDERS: dict[str, tuple[str, Callable[[str], Source]]] = {
    "hmm-4": (
        "4 hidden states, 8 symbols",
        lambda name: ChainSource(name, mixing_chain(4, 8, 2, 0.2), 48),
    ),
    "hmm-16": (
        "16 hidden states, 16 symbols",
        lambda name: ChainSource(name, mixing_chain(16, 16, 2, 0.1), 48),
    ),
    "hmm-64": (
        "64 hidden states, 32 symbols",
        lambda name: ChainSource(name, mixing_chain(64, 32, 3, 0.05), 48),
    ),
    "hmm-16-slow": (
        "16 hidden states that stay for about 16 symbols",
        lambda name: ChainSource(name, mixing_chain(16, 16, 4, 0.3, stay=15 / 16), 48),
    ),
    "hmm-8-second": (
        "8 hidden states, each drawn from the two before",
        lambda name: ChainSource(name, second_order_chain(8, 12, 5, 0.1), 48),
    ),
    "grammar": (
        "nested clauses that close as they opened",
        lambda name: GrammarSource(name, bracket_grammar(), 24),
    ),
    "copies": (
        "a noisy block that comes back every 24 symbols",
        lambda name: CopySource(name, 16, 72, (24,), 0.1),
    ),
    "copies-mixed": (
        "a noisy block that comes back every 17, 20 or 23 symbols",
        lambda name: CopySource(name, 16, 72, (17, 20, 23), 0.1),
    ),
}


def source_names() -> tuple[str, ...]:
    return tuple(_BUILDERS)


def describe_source(name: str) -> str:
    find_source(name)
    return _BUILDERS[name][0]


@cache
def find_source(name: str) -> Source:
    if name not in _BUILDERS:
        close = get_close_matches(name, _BUILDERS, n=1)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"there is no exact source {name!r}{guess}; available: {', '.join(_BUILDERS)}"
        )
    return _BUILDERS[name][1](name)


def draw_sequences(source: Source, purpose: str, count: int, seed: int) -> Tokens:
    """(count, length): the sequences of one purpose and seed, apart from those of any other; the
    same on every machine.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose is {purpose!r}; allowed: {', '.join(PURPOSES)}")
    key = (seed, zlib.crc32(source.name.encode()), PURPOSES.index(purpose), VERSION)
    return source.sample(count, np.random.default_rng(key))
