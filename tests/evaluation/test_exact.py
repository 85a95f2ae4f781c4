"""The task `exact`, and the conditionals of its sources against enumeration."""

import dataclasses
import json
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.toys import random_mdlm, small_model
from tracformer.cli import main
from tracformer.data import PackedBlocks, PreparedData
from tracformer.evaluation.consistency import order_log_prob
from tracformer.evaluation.exact import (
    PATTERNS,
    Exact,
    TruthModel,
    UniformModel,
    draw_pattern,
    kl,
    rank,
    truth_of,
)
from tracformer.evaluation.exact_grammar import Grammar, GrammarSource
from tracformer.evaluation.exact_sources import (
    ChainSource,
    CopySource,
    ExactSource,
    draw_sequences,
    find_source,
    log_joint,
    mixing_chain,
    parse_exact,
    picked,
    second_order_chain,
    source_names,
)
from tracformer.evaluation.result_files import Result, ResultRow, read_results
from tracformer.evaluation.task import Progress, Subject, evaluate, parse_task
from tracformer.generation.decode import fill
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch

MODES = ("car", "ac", "ar")


def run(model: ConditionalModel, mode: str, batch: int = 32, **options: Any) -> Result:
    subject = Subject(model, None, "model", mode, batch)
    return Exact(**options).run(subject, Progress())


def kls(result: Result, metric: str = "kl") -> dict[str, float]:
    return {row.setting["pattern"]: row.value for row in result.rows if row.metric == metric}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", source_names())
def test_the_truth_scores_zero_on_every_pattern(name: str, mode: str) -> None:
    result = run(TruthModel(find_source(name)), mode, source=name, sequences=3)
    assert set(kls(result)) == set(PATTERNS)
    assert max(map(abs, kls(result).values())) < 1e-12
    assert max(map(abs, kls(result, "missed").values())) < 1e-9
    assert not any(entry["wrong"] for entry in result.details["ranking"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["hmm-16", "grammar", "copies-mixed"])
def test_the_uniform_model_scores_log_v_less_the_entropy(name: str, mode: str) -> None:
    source = find_source(name)
    found = kls(run(UniformModel(source), mode, source=name, sequences=4))
    tokens = draw_sequences(source, "test", 4, 0)
    for pattern in ("one", "alternating", "all"):
        context = draw_pattern(PATTERNS[pattern], source.length, 0, range(4))
        logs = truth_of(source, tokens, context, mode)[~context]
        entropy = -(np.exp(logs) * logs).sum(1).mean()
        assert found[pattern] == pytest.approx(
            np.log(source.symbols) - entropy, rel=1e-12, abs=1e-12
        )


def test_the_truth_fills_and_is_consistent_over_orders() -> None:
    source = find_source("hmm-4")
    model, tokens = TruthModel(source), torch.from_numpy(draw_sequences(source, "test", 2, 0))
    context = torch.zeros_like(tokens, dtype=torch.bool)
    context[:, 4:] = True
    sums = [
        order_log_prob(model, Batch(tokens, context), order).sum(1)
        for order in (torch.arange(48), torch.arange(48).flip(0))
    ]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-10, atol=0)
    filled = fill(model, Batch(tokens, context), "car", seed=1)
    torch.testing.assert_close(
        filled.log_prob,
        model.log_prob(Batch(filled.tokens, context), "car").sum(1),
        rtol=1e-12,
        atol=0,
    )
    with pytest.raises(ValueError, match="source 'hmm-4' makes 48"):
        model(Batch(tokens[:, :10], context[:, :10]), "car")


class Leaky(TruthModel):
    """The truth, but uniform in the last quarter unless the last symbol is given."""

    def log_probs(self, tokens: Any, context: Any, mode: str) -> Any:
        logs = super().log_probs(tokens, context, mode).copy()
        blind = ~context[:, -1]
        logs[blind, -12:] = -np.log(self.source.symbols)
        return logs


def test_patterns_that_a_model_gets_wrong_are_marked() -> None:
    result = run(Leaky(find_source("hmm-16")), "car", source="hmm-16", sequences=20)
    wrong = [entry["pattern"] for entry in result.details["ranking"] if entry["wrong"]]
    assert {"two-far", "outer-half"} <= set(wrong)
    assert not {"first-half", "middle-half", "alternating"} & set(wrong)
    assert [row.setting["pattern"] for row in result.rows if row.note.startswith("wrong on")] == [
        p for p in PATTERNS if p in wrong
    ]
    values = [entry["kl"] for entry in result.details["ranking"]]
    assert values == sorted(values, reverse=True)


