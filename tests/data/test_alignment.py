"""Alignments: every format gives the same columns, and the same training data."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from tracformer.data import open_source, prepare, whole_documents
from tracformer.data.alignment import INSERTED, as_rows, read_alignment, sequence_weights

FORMATS = {
    "family.fasta": ">a\nACD-EF\n>b one\nA--QEF\n>c\n-CDQ-F\n",
    "family.a3m": ">a\nACD-EF\n>b one\nA--QghEF\n>c\n-CDQ-kF\n",
    "family.a2m": ">a\nACD-..EF\n>b one\nA--QghEF\n>c\n-CDQ-k.F\n",
    "family.sto": "# STOCKHOLM 1.0\na  ACD-..E.F\nb  A--QghE.F\nc  -CDQ..-kF\n//\n",
}


def write_alignment(folder: Path, text: str) -> Path:
    path = folder / "family.fasta"
    path.write_text(text)
    return path


def test_plain_alignments(tmp_path: Path) -> None:
    alignment = read_alignment(
        write_alignment(tmp_path, ">a x\nAC-\nDE\n>b\n.cqde*\n>empty\n-----\n")
    )
    assert [record.columns for record in alignment.records] == ["AC-DE", "-CQDE"]
    assert [record.sequence for record in alignment.records] == ["ACDE", "CQDE"]
    assert [record.places for record in alignment.records] == [(0, 1, 3, 4), (1, 2, 3, 4)]


def test_a2m_insertions_belong_to_no_column(tmp_path: Path) -> None:
    alignment = read_alignment(write_alignment(tmp_path, ">a\nACdeF\n>b\nA-..F\n>c\n-CgF\n"))
    assert [record.columns for record in alignment.records] == ["ACF", "A-F", "-CF"]
    assert alignment.records[0].places == (0, 1, INSERTED, INSERTED, 2)


def test_sequences_are_those_that_prepare_reads(tmp_path: Path) -> None:
    path = write_alignment(tmp_path, ">a\nACdeF\n>b\nA-..F*\n>c\n-CgF\n>none\n---\n")
    assert [record.sequence for record in read_alignment(path).records] == list(
        whole_documents(open_source(path))
    )


def test_unaligned_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not an alignment: its records have from 2 to 3 columns"):
        read_alignment(write_alignment(tmp_path, ">a\nACD\n>b\nAC\n"))
    with pytest.raises(ValueError, match="line 1 is 'ACGT'"):
        read_alignment(write_alignment(tmp_path, "ACGT\n"))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_give_the_same_training_data(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / (f"{name}.gz" if zipped else name)
    content = FORMATS[name].encode()
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert [record.columns for record in read_alignment(path).records] == [
        "ACD-EF",
        "A--QEF",
        "-CDQ-F",
    ]
    assert [record.name for record in read_alignment(path).records] == ["a", "b", "c"]
    prepared = prepare(
        tmp_path / "out", open_source(path), tokenizer="protein-aligned", validation=0.0
    )
    split = prepared.split("train")
    texts = [prepared.tokenizer.decode(split.document(i).tolist()) for i in range(3)]
    assert [text[:6] for text in texts] == ["ACD-EF", "A--QEF", "-CDQ-F"]


def test_insertions_are_kept_where_gaps_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "family.sto"
    path.write_text(FORMATS[path.name])
    assert list(whole_documents(open_source(path, gaps="remove"))) == ["ACDEF", "AQGHEF", "CDQKF"]


def test_a_damaged_stockholm_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "family.sto"
    path.write_text("# STOCKHOLM 1.0\na ACD\nb AC\n//\n")
    with pytest.raises(ValueError, match=r"family\.sto is not a Stockholm alignment"):
        read_alignment(path)


def test_weights_are_shared_by_neighbours() -> None:
    rows = as_rows(["ACDEF", "ACDEF", "ACDEG", "WWWWW"])
    assert np.allclose(sequence_weights(rows, 0.8), [1 / 3, 1 / 3, 1 / 3, 1.0])
    assert np.allclose(sequence_weights(rows, 0.9), [0.5, 0.5, 1.0, 1.0])
