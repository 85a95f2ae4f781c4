"""Every family and task gives the figures that were recorded under its schema."""

import dataclasses
from pathlib import Path

import pytest

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
from tracformer import baselines as families
from tracformer.evaluation.task import task_class
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


def test_new_options_and_missing_figures_are_told() -> None:
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
