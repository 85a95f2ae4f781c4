"""The page of a report: well-formed, self-contained, with every figure in its place."""

import csv
import dataclasses
import io
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Self

import pytest

from tests.report.results import RATIOS, ranges, ratios, result, write
from tracformer.cli import main
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.report import MOST_NOTES
from tracformer.report.collect import sections, tables
from tracformer.report.tables import HIGHER, Cell, Line, Table, find_paper_figure, paper_tables

VOID = ("meta", "br", "hr", "img", "link", "input")


class WellFormed(HTMLParser):
    """An HTML parser that fails on unmatched tags and collects tags, ids, links and words."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.words: list[str] = []

    @classmethod
    def read(cls, page: str) -> Self:
        parser = cls()
        parser.feed(page)
        parser.close()
        assert parser.open == []
        return parser

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.ids.update(value for key, value in attrs if key == "id" and value)
        self.addresses += [
            value or "" for key, value in attrs if key in ("href", "src", "xlink:href", "action")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


EVERYTHING = [
    ratios("ours", "exact", 20.0),
    ratios("theirs", "exact", 25.0, family="bart"),
    ratios("noisy", "bound", 10.0, family="mdlm", mode="diffusion"),
    ratios("single", "marginal", 5.0, mode="ac"),
    result(
        "ours",
        "orders",
        [ResultRow("spread", {}, 0.5, kind="marginal")],
        details={
            "sequences": {"spread": [0.1, 0.9]},
            "text": {"tokens": ["a", "<b>"], "forward": [-1.0, -2.0], "reverse": [-3.0, -4.0]},
        },
    ),
    result(
        "ours",
        "calibration",
        [ResultRow("ece", {"contexts": "span:p=0.5,mean=10", "ratio": 0.5}, 0.1, kind="exact")],
        details={
            "span:p=0.5,mean=10": {
                "bins": [{"confidence": 0.2, "accuracy": 0.3}, {"confidence": 0.8, "accuracy": 0.7}]
            }
        },
    ),
    result(
        "ours",
        "exact",
        [
            ResultRow("kl", {"source": "hmm-16", "pattern": p}, v, kind="exact")
            for p, v in (("holes", 0.0), ("halves", 0.3))
        ],
    ),
    result("a _%$ name", "speed", [ResultRow("tokens_per_second", {}, 100.0)]),
]


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    page = write(tmp_path, *EVERYTHING)
    shown = WellFormed.read(page)
    assert all(address.startswith("#") for address in shown.addresses)
    assert "http" not in page
    assert shown.tags["script"] == shown.tags["img"] == shown.tags["link"] == 0
    assert max(shown.ids.values()) == 1  # also among the pictures
    assert shown.tags["svg"] == 5  # joint, marginal, histogram, reliability, heat map
    assert {address[1:] for address in shown.addresses} <= set(shown.ids)
    for rule in (
        "prefers-color-scheme: dark",
        "@media print",
        "overflow-x: auto",
        "width=device-width",
    ):
        assert rule in page
    assert sorted(path.name for path in (tmp_path / "report").glob("*.png")) == [
        "calibration-wikitext103-128-reliability-0.png",
        "exact-wikitext103-128-kl.png",
        "orders-wikitext103-128-spread.png",
        "ratios-wikitext103-128-Geometric_10-ratio-joint.png",
        "ratios-wikitext103-128-Geometric_10-ratio-marginal.png",
    ]
    assert "mdlm" in page  # family of the model `noisy`
    # marked, where it shares axes with exact answers
    assert "noisy (bound)" in "".join(shown.words)


def test_the_best_figure_is_marked_within_its_kind(tmp_path: Path) -> None:
    page = write(
        tmp_path, *EVERYTHING[:4], ratios("worse", "marginal", 6.0, family="bert", mode="ac")
    )
    best = re.findall(r"<tr><th scope='row'>([^<]*)</th><td class='best'", page)
    # not `noisy`, whose bound is the lowest figure of the joint ones, and alone in its kind
    assert set(best) == {"ours", "single"}
    section = sections([*EVERYTHING[:3]])[0]
    blocks = [(kind, [line.label for line in lines]) for kind, lines in tables(section)[0].blocks()]
    assert blocks == [("exact", ["ours", "theirs"]), ("bound", ["noisy"])]


def test_a_huge_perplexity_does_not_break_the_page(tmp_path: Path) -> None:
    assert "useless less ours" in write(
        tmp_path, ratios("ours", "exact", 20.0), ratios("useless", "exact", 9000.0)
    )


def test_the_highest_figure_is_marked_where_higher_is_better(tmp_path: Path) -> None:
    rows = [
        [
            ResultRow(
                "bertscore[minilm-l6]",
                {"contexts": "[0.25,0.75]", "over": "whole"},
                value,
                kind="sample",
            )
        ]
        for value in (0.4, 0.6)
    ]
    page = write(
        tmp_path, result("low", "infilling", rows[0]), result("high", "infilling", rows[1])
    )
    assert re.findall(r"<th scope='row'>([^<]*)</th><td class='best'", page) == ["high"]
    assert "BERTScore by minilm-l6" in page


def test_limits_of_modes_are_shown_among_many_notes(tmp_path: Path) -> None:
    limit = "mode ar does not see the text after a blank"
    noisy, plain = (
        ratios("a", "bound", 41.0, family="mdlm", mode="diffusion"),
        ratios("b", "exact", 20.0, family="gpt2", mode="ar"),
    )
    many = [
        dataclasses.replace(noisy.rows[0], note=f"64 draws, standard error of nll {i}")
        for i in range(30)
    ]
    limited = [dataclasses.replace(row, note=limit) for row in plain.rows]
    page = write(
        tmp_path,
        dataclasses.replace(noisy, rows=(*noisy.rows, *many)),
        dataclasses.replace(plain, rows=tuple(limited)),
    )
    assert f"b: {limit}</p>" in page
    # the others are in the CSV
    assert MOST_NOTES <= page.count("64 draws, standard error of nll") <= MOST_NOTES + 1


def test_fills_are_escaped_and_highlighted(tmp_path: Path) -> None:
    evil = "a <script>alert(1)</script> & b"
    fill = {
        "contexts": "[0.25,0.75]",
        "sequence": 0,
        "original": evil,
        "original_spans": [[2, 10]],
        "text": "x & <i>",
        "spans": [[0, 1], [4, 7]],
        "log_prob": -3.5,
    }
    page = write(
        tmp_path,
        result(
            "ours",
            "infilling",
            [ResultRow("bleu4", {"contexts": "[0.25,0.75]"}, 0.5, kind="sample")],
            details={"fills": [fill]},
        ),
    )
    shown = WellFormed.read(page)
    assert shown.tags["script"] == shown.tags["i"] == 0
    assert "a <mark>&lt;script&gt;</mark>alert(1)" in page
    assert "<mark>x</mark> &amp; <mark>&lt;i&gt;</mark>" in page


def test_csv_and_latex_files_have_the_figures_of_the_page(tmp_path: Path) -> None:
    write(tmp_path, *EVERYTHING[:4], EVERYTHING[-1])
    table = next((tmp_path / "report").glob("ratios-*-perplexity.csv")).read_text()
    read = list(csv.DictReader(io.StringIO(table)))
    assert len(read) == 4 * len(RATIOS)
    assert {row["kind"] for row in read} == {"exact", "bound", "marginal"}
    assert (
        float(
            next(row["value"] for row in read if row["model"] == "ours" and row["setting"] == "0.5")
        )
        == 20.5
    )
    latex = next((tmp_path / "report").glob("ratios-*-perplexity.tex")).read_text()
    assert "\\textbf{20.50}" in latex
    assert latex.count("\\midrule") == 3
    assert "a \\_\\%\\$ name" in next((tmp_path / "report").glob("speed-*-*.tex")).read_text()


def test_markdown_marks_the_best_of_each_kind() -> None:
    made = Table(
        "a",
        "accuracy",
        ("x", "y"),
        (
            Line("one", "exact", (Cell(1.5, low=1.0, high=2.0), Cell(1.0))),
            Line("two", "exact", (Cell(2.5, low=2.0, high=3.0, spread=0.25, seeds=3), None)),
            Line("three", "bound", (Cell(9.0), Cell(9.0))),
        ),
        better=HIGHER,
    )
    assert made.to_markdown().splitlines()[2:] == [
        "| one (exact) | 1.500 <sub>1.000..2.000</sub> | 1.000 |",
        "| two (exact) | **2.500** <sub>2.000..3.000, 3 seeds</sub> | - |",
        "| three (bound) | 9.000 | 9.000 |",
    ]


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    some = EVERYTHING[:1] + EVERYTHING[-2:]
    assert write(tmp_path, *some) == write(tmp_path, *some)


def test_bad_input_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "x.json").write_text('{"format": "tracformer-result", ')
    for place, reported in (
        (empty, "no results found in"),
        (broken, "x.json is not a readable result"),
        (tmp_path / "none", "does not exist"),
    ):
        assert main(["report", str(place), "--out", str(tmp_path / "report")]) == 2
        assert reported in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranges("ours", 30.0).save(tmp_path / "results")
    assert (
        main(
            [
                "report",
                str(tmp_path / "results"),
                "--out",
                str(tmp_path / "report"),
                "--title",
                "Mine & yours",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.strip() == str(tmp_path / "report" / "index.html")
    assert "<title>Mine &amp; yours</title>" in (tmp_path / "report" / "index.html").read_text()


def test_the_page_goes_beside_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = ranges("ours", 30.0).save(tmp_path / "results")
    for place in ("results/", str(path)):
        assert main(["report", place]) == 0
        written = Path(capsys.readouterr().out.strip())
        assert written.resolve() == tmp_path / "results" / "report" / "index.html"


def trained(tokens: int, flops: float | None = 1e12, **more: object) -> dict[str, object]:
    facts = {"step": 75, "planned_steps": 2558, "seconds": 90.0, "machine": "a processor"}
    return {**facts, "tokens": tokens, "flops": flops, **more}


def test_models_show_what_they_were_trained_with(tmp_path: Path) -> None:
    same = [
        ratios("ours", "exact", 30.0, training=trained(1_000_000)),
        ratios("theirs", "exact", 40.0, training=trained(1_030_000, 5e12)),
    ]
    page = write(tmp_path / "same", *same)
    assert "75 of 2,558" in page
    assert "class='best'" in page
    assert "unequal budgets" not in page
    head = "<th scope='col'>parameters</th><th scope='col'>tokens seen</th>"
    assert f"{head}<th scope='col'>training FLOPs</th>" in page
    for cell in ("1.03M", "5T"):
        assert f"<td>{cell}</td>" in page


@pytest.mark.parametrize(
    ("other", "marked"),
    [
        (trained(1_000_000, 9e12), True),  # equal tokens
        (trained(2_000_000, 1.02e12), True),  # equal operations
        (trained(2_000_000, 9e12), False),
        (trained(2_000_000, None), False),
        (None, False),  # known of one model only
    ],
)
def test_the_best_is_marked_among_equal_budgets(
    tmp_path: Path, other: dict[str, object] | None, marked: bool
) -> None:
    more = {} if other is None else {"training": other}
    page = write(
        tmp_path,
        ratios("ours", "exact", 30.0, training=trained(1_000_000)),
        ratios("theirs", "exact", 40.0, **more),
    )
    assert ("class='best'" in page) == marked
    assert ("trained with unequal budgets: no best is marked" in page) != marked


def paper_cells(page: str) -> list[str]:
    return re.findall(r"<td class='paper'>([^<]*)", page)


def test_the_papers_figure_is_shown_for_the_same_question_only(tmp_path: Path) -> None:
    same = {"vocab_size": 50257}
    assert paper_cells(write(tmp_path / "same", ranges("ours", 30.0, **same))) == ["29.38"]
    others = {
        "tokenizer": ranges("ours", 30.0),
        "length": ranges("ours", 30.0, **same, options={"length": 256}),
        "data": ranges("ours", 30.0, **same, options={"data": "wikitext2"}),
        "end of text": ranges("ours", 30.0, **same, options={"count_eos": True}),
        "mode": ranges("ours", 30.0, **same, mode="ac"),
        "rows": ranges("ours", 30.0, **same, options={"rows": "documents"}),
        "model": ranges("ours", 30.0, **same, family="bart"),
        "decoder": ranges("ours", 30.0, **same, config={"decoder": "dense"}),
    }
    for name, other in others.items():
        assert paper_cells(write(tmp_path / name, other)) == [], name


def test_figures_of_other_scorers_are_not_compared_with_the_papers(tmp_path: Path) -> None:
    def infilled(metric: str, over: str) -> Result:
        return result(
            "ours",
            "infilling",
            [ResultRow(metric, {"contexts": "[0.25,0.75]", "over": over}, 0.5, kind="sample")],
            vocab_size=50257,
        )

    assert paper_cells(write(tmp_path / "a", infilled("bertscore", "whole"))) == ["0.4640"]
    assert paper_cells(write(tmp_path / "b", infilled("bertscore[minilm-l6]", "whole"))) == []
    assert paper_cells(write(tmp_path / "c", infilled("bertscore", "filled"))) == []


def test_table_11_is_compared_with_mode_ac() -> None:
    requested = {
        "data": "wikitext103",
        "length": 1024,
        "spans": "Geometric(50)",
        "ratio": 0.9,
        "mode": "ac",
    }
    full = find_paper_figure("tracformer-full", "perplexity", requested)
    assert full is not None
    assert (full.value, full.place) == (574.73, "Table 11")
    assert find_paper_figure("tracformer-full", "perplexity", {**requested, "mode": "car"}) is None


def test_the_papers_tables_are_complete() -> None:
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
