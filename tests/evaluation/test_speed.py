import statistics
from mmap import mmap

import pytest
import torch

from tests.evaluation.ranks import on_ranks
from tests.helpers import small_model
from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.evaluation.speed import Speed, watch_memory
from tracformer.evaluation.task import Silent, Subject, parse_task


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_targets_a_second_of_the_median_round(mode: str) -> None:
    task = parse_task("speed:length=16,sequences=2,holes=[0.25,0.75],rounds=3")
    result = task.run(Subject(small_model(), None, "model", mode), Silent())
    row = result.find("tokens_per_second")
    assert row.targets == 16
    assert len(result.details["seconds"]) == 3
    assert row.value == pytest.approx(16 / statistics.median(result.details["seconds"]))
    assert "machine" in row.note
    assert result.find("peak_memory_mib").value > 1.0


def test_a_reverse_process_and_two_ranks() -> None:
    model = MDLM(
        MDLMConfig(vocab_size=6, max_length=16, n_layer=1, n_head=2, d_model=8, d_condition=4)
    ).eval()
    task = Speed(length=8, sequences=1, rounds=1, steps=3)
    first, second = on_ranks(
        2, lambda ranks: task.run(Subject(model, None, "model", "diffusion", ranks=ranks), Silent())
    )
    assert first.rows == second.rows  # one measured, both know


def test_memory_is_seen_while_it_is_held() -> None:
    peak = watch_memory(torch.device("cpu"))
    before = peak()
    with mmap(-1, 2**26) as pages:  # fresh ones, gone at once
        pages.write(bytes(2**26))
    assert peak() >= before + 2**25


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match="each must be at least 1"):
        parse_task("speed:rounds=0")
    with pytest.raises(ValueError, match="no strategy is called 'hole'"):
        parse_task("speed:holes=hole")
    with pytest.raises(ValueError, match="takes at most 16 tokens"):
        Speed().run(Subject(small_model(), None, "model", "car"), Silent())
