from itertools import pairwise, product

import numpy as np
import pytest

from tracformer.evaluation.exact_sources import HiddenMarkov

LENGTH, SYMBOLS = 5, 3


@pytest.fixture
def chain() -> HiddenMarkov:
    return HiddenMarkov.random(states=4, symbols=SYMBOLS, seed=0)


def every_sequence() -> np.ndarray:
    return np.array(list(product(range(SYMBOLS), repeat=LENGTH)))


def brute_force(chain: HiddenMarkov, tokens: np.ndarray) -> np.ndarray:
    """p(x) by summing over every path of hidden states."""
    total = np.zeros(len(tokens))
    for path in product(range(len(chain.initial)), repeat=LENGTH):
        p = chain.initial[path[0]] * np.prod([chain.transition[a, b] for a, b in pairwise(path)])
        total += p * np.prod([chain.emission[z, tokens[:, t]] for t, z in enumerate(path)], axis=0)
    return total


def test_joint_by_brute_force(chain: HiddenMarkov) -> None:
    tokens = every_sequence()
    joint = np.exp(chain.log_evidence(tokens, np.ones(tokens.shape, dtype=bool)))
    np.testing.assert_allclose(joint, brute_force(chain, tokens), rtol=1e-12)
    assert abs(joint.sum() - 1) < 1e-12


@pytest.mark.parametrize("given", [(), (0,), (2,), (1, 4), (0, 1, 2, 3)])
def test_conditionals_by_brute_force(chain: HiddenMarkov, given: tuple[int, ...]) -> None:
    tokens = every_sequence()
    context = np.zeros(tokens.shape, dtype=bool)
    context[:, list(given)] = True
    joint = brute_force(chain, tokens)
    same = (
        (tokens[:, None, :] == tokens[None])[..., list(given)].all(-1)
        if given
        else np.ones((len(tokens),) * 2, dtype=bool)
    )
    conditional = joint / (same * joint).sum(1)
    np.testing.assert_allclose(
        np.exp(chain.log_conditional(tokens, context)), conditional, rtol=1e-10
    )
    marginals = chain.marginals(tokens, context)
    for t in set(range(LENGTH)) - set(given):
        for symbol in range(SYMBOLS):
            expected = (same * joint * (tokens[:, t] == symbol)).sum(1) / (same * joint).sum(1)
            np.testing.assert_allclose(marginals[:, t, symbol], expected, rtol=1e-10)


def test_samples_follow_the_chain(chain: HiddenMarkov) -> None:
    tokens = chain.sample(40_000, LENGTH, np.random.default_rng(1))
    codes = tokens @ SYMBOLS ** np.arange(LENGTH)[::-1]
    observed = np.bincount(codes, minlength=SYMBOLS**LENGTH)
    expected = brute_force(chain, every_sequence()) * len(tokens)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < SYMBOLS**LENGTH + 5 * np.sqrt(2 * SYMBOLS**LENGTH)
