"""Perplexity tasks, the windows of text that every model reads, and confidence intervals."""

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
from tracformer.contexts import Prefix, draw_contexts, parse
from tracformer.data import Tokenizer, byte_tokenizer, char_tokenizer, train_bpe
from tracformer.data.make_tokenizer import ALPHABETS
from tracformer.data.prepare import prepare
from tracformer.evaluation import Subject, bootstrap, make_task, parse_task
from tracformer.evaluation.exact_sources import log_joint
from tracformer.evaluation.perplexity import PAPER_RANGES, FixedRanges, Perplexity, figures
from tracformer.evaluation.questions import SHARED_NOISE, standard_error
from tracformer.evaluation.result_files import Result
from tracformer.evaluation.task import Progress
from tracformer.evaluation.windows import Sequences
from tracformer.generation.token_text import spelled_bytes
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.rng import derived_seed

TEXT = (
    "the grün cat… and the €5 hat. " * 30
    + "<|endoftext|>"
    + "a small ñandú sat on the mat, twice. " * 30
)


def read(
    tokenizer: Tokenizer,
    reference: Tokenizer | None = None,
    max_length: int = 256,
    **options: object,
) -> Sequences:
    model = small_model(vocab_size=tokenizer.vocab_size, max_length=max_length, n_layer=8)
    return make_task("prefixes", options).read(
        Subject(model, tokenizer, "model", "car", reference=reference)
    )  # type: ignore[attr-defined]


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return train_bpe([TEXT], 330)


