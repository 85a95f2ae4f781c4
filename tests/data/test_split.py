"""Validation is held out by hash, as the tail, or by identity after alignment."""

import gzip
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracformer.data import PreparedData, open_source, whole_documents
from tracformer.data.alignment import INSERTED, as_rows, read_alignment, sequence_weights
from tracformer.data.documents import TextPiece
from tracformer.data.prepare import prepare
from tracformer.data.split import (
    ByHash,
    SplitRule,
    Tail,
    WholeSource,
    choose_rule,
    cluster,
)

DOCUMENTS = [f"document number {i}" for i in range(3000)]


def pieces(texts: Iterable[str], size: int = 10**9) -> list[TextPiece]:
    return [
        TextPiece(text[i : i + size], i + size >= len(text), "here")
        for text in texts
        for i in range(0, max(len(text), 1), size)
    ]


def routed(rule: SplitRule, given: list[TextPiece]) -> dict[str, list[str]]:
    """Return whole documents by split; each split must end with the end of a document."""
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    open_ = {"train": "", "validation": ""}
    for split, piece in rule.route(given):
        open_[split] += piece.text
        if piece.end:
            splits[split].append(open_[split])
            open_[split] = ""
    assert open_ == {"train": "", "validation": ""}
    return splits


def test_many_documents_are_drawn_by_hash() -> None:
    rule = choose_rule(pieces(DOCUMENTS), 0.1)
    assert rule == ByHash(0.1)
    splits = routed(rule, pieces(DOCUMENTS))
    assert sorted(splits["train"] + splits["validation"]) == sorted(DOCUMENTS)
    assert 230 < len(splits["validation"]) < 370
    assert routed(rule, pieces(DOCUMENTS[::-1]))["validation"] == splits["validation"][::-1]
    copies = routed(rule, pieces(DOCUMENTS[:50] * 3))
    assert not set(copies["train"]) & set(copies["validation"])


def test_counting_stops_when_there_are_enough() -> None:
    read = 0

    def counted() -> Iterable[TextPiece]:
        nonlocal read
        for read, piece in enumerate(pieces(DOCUMENTS), 1):  # noqa: B007
            yield piece

    choose_rule(counted(), 0.1)
    assert read == 200


def test_all_pieces_of_a_document_go_to_one_side() -> None:
    splits = routed(ByHash(0.5), pieces([f"{i} and some more words" for i in range(100)], size=5))
    assert sorted(splits["train"] + splits["validation"]) == sorted(
        f"{i} and some more words" for i in range(100)
    )
    assert 25 < len(splits["train"]) < 75


