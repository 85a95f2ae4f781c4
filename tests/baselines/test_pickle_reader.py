"""Files with pickles are read without running anything in them."""

import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tracformer.baselines.pickle_reader import (
    Placeholder,
    StoredTensor,
    lookup,
    read_checkpoint,
    read_pickle,
)


@contextmanager
def foreign(*paths: str, base: type = object) -> Iterator[list[Any]]:
    """Make classes of packages that are not installed, and remove them again."""
    modules: dict[str, types.ModuleType] = {}
    kinds = []
    for path in paths:
        *parents, name = path.split(".")
        for i in range(len(parents)):
            module = ".".join(parents[: i + 1])
            modules.setdefault(module, types.ModuleType(module))
        kinds.append(type(name, (base,), {"__module__": ".".join(parents)}))
        setattr(modules[".".join(parents)], name, kinds[-1])
    with mock.patch.dict(sys.modules, modules):
        yield kinds


def with_state(kind: Any, **state: Any) -> Any:
    made = kind()
    made.__dict__.update(state)
    return made


def omegaconf_nodes(value: Any, kinds: list[Any], parent: Any = None) -> Any:
    """The tree that OmegaConf pickles: containers with `_content`, values with `_val`."""
    mapping, sequence, node = kinds
    about = {"ref_type": Any, "resolver_cache": defaultdict(dict), "optional": True}
    if not isinstance(value, dict | list):
        return with_state(node, _metadata=about, _parent=parent, _val=value)
    kind = mapping if isinstance(value, dict) else sequence
    made = with_state(kind, _metadata=about, _parent=parent)
    if isinstance(value, dict):
        made._content = {key: omegaconf_nodes(item, kinds, made) for key, item in value.items()}
    else:
        made._content = [omegaconf_nodes(item, kinds, made) for item in value]
    return made


OMEGACONF = (
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.nodes.AnyNode",
)