def test_windows_are_spread_over_the_text(data: str) -> None:
    whole = read(byte_tokenizer(), data=data, length=32, sequences=0)
    some = read(byte_tokenizer(), data=data, length=32, sequences=7)
    assert len(whole) == (len(TEXT.replace("<|endoftext|>", "").encode()) + 2) // 32
    assert whole.tokens.reshape(-1)[:10].tolist() == list(TEXT.encode()[:10])
    np.testing.assert_array_equal(some.tokens, whole.tokens[np.arange(7) * len(whole) // 7])
    assert whole.hash != some.hash


def test_a_prepared_folder_and_its_text_give_the_same(
    data: str, tmp_path: Path, pieces: Tokenizer
) -> None:
    prepare(tmp_path / "run" / "data", data, byte_tokenizer(), validation=0.0, quiet=True)
    from_text = read(byte_tokenizer(), data=data, length=16, sequences=9)
    for place in ("run", "run/data"):
        prepared = read(
            byte_tokenizer(), data=str(tmp_path / place), split="train", length=16, sequences=9
        )
        np.testing.assert_array_equal(prepared.tokens, from_text.tokens)
    # decoded, and cut by its own tokens
    other = read(pieces, data=str(tmp_path / "run"), split="train", length=16, sequences=9)
    np.testing.assert_array_equal(
        other.tokens, read(pieces, data=data, length=16, sequences=9).tokens
    )


def test_windows_are_beginnings_of_documents(data: str) -> None:
    found = read(byte_tokenizer(), data=data, length=20, sequences=2, rows="documents")
    assert [bytes(row.tolist()) for row in found.tokens] == [
        part.encode()[:20] for part in TEXT.split("<|endoftext|>")
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"length": 5000}, "has 2222 tokens, fewer than a window of 5000"),
        (
            {"length": 900, "rows": "documents", "sequences": 3},
            "sequences is 3, but .* holds only 2 windows of 900 tokens",
        ),
        (
            {"length": 1200, "rows": "documents"},
            "the longest document of .* has 1170 tokens, fewer than a window of 1200",
        ),
        (
            {"length": 32, "sequences": 1000},
            "sequences is 1000, but .* holds only 69 windows of 32 tokens; 0 takes all",
        ),
        (
            {"length": 300, "sequences": 2},
            "have up to 300 tokens in model, which takes at most 256; choose a smaller length",
        ),
        ({"rows": "lines"}, "rows is 'lines'; it must be one of packed, documents"),
        ({"data": ""}, "no data given"),
    ],
)
def test_wrong_data_and_options_raise(
    data: str, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(byte_tokenizer(), **{"data": data, **options})


def test_a_missing_data_set_raises(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"wikitext103.*Looked for at .*nowhere.*tracformer prepare"
    ):
        read(byte_tokenizer(), data=str(tmp_path / "nowhere"))


def test_another_tokenizer_reads_the_same_text(data: str, pieces: Tokenizer) -> None:
    """Windows of bytes may begin and end inside a character; such parts are left out."""
    base = read(byte_tokenizer(), data=data, length=50, sequences=0)
    other = read(pieces, byte_tokenizer(), data=data, length=50, sequences=0)
    assert other.hash == base.hash
    for row, length, window in zip(other.tokens, other.lengths, base.tokens, strict=True):
        whole = b"".join(b"|" if i == 256 else bytes([i]) for i in window)
        text = pieces.decode([i for i in row[:length] if i != pieces.eot_id])
        assert text == whole.decode(errors="ignore").replace("|", "")
    assert (other.tokens == pieces.eot_id)[
        np.arange(other.tokens.shape[1]) < other.lengths[:, None]
    ].sum() == 1  # the last end is after the last window


def test_targets_are_the_same_stretches_of_text(data: str, pieces: Tokenizer) -> None:
    base = read(byte_tokenizer(), data=data, length=50, sequences=0)
    other = read(pieces, byte_tokenizer(), data=data, length=50, sequences=0)
    table = spelled_bytes(pieces)
    assert table is not None
    for name in ("[0.2,0.3]&[0.5,1]", "span:p=0.5,mean=4"):
        expected, own = base.contexts(parse(name), seed=1), other.contexts(parse(name), seed=1)
        for row, (context, mine) in enumerate(zip(expected, own, strict=True)):
            at = 0
            window = [b"\xff" if i == 256 else bytes([i]) for i in base.tokens[row]]
            while window[at][0] & 0xC0 == 0x80:
                at += 1
            for token, given in zip(
                other.tokens[row, : other.lengths[row]].tolist(), mine, strict=False
            ):
                size = 1 if token == pieces.eot_id else len(table[token])
                assert given == context[at : at + size].all()
                at += size
        assert own[np.arange(own.shape[1]) >= other.lengths[:, None]].all()


def test_sizes_are_bytes_of_tokens(pieces: Tokenizer, data: str) -> None:
    found = read(pieces, data=data, length=40, sequences=5)
    assert found.sizes is not None
    texts = [pieces.decode(row) for row in found.tokens]
    assert found.sizes.sum(1).tolist() == [
        len(text.replace("<|endoftext|>", "").encode(errors="replace")) for text in texts
    ]
    letters = char_tokenizer("aé€")
    assert spelled_bytes(letters) == [b"a", "é".encode(), "€".encode(), b""]


def test_an_aligned_model_reads_the_gaps_of_fasta(tmp_path: Path) -> None:
    path = tmp_path / "family.fasta"
    path.write_text(">a\nAC-GT-N\n>b\nACGGT--\n")
    aligned, plain = char_tokenizer(ALPHABETS["dna-aligned"]), char_tokenizer(ALPHABETS["dna"])
    rows = read(aligned, data=str(path), length=7, sequences=0, rows="documents")
    assert [aligned.decode(row) for row in rows.tokens] == ["AC-GT-N", "ACGGT--"]
    rows = read(plain, data=str(path), length=5, sequences=0, rows="documents")
    assert [plain.decode(row) for row in rows.tokens] == ["ACGTN", "ACGGT"]
    # the first model's windows have none
    shared = read(aligned, plain, data=str(path), length=5, sequences=0, rows="documents")
    assert [aligned.decode(row) for row in shared.tokens] == ["ACGTN", "ACGGT"]
    with pytest.raises(ValueError, match=r"model cannot read .*'-'.*use an alphabet with gaps"):
        read(plain, aligned, data=str(path), length=7, sequences=0, rows="documents")


def test_an_end_of_text_is_given_unless_counted(data: str) -> None:
    found = read(byte_tokenizer(), data=data, length=32, sequences=0)
    ends = found.tokens == 256
    assert ends.sum() == 1  # the last one is after the last whole window
    assert found.contexts(Prefix(0.0), 0)[ends].all()
    assert not found.contexts(Prefix(0.0), 0, count_eos=True).any()


# ---- perplexity

COUNT, LENGTH = 70, 20  # more than a block of sequences


@pytest.fixture
def lines(tmp_path: Path) -> str:
    write_lines(tmp_path / "lines.txt", COUNT, LENGTH)
    return str(tmp_path / "lines.txt")


def task(text: str, data: str, **options: object) -> Perplexity:
    requested = {
        "data": data,
        "length": LENGTH,
        "sequences": COUNT,
        "rows": "documents",
        "documents": "line",
        **options,
    }
    found = parse_task(text, requested)
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
    requested = task(text, str(tmp_path / "lines.txt"))
    result = requested.run(known_subject(), Progress())
    for strategy, _ in requested.strategies():
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
    requested = task("contexts:contexts=tokens:1/prefix:0.5,repeats=3", str(tmp_path / "lines.txt"))
    result = requested.run(known_subject(), Progress())
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
    once = (
        task("prefixes:fractions=0.5", requested.data).run(known_subject(), Progress()).find("nll")
    )
    assert result.find("nll", contexts="prefix:0.5").value == pytest.approx(once.value, rel=1e-10)
    assert len(result.details["tokens:1"]["nll"]) == COUNT


def test_marginals_are_marked_and_worse_than_the_joint(lines: str) -> None:
    requested = task("ranges", lines)
    joint, marginal = (requested.run(known_subject(mode), Progress()) for mode in ("car", "ac"))
    assert {row.kind for row in marginal.rows} == {"marginal"}
    assert all(m > j for m, j in zip(values(marginal), values(joint), strict=True))


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_the_batch_does_not_change_a_figure(lines: str, mode: str) -> None:
    requested = task("ratios:mean=3,ratios=0.1/0.9", lines)
    model = small()
    alone, together = (
        values(requested.run(subject(model, mode, batch), Progress())) for batch in (5, 50)
    )
    assert together == pytest.approx(alone, rel=1e-10)
    narrow = [
        values(requested.run(subject(model.float(), mode, batch), Progress())) for batch in (7, 64)
    ]
    assert narrow[0] == pytest.approx(narrow[1], rel=1e-5)
    assert narrow[0] == pytest.approx(alone, rel=1e-3)


def test_answers_are_those_of_one_sequence_at_a_time(lines: str) -> None:
    requested = task("ranges:ranges=[0,0.3]&[0.6,0.8]/[0.5,1]", lines, sequences=5)
    model = small()
    for mode in ("car", "ac", "ar"):
        about = subject(model, mode)
        read, result = requested.read(about), requested.run(about, Progress())
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


# ---- confidence intervals


def test_a_resample_is_a_draw_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of draws: each resample draws N sequences; in parts as in one piece."""
    [whole] = bootstrap._counts(7, 5)
    assert whole.shape == (bootstrap.RESAMPLES, 7)
    assert (whole.sum(1) == 7).all()
    bootstrap._counts.cache_clear()
    monkeypatch.setattr(bootstrap, "COUNTS_AT_ONCE", 700)
    parts = bootstrap._counts(7, 5)
    assert len(parts) == 20
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    bootstrap._counts.cache_clear()


@pytest.mark.parametrize("count", [3, 8, 80])
def test_intervals_cover_the_truth_about_95_percent_of_the_time(count: int) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        targets = rng.integers(5, 15, size=count)
        low, high = bootstrap.ratio_interval(
            targets * 2.0 + rng.normal(size=count) * 5, targets, seed=seed
        ) or (0.0, 0.0)
        hits += low < 2.0 < high
    assert 0.88 < hits / 200 < 0.99


def test_intervals_of_few_sequences_are_stretched_away_from_the_figure() -> None:
    assert bootstrap.stretched((1.0, 4.0), 2.0, 10**6) == pytest.approx((1.0, 4.0), abs=1e-4)
    low, high = bootstrap.stretched((1.0, 4.0), 2.0, 2)
    assert (2.0 - low, high - 2.0) == pytest.approx((9.168, 2 * 9.168), rel=1e-3)


def test_stretched_intervals_of_shares_stay_shares() -> None:
    part, whole = np.array([10, 9, 10]), np.full(3, 10)
    low, high = bootstrap.ratio_interval(part, whole) or (0.0, 0.0)
    assert high > 1.0
    assert bootstrap.share_interval(part, whole) == (low, 1.0)
    assert (bootstrap.share_interval(whole - part, whole) or (1.0, 1.0))[0] == 0.0
    assert (bootstrap.ratio_interval(np.array([-1, 0, 1]), whole) or (0.0, 0.0))[0] < 0.0


def test_paired_differences_cancel_what_is_common() -> None:
    rng = np.random.default_rng(1)
    targets = np.full(100, 10)
    hard = rng.normal(30, 10, size=100)
    a, b = hard + 1 + rng.normal(size=100) * 0.1, hard
    low, high = bootstrap.difference_interval((a, targets), (b, targets)) or (0.0, 0.0)
    assert 0.09 < low < 0.1 < high < 0.11
    wide = bootstrap.ratio_interval(a, targets) or (0.0, 0.0)
    assert wide[1] - wide[0] > 20 * (high - low)
    with pytest.raises(ValueError, match="100 and 99 sequences cannot be paired"):
        bootstrap.difference_interval((a, targets), (b[1:], targets[1:]))


def test_the_same_seed_gives_the_same_interval_and_one_sequence_none() -> None:
    values = np.arange(10.0)
    assert bootstrap.mean_interval(values) == bootstrap.mean_interval(values)
    assert bootstrap.mean_interval(values, seed=1) != bootstrap.mean_interval(values)
    assert bootstrap.mean_interval([1.0]) is None
    assert np.isnan(bootstrap.ratio([1.0], [0.0]))
