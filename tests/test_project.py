"""Project files: version, citation, changelog, workflows and the contents of the wheel."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import tracformer
from tests.helpers import ROOT, script

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