def test_probability_of_an_end_of_text_is_lost_and_ar_has_kl_full() -> None:
    source = find_source("hmm-4")
    model = small_model(vocab_size=source.symbols + 1, max_length=64, n_layer=6)
    result = run(model, "car", source="hmm-4", sequences=2, patterns=("alternating",))
    tokens = draw_sequences(source, "test", 2, 0)
    context = draw_pattern(PATTERNS["alternating"], 48, 0, range(2))
    whole = torch.from_numpy(np.pad(tokens, ((0, 0), (0, 1)), constant_values=source.symbols))
    given = torch.from_numpy(np.pad(context, ((0, 0), (0, 1)), constant_values=True))
    logs = model(Batch(whole, given), "car")[~given].log_softmax(1).detach().numpy()
    true = source.log_next(tokens, context)[~context]
    assert logs.shape[1] == true.shape[1] + 1
    expected = (np.exp(true) * (true - logs[:, :-1])).sum(1).mean()
    assert kls(result)["alternating"] == pytest.approx(expected, rel=1e-10)
    with torch.no_grad():
        nll = -float(model.log_prob(Batch(whole, given), "car").sum())
    assert float(np.sum(result.details["alternating"]["nll"])) == pytest.approx(nll, rel=1e-10)

    blind = run(
        TruthModel(source), "ar", source="hmm-4", sequences=4, patterns=("one", "last-half")
    )
    assert abs(blind.find("kl", pattern="one").value) < 1e-12
    assert blind.find("kl_full", pattern="one").value > 0.01
    assert abs(blind.find("kl_full", pattern="last-half").value) < 1e-12  # nothing follows


def test_kl_ignores_what_cannot_occur() -> None:
    true = np.log(np.array([[1.0, 1e-300]]))
    assert kl(true, np.array([[np.log(0.5), -np.inf]]))[0] == pytest.approx(np.log(2))


def test_a_bound_has_an_excess_and_no_kl() -> None:
    model = random_mdlm(vocab_size=8, max_length=48)
    options: dict[str, Any] = {
        "source": "hmm-4",
        "sequences": 20,
        "patterns": ("one", "two-far"),
        "draws": 4,
    }
    result = run(model, "diffusion", **options)
    assert {(row.metric, row.kind) for row in result.rows} == {("excess", "bound")}
    assert all(
        re.fullmatch(r"(wrong on .*; )?4 draws, standard error of excess [\d.e-]+", row.note)
        for row in result.rows
    )
    sums = result.details["one"]
    assert result.find("excess", pattern="one").value == pytest.approx(
        (sums["nll"].sum() - sums["truth"].sum()) / 20
    )
    assert kls(run(model, "diffusion", batch=3, **options), "excess") == pytest.approx(
        kls(result, "excess"), rel=1e-10
    )


def test_an_interrupted_run_continues_and_a_finished_one_is_read(tmp_path: Path) -> None:
    class Interrupted(UniformModel):
        left = 3

        def log_probs(self, tokens: Any, context: Any, mode: str) -> Any:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            return super().log_probs(tokens, context, mode)

    task = parse_task(
        "exact:source=hmm-4,sequences=10,patterns=one/all/alternating/two-far/first-half"
    )
    model = Interrupted(find_source("hmm-4"))
    subject = Subject(model, None, "uniform", "car")
    with pytest.raises(KeyboardInterrupt):
        list(evaluate([subject], [task], tmp_path))
    assert not list(tmp_path.glob("*.json"))
    model.left = 2
    (result,) = evaluate([subject], [task], tmp_path)
    assert kls(result) == kls(
        run(
            UniformModel(find_source("hmm-4")),
            "car",
            source="hmm-4",
            sequences=10,
            patterns=tuple(kls(result)),
        )
    )
    (again,) = evaluate([subject], [task], tmp_path)  # computes nothing
    assert (kls(again), model.left) == (kls(result), 0)


