"""Rows of tokens and the order in which they are read."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracformer.data import examples as module
from tracformer.data.examples import (
    ExampleOrder,
    Examples,
    PackedBlocks,
    Records,
    open_examples,
    permuted,
)
from tracformer.data.prepare import prepare
from tracformer.data.shards import Split
from tracformer.data.sources import TextSource

sizes, seeds = st.integers(1, 60), st.integers(0, 2**64 - 1)


@pytest.fixture(params=["table", "computed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "computed":
        monkeypatch.setattr(module, "LARGEST_TABLE", 0)


@pytest.mark.usefixtures("way")
class TestBothWays:
    def test_every_epoch_holds_every_example_once(self) -> None:
        for n in (*range(1, 40), 64, 100, 1000):
            order = ExampleOrder(n, seed=n)
            for epoch in range(3):
                assert sorted(order.indices(epoch * n, n).tolist()) == list(range(n))

    def test_a_stream_does_not_depend_on_how_it_is_cut(self) -> None:
        @settings(max_examples=50, deadline=None)
        @given(sizes, seeds, st.lists(st.integers(0, 150), max_size=8))
        def check(n: int, seed: int, cuts: list[int]) -> None:
            order = ExampleOrder(n, seed)
            whole = order.indices(0, 150).tolist()
            edges = [0, *sorted(cuts), 150]
            parts = [
                ExampleOrder(n, seed).indices(start, stop - start).tolist()
                for start, stop in pairwise(edges)
            ]
            assert [i for part in parts for i in part] == whole

        check()

    def test_epochs_and_seeds_differ(self) -> None:
        order = ExampleOrder(100, seed=3)
        first, second = order.indices(0, 100), order.indices(100, 100)
        assert not np.array_equal(first, second)
        assert not np.array_equal(first, ExampleOrder(100, seed=4).indices(0, 100))

    def test_every_place_is_equally_likely(self) -> None:
        n, epochs = 6, 3000
        stream = ExampleOrder(n, seed=1).indices(0, n * epochs).reshape(epochs, n)
        for place in range(n):
            counts = np.bincount(stream[:, place], minlength=n)
            # chi-square with 5 degrees of freedom: p = 1e-4
            assert ((counts - epochs / n) ** 2 / (epochs / n)).sum() < 25.0


def test_a_computed_order_looks_shuffled() -> None:
    n = 5000
    places = permuted(np.arange(n, dtype=np.uint64), n, seed=1, epoch=0)
    assert abs(np.corrcoef(np.arange(n), places)[0, 1]) < 0.05
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(places)) == 1).sum() < 10


def test_large_data_needs_no_table() -> None:
    n = 10**15
    order = ExampleOrder(n, seed=5)
    near_the_end = order.indices(n - 4, 8)
    assert near_the_end.tolist() == [
        *order.indices(n - 4, 4).tolist(),
        *order.indices(n, 4).tolist(),
    ]
    assert ((near_the_end >= 0) & (near_the_end < n)).all()
    assert not order._tables


def test_the_order_is_the_same_on_every_machine() -> None:
    assert ExampleOrder(10, seed=7).indices(0, 10).tolist() == [6, 3, 9, 1, 2, 0, 5, 7, 8, 4]
    assert permuted(np.arange(10, dtype=np.uint64), 10, seed=7, epoch=0).tolist() == [
        3,
        0,
        9,
        1,
        6,
        8,
        5,
        7,
        4,
        2,
    ]


def test_wrong_arguments_of_an_order_are_errors() -> None:
    with pytest.raises(ValueError, match="0 examples"):
        ExampleOrder(0, 0)
    with pytest.raises(ValueError, match="seed is -1"):
        ExampleOrder(4, -1)
    with pytest.raises(ValueError, match="at least 0"):
        ExampleOrder(4, 0).indices(-1, 2)
    assert ExampleOrder(4, 0).indices(3, 0).tolist() == []


TEXTS = ["abcdefgh", "ij", "klmno", "p"]
EOT = 256


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return prepare(
        tmp_path / "out", TextSource(TEXTS), "byte", validation=0.0, shard_tokens=7, quiet=True
    ).split("train")


def rows(view: Examples) -> list[str]:
    """Return every row up to its length, with end of text as a dot; padding is end of text."""
    tokens, lengths = view.get(np.arange(len(view)))
    assert tokens.shape == (len(view), view.length)
    assert tokens.dtype == lengths.dtype == np.int64
    assert all((row[length:] == EOT).all() for row, length in zip(tokens, lengths, strict=True))
    return [
        "".join("." if i == EOT else chr(i) for i in row[:length])
        for row, length in zip(tokens, lengths, strict=True)
    ]


def test_packed_blocks_run_across_documents(split: Split) -> None:
    assert rows(PackedBlocks(split, 6)) == ["abcdef", "gh.ij.", "klmno."]
    assert rows(PackedBlocks(split, 5)) == ["abcde", "fgh.i", "j.klm", "no.p."]


def test_text_shorter_than_one_block_is_an_error(split: Split) -> None:
    with pytest.raises(ValueError, match="split 'train' has 20 tokens, fewer than one block of 21"):
        PackedBlocks(split, 21)


def test_records_have_one_document_per_row(split: Split) -> None:
    assert rows(Records(split, 9)) == ["abcdefgh.", "ij.", "klmno.", "p."]
    # no row holds an end of text alone
    assert rows(Records(split, 4)) == ["abcd", "efgh", "ij.", "klmn", "o.", "p."]
    assert rows(Records(split, 5)) == ["abcde", "fgh.", "ij.", "klmno", "p."]


def test_rows_in_any_order(split: Split) -> None:
    view = Records(split, 4)
    tokens, lengths = view.get(np.array([5, 0, 5]))
    everything = view.get(np.arange(6))
    assert np.array_equal(tokens, everything[0][[5, 0, 5]])
    assert lengths.tolist() == [2, 4, 2]


def test_rows_may_stay_inside_documents(split: Split) -> None:
    assert isinstance(open_examples(split, 6), PackedBlocks)
    assert rows(open_examples(split, 6, cross_documents=False)) == [
        "abcdef",
        "gh.",
        "ij.",
        "klmno.",
        "p.",
    ]
    assert rows(open_examples(split, 5, cross_documents=False)) == [
        "abcde",
        "fgh.",
        "ij.",
        "klmno",
        "p.",
    ]
    assert isinstance(open_examples(split, 6, rows="records"), Records)
    with pytest.raises(ValueError, match="rows is 'blocks'; allowed: packed, records"):
        open_examples(split, 6, rows="blocks")


def test_wrong_arguments_of_rows_are_errors(split: Split) -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        PackedBlocks(split, 0)
    with pytest.raises(ValueError, match="max_length is -1"):
        Records(split, -1)
    with pytest.raises(
        ValueError, match=r"go from 2 to 4; they must be one-dimensional and in 0\.\.3"
    ):
        PackedBlocks(split, 5).get(np.array([2, 4]))
    assert PackedBlocks(split, 5).get(np.array([], np.int64))[0].shape == (0, 5)


def test_weighted_examples_appear_in_proportion() -> None:
    weights = np.array([1.0, 0.5, 0.25, 0.25, 2.0, 0.0])
    order = ExampleOrder(6, 3, weights)
    epochs = [order.indices(epoch * 6, 6) for epoch in range(400)]
    counts = np.array([np.bincount(epoch, minlength=6) for epoch in epochs])
    exact = weights * 6 / weights.sum()
    assert (counts >= np.floor(exact)).all()
    assert (counts <= np.ceil(exact)).all()
    assert np.allclose(counts.mean(0), exact, atol=0.1)
    assert np.array_equal(np.concatenate(epochs[:2]), ExampleOrder(6, 3, weights).indices(0, 12))


def test_rows_of_a_family_are_weighted_by_their_neighbours(tmp_path: Path) -> None:
    texts = ["ACDEF", "ACDEF", "ACDEG", "WWWWW"]
    data = prepare(tmp_path / "d", TextSource(texts), "protein-aligned", validation=0.0)
    split = data.split("train")
    assert np.allclose(Records(split, 5, 0.8).weights, [1 / 3, 1 / 3, 1 / 3, 1.0])
    assert Records(split, 5).weights is None
    data = prepare(tmp_path / "e", TextSource(["ACD", "AC"]), "protein-aligned", validation=0.0)
    with pytest.raises(ValueError, match="all of one length"):
        Records(data.split("train"), 5, 0.8)
