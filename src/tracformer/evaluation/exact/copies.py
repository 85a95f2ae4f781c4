"""Periodic copies across long gaps: a hidden block of random symbols comes again and again, each time with noise.

    period P   uniform over `periods`
    block      h_0 .. h_{P-1}, each uniform over the V symbols
    x_t        h_{t mod P} with probability 1 - noise, else uniform over the V symbols

Given the period, the positions of one phase know of each other and of nothing else, however far apart they are; which period it is must
be told from all phases together. With n known symbols in a phase, c_v of them equal to v, the block's symbol has the weight
w_v = same^c_v other^(n - c_v), where other = noise / V and same = 1 - noise + other.
"""

from dataclasses import dataclass

import numpy as np

from tracformer.evaluation.exact.sources import Floats, Known, Tokens, floored_log


@dataclass(frozen=True)
class CopySource:
    name: str
    symbols: int
    length: int
    periods: tuple[int, ...]
    noise: float

    def __post_init__(self) -> None:
        if not self.periods or min(self.periods) < 1:
            raise ValueError(f"periods is {self.periods!r}; it must hold at least one positive integer")
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
        """(B, T, V) log p(x_t | the tokens before t that `left` names, those behind t that `right` names), a mean over periods."""
        evidence, answers = zip(*(self._under(period, tokens, left, right) for period in self.periods), strict=True)
        joint = np.stack(evidence)  # (periods, B, T)
        weights = np.exp(joint - joint.max(0))
        weights /= weights.sum(0)
        return floored_log((weights[..., None] * np.stack(answers)).sum(0))

    def _under(self, period: int, tokens: Tokens, left: Known, right: Known) -> tuple[Floats, Floats]:
        """At each t, under one period: the log-probability of what is known beside x_t (B, T), and p(x_t | it) (B, T, V).

        With t = copy * period + phase, the phases before that of t have their first copy + 1 symbols to the left of t, the others `copy`.
        """
        B, T = tokens.shape
        copies = -(-T // period)
        symbols = np.zeros((2, B, copies * period, self.symbols))  # one-hot where known, zero elsewhere
        for which, known in enumerate((left, right)):
            symbols[which, :, :T] = np.eye(self.symbols)[tokens] * known[..., None]
        before, behind = symbols.reshape(2, B, copies, period, self.symbols)
        nothing = np.zeros((B, 1, period, self.symbols))
        passed = np.concatenate((nothing, before.cumsum(1)), axis=1)  # (B, copies + 1, period, V): counts in the first k copies
        coming = np.concatenate((behind[:, ::-1].cumsum(1)[:, ::-1], nothing), axis=1)  # and in those from k on
        phases = self._log_evidence(passed + coming)  # (B, copies + 1, period) of a phase of which k symbols are passed
        own = passed[:, :-1] + coming[:, 1:]  # (B, copies, period, V) in the phase of t, without t
        lower = phases[:, 1:].cumsum(2) - phases[:, 1:]  # (B, copies, period): of all phases before that of t
        higher = phases[:, :-1, ::-1].cumsum(2)[:, :, ::-1] - phases[:, :-1]
        evidence = lower + higher + self._log_evidence(own)
        return evidence.reshape(B, -1)[:, :T], self._answer(own).reshape(B, copies * period, -1)[:, :T]

    def _log_weights(self, counts: Floats) -> Floats:
        """(..., V) log w_v"""
        other = self.noise / self.symbols
        return counts * np.log1p((1.0 - self.noise) / other) + counts.sum(-1, keepdims=True) * np.log(other)

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
