"""Documents agree with the results, their Python runs, and the examples do what they say."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.helpers import ROOT, example, script
from tests.report.results import result
from tracformer.cli import COMMANDS, parser_of
from tracformer.evaluation.result_files import Result, ResultRow, read_results
from tracformer.report.claims import NOT_RUN
from tracformer.report.tables import Cell, Line, Table

results = script("docs/results.py")


def test_documents_have_the_tables_and_figures_of_the_results() -> None:
    made = results.tables_of(read_results(results.RESULTS))
    assert results.BLOCK.findall(results.DOCUMENT.read_text())
    for path in results.DOCUMENTS:
        document = path.read_text()
        assert results.MARK.findall(document)
        assert results.render(document, made) == document


def test_files_of_the_report_have_the_figures_of_the_results() -> None:
    """Checks each CSV file that the document names, cell by cell."""
    made = results.tables_of(read_results(results.RESULTS))
    named = set(re.findall(r"[\w.+-]+\.csv", results.DOCUMENT.read_text()))
    assert named
    for name in named:
        assert (results.RESULTS / "report" / name).read_text() == made[name].to_csv()


def test_files_that_the_document_names_exist() -> None:
    document = results.DOCUMENT.read_text()
    for name in re.findall(r"\]\((\.\./results/[^)#]+|pictures/[^)]+)\)", document):
        assert (results.DOCUMENT.parent / name).exists()


def test_results_hold_no_texts() -> None:
    paths = list(results.RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        assert json.loads(path.read_text())["details"] == {}


def test_new_results_are_added_to_the_stored_ones(tmp_path: Path) -> None:
    kept, earlier, later = (
        Result(
            model,
            "gpt2",
            "ar",
            "ratios",
            {"data": "d"},
            (ResultRow("perplexity", {"ratio": 0.5}, value, kind="exact"),),
            {"a": 1},
            {"time": time},
        )
        for model, value, time in (("a #0", 1.0, "1"), ("b #0", 2.0, "1"), ("b #0", 3.0, "2"))
    )
    for place, each in (("there", kept), ("there", earlier), ("new", later)):
        each.save(tmp_path / place)
    results.take_over(tmp_path / "new", tmp_path / "there")
    found = {result.model: result for result in read_results(tmp_path / "there")}
    assert {name: result.rows[0].value for name, result in found.items()} == {
        "a #0": 1.0,
        "b #0": 3.0,
    }
    assert all(not result.details for result in found.values())
    assert (tmp_path / "there" / "report" / "index.html").is_file()


def test_a_later_estimate_does_not_replace_a_better_one(tmp_path: Path) -> None:
    good, rough = (
        Result(
            "mdlm #0",
            "mdlm",
            "diffusion",
            "ratios",
            {"data": "d", "draws": draws},
            (ResultRow("perplexity", {"ratio": 0.5}, value, kind="bound"),),
            {},
            {"time": time},
        )
        for draws, value, time in ((None, 1.0, "1"), (4, 2.0, "2"))
    )
    good.save(tmp_path / "there")
    rough.save(tmp_path / "new")
    results.take_over(tmp_path / "new", tmp_path / "there")
    assert [found.rows[0].value for found in read_results(tmp_path / "there")] == [1.0]


def test_a_failure_leaves_the_stored_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Result(
        "a",
        "gpt2",
        "ar",
        "ratios",
        {"data": "d"},
        (ResultRow("perplexity", {"ratio": 0.5}, 1.0, kind="exact"),),
    )
    made.save(tmp_path / "there")
    made.save(tmp_path / "new")

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(results, "write_report", fail)
    with pytest.raises(OSError, match="no space"):
        results.take_over(tmp_path / "new", tmp_path / "there")
    assert read_results(tmp_path / "there") == [made]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "there"]


def test_missing_tables_and_models_are_errors() -> None:
    table = Table("a", "t", ("0.5",), (Line("m", "exact", (Cell(1.5, low=1.0, high=2.0),)),))
    document = "<!-- table a.csv: m -->\n<!-- end -->"
    assert results.render(document, {"a.csv": table}) == (
        "<!-- table a.csv: m -->\n|  | 0.5 |\n| --- | ---: |\n| m | 1.500 <sub>1.000..2.000</sub> "
        "|\n<!-- end -->"
    )
    with pytest.raises(ValueError, match="a has no 'n'"):
        results.render(document.replace(" m ", " n "), {"a.csv": table})
    with pytest.raises(ValueError, match=r"no table 'a\.csv'; there are b\.csv"):
        results.render(document, {"b.csv": table})


def test_figures_in_sentences_are_computed_and_claims_are_checked() -> None:
    cells = {"a": (50.0, 60.0, 98.5), "b": (100.0, 80.0, 100.0), "c": (150.0, 120.0, 100.0)}
    lines = tuple(
        Line(name, "exact", tuple(Cell(value) for value in values))
        for name, values in cells.items()
    )
    made = {
        f"{name}-perplexity.csv": Table(name, "t", ("0.1", "0.5", "0.9"), lines)
        for name in ("x", "y")
    }

    def figure(claim: str) -> str:
        document = f"by <!-- {claim} -->?<!-- end -->."
        return (
            str(results.render(document, made))
            .removeprefix(f"by <!-- {claim} -->")
            .removesuffix("<!-- end -->.")
        )

    assert figure("share x, y: a below b at 0.1..0.5") == "25 to 50%"
    assert figure("share x: b above a at 0.5") == "33%"
    assert figure("share x: a below b at 0.9") == "1.5%"
    assert figure("range x: a at 0.1..0.5") == "50 and 60"
    assert figure("range x: b at 0.9") == "100"
    assert figure("times x, y: a, c over b") == "0.5 to 1.5"
    assert figure("within x: a of b at 0.5..0.9") == "25%"
    wrong = {
        "share x: a above b": r"a in x at 0\.1 is not above b",
        "share x: a below a": "x has not both of a and a",
        "share x: a above d": "x has no 'd'",
        "share z: a below b": "no table 'z'",
        "share x: a below b at 0.2": r"x has no column '0\.2'; it has 0\.1",
        "share x: a under b": "cannot be read",
        "range x: a, b": "cannot be read",
    }
    for claim, reported in wrong.items():
        with pytest.raises(ValueError, match=reported):
            figure(claim)


# ---- pages

run_pages = script("tools/run_pages.py")
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
# Where a command stands for any: its words cannot be read.
TEMPLATE = re.compile(r"[A-Z]{3,}|\.\.\.|<")


# Where the code and the commands of each page run. Pages without any need no entry.
SHORT = ("README", "tutorials/fill", "install", "kernels")
LONG = (
    "tutorials/train",
    "tutorials/proteins",
    "tutorials/compare",
    "tutorials/extend",
    "infilling",
    "evaluation",
    "peers",
    "proteins",
    "scale",
    "training",
)
ELSEWHERE = {
    "huggingface": "tests/hf/test_folder.py",
    "serve": "tests/server/test_operations.py",
    "tutorials/serve": "tests/server/test_operations.py",
    "reproduce": "tests/reproduce/test_experiment.py",  # planned; tests/reproduce runs scale `tiny`
}
# Hours of work: their commands are only parsed.
PARSED = ("results", "speed", "study")


def name_of(page: Path) -> str:
    return "README" if page.name == "README.md" else str(page.relative_to(DOCS).with_suffix(""))


def test_every_block_runs_somewhere_or_says_why_not() -> None:
    assert set(PARSED) <= {name_of(page) for page in PAGES}
    for name, path in ELSEWHERE.items():
        assert f'"{Path(name).name}.md"' in (ROOT / path).read_text(), name
    for page in PAGES:
        runs = [
            block
            for block in run_pages.BLOCK.finditer(page.read_text())
            if not block["note"]
            and (block["kind"] == "python" or run_pages.commands(block["code"]))
        ]
        if runs:
            assert name_of(page) in {*SHORT, *LONG, *ELSEWHERE, *PARSED}, page


@pytest.mark.parametrize(
    "page", [*SHORT, *(pytest.param(page, marks=pytest.mark.soak) for page in LONG)]
)
def test_pages_show_what_their_code_prints(page: str) -> None:
    ran = run_pages.run_page((ROOT if page == "README" else DOCS) / f"{page}.md")
    assert ran.text == ran.expected


def test_the_notebook_shows_what_its_code_prints() -> None:
    ran = run_pages.run_notebook(ROOT / "examples" / "quickstart.ipynb")
    assert json.loads(ran.text) == json.loads(ran.expected)


def test_blocks_run_in_order_and_outputs_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```text\nold\n```\n"
        "<!-- not run: it would fail -->\n```python\n1 / 0\n```\n"
        "```sh\ntracformer --version\n```\n\n```text\n```\n"
    )
    expected = run_pages.run_page(page).expected
    assert "```text\n1\n```" in expected
    assert re.search(r"```text\n\d+\.\d+\S*\n```", expected)
    page.write_text("\n\n```python\nnothing\n```\n")
    with pytest.raises(NameError):
        run_pages.run_page(page)
    page.write_text("```sh\ntracformer infill 'no blank'\n```\n")
    with pytest.raises(SystemExit, match="ended with 2"):
        run_pages.run_page(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_pages_parse(page: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)
    for words in run_pages.commands("\n".join(blocks)):
        if words and words[0] in COMMANDS and not TEMPLATE.search(" ".join(words)):
            assert parser_of(words[0]).parse_intermixed_args(words[1:])
        elif words and not words[0].startswith("-"):
            assert words[0] in COMMANDS, words


def test_files_that_pages_name_exist() -> None:
    places = ("src", "tests", "docs", "tools", "benchmarks", "examples", ".github")
    files = [path.relative_to(ROOT) for place in places for path in (ROOT / place).rglob("*.*")]
    known = {"/".join(file.parts[start:]) for file in files for start in range(len(file.parts))}
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]:
        named = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|cpp|yaml|yml|md))\b", page.read_text())
        assert {name for name in named if not TEMPLATE.search(name)} <= known, page


def test_every_page_is_on_the_site_and_short_ones_stay_short() -> None:
    index = (DOCS / "index.md").read_text()
    listed = re.findall(
        r"^[\w/-]+$", "\n".join(re.findall(r"```{toctree}(.*?)```", index, re.S)), re.M
    )
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES[1:]}
    assert set(listed) == pages - {"index"}
    assert len((ROOT / "README.md").read_text().split()) <= 600


def test_drawings_are_those_of_the_geometry() -> None:
    concepts = script("docs/pictures/concepts.py")
    for name, draw in concepts.DRAWINGS.items():
        assert (DOCS / "pictures" / name).read_text() == draw()


# ---- examples


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_examples_are_short() -> None:
    assert EXAMPLES
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 60, path


def test_own_data(capsys: pytest.CaptureFixture[str]) -> None:
    example("own_data").main(steps=2, sequences=4)
    assert "of the removed bases came back" in capsys.readouterr().out


def test_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    example("tensors").main(steps=2)
    assert "of the hidden digits are right" in capsys.readouterr().out


@pytest.mark.soak
def test_hidden_bases_are_recovered(tmp_path: Path) -> None:
    module = example("own_data")
    assert module.check(module.train(tmp_path, 150), 100) > 0.8


# ---- the page of results

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
def study() -> list[Result]:
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


def test_results_of_the_study_hold_no_texts() -> None:
    for path in page.RESULTS.glob("*.json"):
        assert not set(page.TEXTS) & set(json.loads(path.read_text())["details"])


def test_verdicts_gains_and_differences(study: list[Result]) -> None:
    made = page.Page(study)
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
def test_mistakes_in_marks_are_named(study: list[Result], document: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        page.Page(study).render(document)


def test_pictures_show_what_was_run(study: list[Result], tmp_path: Path) -> None:
    assert page.Page([]).draw(tmp_path) == []
    assert [path.name for path in page.Page(study).draw(tmp_path)] == ["study-gains.png"]


def test_taking_over_keeps_rounded_sums_and_the_newest_result(
    study: list[Result], tmp_path: Path
) -> None:
    def at(time: str, model: Result, **details: object) -> Result:
        manifest = {**model.manifest, "time": time}
        return dataclasses.replace(model, manifest=manifest, details={**model.details, **details})

    first = study[0]
    at("1", first).save(tmp_path / "there")
    at("2", first, fills=["Once upon a time"]).save(tmp_path / "new")
    study[1].save(tmp_path / "new")
    page.take_over(tmp_path / "new", tmp_path / "there")
    found = {each.options["mean"]: each for each in read_results(tmp_path / "there")}
    assert found.keys() == {12, 3}
    assert found[12].manifest["time"] == "2"
    assert "fills" not in found[12].details
    assert found[12].details["span:p=0.5,mean=12"]["nll"][:2] == [60.0, 60.1235]
