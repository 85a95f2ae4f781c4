import json
from pathlib import Path

import pytest
import torch

from tracformer.training import checkpoint as ckpt

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
def test_whatever_number_of_ranks_wrote_it_any_number_can_read_it(
    tmp_path: Path, world: int
) -> None:
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
def test_damage_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage: "type[damage_flip]"
) -> None:
    older, newer = write(tmp_path, 10), write(tmp_path, 20)
    told = damage(newer)
    found, skipped = ckpt.newest_whole(tmp_path)
    assert found == older
    assert len(skipped) == 1
    assert skipped[0].startswith("step-00000020")
    assert told in skipped[0]


def test_unfinished_writing_is_never_seen(tmp_path: Path) -> None:
    older = write(tmp_path, 1)
    writer = ckpt.CheckpointWriter(tmp_path, 2)
    writer.begin()
    writer.write_shard("weights", ckpt.Shard(TENSORS, {}))
    assert ckpt.newest_whole(tmp_path) == (older, [])
    ckpt.prune(tmp_path, keep=2)
    assert [entry.name for entry in tmp_path.iterdir()] == [older.name]


def test_a_checkpoint_without_weights_is_damaged(tmp_path: Path) -> None:
    older = write(tmp_path, 1)
    writer = ckpt.CheckpointWriter(tmp_path, 2)
    writer.begin()
    writer.finish({"step": 2})
    assert ckpt.newest_whole(tmp_path) == (older, ["step-00000002 holds no weights"])


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 100, 20, 3):
        write(tmp_path, step)
    ckpt.prune(tmp_path, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]


def test_prune_counts_whole_ones_alone(tmp_path: Path) -> None:
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


def test_prune_leaves_what_was_just_written(tmp_path: Path) -> None:
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
    assert ckpt.newest_whole(tmp_path)[0] == written


def test_prune_takes_for_whole_what_is_said_to_be(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    damage_flip(tmp_path / "step-00000020")  # is not read again
    ckpt.prune(tmp_path, keep=2, whole={tmp_path / "step-00000020", tmp_path / "step-00000030"})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(ckpt.DamagedCheckpointError, match="format 99"):
        ckpt.Reader(path)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert ckpt.newest_whole(tmp_path / "nowhere") == (None, [])
