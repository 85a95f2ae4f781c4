"""Exact sources against enumeration of all sequences, their conditionals against each other."""

from itertools import pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

from tracformer.evaluation.exact_grammar import Grammar, GrammarSource
from tracformer.evaluation.exact_sources import (
    ChainSource,
    CopySource,
    ExactSource,
    draw_sequences,
    find_source,
    log_joint,
    mixing_chain,
    picked,
    second_order_chain,
    source_names,
)

SYMBOLS, LENGTH = 3, 5
EVERY = np.array(list(product(range(SYMBOLS), repeat=LENGTH)))  # (243, 5)


def random_grammar(symbols: int = 2, words: int = SYMBOLS, seed: int = 0) -> Grammar:
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(symbols * symbols + words), size=symbols)
    return Grammar(weights[:, words:].reshape(symbols, symbols, symbols), weights[:, :words])


TINY: dict[str, ExactSource] = {
    "chain": ChainSource("chain", LENGTH, mixing_chain(3, SYMBOLS, 0, 0.5)),
    "slow": ChainSource("slow", LENGTH, mixing_chain(3, SYMBOLS, 1, 0.5, stay=0.9)),
    "second": ChainSource("second", LENGTH, second_order_chain(2, SYMBOLS, 2, 0.5)),
    "grammar": GrammarSource("grammar", LENGTH, random_grammar()),
    "copies": CopySource("copies", LENGTH, SYMBOLS, (2,), 0.3),
    "mixed": CopySource("mixed", LENGTH, SYMBOLS, (2, 3), 0.3),
}


def enumerated(name: str) -> NDArray[np.float64]:
    """Return the probability of each sequence, (243,), by summing over all hidden variables."""
    source = TINY[name]
    total = np.zeros(len(EVERY))
    if isinstance(source, ChainSource):
        chain = source.chain
        for path in product(range(len(chain.initial)), repeat=LENGTH):
            p = chain.initial[path[0]] * np.prod(
                [chain.transition[a, b] for a, b in pairwise(path)]
            )
            total += p * np.prod(
                [chain.emission[z, EVERY[:, t]] for t, z in enumerate(path)], axis=0
            )
        return total
    if isinstance(source, CopySource):
        for period in source.periods:
            for block in product(range(SYMBOLS), repeat=period):
                copies = np.array([block[t % period] for t in range(LENGTH)])
                share = 1 / len(source.periods) / SYMBOLS**period
                total += share * np.where(
                    copies == EVERY,
                    1 - source.noise + source.noise / SYMBOLS,
                    source.noise / SYMBOLS,
                ).prod(1)
        return total
    assert isinstance(source, GrammarSource)
    total = trees(source.grammar, 0, 0, LENGTH)
    return total / total.sum()  # of this length


def trees(grammar: Grammar, symbol: int, start: int, stop: int) -> NDArray[np.float64]:
    """Return the weight of all trees over words start..stop-1 of each sentence, (243,)."""
    if stop - start == 1:
        return grammar.words[symbol, EVERY[:, start]]
    total = np.zeros(len(EVERY))
    for cut, b, c in product(
        range(start + 1, stop), range(len(grammar.rules)), range(len(grammar.rules))
    ):
        total += (
            grammar.rules[symbol, b, c]
            * trees(grammar, b, start, cut)
            * trees(grammar, c, cut, stop)
        )
    return total


@pytest.fixture(scope="module")
def laws() -> dict[str, NDArray[np.float64]]:
    return {name: enumerated(name) for name in TINY}


def answer(
    law: NDArray[np.float64], tokens: NDArray[np.int64], t: int, known: list[int]
) -> NDArray[np.float64]:
    """Return p(x_t | the known tokens), (V,), by counting."""
    agree = (EVERY[:, known] == tokens[known]).all(1)
    weights = np.array([law[agree & (EVERY[:, t] == v)].sum() for v in range(SYMBOLS)])
    return weights / weights.sum()


@pytest.mark.parametrize("name", TINY)
def test_every_conditional_by_enumeration(name: str, laws: dict[str, NDArray[np.float64]]) -> None:
    source, law, rng = TINY[name], laws[name], np.random.default_rng(0)
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    tokens = EVERY[rng.choice(len(EVERY), 12, p=law)]
    context = rng.random(tokens.shape) < 0.4
    context[0], context[1] = False, True
    found = {
        "next": (
            source.log_next(tokens, context),
            lambda c, t: [s for s in range(LENGTH) if s < t or (c[s] and s > t)],
        ),
        "marginal": (
            source.log_marginal(tokens, context),
            lambda c, t: [s for s in range(LENGTH) if c[s] and s != t],
        ),
        "left": (source.log_left(tokens), lambda c, t: list(range(t))),
    }
    for kind, (logs, known) in found.items():
        for b, t in product(range(len(tokens)), range(LENGTH)):
            expected = answer(law, tokens[b], t, known(context[b], t))
            np.testing.assert_allclose(
                np.exp(logs[b, t]), expected, rtol=1e-10, err_msg=f"{kind} {b} {t}"
            )


