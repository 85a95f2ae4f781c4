"""Verdicts follow from paired differences, the gate, and what was run."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.report.results import result
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.report.claims import Claims, Judge, read_claims

WINDOWS = 40
TARGETS = 10
CONTEXTS = ("span:p=0.1,mean=12", "span:p=0.5,mean=12")
FILE = """
gate: {question: one-token, baseline: frequencies, gain: 0.3}
questions:
  one-token: {task: contexts, repeats: 16}
  spans: {task: ratios, mean: 12}
  long: {task: ratios, mean: 12, only: ["span:p=0.5,mean=12"]}
  fills: {task: infilling}
claims:
  - {place: Figure 5, text: ours is ahead, better: ours, worse: [theirs], questions: [spans]}
"""


def answers(
    model: str, task: str, nll: dict[str, float], noise: float = 0.02, seed: int = 0, **more: object
) -> Result:
    """Return a result with these nats per target; windows of one number are alike in all models."""
    hard = np.random.default_rng(0).normal(0, 0.5, WINDOWS)  # what all models find hard
    own = np.random.default_rng([seed, sum(map(ord, model))]).normal(0, noise, WINDOWS)
    rows, details = [], {}
    for contexts, level in nll.items():
        sums = TARGETS * (level + hard + own - own.mean() - hard.mean())
        details[contexts] = {"nll": sums.tolist(), "targets": [TARGETS] * WINDOWS}
        rows.append(ResultRow("nll", {"contexts": contexts}, level, kind="exact"))
    options = {"mean": 12} if task == "ratios" else {"repeats": 16}
    return result(f"{model} #{seed}", task, rows, options=options, details=details, **more)


def gated(model: str, gain: float = 1.0, seed: int = 0) -> Result:
    return answers(model, "contexts", {"tokens:1": 6.0 - gain}, seed=seed)


def study(
    theirs: float | dict[str, float], gain: float = 1.0, seeds: tuple[int, ...] = (0, 1, 2)
) -> list[Result]:
    """Return the results of `ours` at 4 nats and of `theirs` at other levels."""
    level = theirs if isinstance(theirs, dict) else dict.fromkeys(CONTEXTS, theirs)
    found = [gated("frequencies", 0.0)]
    for seed in seeds:
        found += [gated("ours", seed=seed), gated("theirs", gain, seed)]
        found.append(answers("ours", "ratios", dict.fromkeys(CONTEXTS, 4.0), seed=seed))
        found.append(answers("theirs", "ratios", level, seed=seed))
    return found


@pytest.fixture
def claims(tmp_path: Path) -> Claims:
    (tmp_path / "claims.yaml").write_text(FILE)
    return read_claims(tmp_path / "claims.yaml")


def changed(claims: Claims, **changes: object) -> Claims:
    return dataclasses.replace(claims, claims=(dataclasses.replace(claims.claims[0], **changes),))


def judge(claims: Claims, results: list[Result]) -> str:
    (verdict,) = Judge(claims, results).verdicts()
    return verdict.text


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [
        (4.1, "**holds**"),
        (3.9, "**contradicted**"),
        (4.001, "**not testable here**: the interval of the difference contains 0"),
        # ahead on the whole, but not everywhere
        ({CONTEXTS[0]: 3.9, CONTEXTS[1]: 4.5}, "**contradicted**: -0.100 [-0.1"),
    ],
)
def test_the_interval_of_the_paired_difference_decides(
    claims: Claims, theirs: float, verdict: str
) -> None:
    assert judge(claims, study(theirs)).startswith(verdict)


def test_the_difference_is_paired_by_window(claims: Claims) -> None:
    """Windows differ by half a nat, models by 0.1: only a paired interval excludes 0."""
    (verdict,) = Judge(claims, study(4.1)).verdicts()
    assert verdict.difference.value == pytest.approx(0.1, abs=1e-9)
    assert 0.08 < verdict.difference.low < 0.1 < verdict.difference.high < 0.12
    assert verdict.difference.seeds == 3
    assert {each.task for each in verdict.results} == {"ratios"}
    assert len(verdict.results) == 6


def test_one_seed_is_named(claims: Claims) -> None:
    assert judge(claims, study(4.1, seeds=(0,))) == "**holds**, one seed"


def test_the_spread_of_seeds_widens_the_interval(claims: Claims) -> None:
    results = study(4.1)
    (steady,) = Judge(claims, results).verdicts()
    uneven = [
        answers("theirs", "ratios", dict.fromkeys(CONTEXTS, level), seed=seed)
        for seed, level in enumerate((3.9, 4.1, 4.3))
    ]
    kept = [each for each in results if (each.model[:6], each.task) != ("theirs", "ratios")]
    (verdict,) = Judge(claims, [*kept, *uneven]).verdicts()
    assert verdict.difference.value == pytest.approx(steady.difference.value)
    assert verdict.difference.low < 0 < steady.difference.low
    assert verdict.outcome == "not testable here"


def test_a_model_that_did_not_learn_decides_nothing(claims: Claims) -> None:
    assert judge(claims, study(4.1, gain=0.2)) == (
        "**not testable here**: theirs gains 0.20 nats from the context of one hidden token, less "
        "than 0.3"
    )
    # of several variants, one that did not learn is left out
    better = answers("variant", "ratios", dict.fromkeys(CONTEXTS, 3.0))
    both = changed(claims, worse=("theirs", "variant"))
    assert judge(both, [*study(4.1), better, gated("variant", 0.1)]) == "**holds**"
    assert judge(both, [*study(4.1), better, gated("variant")]) == "**contradicted**, one seed"


@pytest.mark.parametrize("missing", ["frequencies", "ours", "theirs"])
def test_a_missing_result_leaves_the_verdict_open(claims: Claims, missing: str) -> None:
    results = study(4.1)
    for task in {"contexts"} | ({"ratios"} if missing != "frequencies" else set()):
        kept = [each for each in results if not (missing in each.model and each.task == task)]
        assert judge(claims, kept) == "**not run**"


@pytest.mark.parametrize("key", ["data", "contexts", "tokenizer"])
def test_results_of_different_inputs_are_refused(claims: Claims, key: str) -> None:
    results = study(4.1, seeds=(0,))
    other = dict(results[-1].manifest)
    other["hashes"] = {**other["hashes"], key: "another"}
    results[-1] = dataclasses.replace(results[-1], manifest=other)
    with pytest.raises(ValueError, match=f"their {key} differ"):
        Judge(claims, results).verdicts()


def test_a_claim_of_equality_needs_an_interval_within_the_margin(claims: Claims) -> None:
    equal = changed(claims, margin=0.05)
    assert judge(equal, study(4.01)) == "**holds**"
    assert judge(equal, study(4.2)) == "**contradicted**"
    assert judge(equal, study(3.8)) == "**contradicted**"
    assert judge(equal, study(4.05)).startswith("**not testable here**: the interval is wider")


def test_questions_may_name_some_contexts(claims: Claims) -> None:
    level = {CONTEXTS[0]: 3.9, CONTEXTS[1]: 4.5}
    assert judge(changed(claims, questions=("long",)), study(level)) == "**holds**"


def test_scores_and_sizes(claims: Claims) -> None:
    def scored(model: str, value: float) -> Result:
        row = ResultRow("bertscore[x]", {"over": "whole"}, value, value - 0.01, value + 0.01)
        part = ResultRow("bertscore[x]", {"over": "filled"}, 0.0)
        return result(f"{model} #0", "infilling", [row, part])

    results = [*study(4.0, seeds=(0,)), scored("ours", 0.5), scored("theirs", 0.47)]
    fills = changed(claims, metric="bertscore", questions=("fills",))
    (verdict,) = Judge(fills, results).verdicts()
    assert verdict.text == "**holds**, one seed"
    assert verdict.difference.low == pytest.approx(0.03 - 0.01 * 2**0.5)
    above = changed(claims, metric="bertscore", questions=("fills",), worse=(), above=0.6)
    assert judge(above, results) == "**contradicted**, one seed"
    sizes = [result("ours", "sizes", [ResultRow("parameters", {}, 108.7e6)])]
    assert judge(changed(claims, sizes={"ours": 109}), sizes) == "**holds**"
    assert judge(changed(claims, sizes={"ours": 110}), sizes) == (
        "**contradicted**: ours has 108.7M, not 110M"
    )
    assert judge(changed(claims, reason="no text"), []) == "**not testable here**: no text"


def test_mistakes_in_the_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(FILE.replace("questions: [spans]", "questions: [span]"))
    with pytest.raises(
        ValueError, match=r"Figure 5: unknown question 'span'; did you mean 'spans'"
    ):
        read_claims(path)
    path.write_text(FILE.replace("better: ours", "bettr: ours"))
    with pytest.raises(ValueError, match="unknown key 'bettr'"):
        read_claims(path)
