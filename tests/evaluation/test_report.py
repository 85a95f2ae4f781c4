"""The page: whole, without the network, with every figure where it belongs and none where it does not."""

import csv
import dataclasses
import io
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Self

import pytest

from tracformer.cli.main import main
from tracformer.evaluation.paper_figures import find_paper_figure, paper_tables
from tracformer.evaluation.report import write_report
from tracformer.evaluation.report.collect import one_each, sections, tables
from tracformer.evaluation.report.differences import paired_table
from tracformer.evaluation.report.tables import HIGHER, Cell, Line, Table
from tracformer.evaluation.report.views import curves_of
from tracformer.evaluation.report.write import MOST_NOTES
from tracformer.evaluation.results import Result, Row

VOID = ("meta", "br", "hr", "img", "link", "input")
RATIOS = (0.1, 0.5, 0.9)


class WellFormed(HTMLParser):
    """Fails where tags do not match; counts them, and keeps the visible words and every address."""

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
        self.addresses += [value or "" for key, value in attrs if key in ("href", "src", "xlink:href", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def result(model: str, task: str, rows: list[Row], family: str = "tracformer", mode: str = "car", **more: Any) -> Result:
    """As an evaluation leaves it; `vocab_size`, `config`, `options` and `details` may be given."""
    config = {"vocab_size": more.get("vocab_size", 4096), **more.get("config", {})}
    options = {"data": "wikitext103", "length": 128, "count_eos": False, **more.get("options", {})}
    described = {"parameters": 1000, "parameters_without_embeddings": 900, "config": config}
    manifest = {"hashes": {"data": "d", "contexts": "c", "tokenizer": "t", "weights": model}, "model": described}
    return Result(model, family, mode, task, options, tuple(rows), more.get("details", {}), manifest)


def ratios(model: str, kind: str, level: float, **more: Any) -> Result:
    names = {ratio: f"span:p={ratio},mean=10" for ratio in RATIOS}
    rows = [
        Row("perplexity", {"contexts": names[r], "ratio": r, "spans": "Geometric(10)"}, level + r, level, level + 2 * r, kind, 3, 30)
        for r in RATIOS
    ]
    details = {name: {"nll": [level, level + 1, level + 2], "targets": [3, 4, 3], "bytes": [9, 9, 9]} for name in names.values()}
    return result(model, "ratios", rows, details=details, **more)


def ranges(model: str, value: float, **more: Any) -> Result:
    return result(model, "ranges", [Row("perplexity", {"contexts": "[0.25,0.75]", "ranges": "[0.25,0.75]"}, value, kind="exact")], **more)


def write(folder: Path, *results: Result, **options: Any) -> str:
    for each in results:
        each.save(folder / "results")
    return write_report([folder / "results"], folder / "report", **options).read_text()


def cells(page: str) -> list[str]:
    return re.findall(r"<td class='paper'>([^<]*)", page)


EVERYTHING = [
    ratios("ours", "exact", 20.0),
    ratios("theirs", "exact", 25.0, family="bart"),
    ratios("noisy", "bound", 10.0, family="mdlm", mode="diffusion"),
    ratios("single", "marginal", 5.0, mode="ac"),
    result(
        "ours",
        "orders",
        [Row("spread", {}, 0.5, kind="marginal")],
        details={
            "sequences": {"spread": [0.1, 0.9]},
            "text": {"tokens": ["a", "<b>"], "forward": [-1.0, -2.0], "reverse": [-3.0, -4.0]},
        },
    ),
    result(
        "ours",
        "calibration",
        [Row("ece", {"contexts": "span:p=0.5,mean=10", "ratio": 0.5}, 0.1, kind="exact")],
        details={"span:p=0.5,mean=10": {"bins": [{"confidence": 0.2, "accuracy": 0.3}, {"confidence": 0.8, "accuracy": 0.7}]}},
    ),
    result("ours", "exact", [Row("kl", {"source": "hmm-16", "pattern": p}, v, kind="exact") for p, v in (("holes", 0.0), ("halves", 0.3))]),
    result("a _%$ name", "speed", [Row("tokens_per_second", {}, 100.0)]),
]


def test_one_page_without_the_network(tmp_path: Path) -> None:
    page = write(tmp_path, *EVERYTHING)
    shown = WellFormed.read(page)
    assert all(address.startswith("#") for address in shown.addresses)
    assert "http" not in page
    assert shown.tags["script"] == shown.tags["img"] == shown.tags["link"] == 0
    assert max(shown.ids.values()) == 1  # also among the pictures
    assert shown.tags["svg"] == 5  # joint, marginal, histogram, reliability, heat map
    assert {address[1:] for address in shown.addresses} <= set(shown.ids)
    for rule in ("prefers-color-scheme: dark", "@media print", "overflow-x: auto", "width=device-width"):
        assert rule in page
    assert sorted(path.name for path in (tmp_path / "report").glob("*.png")) == [
        "calibration-wikitext103-128-reliability-0.png",
        "exact-wikitext103-128-kl.png",
        "orders-wikitext103-128-spread.png",
        "ratios-wikitext103-128-Geometric_10-ratio-joint.png",
        "ratios-wikitext103-128-Geometric_10-ratio-marginal.png",
    ]
    assert "mdlm" in page  # family of the model `noisy`
    assert "noisy (bound)" in "".join(shown.words)  # marked, where it shares axes with exact answers


def test_the_best_is_marked_within_its_kind_alone(tmp_path: Path) -> None:
    page = write(tmp_path, *EVERYTHING[:4], ratios("worse", "marginal", 6.0, family="bert", mode="ac"))
    best = re.findall(r"<tr><th scope='row'>([^<]*)</th><td class='best'", page)
    assert set(best) == {"ours", "single"}  # not `noisy`, whose bound is the lowest figure of the joint ones, and alone in its kind
    section = sections([*EVERYTHING[:3]])[0]
    blocks = [(kind, [line.label for line in lines]) for kind, lines in tables(section, "x")[0].blocks()]
    assert blocks == [("exact", ["ours", "theirs"]), ("bound", ["noisy"])]


def test_differences_are_paired_and_never_across_kinds(tmp_path: Path) -> None:
    page = write(tmp_path, *EVERYTHING[:4])
    assert "theirs less ours" in page
    assert "noisy less" not in page
    assert "single less" not in page


def test_differences_of_a_table_are_in_one_unit() -> None:
    """Once a model has other tokens, bits per byte for all."""

    def asked(model: str, tokenizer: str, level: float) -> Result:
        plain = ratios(model, "exact", level)
        rows = (*plain.rows, *(dataclasses.replace(row, metric="bits_per_byte", value=row.value / 8) for row in plain.rows))
        hashes = {**plain.manifest["hashes"], "tokenizer": tokenizer}
        return dataclasses.replace(plain, rows=rows, manifest={**plain.manifest, "hashes": hashes})

    (section,) = sections([asked("a", "t", 2.0), asked("b", "t", 3.0), asked("c", "u", 4.0)])
    table = paired_table(section, "x")
    assert table is not None
    assert "bits per byte" in table.title
    values = [line.cells[0].value for line in table.lines if line.cells[0] is not None]
    assert values == pytest.approx([3 / 27 / math.log(2), 6 / 27 / math.log(2)])  # three sequences, one nat more each, 27 bytes
    same = paired_table(sections([asked("a", "t", 2.0), asked("b", "t", 3.0)])[0], "x")
    assert same is not None
    assert "perplexity" in same.title


def test_differences_are_of_all_seeds_that_kept_their_sums() -> None:
    three = [ratios(f"a #{i}", "exact", level) for i, level in enumerate((2.0, 9.0, 10.0))]
    other = ratios("b #0", "exact", 5.0)
    table = paired_table(sections([*three, other])[0], "x")
    assert table is not None
    assert [line.label for line in table.lines] == ["b less a"]
    cell = table.lines[0].cells[0]
    assert cell is not None
    assert cell.value == pytest.approx(math.exp((3 * 5 + 3) / 10) - math.exp((3 * 7 + 3) / 10))  # the seeds' mean level is 7
    assert "seeds: a 0/1/2, b 0" in table.caption
    without = [dataclasses.replace(three[0], details={}), *three[1:]]
    table = paired_table(sections([*without, other])[0], "x")
    assert table is not None
    assert "seeds: a 1/2, b 0" in table.caption


def test_a_hopeless_model_does_not_break_the_page(tmp_path: Path) -> None:
    assert "useless less ours" in write(tmp_path, ratios("ours", "exact", 20.0), ratios("useless", "exact", 9000.0))


def test_higher_is_better_where_it_is(tmp_path: Path) -> None:
    rows = [[Row("bertscore[minilm-l6]", {"contexts": "[0.25,0.75]", "over": "whole"}, value, kind="sample")] for value in (0.4, 0.6)]
    page = write(tmp_path, result("low", "infilling", rows[0]), result("high", "infilling", rows[1]))
    assert re.findall(r"<th scope='row'>([^<]*)</th><td class='best'", page) == ["high"]
    assert "BERTScore by minilm-l6" in page


def test_the_papers_figure_stands_beside_the_same_question_alone(tmp_path: Path) -> None:
    same = {"vocab_size": 50257}
    assert cells(write(tmp_path / "same", ranges("ours", 30.0, **same))) == ["29.38"]
    others = {
        "tokeniser": ranges("ours", 30.0),
        "length": ranges("ours", 30.0, **same, options={"length": 256}),
        "data": ranges("ours", 30.0, **same, options={"data": "wikitext2"}),
        "end of text": ranges("ours", 30.0, **same, options={"count_eos": True}),
        "mode": ranges("ours", 30.0, **same, mode="ac"),
        "model": ranges("ours", 30.0, **same, family="bart"),
        "decoder": ranges("ours", 30.0, **same, config={"decoder": "dense"}),
    }
    for name, other in others.items():
        assert cells(write(tmp_path / name, other)) == [], name


def test_a_figure_of_another_scorer_never_meets_the_papers(tmp_path: Path) -> None:
    def infilled(metric: str, over: str) -> Result:
        return result("ours", "infilling", [Row(metric, {"contexts": "[0.25,0.75]", "over": over}, 0.5, kind="sample")], vocab_size=50257)

    assert cells(write(tmp_path / "a", infilled("bertscore", "whole"))) == ["0.4640"]
    assert cells(write(tmp_path / "b", infilled("bertscore[minilm-l6]", "whole"))) == []
    assert cells(write(tmp_path / "c", infilled("bertscore", "filled"))) == []


def test_table_11_stands_beside_ac() -> None:
    asked = {"data": "wikitext103", "length": 1024, "spans": "Geometric(50)", "ratio": 0.9, "mode": "ac"}
    full = find_paper_figure("tracformer-full", "perplexity", asked)
    assert full is not None
    assert (full.value, full.place) == (574.73, "Table 11")
    assert find_paper_figure("tracformer-full", "perplexity", {**asked, "mode": "car"}) is None


def test_the_papers_tables_are_whole() -> None:
    counts = {name: len(table.figures) for name, table in paper_tables().items()}
    assert counts == {"table1": 24, "table2": 36, "table3": 11, "table4": 30, "table7": 4, "table8": 48, "table9": 12, "table11": 36}
    ours = [
        figure.value
        for figure in paper_tables()["table2"].figures
        if figure.model == "tracformer" and figure.setting["data"] == "wikitext103"
    ]
    assert ours == [29.38, 29.67, 34.73, 37.73, 24.31, 33.88]


def test_training_seeds_share_a_line(tmp_path: Path) -> None:
    page = write(tmp_path, ranges("ours #0", 10.0), ranges("ours #1", 12.0))
    assert "ours #0</th>" not in page
    assert "<td>11<small>0 to 23.71; 2 seeds, standard deviation 1.414</small></td>" in page  # t = 12.706; no perplexity is negative


def seeded(model: str, value: float, half: float, **more: Any) -> Result:
    row = Row("perplexity", {"contexts": "c", "ratio": 0.5}, value, value - half, value + half, "exact", 9, 90)
    return result(model, "ratios", [row], **more)


def test_the_interval_of_a_mean_over_seeds_is_never_narrower_than_that_over_sequences() -> None:
    (section,) = sections([*(seeded(f"ours #{i}", 60 + 0.1 * i, 3.0) for i in range(3)), seeded("theirs #0", 61.0, 3.0)])
    (table,) = tables(section, "x")
    ours, theirs = (line.cells[0] for line in table.lines)
    assert ours is not None
    assert theirs is not None
    width = math.hypot(3.0, 4.303 * 0.1 / math.sqrt(3))
    assert (ours.low, ours.high) == pytest.approx((60.1 - width, 60.1 + width))
    assert (theirs.low, theirs.high) == (58.0, 64.0)
    assert table.to_markdown().splitlines()[2:] == [
        "| ours | **60.10** <sub>57.09..63.11, 3 seeds</sub> |",
        "| theirs | 61 <sub>58..64</sub> |",
    ]
    assert "ours & \\textbf{60.10} {\\scriptsize [57.09, 63.11], 3 seeds} \\\\" in table.to_latex()
    assert "theirs & 61 {\\scriptsize [58, 64]} \\\\" in table.to_latex()
    (curve,) = curves_of(section.entries[0], "perplexity", "ratio")
    assert (curve.low[0], curve.high[0], curve.name) == (ours.low, ours.high, "ours, 3 seeds")


def test_seeds_that_differ_widen_the_interval() -> None:
    (section,) = sections([seeded("ours #0", 50.0, 1.0), seeded("ours #1", 60.0, 1.0), seeded("ours #2", 70.0, 1.0)])
    (cell,) = tables(section, "x")[0].lines[0].cells
    assert cell is not None
    assert cell.low == pytest.approx(60 - math.hypot(1.0, 4.303 * 10 / math.sqrt(3)))
    (section,) = sections([seeded("ours #0", math.inf, 1.0), seeded("ours #1", 60.0, 1.0)])
    (cell,) = tables(section, "x")[0].lines[0].cells
    assert cell == Cell(math.inf, seeds=2)


def test_the_newest_of_several_results_is_shown(tmp_path: Path) -> None:
    """Weights or code have changed since: that is no second training seed."""
    made = [ranges("ours", value) for value in (10.0, 12.0)]
    dated = [
        dataclasses.replace(r, manifest={**r.manifest, "hashes": {"weights": str(i)}, "time": f"2025-01-0{9 - i}"})
        for i, r in enumerate(made)
    ]
    page = write(tmp_path, *dated)
    assert "<td>10</td>" in page
    assert "2 seeds" not in page
    assert "1 older or rougher results of the same questions are left out" in page


def noisy(level: float, draws: int | None, day: int, weights: str = "w") -> Result:
    made = ratios("noisy", "bound", level, family="mdlm", mode="diffusion", options={"draws": draws})
    hashes = {**made.manifest["hashes"], "weights": weights}
    return dataclasses.replace(made, manifest={**made.manifest, "hashes": hashes, "time": f"2025-01-0{day}"})


def test_estimates_stand_beside_exact_answers_whatever_their_draws(tmp_path: Path) -> None:
    page = write(tmp_path, ratios("ours", "exact", 20.0), noisy(41.0, 4, 2), noisy(43.0, 64, 1))
    assert page.count("<h2>Perplexity against") == 1
    assert "<td>43.50<small>" in page  # made earlier, of more draws
    assert "<td>41.50<small>" not in page
    assert "1 older or rougher results of the same questions are left out" in page


def test_of_several_estimates_the_best_one_stays() -> None:
    """The model's own number of draws is 64."""
    rough, own, more, later = noisy(41.0, 4, 3), noisy(42.0, None, 1), noisy(43.0, 65, 1), noisy(44.0, 64, 2)
    assert one_each([own, rough]) == [own]
    assert one_each([more, own]) == [more]
    assert one_each([own, later]) == [later]
    assert one_each([noisy(40.0, 64, 1, weights="old"), rough]) == [rough]  # other weights, another model


def test_what_a_mode_cannot_do_is_told_however_many_notes_there_are(tmp_path: Path) -> None:
    limit = "mode ar does not see what follows a hole"
    noisy, plain = ratios("a", "bound", 41.0, family="mdlm", mode="diffusion"), ratios("b", "exact", 20.0, family="gpt2", mode="ar")
    many = [dataclasses.replace(noisy.rows[0], note=f"64 draws, standard error of nll {i}") for i in range(30)]
    limited = [dataclasses.replace(row, note=limit) for row in plain.rows]
    page = write(tmp_path, dataclasses.replace(noisy, rows=(*noisy.rows, *many)), dataclasses.replace(plain, rows=tuple(limited)))
    assert f"b: {limit}</p>" in page
    assert MOST_NOTES <= page.count("64 draws, standard error of nll") <= MOST_NOTES + 1  # the others are in the CSV


def test_data_sets_of_an_unconditional_task_stand_side_by_side(tmp_path: Path) -> None:
    rows = [Row("perplexity", {"contexts": "empty"}, 40.0, kind="exact")]
    asked = (("ours", "ptb"), ("ours", "lambada"), ("theirs", "lambada"), ("theirs", "ptb"), ("others", "ptb"))
    page = write(tmp_path, *(result(model, "unconditional", rows, options={"data": data}) for model, data in asked))
    assert page.count("<h2>Unconditional perplexity") == 1
    assert "<th scope='col'>lambada</th><th scope='col'>ptb</th>" in page
    assert "<th scope='row'>others</th><td class='gap'>-</td><td" in page


def with_hashes(made: Result, **hashes: str) -> Result:
    return dataclasses.replace(made, manifest={**made.manifest, "hashes": {**made.manifest["hashes"], **hashes}})


def test_another_text_or_other_holes_of_the_same_name_are_another_question(tmp_path: Path) -> None:
    plain, other = ranges("ours", 10.0), ranges("theirs", 12.0)
    assert len(sections([plain, other])) == 1
    assert len(sections([plain, with_hashes(other, data="e")])) == 2
    assert len(sections([plain, with_hashes(other, contexts="e")])) == 2
    assert len(one_each([plain, with_hashes(plain, data="e")])) == 2
    bare = [dataclasses.replace(each, manifest={}) for each in (plain, other)]
    assert len(sections(bare)) == 1
    page = write(tmp_path, plain, with_hashes(other, data="e"))
    assert page.count("(inputs d/c)</h2>") == page.count("(inputs e/c)</h2>") == 1
    assert {"ranges-wikitext103-128-perplexity.csv", "ranges-wikitext103-128-2-perplexity.csv"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }


def test_texts_of_one_name_have_columns_of_their_own() -> None:
    rows = [Row("perplexity", {"contexts": "empty"}, 40.0, kind="exact")]
    asked = [result(model, "unconditional", rows, options={"data": data}) for model, data in (("a", "ptb"), ("a", "1bw"), ("b", "ptb"))]
    (section,) = sections([*asked[:2], with_hashes(asked[2], data="e")])
    assert tables(section, "x")[0].columns == ("ptb", "1bw", "ptb (2)")


def test_the_same_weights_are_one_seed() -> None:
    runs = [with_hashes(ranges(name, value), weights=weights) for name, value, weights in (("m", 60.0, "A"), ("m #0", 60.0, "A"))]
    (cell,) = tables(sections(runs)[0], "x")[0].lines[0].cells
    assert cell is not None
    assert cell.seeds == 1
    (cell,) = tables(sections([*runs, with_hashes(ranges("m #1", 62.0), weights="B")])[0], "x")[0].lines[0].cells
    assert cell is not None
    assert (cell.value, cell.seeds) == (61.0, 2)
    rows = [Row("perplexity", {"contexts": "empty"}, 40.0, kind="exact")]
    apart = [result(name, "unconditional", rows, options={"data": data}) for name, data in (("m", "ptb"), ("m #0", "1bw"))]
    (section,) = sections([with_hashes(each, weights="A") for each in apart])
    assert [None if each is None else each.seeds for each in tables(section, "x")[0].lines[0].cells] == [1, 1]


def test_perplexities_of_other_tokens_do_not_compete() -> None:
    small, large = ranges("bytes", 3.0), with_hashes(ranges("words", 40.0), tokenizer="u")
    assert "**" not in tables(sections([small, large])[0], "x")[0].to_markdown()
    assert "**3.000**" in tables(sections([small, ranges("words", 40.0)])[0], "x")[0].to_markdown()
    lines = tables(sections([ranges("m #0", 3.0), with_hashes(ranges("m #1", 40.0), tokenizer="u")])[0], "x")[0].lines
    assert [line.label for line in lines] == ["m (tokeniser t)", "m (tokeniser u)"]


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
        tmp_path, result("ours", "infilling", [Row("bleu4", {"contexts": "[0.25,0.75]"}, 0.5, kind="sample")], details={"fills": [fill]})
    )
    shown = WellFormed.read(page)
    assert shown.tags["script"] == shown.tags["i"] == 0
    assert "a <mark>&lt;script&gt;</mark>alert(1)" in page
    assert "<mark>x</mark> &amp; <mark>&lt;i&gt;</mark>" in page


def test_csv_and_latex_say_the_same_as_the_page(tmp_path: Path) -> None:
    write(tmp_path, *EVERYTHING[:4], EVERYTHING[-1])
    table = next((tmp_path / "report").glob("ratios-*-perplexity.csv")).read_text()
    read = list(csv.DictReader(io.StringIO(table)))
    assert len(read) == 4 * len(RATIOS)
    assert {row["kind"] for row in read} == {"exact", "bound", "marginal"}
    assert float(next(row["value"] for row in read if row["model"] == "ours" and row["setting"] == "0.5")) == 20.5
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


def test_bad_input_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "x.json").write_text('{"format": "tracformer-result", ')
    for place, told in (
        (empty, "there are no results in"),
        (broken, "x.json is not a result that can be read"),
        (tmp_path / "none", "does not exist"),
    ):
        assert main(["report", str(place), "--out", str(tmp_path / "report")]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranges("ours", 30.0).save(tmp_path / "results")
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "report"), "--title", "Mine & yours"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report" / "index.html")
    assert "<title>Mine &amp; yours</title>" in (tmp_path / "report" / "index.html").read_text()
