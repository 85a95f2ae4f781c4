"""Recorded figures, fills and scores do not change unless they are recorded again.

python -m tests.golden.record          figures of families and tasks, after their schema is raised
python -m tests.golden.test_figures    fills and scores of the bundled model, in stories.json"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import tracformer
from tests.golden import record
from tests.golden.figures import (
    COMMAND,
    Figures,
    compute,
    family_figures,
    problem_of,
    read_record,
    subjects,
)
from tracformer import LanguageModel
from tracformer import baselines as families
from tracformer.evaluation.task import task_class
from tracformer.generation.orders import parse_order
from tracformer.generation.samplers import Sampler
from tracformer.model import likelihood

SUBJECTS = list(subjects())


@pytest.mark.parametrize(("kind", "name"), SUBJECTS, ids=lambda word: word)
def test_figures_are_those_recorded(kind: str, name: str, tmp_path: Path) -> None:
    recorded = read_record()[kind].get(name)
    if recorded is None:
        pytest.fail(f"no figures of {name!r} are recorded; run `{COMMAND}`", pytrace=False)
    try:
        found = compute(kind, name, tmp_path)
    except ImportError as error:  # of an optional package
        pytest.skip(str(error))
    if (problem := problem_of(kind, name, found, recorded)) is not None:
        pytest.fail(problem, pytrace=False)


def test_nothing_is_recorded_that_is_not_registered() -> None:
    recorded = {(kind, name) for kind, entries in read_record().items() for name in entries}
    assert recorded <= set(SUBJECTS), f"run `{COMMAND}`"


def test_a_changed_loss_fails_until_the_schema_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recorded = likelihood.weighted_nll, read_record()["families"]["tracformer"]
    monkeypatch.setattr(likelihood, "weighted_nll", lambda *values: 1.00001 * plain(*values))
    changed = family_figures("tracformer")
    problem = problem_of("families", "tracformer", changed, recorded)
    assert problem is not None
    assert problem.startswith("figures of family 'tracformer' changed: car loss was")
    assert problem.endswith(f"raise its schema in tracformer.baselines and run `{COMMAND}`")
    assert record.decide("families", "tracformer", changed, recorded) == (recorded, problem)

    family = families.find_family("tracformer")
    family = dataclasses.replace(family, schema=family.schema + 1)
    monkeypatch.setitem(families._families, "tracformer", family)
    raised = family_figures("tracformer")
    assert f"run `{COMMAND}`" in str(problem_of("families", "tracformer", raised, recorded))
    assert record.decide("families", "tracformer", raised, recorded) == (raised, None)


def test_new_options_and_missing_figures_are_reported() -> None:
    before = Figures({"task": 1}, {"nll": [1.0], "bits": [None]}, ["length"])
    after = Figures({"task": 1}, {"nll": [1.0], "gain": [2.0]}, ["length", "repeats"])
    problem = str(problem_of("tasks", "ratios", after, before))
    assert "option 'repeats' is new: put it into `later_options`" in problem
    assert "bits was [None] and is now None" in problem
    assert "gain was None and is now [2.0]" in problem
    assert task_class("ratios").__module__ in problem
    missing = f"no figures of task 'ratios' are recorded; run `{COMMAND}`"
    assert problem_of("tasks", "ratios", after, None) == missing
    assert problem_of("tasks", "ratios", before, before) is None


def test_figures_count_as_equal_up_to_rounding() -> None:
    before = Figures({"task": 1}, {"nll": [1.0], "mauve[x]": [0.5]})
    assert not Figures({"task": 1}, {"nll": [1.0 + 1e-7], "mauve[x]": [0.5001]}).differences(before)
    assert Figures({"task": 1}, {"nll": [1.0 + 1e-5], "mauve[x]": [0.51]}).differences(before) == [
        "nll was [1.0] and is now [1.00001]",
        "mauve[x] was [0.5] and is now [0.51]",
    ]


# ---- fills and scores of the bundled model

RECORD = Path(__file__).parent / "stories.json"
CASES: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
TOLERANCE = 1e-4  # nats


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tracformer.load("stories")


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_stories_gives_what_was_recorded(lm: LanguageModel, case: dict[str, Any]) -> None:
    assert differences(results_of(lm, case), case["results"]) == []


def results_of(lm: LanguageModel, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a case as JSON has them."""
    call, text, options = case["call"], case.get("text"), dict(case.get("options", {}))
    if "sampler" in options:
        options["sampler"] = Sampler(**options["sampler"])
    if "order" in options:
        options["order"] = parse_order(**options["order"])
    if "prior" in options:
        options["prior"] = {int(length): weight for length, weight in options["prior"].items()}
    if call == "infill":
        return [filled(result) for result in lm.infill(text, quality="raw", **options)]
    if call == "score":
        return [scored(lm.score(text, **options))]
    if call == "marginals":
        return [marginal(result) for result in lm.marginals(text, **options)]
    assert call == "sample"
    return [sampled(result) for result in lm.sample(**options)]


def filled(result: Any) -> dict[str, Any]:
    choice = result.length_choice
    return {
        "text": result.text,
        "seed": result.seed,
        "fills": [span.text for span in result.spans],
        "tokens": [list(span.token_ids) for span in result.spans],
        "log_prob": result.log_prob,
        "log_probs": [list(span.log_probs) for span in result.spans],
        "lengths": None if choice is None else [list(each) for each in choice.lengths],
        "length_log_probs": None if choice is None else list(choice.log_probabilities),
    }


def scored(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "tokens": [list(span.tokens) for span in result.spans],
        "log_prob": result.log_prob,
        "log_probs": [list(span.log_probs) for span in result.spans],
        "candidates": [[candidates(each) for each in span.candidates] for span in result.spans],
    }


def marginal(result: Any) -> dict[str, Any]:
    return {
        "position": [result.position_in_text, result.blank, result.index],
        "candidates": candidates(result.candidates),
    }


def sampled(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "seed": result.seed,
        "tokens": list(result.token_ids),
        "log_prob": result.log_prob,
        "log_probs": list(result.log_probs),
        "ended": result.ended,
        "stopped": result.stopped,
    }


def candidates(likely: Any) -> list[list[Any]]:
    return [[each.text, each.log_prob] for each in likely]


def differences(now: Any, before: Any, where: str = "results") -> list[str]:
    """Return a line for each value that is not the recorded one."""
    if isinstance(now, float) and isinstance(before, float):
        return [] if abs(now - before) <= TOLERANCE else [f"{where} was {before} and is {now}"]
    if isinstance(now, dict) and isinstance(before, dict) and now.keys() == before.keys():
        lines = (differences(now[key], before[key], f"{where}.{key}") for key in now)
        return [line for each in lines for line in each]
    if isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        pairs = enumerate(zip(now, before, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    return [] if now == before else [f"{where} was {before!r} and is {now!r}"]


def record_stories() -> None:
    """Compute the results of every case and write them to the record_stories."""
    lm = tracformer.load("stories")
    cases = [{**case, "results": results_of(lm, case)} for case in CASES]
    lines = [json.dumps(_rounded(case), ensure_ascii=False) for case in cases]
    RECORD.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


if __name__ == "__main__":
    record_stories()
