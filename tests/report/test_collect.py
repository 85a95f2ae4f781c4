"""Results to sections: which results are shown, seeds as one line, paired differences."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from tests.report.results import ranges, ratios, result, with_hashes, write
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.report import paired_table
from tracformer.report.collect import choose, sections, tables
from tracformer.report.figures import curves_of
from tracformer.report.tables import Cell


def test_training_seeds_share_a_line(tmp_path: Path) -> None:
    page = write(tmp_path, ranges("ours #0", 10.0), ranges("ours #1", 12.0))
    assert "ours #0</th>" not in page
    # t = 12.706; no perplexity is negative
    assert "<td>11<small>0 to 23.71; 2 seeds, standard deviation 1.414</small></td>" in page


def seeded(model: str, value: float, half: float, **more: Any) -> Result:
    row = ResultRow(
        "perplexity",
        {"contexts": "c", "ratio": 0.5},
        value,
        value - half,
        value + half,
        "exact",
        9,
        90,
    )
    return result(model, "ratios", [row], **more)


def test_the_interval_of_a_mean_over_seeds_is_never_narrower_than_that_over_sequences() -> None:
    (section,) = sections(
        [
            *(seeded(f"ours #{i}", 60 + 0.1 * i, 3.0) for i in range(3)),
            seeded("theirs #0", 61.0, 3.0),
        ]
    )
    (table,) = tables(section)
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
    (section,) = sections(
        [seeded("ours #0", 50.0, 1.0), seeded("ours #1", 60.0, 1.0), seeded("ours #2", 70.0, 1.0)]
    )
    (cell,) = tables(section)[0].lines[0].cells
    assert cell is not None
    assert cell.low == pytest.approx(60 - math.hypot(1.0, 4.303 * 10 / math.sqrt(3)))
    (section,) = sections([seeded("ours #0", math.inf, 1.0), seeded("ours #1", 60.0, 1.0)])
    (cell,) = tables(section)[0].lines[0].cells
    assert cell == Cell(math.inf, seeds=2)


def test_weights_that_were_evaluated_twice_are_one_seed() -> None:
    runs = [
        with_hashes(ranges(name, value), weights=weights)
        for name, value, weights in (("m", 60.0, "A"), ("m #0", 60.0, "A"))
    ]
    (cell,) = tables(sections(runs)[0])[0].lines[0].cells
    assert cell is not None
    assert cell.seeds == 1
    (cell,) = (
        tables(sections([*runs, with_hashes(ranges("m #1", 62.0), weights="B")])[0])[0]
        .lines[0]
        .cells
    )
    assert cell is not None
    assert (cell.value, cell.seeds) == (61.0, 2)
    rows = [ResultRow("perplexity", {"contexts": "empty"}, 40.0, kind="exact")]
    apart = [
        result(name, "unconditional", rows, options={"data": data})
        for name, data in (("m", "ptb"), ("m #0", "1bw"))
    ]
    (section,) = sections([with_hashes(each, weights="A") for each in apart])
    assert [None if each is None else each.seeds for each in tables(section)[0].lines[0].cells] == [
        1,
        1,
    ]


def test_the_newest_of_several_results_is_shown(tmp_path: Path) -> None:
    """Results of changed weights are not further training seeds."""
    made = [ranges("ours", value) for value in (10.0, 12.0)]
    dated = [
        dataclasses.replace(
            r, manifest={**r.manifest, "hashes": {"weights": str(i)}, "time": f"2025-01-0{9 - i}"}
        )
        for i, r in enumerate(made)
    ]
    page = write(tmp_path, *dated)
    assert "<td>10</td>" in page
    assert "2 seeds" not in page
    assert "1 result is left out: newer or more precise results answer the same questions" in page


def noisy(level: float, draws: int | None, day: int, weights: str = "w") -> Result:
    made = ratios(
        "noisy", "bound", level, family="mdlm", mode="diffusion", options={"draws": draws}
    )
    hashes = {**made.manifest["hashes"], "weights": weights}
    return dataclasses.replace(
        made, manifest={**made.manifest, "hashes": hashes, "time": f"2025-01-0{day}"}
    )


def test_bounds_and_exact_answers_share_a_section(tmp_path: Path) -> None:
    page = write(tmp_path, ratios("ours", "exact", 20.0), noisy(41.0, 4, 2), noisy(43.0, 64, 1))
    assert page.count("<h2>Perplexity against") == 1
    assert "<td>43.50<small>" in page  # made earlier, of more draws
    assert "<td>41.50<small>" not in page
    assert "1 result is left out: newer or more precise results answer the same questions" in page


def test_of_several_estimates_the_most_precise_is_shown() -> None:
    """The model's own number of draws is 64."""
    rough, own, more, later = (
        noisy(41.0, 4, 3),
        noisy(42.0, None, 1),
        noisy(43.0, 65, 1),
        noisy(44.0, 64, 2),
    )
    assert choose([own, rough]) == [own]
    assert choose([more, own]) == [more]
    assert choose([own, later]) == [later]
    # other weights, another model
    assert choose([noisy(40.0, 64, 1, weights="old"), rough]) == [rough]


def test_results_of_a_higher_schema_replace_others_and_are_not_compared_with_them() -> None:
    def of_schema(made: Result, schema: int) -> Result:
        return dataclasses.replace(
            made, manifest={**made.manifest, "schemas": {"family": 1, "task": schema}}
        )

    old, new = noisy(41.0, 64, 3), of_schema(noisy(42.0, 4, 1), 2)
    assert choose([old, new]) == [new]
    # results that do not say are of schema 1
    assert choose([old, of_schema(old, 1)]) == [of_schema(old, 1)]
    other = ratios("ours", "exact", 20.0)
    assert len(sections([other, of_schema(new, 1)])) == 1
    found = sections([other, new])
    assert len(found) == 2
    assert [section.title.endswith(" (2)") for section in found] == [False, True]


