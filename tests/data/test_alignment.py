from pathlib import Path

import pytest

from tracformer.data import documents, open_source
from tracformer.data.split import INSERTED, read_alignment


def written(folder: Path, text: str) -> Path:
    path = folder / "family.fasta"
    path.write_text(text)
    return path


def test_plain_alignments(tmp_path: Path) -> None:
    alignment = read_alignment(written(tmp_path, ">a x\nAC-\nDE\n>b\n.cqde*\n>empty\n-----\n"))
    assert [record.columns for record in alignment.records] == ["AC-DE", "-CQDE"]
    assert [record.sequence for record in alignment.records] == ["ACDE", "CQDE"]
    assert [record.places for record in alignment.records] == [(0, 1, 3, 4), (1, 2, 3, 4)]


def test_a2m_insertions_belong_to_no_column(tmp_path: Path) -> None:
    alignment = read_alignment(written(tmp_path, ">a\nACdeF\n>b\nA-..F\n>c\n-CgF\n"))
    assert [record.columns for record in alignment.records] == ["ACF", "A-F", "-CF"]
    assert alignment.records[0].places == (0, 1, INSERTED, INSERTED, 2)


def test_sequences_are_those_that_prepare_reads(tmp_path: Path) -> None:
    path = written(tmp_path, ">a\nACdeF\n>b\nA-..F*\n>c\n-CgF\n>none\n---\n")
    assert [record.sequence for record in read_alignment(path).records] == list(
        documents(open_source(path))
    )


def test_unaligned_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not an alignment: its records have from 2 to 3 columns"):
        read_alignment(written(tmp_path, ">a\nACD\n>b\nAC\n"))
    with pytest.raises(ValueError, match="line 1 is 'ACGT'"):
        read_alignment(written(tmp_path, "ACGT\n"))