def test_ranking_needs_more_than_chance() -> None:
    rows = [
        ResultRow("kl", {"pattern": str(i)}, value, low, high)
        for i, (value, low, high) in enumerate([(1, 0.2, 3), (0.1, 0.1, 0.1), (1.9, 1.8, 2)])
    ]
    noted, ranking = rank(rows)
    assert [row.note for row in noted] == ["", "", "wrong on 2: 1.9 times the mean pattern"]
    assert [entry["pattern"] for entry in ranking] == ["2", "0", "1"]


def test_wrong_options_raise() -> None:
    with pytest.raises(ValueError, match="did you mean 'grammar'"):
        parse_task("exact:source=gramar")
    with pytest.raises(ValueError, match="did you mean 'alternating'"):
        parse_task("exact:patterns=alternate")
    with pytest.raises(ValueError, match="version is 7"):
        parse_task("exact:version=7")
    with pytest.raises(ValueError, match=r"prepare exact:hmm-16"):
        run(small_model(vocab_size=30, max_length=64, n_layer=6), "car", source="hmm-16")
    with pytest.raises(ValueError, match="takes at most 16 tokens"):
        run(small_model(vocab_size=16, max_length=16), "car", source="hmm-16")


def test_contexts_and_data_are_hashed() -> None:
    subject = Subject(UniformModel(find_source("hmm-4")), None, "u", "ac")
    task = Exact(source="hmm-4", sequences=5)
    hashes = task.inputs(subject)
    assert hashes == task.inputs(subject)
    assert all(
        hashes[key] != dataclasses.replace(task, seed=1).inputs(subject)[key]
        for key in ("data", "contexts")
    )


# ---- sources as training data


def test_a_packed_row_is_one_sequence_and_its_end(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "data"), "--json"]
    assert main(["prepare", "exact:grammar,sequences=40,seed=3", *out]) == 0
    data, source = PreparedData.open(tmp_path / "data"), find_source("grammar")
    assert data.tokenizer.vocab_size == source.symbols + 1
    for split, count in (("train", 40), ("validation", 2)):
        rows = PackedBlocks(data.split(split), source.length + 1)
        tokens, _ = rows.get(np.arange(len(rows)))
        assert np.array_equal(tokens[:, :-1], draw_sequences(source, split, count, 3))
        assert data.tokenizer.eot_id == source.symbols
        assert (tokens[:, -1] == source.symbols).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["exact:hmm"], "unknown exact source 'hmm'"),
        (["exact:hmm-4,steps=3"], "sequences=NUMBER or seed=NUMBER"),
        (["exact:hmm-4,sequences=0"], "sequences is 0; it must be at least 1"),
        (["exact:hmm-4", "--tokenizer", "byte"], "is generated, with its own tokenizer"),
    ],
)
def test_wrong_data_is_one_error(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *words, "--out", str(tmp_path / "data")]) == 2
    assert message in capsys.readouterr().err


def test_each_symbol_has_a_letter() -> None:
    drawn = parse_exact("exact:hmm-64,sequences=1")
    assert drawn.tokenizer.vocab_size == 33
    assert (drawn.sequences, drawn.seed) == (1, 0)


def test_data_training_and_evaluation_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, trained, out = (str(tmp_path / name) for name in ("data", "run", "results"))
    assert main(["prepare", "exact:grammar,sequences=200", "--out", data, "--json"]) == 0
    sizes = {"preset": "tiny", "d_model": 16, "n_head": 2, "n_layer": 5, "max_length": 32}
    model = [f"model.{key}={value}" for key, value in sizes.items()]
    steps = ["length=25", "steps=3", "optimizer.warmup=1", "eval_sequences=8"]
    assert main(["train", f"data={data}", f"run={trained}", *model, *steps]) == 0
    capsys.readouterr()
    task = "exact:source=grammar,sequences=3,patterns=one/all"
    words = ["--task", task, "--out", out, "--mode", "ac", "--json"]
    assert main(["eval", trained, *words]) == 0
    message = json.loads(capsys.readouterr().out)
    (result,) = read_results(out)
    assert {row["setting"]["pattern"] for row in message["rows"]} == {"one", "all"}
    assert result.find("kl", pattern="one").value > 0
    assert result.manifest["hashes"]["contexts"]


# ---- sources

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
