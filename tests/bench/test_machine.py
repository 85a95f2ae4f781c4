import pytest
import torch
from tracformer.bench.pieces import least_time

from tracformer import native
from tracformer.bench import pieces as measure


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
@pytest.mark.parametrize("count", [0, 1, 127, 100_003, 2**18 + 5])
def test_the_reader_reads_everything(count: int) -> None:
    x = torch.randint(-3, 4, (count,)).float()  # small integers: their sum is exact in any order
    assert torch.ops.tracformer.streamed_sum(x) == x.sum().item()


def test_the_least_of_the_rounds_after_the_first() -> None:
    calls: list[int] = []
    assert least_time(lambda: calls.append(1), rounds=3) >= 0.0
    assert len(calls) == 4


def test_own_work_is_not_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three core-seconds in all, two of them ours, within two seconds: others used half a core."""
    monkeypatch.setattr(measure.time, "monotonic", iter((10.0, 12.0)).__next__)
    monkeypatch.setattr(measure, "_busy_seconds", iter((100.0, 103.0)).__next__)
    monkeypatch.setattr(measure, "_own_seconds", iter((5.0, 7.0)).__next__)
    assert measure.Neighbours().cores() == 0.5
