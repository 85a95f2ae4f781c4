"""The layers of the package, its names, and docs/architecture.md, which describes them."""

import json
import re

from tests.helpers import ROOT, script

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