@settings(deadline=None)
@given(
    st.lists(st.text("ab \n", min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(1, 50),
    st.floats(0.01, 0.5),
)
def test_a_tail_loses_nothing_and_ends_every_document(
    texts: list[str], size: int, fraction: float
) -> None:
    total = sum(map(len, texts))
    if int(total * (1.0 - fraction)) < 1:
        return
    rule = choose_rule(pieces(texts, size), fraction)
    assert isinstance(rule, Tail)
    splits = routed(rule, pieces(texts, size))
    assert "".join(splits["train"] + splits["validation"]) == "".join(texts)
    assert splits["train"]
    assert splits["validation"]


def test_a_tail_begins_at_a_document_if_one_is_near() -> None:
    texts = ["a" * 500, "b" * 400, "c" * 60, "d" * 40]
    assert routed(choose_rule(pieces(texts), 0.1), pieces(texts))["validation"] == texts[2:]


def test_a_tail_begins_at_white_space_inside_a_book() -> None:
    book = "word " * 1000
    splits = routed(choose_rule(pieces([book]), 0.1), pieces([book]))
    assert len(splits["train"][0]) == 4499
    assert splits["validation"][0].startswith(" word")


def test_no_hold_out_and_too_little_text() -> None:
    assert choose_rule([], 0.0) == WholeSource("train")
    with pytest.raises(ValueError, match=r"1 characters long, too short to hold out 5\.0%"):
        choose_rule(pieces(["a"]), 0.05)


LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def family(
    ancestors: int, copies: int, width: int = 40, seed: int = 0, conserved: float = 0.0
) -> list[str]:
    """Return descendants of several ancestors, with gaps.

    Descendants of one ancestor are similar; those of two share only the conserved columns.
    """
    rng = random.Random(seed)
    rows = []
    first = rng.choices(LETTERS, k=width)
    for _ in range(ancestors):
        ancestor = [old if rng.random() < conserved else rng.choice(LETTERS) for old in first]
        rows += ["".join(_changed(letter, rng) for letter in ancestor) for _ in range(copies)]
    rng.shuffle(rows)
    return rows


def _changed(letter: str, rng: random.Random) -> str:
    draw = rng.random()
    return "-" if draw < 0.05 else rng.choice(LETTERS) if draw < 0.2 else letter


def write_family(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(f">{number}\n{row}\n" for number, row in enumerate(rows)))
    return path


def texts(data: PreparedData, split: str) -> list[str]:
    part = data.split(split)
    return [data.tokenizer.decode(part.document(i)[:-1]) for i in range(part.counts.documents)]


def identities(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (A, B) identities by the definition: equal residues over those of the shorter."""
    gap = ord("-")
    equal = ((a[:, None] == b) & (a[:, None] != gap)).sum(2)
    shorter = np.minimum((a != gap).sum(1)[:, None], (b != gap).sum(1))
    return equal / np.maximum(shorter, 1)


def test_identity_is_a_share_of_the_shorter_sequence() -> None:
    rows = as_rows(["ACDEF", "ACQEG", "-----"])
    assert cluster(rows, 0.59).tolist() == [0, 0, 2]
    assert cluster(rows, 0.61).tolist() == [0, 1, 2]
    assert cluster(as_rows(["ACDEF", "AC---"]), 0.99).tolist() == [0, 0]


def test_clusters_are_the_connected_sequences() -> None:
    rows = as_rows(family(6, 30))
    near = identities(rows, rows) > 0.5
    reached = np.eye(len(rows), dtype=bool) | near
    for _ in range(len(rows)):
        reached = reached @ reached
    np.testing.assert_array_equal(cluster(rows, 0.5), reached.argmax(1))


def test_a_chain_is_one_cluster() -> None:
    rows = as_rows(["ABCD"[:i] + "wxyz"[i:] for i in (4, 0, 3, 1, 2)])
    assert cluster(rows, 0.7).tolist() == [0] * 5
    assert cluster(rows, 0.8).tolist() == [0, 1, 2, 3, 4]


def test_nothing_held_out_resembles_training(tmp_path: Path) -> None:
    rows = [family(30, 10, seed=1), family(20, 10, width=25, seed=2)]
    rows[0] += rows[0][:40]  # copies
    files = [
        write_family(tmp_path / f"family{number}.fasta", each) for number, each in enumerate(rows)
    ]
    folder = tmp_path / "families"
    folder.mkdir()
    for file in files:
        file.rename(folder / file.name)
    data = prepare(tmp_path / "data", folder, "protein", validation=0.1, identity=0.6)
    assert sum(split.documents for split in data.manifest.splits.values()) == 30 * 10 + 40 + 20 * 10
    sides = {name: set(texts(data, name)) for name in ("train", "validation", "test")}
    for file in sorted(folder.iterdir()):
        records = read_alignment(file).by_sequence
        parts = {
            name: as_rows([records[text].columns for text in records if text in sides[name]])
            for name in sides
        }
        for name in ("validation", "test"):
            assert 0.05 * len(records) <= len(parts[name]) <= 0.1 * len(records)
            assert identities(parts[name], parts["train"]).max() <= 0.6
        assert identities(parts["test"], parts["validation"]).max() <= 0.6
    again = prepare(tmp_path / "again", folder, "protein", validation=0.1, identity=0.6)
    assert again.manifest.files == data.manifest.files
    assert data.manifest.carving["train"] == {
        "rule": "clusters by identity in columns",
        "threshold": 0.6,
        "fraction": 0.1,
        "distinct": False,
        "records": 540,
        "copies": 40,
        "other_letters": {},
    }


def test_copies_are_left_out_and_counted(tmp_path: Path) -> None:
    """Insertions are not read with gaps, but a held-out sequence with them stays held out."""
    rows = [row[:5] + "xz" + row[5:] if i % 3 else row for i, row in enumerate(family(30, 10))]
    path = tmp_path / "family.a3m"
    write_family(path, [*rows, *rows[:25]])
    read = {
        distinct: prepare(
            tmp_path / str(distinct), path, "protein-aligned", identity=0.6, distinct=distinct
        )
        for distinct in (False, True)
    }
    for distinct, data in read.items():
        facts = data.manifest.carving["train"]
        assert (facts["records"], facts["copies"]) == (325, 25)
        assert facts["other_letters"] == {"X": 216, "Z": 216}
        sides = {name: set(texts(data, name)) for name in data.manifest.splits}
        assert not sides["train"] & (sides["validation"] | sides["test"])
        assert sum(s.documents for s in data.manifest.splits.values()) == (300 if distinct else 325)
    with pytest.raises(ValueError, match="distinct is for aligned sequences"):
        prepare(tmp_path / "other", path, "protein", distinct=True)


def test_families_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    one_line = write_family(tmp_path / "one.fasta", family(1, 30))
    with pytest.raises(
        ValueError, match="form 1 clusters, and none is small enough for validation; raise identity"
    ):
        prepare(tmp_path / "data", one_line, "protein", identity=0.3)
    with pytest.raises(ValueError, match="identity is 60"):
        prepare(tmp_path / "data", one_line, "protein", identity=60)
    text = tmp_path / "a.txt"
    text.write_text("some text")
    with pytest.raises(ValueError, match="for aligned sequences"):
        prepare(tmp_path / "data", text, "byte", identity=0.5)


# ---- alignments: every format gives the same columns and training data

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
    message = "not an alignment: line 5: record c has 2 columns, but most have 3"
    with pytest.raises(ValueError, match=message):
        read_alignment(write_alignment(tmp_path, ">a\nACD\n>b\nA-E\n>c x\nAC\n"))
    with pytest.raises(ValueError, match="line 1: record a has 3 columns, but most have 2"):
        read_alignment(write_alignment(tmp_path, ">a\nacd\n>b\nac\n>c\nac\n"))
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
