"""The page of results is made of the committed result files, and of nothing else."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.helpers import script
from tests.report.results import result
from tracformer.evaluation.result_files import Result, ResultRow, read_results
from tracformer.report.claims import NOT_RUN

page = script("docs/study.py")
RATIOS = (0.1, 0.5, 0.9)
WINDOWS = 20


def perplexities(model: str, mode: str, nll: float, mean: int, seed: int = 0) -> Result:
    rows, details = [], {}
    for ratio in RATIOS:
        name = f"span:p={ratio},mean={mean}"
        setting = {"contexts": name, "ratio": ratio}
        kind = "exact" if mode == "car" else "marginal"
        rows.append(ResultRow("nll", setting, nll, nll - 0.1, nll + 0.1, kind))
        details[name] = {
            "nll": [10 * nll + 0.123456 * (i % 3) for i in range(WINDOWS)],
            "targets": [10] * WINDOWS,
        }
    options = {"mean": mean, "length": 128}
    return result(f"{model} #{seed}", "ratios", rows, mode=mode, options=options, details=details)


def one_token(model: str, mode: str, nll: float) -> Result:
    options = {"contexts": ["tokens:1"], "length": 128}
    rows = [ResultRow("nll", {"contexts": "tokens:1"}, nll, kind="exact")]
    return result(f"{model} #0", "contexts", rows, mode=mode, options=options)


def committed() -> list[Result]:
    return read_results(page.RESULTS) if page.RESULTS.exists() else []


@pytest.fixture
def results() -> list[Result]:
    """Return results of three systems in CAR."""
    found = []
    for model, level in (("frequencies", 6.0), ("tracformer-car", 3.0), ("bart-modern", 3.5)):
        found += [perplexities(model, "car", level, mean) for mean in (12, 3, 1)]
        found.append(one_token(model, "car", level))
    return found


def test_the_page_shows_the_results() -> None:
    document = page.DOCUMENT.read_text()
    assert page.MARK.findall(document)
    assert page.Page(committed()).render(document) == document


def test_every_claim_has_a_verdict_and_its_files_exist() -> None:
    made = page.Page(committed())
    lines = made.verdicts().splitlines()[2:]
    assert len(lines) == len(made.claims.claims)
    for line in lines:
        claim, verdict, figure, files = (cell.strip() for cell in line.strip("|").split(" | "))
        assert claim
        assert verdict
        settled = verdict.startswith(("**holds**", "**contradicted**"))
        assert bool(files) >= settled
        assert figure or not settled or "sizes" in files
        for path in re.findall(r"\]\(([^)]+)\)", files):
            assert (page.DOCUMENT.parent / path).is_file()


def test_other_links_of_the_page_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", page.DOCUMENT.read_text()):
        assert (page.DOCUMENT.parent / path).exists(), path


def test_results_hold_no_texts() -> None:
    for path in page.RESULTS.glob("*.json"):
        assert not set(page.TEXTS) & set(json.loads(path.read_text())["details"])


def test_verdicts_gains_and_differences(results: list[Result]) -> None:
    made = page.Page(results)
    verdicts = made.verdicts()
    modern = next(
        line for line in verdicts.splitlines() if "CAR" not in line and "BART with" in line
    )
    assert "**holds**, one seed" in modern
    assert "+0.500 [+0.500, +0.500]" in modern
    assert f"**{NOT_RUN}**" in verdicts
    assert made.difference("bart-modern - tracformer-car: spans-12") == "+0.500 [+0.500, +0.500]"
    gains = made.gains("CAR").splitlines()
    assert gains[2].startswith("| `tracformer-car` | 3.000 | 3.000 | 3.000 | 3.000 |")
    assert gains[3].startswith("| `bart-modern` | 2.500")
    assert made.gains("AC") == f"({NOT_RUN})\n"
    assert "2 of the" in made.state()
    document = "<!-- state -->\nold<!-- end --> and <!-- gains AC -->\nold<!-- end -->"
    rendered = made.render(document)
    assert "old" not in rendered
    assert made.render(rendered) == rendered


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("<!-- stat -->x<!-- end -->", "unknown mark 'stat'"),
        ("<!-- gains AR -->x<!-- end -->", "gains 'AR': it must be one of CAR, AC"),
        ("<!-- difference a b -->x<!-- end -->", "write it as WORSE - BETTER: QUESTION"),
    ],
)
def test_mistakes_in_marks_are_named(results: list[Result], document: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        page.Page(results).render(document)


def test_pictures_show_what_was_run(results: list[Result], tmp_path: Path) -> None:
    assert page.Page([]).draw(tmp_path) == []
    assert [path.name for path in page.Page(results).draw(tmp_path)] == ["study-gains.png"]


def test_taking_over_keeps_rounded_sums_and_the_newest_result(
    results: list[Result], tmp_path: Path
) -> None:
    def at(time: str, model: Result, **details: object) -> Result:
        manifest = {**model.manifest, "time": time}
        return dataclasses.replace(model, manifest=manifest, details={**model.details, **details})

    first = results[0]
    at("1", first).save(tmp_path / "there")
    at("2", first, fills=["Once upon a time"]).save(tmp_path / "new")
    results[1].save(tmp_path / "new")
    page.take_over(tmp_path / "new", tmp_path / "there")
    found = {each.options["mean"]: each for each in read_results(tmp_path / "there")}
    assert found.keys() == {12, 3}
    assert found[12].manifest["time"] == "2"
    assert "fills" not in found[12].details
    assert found[12].details["span:p=0.5,mean=12"]["nll"][:2] == [60.0, 60.1235]