def write_archive(file: Path, raw: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file in torch's format whose pickle is `raw`, with one storage of four floats."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", raw, compression)
        archive.writestr("archive/data/0", np.arange(4, dtype="<f4").tobytes())
    return file


def test_tensors_are_those_that_torch_reads(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    weights = OrderedDict(
        whole=base,
        view=base[2:5, 1:3],
        turned=base.T,
        half=base.half(),
        brain=base.bfloat16(),
        double=base.double(),
        scalar=torch.tensor(2.5),
        empty=torch.zeros(0, 3),
        expanded=torch.ones(1).expand(5),
        parameter=torch.nn.Parameter(base + 1),
    )
    torch.save(weights, tmp_path / "file.pt")
    found = read_checkpoint(tmp_path / "file.pt")
    assert list(found) == list(weights)
    for name, expected in weights.items():
        assert isinstance(found[name], StoredTensor)
        tensor = found[name].load()
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected.detach())


def test_plain_values_and_numpy_numbers(tmp_path: Path) -> None:
    values = {
        "learning_rate": np.float64(0.1) * np.minimum(3 / 7, 1.0),
        "numbers": [np.float32(1.5), np.int64(-3), np.uint8(200), np.bool_(True), np.float16(2)],
        "betas": (0.9, 0.999),
        "raw": b"\x00\xff",
        "names": {"a", "b"},
        "nothing": None,
        "size": torch.Size([2, 3]),
        "counts": defaultdict(list, {"a": [1]}),
    }
    torch.save(values, tmp_path / "file.pt")
    assert read_checkpoint(tmp_path / "file.pt") == values
    big = pickle.dumps(np.float64(2.5).astype(">f8"), protocol=2)
    assert read_checkpoint(write_archive(tmp_path / "big.pt", big)) == 2.5


def test_values_in_objects_of_packages_that_are_not_installed(tmp_path: Path) -> None:
    tree = {"model": {"hidden_size": 8, "name": "small"}, "tags": ["a", {"b": 1}], "none": None}
    with foreign(*OMEGACONF, "somewhere.Strange") as (*kinds, strange):
        config = omegaconf_nodes(tree, kinds)
        torch.save({"config": config, "other": with_state(strange, size=3)}, tmp_path / "file.pt")
    assert not any(name.startswith(("omegaconf", "somewhere")) for name in sys.modules)
    found = read_checkpoint(tmp_path / "file.pt")
    assert lookup(found, "config", "model", "hidden_size") == 8
    assert lookup(found, "config", "model", "name") == "small"
    assert lookup(lookup(found, "config", "tags")[1], "b") == 1
    assert lookup(found, "config", "none") is None
    assert lookup(found, "config", "model", "absent", "further") is None
    assert lookup(found, "other", "size") == 3
    assert repr(found["other"]) == "<somewhere.Strange>"


@pytest.mark.parametrize(("base", "value"), [(dict, {"x": 1}), (list, [1, 2])])
def test_subclasses_of_containers(base: type, value: Any, tmp_path: Path) -> None:
    with foreign("lightning.Container", base=base) as (kind,):
        torch.save({"a": kind(value)}, tmp_path / "file.pt")
    found = read_checkpoint(tmp_path / "file.pt")
    assert value == (lookup(found, "a") if base is dict else found["a"].items)


def test_a_circle_ends(tmp_path: Path) -> None:
    with foreign("omegaconf.dictconfig.DictConfig") as (kind,):
        node = kind()
        node._content = node
        torch.save({"config": node}, tmp_path / "file.pt")
    assert isinstance(lookup(read_checkpoint(tmp_path / "file.pt"), "config"), Placeholder)


def test_files_older_than_the_zip_format(tmp_path: Path) -> None:
    file = tmp_path / "old.pt"
    torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    assert torch.equal(read_checkpoint(file)["a"], torch.ones(2))
    document = {"model": {}, "ema": {}, "lr": np.float64(1)}
    torch.save(document, file, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"old\.pt cannot be read.*'ema'.*Reason: .*GLOBAL"):
        read_checkpoint(file)


class Calls:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


class Touchy:
    """Makes the file `sprung` when it is made, given its state, or changed."""

    def __new__(cls, *args: Any, **options: Any) -> "Touchy":
        if args or options:
            Path("sprung").touch()
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        Path("sprung").touch()


class Restored:
    def __setstate__(self, state: Any) -> None:
        Path("sprung").touch()


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def named(path: str) -> bytes:
    module, name = path.rsplit(".", 1)
    return f"c{module}\n{name}\n".encode()


COMMAND = text("touch sprung")

TOUCHY, EVAL = named(f"{__name__}.Touchy"), named("builtins.eval")

# Pickles that make the file `sprung` when the standard library reads them.
TRAPS = {
    "reduce": pickle.dumps(Calls(os.system, "touch sprung"), protocol=2),
    "reduce, protocol 5": pickle.dumps(Calls(os.system, "touch sprung"), protocol=5),
    "eval": pickle.dumps(Calls(eval, "open('sprung', 'w').close()"), protocol=2),
    "method": pickle.dumps(Calls(Path.touch, Path("sprung")), protocol=2),
    "inst": b"(S'touch sprung'\nios\nsystem\n.",
    "obj": b"(" + named("os.system") + COMMAND + b"o.",
    "stack global": b"\x80\x04" + text("os") + text("system") + b"\x93" + COMMAND + b"\x85R.",
    "newobj": b"\x80\x02" + TOUCHY + COMMAND + b"\x85\x81.",
    "newobj_ex": b"\x80\x04" + TOUCHY + b")}" + text("a") + b"K\x01s\x92.",
    "build by setstate": b"\x80\x02" + named(f"{__name__}.Restored") + b")\x81" + COMMAND + b"b.",
    "build by slots": b"\x80\x02" + TOUCHY + b")\x81N}" + text("a") + b"K\x01s\x86b.",
    "result of a call": EVAL + text("__import__('os').system") + b"\x85R" + COMMAND + b"\x85R.",
}


@pytest.mark.parametrize("trap", TRAPS)
def test_traps_stay_closed(trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(TRAPS[trap])
    assert Path("sprung").exists()  # it is a trap
    Path("sprung").unlink()
    found = read_checkpoint(write_archive(tmp_path / "file.pt", TRAPS[trap]))
    assert isinstance(found, Placeholder)
    assert not Path("sprung").exists()


def test_classes_are_not_changed(tmp_path: Path) -> None:
    """BUILD on a class itself would set its attributes."""
    raw = named(f"{__name__}.Restored") + b"N}" + text("evil") + b"K\x01s\x86b."
    read_checkpoint(write_archive(tmp_path / "file.pt", raw))
    assert not hasattr(Restored, "evil")


FLOATS = named("torch.FloatStorage")

STORAGE = b"(" + text("storage") + FLOATS + text("0") + text("cpu") + b"K\x04tQ"


def tensor(offset: int, size: int, stride: int, storage: bytes = STORAGE) -> bytes:
    numbers = b"".join(b"J" + n.to_bytes(4, "little", signed=True) for n in (offset, size, stride))
    offsets, sizes, strides = numbers[:5], numbers[5:10] + b"\x85", numbers[10:] + b"\x85"
    rebuild = named("torch._utils._rebuild_tensor_v2")
    return b"\x80\x02" + rebuild + b"(" + storage + offsets + sizes + strides + b"\x89}tR."


def test_tensors_stay_within_their_storage(tmp_path: Path) -> None:
    file = write_archive(tmp_path / "file.pt", tensor(1, 2, 2))
    assert read_checkpoint(file).load().tolist() == [1.0, 3.0]
    for offset, size, stride in ((1, 3, 2), (0, 5, 1), (5, 1, 1), (-1, 1, 1), (3, 2, -1)):
        file = write_archive(tmp_path / "file.pt", tensor(offset, size, stride))
        with pytest.raises(ValueError, match=r"file\.pt is damaged.*exceeds its storage"):
            read_checkpoint(file)
    missing = STORAGE.replace(text("0"), text("1"))
    with pytest.raises(ValueError, match="record data/1 is missing"):
        read_checkpoint(write_archive(file, tensor(0, 1, 1, missing)))


def test_a_wide_tensor_takes_no_memory_before_it_is_wanted(tmp_path: Path) -> None:
    found = read_checkpoint(write_archive(tmp_path / "file.pt", tensor(0, 2**31 - 1, 0)))
    assert found.shape == (2**31 - 1,)


def test_records_that_would_grow_are_refused(tmp_path: Path) -> None:
    for size in (10, 10**6):
        raw = pickle.dumps([0] * size)
        file = write_archive(tmp_path / "file.pt", raw, zipfile.ZIP_DEFLATED)
        with pytest.raises(ValueError, match=r"record data\.pkl is compressed"):
            read_checkpoint(file)


def test_objects_that_are_copied_over_and_over_are_refused(tmp_path: Path) -> None:
    """A list of n elements, of which n sets are made: n^2 from a file of 3n bytes."""
    n = 10**4
    many = b"]q\x00(" + b"K\x01" * n + b"e0" + named("builtins.set") + b"q\x010("
    raw = b"\x80\x02" + many + b"h\x01h\x00\x85R" * n + b"t."
    with pytest.raises(ValueError, match="copies one object over and over"):
        read_checkpoint(write_archive(tmp_path / "file.pt", raw))


def test_extensions_and_large_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extension 7 is not supported"):
        read_checkpoint(write_archive(tmp_path / "file.pt", b"\x80\x02\x82\x07."))
    memo = b"\x80\x02K\x01r\xff\xff\xff\x7f."
    assert read_checkpoint(write_archive(tmp_path / "file.pt", memo)) == 1
    for opcode in (b"\x96", b"\x8e", b"\x8d"):  # bytearrays, bytes and texts of 2^50 bytes
        raw = b"\x80\x05" + opcode + (2**50).to_bytes(8, "little") + b"a."
        with pytest.raises(ValueError, match="is damaged"):
            read_checkpoint(write_archive(tmp_path / "file.pt", raw))


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"a": torch.randn(50), "b": np.float64(1)}, file)
    whole = file.read_bytes()
    for length in (0, 3, 10, len(whole) // 2, len(whole) - 5):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"file\.pt .*damaged.*Reason: \w"):
            read_checkpoint(file)


@pytest.mark.parametrize(
    "trouble",
    [
        MemoryError(),
        OSError(5, "Input/output error"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_trouble_of_the_machine_is_not_blamed_on_the_file(
    trouble: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise trouble

    torch.save({"a": torch.ones(1)}, tmp_path / "file.pt")
    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(zipfile, "ZipFile", fail)
    for read in (read_pickle, read_checkpoint):
        with pytest.raises(type(trouble)) as raised:
            read(tmp_path / "file.pt")
        assert raised.value is trouble
