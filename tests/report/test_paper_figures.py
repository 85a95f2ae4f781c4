"""The paper's figures: beside the same question, and beside no other."""

import re
from pathlib import Path

from tests.report.results import ranges, result, write
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.report.paper_figures import find_paper_figure, paper_tables


def cells(page: str) -> list[str]:
    return re.findall(r"<td class='paper'>([^<]*)", page)


def test_the_papers_figure_stands_beside_the_same_question_alone(tmp_path: Path) -> None:
    same = {"vocab_size": 50257}
    assert cells(write(tmp_path / "same", ranges("ours", 30.0, **same))) == ["29.38"]
    others = {
        "tokeniser": ranges("ours", 30.0),
        "length": ranges("ours", 30.0, **same, options={"length": 256}),
        "data": ranges("ours", 30.0, **same, options={"data": "wikitext2"}),
        "end of text": ranges("ours", 30.0, **same, options={"count_eos": True}),
        "mode": ranges("ours", 30.0, **same, mode="ac"),
        "rows": ranges("ours", 30.0, **same, options={"rows": "documents"}),
        "model": ranges("ours", 30.0, **same, family="bart"),
        "decoder": ranges("ours", 30.0, **same, config={"decoder": "dense"}),
    }
    for name, other in others.items():
        assert cells(write(tmp_path / name, other)) == [], name


def test_a_figure_of_another_scorer_never_meets_the_papers(tmp_path: Path) -> None:
    def infilled(metric: str, over: str) -> Result:
        return result(
            "ours",
            "infilling",
            [ResultRow(metric, {"contexts": "[0.25,0.75]", "over": over}, 0.5, kind="sample")],
            vocab_size=50257,
        )

    assert cells(write(tmp_path / "a", infilled("bertscore", "whole"))) == ["0.4640"]
    assert cells(write(tmp_path / "b", infilled("bertscore[minilm-l6]", "whole"))) == []
    assert cells(write(tmp_path / "c", infilled("bertscore", "filled"))) == []


def test_table_11_stands_beside_ac() -> None:
    asked = {
        "data": "wikitext103",
        "length": 1024,
        "spans": "Geometric(50)",
        "ratio": 0.9,
        "mode": "ac",
    }
    full = find_paper_figure("tracformer-full", "perplexity", asked)
    assert full is not None
    assert (full.value, full.place) == (574.73, "Table 11")
    assert find_paper_figure("tracformer-full", "perplexity", {**asked, "mode": "car"}) is None


def test_the_papers_tables_are_whole() -> None:
    counts = {name: len(table.figures) for name, table in paper_tables().items()}
    assert counts == {
        "table1": 24,
        "table2": 36,
        "table3": 11,
        "table4": 30,
        "table7": 4,
        "table8": 48,
        "table9": 12,
        "table11": 36,
    }
    ours = [
        figure.value
        for figure in paper_tables()["table2"].figures
        if figure.model == "tracformer" and figure.setting["data"] == "wikitext103"
    ]
    assert ours == [29.38, 29.67, 34.73, 37.73, 24.31, 33.88]