def test_data_sets_of_an_unconditional_task_are_columns(tmp_path: Path) -> None:
    rows = [ResultRow("perplexity", {"contexts": "empty"}, 40.0, kind="exact")]
    requested = (
        ("ours", "ptb"),
        ("ours", "lambada"),
        ("theirs", "lambada"),
        ("theirs", "ptb"),
        ("others", "ptb"),
    )
    page = write(
        tmp_path,
        *(
            result(model, "unconditional", rows, options={"data": data})
            for model, data in requested
        ),
    )
    assert page.count("<h2>Unconditional perplexity") == 1
    assert "<th scope='col'>lambada</th><th scope='col'>ptb</th>" in page
    assert "<th scope='row'>others</th><td class='gap'>-</td><td" in page


def test_results_on_other_data_or_contexts_are_another_section(tmp_path: Path) -> None:
    plain, other = ranges("ours", 10.0), ranges("theirs", 12.0)
    assert len(sections([plain, other])) == 1
    assert len(sections([plain, with_hashes(other, data="e")])) == 2
    assert len(sections([plain, with_hashes(other, contexts="e")])) == 2
    assert len(choose([plain, with_hashes(plain, data="e")])) == 2
    bare = [dataclasses.replace(each, manifest={}) for each in (plain, other)]
    assert len(sections(bare)) == 1
    page = write(tmp_path, plain, with_hashes(other, data="e"))
    assert page.count("T = 128</h2>") == page.count("T = 128 (2)</h2>") == 1
    assert {"ranges-wikitext103-128-perplexity.csv", "ranges-wikitext103-128-2-perplexity.csv"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }


def test_texts_of_the_same_name_have_separate_columns() -> None:
    rows = [ResultRow("perplexity", {"contexts": "empty"}, 40.0, kind="exact")]
    requested = [
        result(model, "unconditional", rows, options={"data": data})
        for model, data in (("a", "ptb"), ("a", "1bw"), ("b", "ptb"))
    ]
    (section,) = sections([*requested[:2], with_hashes(requested[2], data="e")])
    assert tables(section)[0].columns == ("ptb", "1bw", "ptb (2)")


def test_perplexities_of_different_tokenizers_are_not_ranked() -> None:
    small, large = ranges("bytes", 3.0), with_hashes(ranges("words", 40.0), tokenizer="u")
    assert "**" not in tables(sections([small, large])[0])[0].to_markdown()
    assert "**3.000**" in tables(sections([small, ranges("words", 40.0)])[0])[0].to_markdown()
    lines = tables(
        sections([ranges("m #0", 3.0), with_hashes(ranges("m #1", 40.0), tokenizer="u")])[0],
    )[0].lines
    assert [line.label for line in lines] == ["m (tokenizer t)", "m (tokenizer u)"]


def test_differences_are_paired_and_never_across_kinds(tmp_path: Path) -> None:
    page = write(
        tmp_path,
        ratios("ours", "exact", 20.0),
        ratios("theirs", "exact", 25.0, family="bart"),
        ratios("noisy", "bound", 10.0, family="mdlm", mode="diffusion"),
        ratios("single", "marginal", 5.0, mode="ac"),
    )
    assert "theirs less ours" in page
    assert "noisy less" not in page
    assert "single less" not in page


def test_differences_of_a_table_are_in_one_unit() -> None:
    """Once a model has other tokens, bits per byte for all."""

    def requested(model: str, tokenizer: str, level: float) -> Result:
        plain = ratios(model, "exact", level)
        rows = (
            *plain.rows,
            *(
                dataclasses.replace(row, metric="bits_per_byte", value=row.value / 8)
                for row in plain.rows
            ),
        )
        hashes = {**plain.manifest["hashes"], "tokenizer": tokenizer}
        return dataclasses.replace(plain, rows=rows, manifest={**plain.manifest, "hashes": hashes})

    (section,) = sections(
        [requested("a", "t", 2.0), requested("b", "t", 3.0), requested("c", "u", 4.0)]
    )
    table = paired_table(section)
    assert table is not None
    assert "bits per byte" in table.title
    values = [line.cells[0].value for line in table.lines if line.cells[0] is not None]
    # three sequences, one nat more each, 27 bytes
    assert values == pytest.approx([3 / 27 / math.log(2), 6 / 27 / math.log(2)])
    same = paired_table(sections([requested("a", "t", 2.0), requested("b", "t", 3.0)])[0])
    assert same is not None
    assert "perplexity" in same.title


def test_differences_use_all_seeds_with_sums_per_sequence() -> None:
    three = [ratios(f"a #{i}", "exact", level) for i, level in enumerate((2.0, 9.0, 10.0))]
    other = ratios("b #0", "exact", 5.0)
    table = paired_table(sections([*three, other])[0])
    assert table is not None
    assert [line.label for line in table.lines] == ["b less a"]
    cell = table.lines[0].cells[0]
    assert cell is not None
    # the seeds' mean level is 7
    assert cell.value == pytest.approx(math.exp((3 * 5 + 3) / 10) - math.exp((3 * 7 + 3) / 10))
    assert "seeds: a 0/1/2, b 0" in table.caption
    without = [dataclasses.replace(three[0], details={}), *three[1:]]
    table = paired_table(sections([*without, other])[0])
    assert table is not None
    assert "seeds: a 1/2, b 0" in table.caption
