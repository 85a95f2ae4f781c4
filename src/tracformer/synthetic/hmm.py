"""Hidden Markov chains: a source whose every conditional is known exactly, so that a model can be measured against the truth."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]
Known = NDArray[np.bool_]


@dataclass(frozen=True)
class HiddenMarkov:
    initial: Floats  # (S,) p(z_1)
    transition: Floats  # (S, S) p(z_t | z_{t-1}), a row for each z_{t-1}
    emission: Floats  # (S, V) p(x_t | z_t)

    @classmethod
    def random(cls, states: int, symbols: int, seed: int, sharpness: float = 0.3) -> Self:
        """Rows from a symmetric Dirichlet; the lower `sharpness`, the more a symbol says about its neighbours."""
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
        """(B, T) log p(x_t | known x_<t) where x_t is known, zero elsewhere: the forward algorithm. With all known, what AR should say."""
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
        """(B, T, V) p(x_t | x_C) at every position, a given one read as if it alone were unknown: what AC should say."""
        return self.conditionals(tokens, context, context)

    def conditionals(self, tokens: Tokens, left: Known, right: Known) -> Floats:
        """(B, T, V) p(x_t | the tokens before t that `left` names, those behind t that `right` names).

        Forward messages carry the one, backward messages the other: p(x_t) ~ sum over z of before_t(z) after_t(z) p(x_t | z).
        """
        known_left, known_right = self._likelihood(tokens, left), self._likelihood(tokens, right)  # (B, T, S)
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
