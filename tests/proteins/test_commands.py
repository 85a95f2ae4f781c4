"""`tracformer mutants` and `tracformer design`, from an alignment to files, and their errors."""

import csv
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tracformer
from tests.proteins.test_mutants import family_file
from tracformer import Batch, Tracformer, TracformerConfig
from tracformer.cli import main
from tracformer.data import PreparedData, Records, build_tokenizer
from tracformer.data.alignment import read_alignment
from tracformer.proteins.wild_type import family_columns, family_hmm, save_hmm

WILD = "MWRDWHCF"


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model of an aligned family, and the family."""
    folder = tmp_path_factory.mktemp("family")
    tokenizer = build_tokenizer("protein-aligned")
    torch.manual_seed(0)
    config = TracformerConfig(
        vocab_size=tokenizer.vocab_size, max_length=16, n_layer=4, n_head=2, d_model=16, n_max=4
    )
    Tracformer(config).save_pretrained(folder / "model")
    tokenizer.save(folder / "model")
    family_file(folder)
    return folder


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_mutants_from_table_to_files(
    aligned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyhmmer")
    table = tmp_path / "dms.csv"
    names = ["M5A", "W6A", "R7K", "D8E", "W6A:W9A"]
    rows = [f"{name},{value}" for value, name in enumerate(names)]
    table.write_text("mutant,activity\n" + "\n".join(rows) + "\n")
    common = ("mutants", "-m", aligned / "model", "--wild-type", WILD, "--first", 5)
    files = ("--out", tmp_path / "scores.csv", "--heat-map", tmp_path / "map.png")
    code, out, err = ran(
        capsys, *common, "--family", aligned / "family.a3m", "--mutants", table,
        "--score-column", "activity", "--rivals", *files,
    )  # fmt: skip
    assert code == 0, err
    methods = ("tracformer car", "tracformer ac", "tracformer whole", "sum of singles")
    for method in (*methods, "profile", "hmm", "ardca"):
        assert f"\n{method} " in out
    with open(tmp_path / "scores.csv", newline="") as file:
        assert [row["mutant"] for row in csv.DictReader(file)] == names
    assert (tmp_path / "map.png").stat().st_size > 1000
    # without --family the wild type is aligned by the model's own profile
    code, _, err = ran(capsys, *common, "--all-singles")
    assert code == 2
    assert "family.hmm: there is no such file" in err
    columns = [record.columns for record in read_alignment(aligned / "family.a3m").records]
    save_hmm(family_hmm(columns), aligned / "model")
    code, out, err = ran(capsys, *common, "--all-singles")
    assert code == 0, err
    assert f"the 10 highest of {8 * 19}" in out


def test_a_family_is_trained_by_the_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of columns starts at their frequencies, and aligns a wild type by its own profile."""
    pytest.importorskip("pyhmmer")
    rows = [f"M{a}{b}{c}W" for a in "ACD" for b in "EFGHK" for c in "LMNPQ"]
    family = tmp_path / "family.fasta"
    family.write_text("".join(f">s{i}\n{row}\n" for i, row in enumerate([*rows, *rows[:9]])))
    code, out, err = ran(
        capsys, "prepare", family, "--identity", 0.85, "--distinct", "--validation", 0.1,
        "--tokenizer", "protein-aligned", "--out", tmp_path / "data",
    )  # fmt: skip
    assert code == 0, err
    assert "84 records, 9 copies of another left out" in out
    run = tmp_path / "run"
    code, out, err = ran(
        capsys, "train", "protein-family", f"data={tmp_path / 'data'}", f"run={run}", "steps=2",
        "batch=4", "model.d_model=16", "eval_every=2", "optimizer.lr=1e-9",
    )  # fmt: skip
    assert code == 0, err
    assert "family.hmm: profile of 5 columns" in out
    lm = tracformer.load(run)
    assert (lm.model.config.max_length, lm.model.config.n_layer) == (5, 3)
    data = PreparedData.open(tmp_path / "data")
    examples = Records(data.split("train"), 5, identity_weights=0.8)
    shares = examples.column_shares(lm.tokenizer.vocab_size)
    found = lm.model(Batch(torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 5).bool()))
    np.testing.assert_allclose(found[0].softmax(1).detach(), shares, atol=0.3)
    assert found[0, 0].argmax() == lm.tokenizer.encode("M")[0]
    [score] = lm.score_mutants("maelw", ["A2C:L4M"], first=1)
    assert math.isfinite(score.log_ratio)
    assert len(lm.score_mutants("MAELW")) == 5 * 19
    training = family_columns(tmp_path / "data")
    assert len(training) == data.manifest.splits["train"].documents
    assert set(training) < set(rows)
    [again] = lm.score_mutants("maelw", ["A2C:L4M"], family=tmp_path / "data")
    assert again.log_ratio == score.log_ratio
    with pytest.raises(ValueError, match="rows of an alignment, which all have 5"):
        lm.infill("MA[[1]]L")
    assert len(lm.infill("MA[[1]]LW")[0].text) == 5  # without an end of text


def test_columns_need_an_alignment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.fasta"
    text.write_text(">a\nACDE\n>b\nACD\n>c\nAC\n>d\nACDEF\n" * 10)
    words = ("train", f"data={text}", f"run={tmp_path / 'run'}", "steps=2", "model.columns=true")
    code, _, err = ran(capsys, *words)
    assert code == 2
    assert "model.columns needs one sequence per row: data.rows=records" in err
    code, _, err = ran(capsys, *words, "data.rows=records")
    assert code == 2
    assert "but those of an alignment have one length" in err


def test_a_heat_map_without_matplotlib_is_refused_before_scoring(
    aligned: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ("mutants", "-m", aligned / "model", "--wild-type", WILD, "--all-singles")
    files = ("--out", tmp_path / "scores.csv", "--heat-map", tmp_path / "map.png")
    code, _, err = ran(capsys, *words, *files)
    assert code == 2
    assert "pip install 'tracformer[plot]'" in err
    assert not (tmp_path / "scores.csv").exists()


def test_design_writes_fasta(
    aligned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyhmmer")
    words = (
        "design", "-m", aligned / "model", "--wild-type", "s1", "--family", aligned / "family.a3m",
        "--region", "7-8", "-n", 4, "--max-changes", 1,
    )  # fmt: skip
    code, out, err = ran(capsys, *words, "--out", tmp_path / "designs.fasta")
    assert (code, out) == (0, "")
    assert "4 distinct designs, mean pairwise identity" in err
    lines = (tmp_path / "designs.fasta").read_text().splitlines()
    assert len(lines) == 8
    assert lines[0].startswith(">design_1 log_prob=")
    code, out, _ = ran(capsys, *words)
    assert out.splitlines() == lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mutants", "--wild-type", "ACD"), "give either --mutants CSV or --all-singles"),
        (("mutants", "--wild-type", "ACD", "--all-singles", "--rivals"), "--rivals needs --family"),
        (
            ("mutants", "--wild-type", "ACD", "--all-singles", "--heat-map", "map.doc"),
            "must end with .png, .svg, .pdf",
        ),
        (
            ("mutants", "-m", "proteins", "--wild-type", "DLG4", "--all-singles"),
            "neither a sequence of the 20 amino acids nor a file",
        ),
        (("design", "--wild-type", "ACD", "--region", "x"), "write FIRST-LAST"),
        (
            ("design", "--wild-type", "ACD", "--region", "1", "--max-changes", "0"),
            "--max-changes is 0; it must be at least 1",
        ),
    ],
)
def test_errors(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ran(capsys, *words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