@pytest.mark.parametrize("name", TINY)
def test_samples_follow_the_law(name: str, laws: dict[str, NDArray[np.float64]]) -> None:
    tokens = TINY[name].sample(20_000, np.random.default_rng(1))
    observed = np.bincount(tokens @ SYMBOLS ** np.arange(LENGTH)[::-1], minlength=len(EVERY))
    expected = laws[name] * len(tokens)
    often = expected > 5  # the rest together
    pairs = [
        (observed[often], expected[often]),
        (observed[~often].sum()[None], expected[~often].sum()[None]),
    ]
    chi_square = sum(
        float(((o - e) ** 2 / np.maximum(e, 1e-9)).sum()) for o, e in pairs if e.sum() > 1
    )
    assert chi_square < often.sum() + 5 * np.sqrt(2 * often.sum())


@pytest.mark.parametrize("name", source_names())
def test_chain_rule_in_either_direction(name: str) -> None:
    """log p(x_R | x_C) by CAR conditionals, and by marginals from right to left, are equal."""
    source = find_source(name)
    tokens = draw_sequences(source, "test", 3, 0)
    context = np.random.default_rng(0).random(tokens.shape) < 0.8
    backwards, known = np.zeros(len(tokens)), context.copy()
    for t in range(source.length - 1, -1, -1):
        if not known[:, t].all():
            backwards += np.where(
                known[:, t], 0.0, picked(source.log_marginal(tokens, known), tokens)[:, t]
            )
        known[:, t] = True
    np.testing.assert_allclose(backwards, log_joint(source, tokens, context), rtol=1e-10)


@pytest.mark.parametrize("name", source_names())
def test_conditionals_are_distributions_and_ignore_what_is_unknown(name: str) -> None:
    source = find_source(name)
    tokens = draw_sequences(source, "test", 3, 0)
    assert tokens.shape == (3, source.length)
    assert set(tokens.ravel().tolist()) <= set(range(source.symbols))
    context = np.random.default_rng(1).random(tokens.shape) < 0.3
    for logs in (
        source.log_next(tokens, context),
        source.log_marginal(tokens, context),
        source.log_left(tokens),
    ):
        np.testing.assert_allclose(np.exp(logs).sum(2), 1.0, rtol=1e-12)
    other = np.where(context, tokens, draw_sequences(source, "test", 3, 9))
    np.testing.assert_allclose(
        source.log_marginal(other, context)[~context],
        source.log_marginal(tokens, context)[~context],
        atol=1e-12,
    )
    last = source.length // 2
    changed = np.where(np.arange(source.length) > last, other, tokens)
    np.testing.assert_allclose(
        source.log_next(changed, context)[:, : last + 1],
        source.log_next(tokens, context)[:, : last + 1],
        atol=1e-9,
    )


def test_purposes_and_seeds_have_different_sequences() -> None:
    source = find_source("hmm-4")
    first = draw_sequences(source, "test", 5, 0)
    assert np.array_equal(first, draw_sequences(source, "test", 5, 0))
    assert not np.array_equal(first, draw_sequences(source, "train", 5, 0))
    assert not np.array_equal(first, draw_sequences(source, "test", 5, 1))
    with pytest.raises(ValueError, match="did you mean 'hmm-4'"):
        find_source("hmm4")


def test_sources_of_a_version_do_not_change() -> None:
    """If this fails, figures are not comparable any more: raise VERSION."""
    sums = {
        name: int(draw_sequences(find_source(name), "test", 20, 0).sum()) for name in source_names()
    }
    assert sums == {
        "hmm-4": 3208,
        "hmm-16": 6708,
        "hmm-64": 15147,
        "hmm-16-slow": 8417,
        "hmm-8-second": 4702,
        "grammar": 3431,
        "copies": 11285,
        "copies-mixed": 11165,
    }


def test_a_grammar_must_sum_to_one() -> None:
    with pytest.raises(ValueError, match="must sum to 1"):
        Grammar(np.zeros((1, 1, 1)), np.full((1, 2), 0.4))
