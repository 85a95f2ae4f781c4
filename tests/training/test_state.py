from pathlib import Path

import torch

from tests.helpers import small_model
from tracformer.distributed import Ranks
from tracformer.training.checkpoint import CheckpointWriter, Reader, State
from tracformer.training.optimizer import build_optimizer
from tracformer.training.train_config import OptimizerConfig


def state_of(ema: float) -> State:
    model = small_model()
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(), fused=False)
    return State(
        model, optimizer, Ranks(0, 1, torch.device("cpu")), sharded=False, ema=ema, data=""
    )


def advance(state: State, weight: float) -> None:
    with torch.no_grad():
        state.model.norm.weight.fill_(weight)
    state.advance(1)


def test_averaged_weights_forget_where_they_started() -> None:
    """decay = min(ema, (1 + step) / (10 + step))"""
    state = state_of(ema=0.999)
    mean = state.model.norm.weight.detach().clone()
    for step in range(1, 31):
        advance(state, float(step))
        mean += (1 - (1 + step) / (10 + step)) * (step - mean)
        torch.testing.assert_close(state.average["norm.weight"], mean)
    assert 20 < float(mean[0]) < 30
    late = state_of(ema=0.5)
    late.step, late.average["norm.weight"] = 100, torch.zeros_like(mean)
    advance(late, 1.0)
    torch.testing.assert_close(late.average["norm.weight"], torch.full_like(mean, 0.5))


def test_an_average_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    whole, first = state_of(ema=0.99), state_of(ema=0.99)
    for state in (whole, first):
        for parameter in state.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        for step in range(3):
            state.optimizer.step()
            advance(state, step / 7)
    writer = CheckpointWriter(tmp_path, 3)
    writer.begin()
    for kind, shard in first.shards().items():
        writer.write_shard(kind, shard)
    second = state_of(ema=0.99)
    second.load(Reader(writer.finish(first.describe())))
    for state in (whole, second):
        advance(state, 0.3)
    assert all(torch.equal(second.average[name], mean) for name, mean in whole.average.items())


def test_the_place_in_the_stream_counts_sequences() -> None:
    state = state_of(ema=0.0)
    state.advance(8)
    state.advance(5)
    assert (state.step, state.position) == (2, 13)
