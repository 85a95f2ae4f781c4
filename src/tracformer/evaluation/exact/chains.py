"""Hidden Markov chains of several sizes and memories, behind the protocol of a source."""

from dataclasses import dataclass

import numpy as np

from tracformer.evaluation.exact.sources import Floats, Known, Tokens, floored_log
from tracformer.synthetic.hmm import HiddenMarkov


@dataclass(frozen=True)
class ChainSource:
    """The CAR conditional joins forward messages over the true prefix with backward messages over the given suffix."""

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


def mixing_chain(states: int, symbols: int, seed: int, sharpness: float, stay: float = 0.0) -> HiddenMarkov:
    """Random rows; with probability `stay` the state does not move, so that it is remembered for about 1 / (1 - stay) symbols."""
    chain = HiddenMarkov.random(states, symbols, seed, sharpness)
    return HiddenMarkov(chain.initial, stay * np.eye(states) + (1.0 - stay) * chain.transition, chain.emission)


def second_order_chain(states: int, symbols: int, seed: int, sharpness: float) -> HiddenMarkov:
    """p(z_t | z_{t-2}, z_{t-1}) as a first-order chain over the pairs (z_{t-1}, z_t); only the newer state of a pair is heard."""
    rng = np.random.default_rng(seed)
    following = rng.dirichlet(np.full(states, sharpness), size=(states, states))  # (S, S, S) p(z_t | z_{t-2}, z_{t-1})
    emission = rng.dirichlet(np.full(symbols, sharpness), size=states)  # (S, V)
    transition = np.zeros((states, states, states, states))
    for newer in range(states):
        transition[:, newer, newer, :] = following[:, newer]  # (a, b) -> (b, c)
    pairs = states * states
    return HiddenMarkov(np.full(pairs, 1.0 / pairs), transition.reshape(pairs, pairs), np.tile(emission, (states, 1)))
