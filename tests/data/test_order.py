from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracformer.data import rows as module
from tracformer.data.rows import ExampleOrder, scattered

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

    def test_slicing_does_not_matter(self) -> None:
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
    places = scattered(np.arange(n, dtype=np.uint64), n, seed=1, epoch=0)
    assert abs(np.corrcoef(np.arange(n), places)[0, 1]) < 0.05
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(places)) == 1).sum() < 10


def test_huge_data_needs_no_table() -> None:
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
    assert scattered(np.arange(10, dtype=np.uint64), 10, seed=7, epoch=0).tolist() == [
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


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="0 examples"):
        ExampleOrder(0, 0)
    with pytest.raises(ValueError, match="seed is -1"):
        ExampleOrder(4, -1)
    with pytest.raises(ValueError, match="at least 0"):
        ExampleOrder(4, 0).indices(-1, 2)
    assert ExampleOrder(4, 0).indices(3, 0).tolist() == []
