"""The committed figures: the document, its tables, the report's files and the results agree."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.scripts import script
from tracformer.evaluation.report.collect import by_file_stem, in_order, sections, tables
from tracformer.evaluation.results import read_results

results = script("docs/results.py")


def test_the_tables_of_the_document_are_those_of_the_report() -> None:
    document = results.DOCUMENT.read_text()
    assert results.BLOCK.findall(document)
    assert results.render(document) == document


def test_the_report_s_figures_are_those_of_the_results() -> None:
    """Each file that the document names, cell by cell, from the rows in results/mini."""
    read = in_order(read_results(results.RESULTS))
    made = {table.name: table for name, section in by_file_stem(sections(read)).items() for table in tables(section, name)}
    named = {Path(name).stem for name in re.findall(r"[\w.+-]+\.csv", results.DOCUMENT.read_text())}
    assert named
    for name in named:
        committed = list(csv.reader((results.RESULTS / "report" / f"{name}.csv").read_text().splitlines()))
        assert committed == list(csv.reader(made[name].to_csv().splitlines()))


def test_files_that_the_document_names_are_there() -> None:
    document = results.DOCUMENT.read_text()
    for name in re.findall(r"\]\((\.\./results/[^)#]+|pictures/[^)]+)\)", document):
        assert (results.DOCUMENT.parent / name).exists()


def test_results_hold_no_texts() -> None:
    paths = list(results.RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        assert json.loads(path.read_text())["details"] == {}


def test_a_model_that_is_not_in_the_table_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title,model,kind,setting,value,low,high,spread\nt,m,exact,0.5,1.5,1,2,\n")
    assert results.markdown(tmp_path / "a.csv", ["m"]) == "|  | 0.5 |\n| --- | ---: |\n| m | 1.500 <sub>1.000..2.000</sub> |\n"
    with pytest.raises(ValueError, match=r"a\.csv has no 'n'"):
        results.markdown(tmp_path / "a.csv", ["n"])
