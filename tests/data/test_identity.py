import random
from pathlib import Path

import numpy as np
import pytest

from tracformer.data import PreparedData, prepare
from tracformer.data.split import as_rows, cluster, identities, nearest_identity, read_alignment

LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def family(
    ancestors: int, copies: int, width: int = 40, seed: int = 0, conserved: float = 0.0
) -> list[str]:
    """Descendants of several ancestors: alike within a line, unlike between lines save in conserved
    columns; gaps here and there.
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


def written(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(f">{number}\n{row}\n" for number, row in enumerate(rows)))
    return path


def texts(data: PreparedData, split: str) -> list[str]:
    part = data.split(split)
    return [data.tokenizer.decode(part.document(i)[:-1]) for i in range(part.counts.documents)]


def test_identity_counts_columns_of_the_shorter() -> None:
    rows = as_rows(["ACDEF", "AC---", "ACQEG", "-----"])
    expected = [[1, 1, 0.6, 0], [1, 1, 1, 0], [0.6, 1, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(identities(rows, rows), expected, rtol=1e-6)


def test_clusters_are_what_is_linked() -> None:
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
    files = [written(tmp_path / f"family{number}.fasta", each) for number, each in enumerate(rows)]
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
            assert nearest_identity(parts[name], parts["train"]).max() <= 0.6
        assert nearest_identity(parts["test"], parts["validation"]).max() <= 0.6
    again = prepare(tmp_path / "again", folder, "protein", validation=0.1, identity=0.6)
    assert again.manifest.files == data.manifest.files
    assert data.manifest.carving["train"] == {
        "rule": "clusters by identity in columns",
        "threshold": 0.6,
        "fraction": 0.1,
    }


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    one_line = written(tmp_path / "one.fasta", family(1, 30))
    with pytest.raises(
        ValueError, match="form 1 clusters, and none is small enough for validation; raise identity"
    ):
        prepare(tmp_path / "data", one_line, "protein", identity=0.3)
    with pytest.raises(ValueError, match="identity is 60"):
        prepare(tmp_path / "data", one_line, "protein", identity=60)
    text = tmp_path / "a.txt"
    text.write_text("some text")
    with pytest.raises(ValueError, match="for aligned FASTA files"):
        prepare(tmp_path / "data", text, "byte", identity=0.5)
