"""The project: its layers and names, the public API, and files such as the changelog."""

import inspect
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import tracformer
from tests.helpers import ROOT, script
from tracformer.generation.request_options import InfillOptions, Sampler, flat_options

# ---- the layers of the package, its names, and docs/architecture.md

measure_code = script("tools/measure_code.py")
check_faults = script("tools/check_faults.py")


def test_imports_follow_the_layers_without_cycles() -> None:
    assert measure_code.import_problems() == []


def test_no_class_or_file_name_is_used_twice() -> None:
    assert measure_code.name_problems() == []


def test_exported_names_have_complete_docstrings() -> None:
    assert measure_code.docstring_problems() == []


def test_cycles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "b"}}
    assert measure_code.cycles(edges) == [["a", "b", "c", "a"], ["b", "c", "b"]]


def test_the_drawing_of_the_layers_is_up_to_date() -> None:
    page = measure_code.PAGE.read_text()
    assert "```mermaid" in page
    assert measure_code.page_with_drawing(page) == page, (
        "run `python tools/measure_code.py --layers`"
    )


def test_files_named_by_the_page_exist() -> None:
    named = re.findall(r"`([\w/.]+(?:\.py|/))`", measure_code.PAGE.read_text())
    assert len(named) > 40
    for name in named:
        assert (measure_code.PACKAGE / name).exists() or (ROOT / name).exists(), name


def test_the_code_and_the_tests_of_seeded_faults_are_found() -> None:
    faults = json.loads(check_faults.FAULTS.read_text())
    assert [line for each in faults for line in check_faults.problems(each, ROOT / "src")] == []


# ---- the public API: every name is documented, and importing it is cheap


@pytest.mark.parametrize("name", tracformer.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    documented = inspect.getdoc(getattr(tracformer, name))
    assert documented
    assert "Example" in documented
    assert name in dir(tracformer)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tracformer.nothing


@pytest.mark.parametrize("module", ["tracformer", "tracformer.generation.request_options"])
def test_importing_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_survive_the_way_over_a_mapping() -> None:
    options = InfillOptions.make(n=3, order="entropy", k=2, temperature=0.5, banned=[1])
    assert set(options.to_dict()) == set(flat_options(InfillOptions))
    assert InfillOptions.make(**options.to_dict()) == options
    assert options.sampler == Sampler(temperature=0.5, banned=(1,))
    with pytest.raises(ValueError, match="unknown option 'temprature'; did you mean 'temperature'"):
        InfillOptions.make(temprature=1.0)


# ---- version, citation, changelog, workflows and the contents of the wheel

check_wheel = script("tools/check_wheel.py")


def test_citation_has_the_fields_of_the_format_and_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
    assert tracformer.__version__.removesuffix(".dev0") == citation["version"]
    paper = citation["preferred-citation"]
    assert paper["title"] == "Tractable Transformers for Flexible Conditional Generation"
    assert len(paper["authors"]) == 6


def test_the_page_on_installation_has_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/install.md").read_text(), re.M)
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(named) == sorted(project["optional-dependencies"])


def test_the_changelog_has_the_sections_of_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.+)$", text, re.M)
    assert releases
    for release in releases:
        assert re.fullmatch(r"\[Unreleased\]|\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", release)
    kinds = set(re.findall(r"^### (.+)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_workflows_call_targets_and_files_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert {path.stem for path in workflows} == {"tests", "docs", "release"}
    for path in workflows:
        text = path.read_text()
        assert yaml.safe_load(text)["jobs"]
        assert set(re.findall(r"run: make (\w+)", text)) <= targets
        for name in re.findall(r"python (tools/\w+\.py)", text):
            assert (ROOT / name).is_file()


def test_a_wheel_that_lacks_a_file_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src/tracformer/bundled").mkdir(parents=True)
    (tmp_path / "src/tracformer/py.typed").touch()
    (tmp_path / "src/tracformer/bundled/config.json").touch()
    monkeypatch.setattr(check_wheel, "SOURCE", tmp_path / "src")
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tracformer/py.typed", "")
        archive.writestr("tracformer/old.py", "")
        archive.writestr("tracformer-0.1.dist-info/METADATA", "")
    assert check_wheel.problems(wheel) == [
        "tracformer/bundled/config.json is missing",
        "tracformer/old.py is not in the source tree",
    ]
