"""Checkpoints survive damage and other numbers of ranks; the state restores exactly."""

import json
from pathlib import Path

import pytest
import torch

from tests.toys import small_model
from tracformer.devices import Ranks
from tracformer.training import checkpoint as ckpt
from tracformer.training.checkpoint import CheckpointWriter, Reader, State
from tracformer.training.optimizer import build_optimizer
from tracformer.training.train_config import OptimizerConfig

TENSORS = {"a": torch.randn(7, 3), "b": torch.arange(5.0), "c": torch.randn(2, 2, 2)}


def write(
    folder: Path, step: int, tensors: dict[str, torch.Tensor] = TENSORS, world: int = 1
) -> Path:
    writer = ckpt.CheckpointWriter(folder, step)
    writer.begin()
    for rank in range(world):
        shard = ckpt.Shard({}, {})
        for name, tensor in tensors.items():
            chunk = -(-len(tensor) // world)
            start, stop = min(rank * chunk, len(tensor)), min((rank + 1) * chunk, len(tensor))
            shard.tensors[name] = tensor[start:stop]
            shard.rows[name] = ckpt.RowRange(tuple(tensor.shape), start, stop)
        writer.write_shard("weights", shard, rank, world)
    return writer.finish({"step": step})


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, world: int) -> None:
    reader = ckpt.Reader(write(tmp_path, 3, world=world))
    assert reader.state["step"] == 3
    for name, tensor in TENSORS.items():
        for start in range(len(tensor) + 1):
            for stop in range(start, len(tensor) + 1):
                assert torch.equal(reader.rows("weights", name, start, stop), tensor[start:stop])


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    assert {entry.suffix for entry in write(tmp_path, 1).iterdir()} == {".safetensors", ".json"}


def damage_flip(path: Path) -> str:
    file = next(path.glob("weights-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x10
    file.write_bytes(data)
    return f"{file.name} differs"


def damage_cut(path: Path) -> str:
    file = next(path.glob("weights-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])
    return f"{file.name} has"


def damage_missing(path: Path) -> str:
    file = next(path.glob("weights-*.safetensors"))
    file.unlink()
    return f"{file.name} is missing"


def damage_manifest(path: Path) -> str:
    (path / "manifest.json").write_text('{"files": ')
    return "manifest.json is not readable"


def damage_no_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "has no manifest.json"


@pytest.mark.parametrize(
    "damage", [damage_flip, damage_cut, damage_missing, damage_manifest, damage_no_manifest]
)
def test_damage_is_reported_and_the_previous_checkpoint_is_used(
    tmp_path: Path, damage: "type[damage_flip]"
) -> None:
    older, newer = write(tmp_path, 10), write(tmp_path, 20)
    message = damage(newer)
    found, skipped = ckpt.newest_intact(tmp_path)
    assert found == older
    assert len(skipped) == 1
    assert skipped[0].startswith("step-00000020")
    assert message in skipped[0]


def test_an_unfinished_checkpoint_is_ignored(tmp_path: Path) -> None:
    older = write(tmp_path, 1)
    writer = ckpt.CheckpointWriter(tmp_path, 2)
    writer.begin()
    writer.write_shard("weights", ckpt.Shard(TENSORS, {}))
    assert ckpt.newest_intact(tmp_path) == (older, [])
    ckpt.prune(tmp_path, keep=2)
    assert [entry.name for entry in tmp_path.iterdir()] == [older.name]


def test_a_checkpoint_without_weights_is_damaged(tmp_path: Path) -> None:
    older = write(tmp_path, 1)
    writer = ckpt.CheckpointWriter(tmp_path, 2)
    writer.begin()
    writer.finish({"step": 2})
    assert ckpt.newest_intact(tmp_path) == (older, ["step-00000002 holds no weights"])


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 100, 20, 3):
        write(tmp_path, step)
    ckpt.prune(tmp_path, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]


def test_prune_counts_only_intact_checkpoints(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        write(tmp_path, step)
    damage_flip(tmp_path / "step-00000040")
    damage_cut(tmp_path / "step-00000020")
    ckpt.prune(tmp_path, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "step-00000030",
        "step-00000040",
        "step-00000050",
    ]


def test_prune_keeps_the_checkpoint_just_written(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    written = write(tmp_path, 5)
    ckpt.prune(tmp_path, keep=2, written=written)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "step-00000005",
        "step-00000020",
        "step-00000030",
    ]
    damage_flip(tmp_path / "step-00000020")
    damage_flip(tmp_path / "step-00000030")
    ckpt.prune(tmp_path, keep=2, written=written)
    assert ckpt.newest_intact(tmp_path)[0] == written


def test_prune_does_not_read_checkpoints_known_to_be_intact(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    damage_flip(tmp_path / "step-00000020")  # is not read again
    ckpt.prune(tmp_path, keep=2, intact={tmp_path / "step-00000020", tmp_path / "step-00000030"})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(ckpt.DamagedCheckpointError, match="format 99"):
        ckpt.Reader(path)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert ckpt.newest_intact(tmp_path / "nowhere") == (None, [])


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


def test_averaged_weights_forget_the_initial_weights() -> None:
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


def test_an_average_resumes_exactly(tmp_path: Path) -> None:
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


def test_the_position_in_the_stream_counts_rows() -> None:
    state = state_of(ema=0.0)
    state.advance(8)
    state.advance(5)
    assert (state.step, state.position) == (2, 13)
