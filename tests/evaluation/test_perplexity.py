"""Perplexity of the truth is that of its source, and the batch does not change it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.toys import (
    LETTERS,
    chain_source,
    chain_tokenizer,
    known_subject,
    random_mdlm,
    small_baseline,
    small_model,
    write_lines,
)
from tracformer.contexts import draw_contexts, parse
from tracformer.evaluation import Subject, parse_task
from tracformer.evaluation.exact_sources import log_joint
from tracformer.evaluation.perplexity import PAPER_RANGES, FixedRanges, Perplexity, figures
from tracformer.evaluation.questions import SHARED_NOISE, standard_error
from tracformer.evaluation.result_files import Result
from tracformer.evaluation.task import Progress
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.rng import derived_seed

COUNT, LENGTH = 70, 20  # more than a block of sequences


@pytest.fixture
def lines(tmp_path: Path) -> str:
    write_lines(tmp_path / "lines.txt", COUNT, LENGTH)
    return str(tmp_path / "lines.txt")


def task(text: str, data: str, **options: object) -> Perplexity:
    asked = {
        "data": data,
        "length": LENGTH,
        "sequences": COUNT,
        "rows": "documents",
        "documents": "line",
        **options,
    }
    found = parse_task(text, asked)
    assert isinstance(found, Perplexity)
    return found


def subject(model: ConditionalModel, mode: str, batch: int = 16) -> Subject:
    return Subject(model, chain_tokenizer(), "model", mode, batch)


def small(**changes: object) -> ConditionalModel:
    return small_model(vocab_size=len(LETTERS) + 1, max_length=32, n_layer=5, **changes)


def values(result: Result) -> list[float]:
    return [row.value for row in result.rows]


@pytest.mark.parametrize(
    "text",
    [
        "ratios:mean=3,ratios=0.2/0.9",
        "ratios:mean=4,sd=2,ratios=0.5",
        "ranges",
        "prefixes:fractions=0/0.5",
        "unconditional",
    ],
)
def test_the_truth_has_the_perplexity_of_the_source(tmp_path: Path, text: str) -> None:
    tokens = write_lines(tmp_path / "lines.txt", COUNT, LENGTH)
    asked = task(text, str(tmp_path / "lines.txt"))
    result = asked.run(known_subject(), Progress())
    for strategy, _ in asked.strategies():
        context = draw_contexts(strategy, [LENGTH] * COUNT, 0, range(COUNT))
        nll = -log_joint(chain_source(), tokens, context).sum() / (~context).sum()
        row = result.find("perplexity", contexts=strategy.name)
        assert row.value == pytest.approx(math.exp(nll), rel=1e-10)
        assert (row.kind, row.sequences, row.targets) == ("exact", COUNT, (~context).sum())
        assert row.low < row.value < row.high
        assert result.find("nll", contexts=strategy.name).value == pytest.approx(nll, rel=1e-10)
        # One letter is one byte.
        assert result.find("bits_per_byte", contexts=strategy.name).value == pytest.approx(
            nll / math.log(2), rel=1e-10
        )


def test_repeated_contexts_count_together(tmp_path: Path) -> None:
    tokens = write_lines(tmp_path / "lines.txt", COUNT, LENGTH)
    asked = task("contexts:contexts=tokens:1/prefix:0.5,repeats=3", str(tmp_path / "lines.txt"))
    result = asked.run(known_subject(), Progress())
    seeds = [derived_seed(0, number) for number in range(3)]
    drawn = [
        draw_contexts(parse("tokens:1"), [LENGTH] * COUNT, seed, range(COUNT)) for seed in seeds
    ]
    nll = -sum(log_joint(chain_source(), tokens, context).sum() for context in drawn) / (3 * COUNT)
    row = result.find("nll", contexts="tokens:1")
    assert (row.value, row.targets, row.sequences) == (
        pytest.approx(nll, rel=1e-10),
        3 * COUNT,
        COUNT,
    )
    once = task("prefixes:fractions=0.5", asked.data).run(known_subject(), Progress()).find("nll")
    assert result.find("nll", contexts="prefix:0.5").value == pytest.approx(once.value, rel=1e-10)
    assert len(result.details["tokens:1"]["nll"]) == COUNT


def test_marginals_are_marked_and_worse_than_the_joint(lines: str) -> None:
    asked = task("ranges", lines)
    joint, marginal = (asked.run(known_subject(mode), Progress()) for mode in ("car", "ac"))
    assert {row.kind for row in marginal.rows} == {"marginal"}
    assert all(m > j for m, j in zip(values(marginal), values(joint), strict=True))


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_the_batch_does_not_change_a_figure(lines: str, mode: str) -> None:
    asked = task("ratios:mean=3,ratios=0.1/0.9", lines)
    model = small()
    alone, together = (
        values(asked.run(subject(model, mode, batch), Progress())) for batch in (5, 50)
    )
    assert together == pytest.approx(alone, rel=1e-10)
    narrow = [
        values(asked.run(subject(model.float(), mode, batch), Progress())) for batch in (7, 64)
    ]
    assert narrow[0] == pytest.approx(narrow[1], rel=1e-5)
    assert narrow[0] == pytest.approx(alone, rel=1e-3)


def test_answers_are_those_of_one_sequence_at_a_time(lines: str) -> None:
    asked = task("ranges:ranges=[0,0.3]&[0.6,0.8]/[0.5,1]", lines, sequences=5)
    model = small()
    for mode in ("car", "ac", "ar"):
        about = subject(model, mode)
        read, result = asked.read(about), asked.run(about, Progress())
        for name in ("[0,0.3]&[0.6,0.8]", "[0.5,1]"):
            context = torch.from_numpy(read.contexts(parse(name), 0))
            expected = [
                -model.log_prob(Batch(torch.from_numpy(read.tokens[[i]]), context[[i]]), mode)
                .sum()
                .item()
                for i in range(5)
            ]
            assert result.details[name]["nll"] == pytest.approx(expected, rel=1e-12)


def test_mode_ar_answers_all_contexts_in_one_pass(lines: str) -> None:
    about = known_subject("ar", batch=7)
    task("ratios:mean=3", lines).run(about, Progress())
    assert sum(about.model.batches) == COUNT  # type: ignore[union-attr, operator]
    about = known_subject("car", batch=7)
    task("ratios:mean=3", lines).run(about, Progress())
    assert sum(about.model.batches) == 9 * COUNT  # type: ignore[union-attr, operator]
    assert max(about.model.batches) == 7  # type: ignore[union-attr, type-var]


def test_the_limits_of_a_mode_are_in_the_note(lines: str) -> None:
    result = task("ranges", lines, sequences=3).run(
        subject(small_baseline("gpt2", max_length=32, vocab_size=6), "ar"), Progress()
    )
    assert {row.note for row in result.rows} == {"mode ar does not see the text after a blank"}


def test_a_bound_has_draws_and_a_standard_error(lines: str) -> None:
    model = random_mdlm(max_length=32, std=0.3)
    few, many = (
        task("ranges:ranges=[0.25,0.75]", lines, sequences=40, draws=draws) for draws in (4, 64)
    )
    alone, together = (few.run(subject(model, "diffusion", batch), Progress()) for batch in (1, 32))
    assert values(alone) == pytest.approx(values(together), rel=1e-10)
    row = alone.find("nll")
    assert (row.kind, row.note.split(",")[0]) == ("bound", "4 draws")
    unsaid = task("ranges:ranges=[0.25,0.75]", lines, sequences=2).run(
        subject(model, "diffusion"), Progress()
    )
    assert unsaid.find("nll").note.startswith("64 draws, standard error of nll ")
    errors = [
        float(task_.run(subject(model, "diffusion"), Progress()).find("nll").note.split()[-1])
        for task_ in (few, many)
    ]
    assert 0 < errors[1] < errors[0]
    other = task("ranges:ranges=[0.25,0.75]", lines, sequences=40, draws=4, seed=1).run(
        subject(model, "diffusion"), Progress()
    )
    assert 0 < abs(other.find("nll").value - row.value) < 6 * errors[0]


def test_groups_that_share_noise_count_as_one() -> None:
    """With noise common to 16 sequences, errors are those of 1/16 as many sequences."""
    rng = np.random.default_rng(0)
    count, targets = 1600, 10
    nll = np.repeat(rng.normal(size=count // SHARED_NOISE), SHARED_NOISE) * targets + 30.0
    true = 1.0 / math.sqrt(count / SHARED_NOISE)
    assert standard_error(nll, np.ones(count), np.full(count, float(targets))) == pytest.approx(
        true, rel=0.2
    )
    about = known_subject()
    sums = {"nll": nll.tolist(), "targets": [targets] * count, "bytes": [targets] * count}
    exact = figures({"contexts": "c"}, sums, about, "")
    about.model.answers = {"car": "bound"}  # type: ignore[misc]
    for plain, row in zip(exact, figures({"contexts": "c"}, sums, about, ""), strict=True):
        assert row.value == plain.value
        assert row.high - row.low == pytest.approx(4 * (plain.high - plain.low), rel=0.25)
    nll_row = next(
        row for row in figures({"contexts": "c"}, sums, about, "") if row.metric == "nll"
    )
    assert nll_row.high - nll_row.low == pytest.approx(2 * 1.96 * true, rel=0.2)


def test_the_standard_error_of_independent_sequences_is_not_overstated() -> None:
    rng = np.random.default_rng(1)
    count, targets = 1600, 10
    errors = np.full(count, 5.0)
    nll = 30.0 + rng.normal(size=count) * errors
    assert standard_error(nll, errors, np.full(count, float(targets))) == pytest.approx(
        0.5 / math.sqrt(count), rel=0.25
    )
    few = slice(0, SHARED_NOISE)  # one group: their own errors, added
    assert standard_error(nll[few], errors[few], np.full(SHARED_NOISE, 10.0)) == 0.5


def test_each_group_has_noise_of_its_own(lines: str) -> None:
    seen: list[int] = []
    about = known_subject()
    about.model.answers = {"car": "bound"}  # type: ignore[misc]
    estimate = about.model.estimate

    def noted(*inputs: object, seed: int = 0, **rest: object) -> object:
        seen.append(seed)
        return estimate(*inputs, **rest)  # type: ignore[arg-type]

    about.model.estimate = noted  # type: ignore[method-assign, assignment]
    task("unconditional", lines).run(about, Progress())
    assert len(set(seen)) == -(-COUNT // 16)


def test_an_end_of_text_is_given_unless_it_is_counted(tmp_path: Path) -> None:
    write_lines(tmp_path / "lines.txt", 40, 9)
    options = {"length": 20, "sequences": 10, "rows": "packed"}
    model = small()
    uncounted, counted = (
        task("ranges:ranges=[0,1]", str(tmp_path / "lines.txt"), count_eos=count, **options).run(
            subject(model, "car"), Progress()
        )
        for count in (False, True)
    )
    # windows of two lines and their ends
    assert (uncounted.find("nll").targets, counted.find("nll").targets) == (180, 200)
    assert sum(counted.details["[0,1]"]["bytes"]) == 180


def test_the_papers_ranges() -> None:
    """Six each, four of them in both tables; targets at T=10 as floor(aT) <= t < floor(bT)."""
    first, second = (FixedRanges(data="x", ranges=(table,)).strategies() for table in PAPER_RANGES)
    assert len(first) == len(second) == 6
    assert len(FixedRanges(data="x", ranges=("table1", "table2")).strategies()) == 8
    rng = np.random.default_rng(0)
    assert [int((~strategy.draw(10, rng)).sum()) for strategy, _ in first] == [5, 5, 6, 7, 5, 7]
    assert [int((~strategy.draw(100, rng)).sum()) for strategy, _ in second] == [
        50,
        60,
        70,
        50,
        30,
        80,
    ]
