"""`tracformer mutants` and `tracformer design`, from an alignment to files, and their errors."""

import csv
from pathlib import Path

import pytest
import torch

from tests.proteins.test_mutants import family_file
from tracformer import Tracformer, TracformerConfig
from tracformer.cli import main
from tracformer.data import build_tokenizer
from tracformer.data.alignment import read_alignment
from tracformer.proteins.wild_type import family_hmm, save_hmm

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
    for method in ("tracformer", "sum of singles", "profile", "hmm", "ardca"):
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
