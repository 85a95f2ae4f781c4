"""Read PyTorch files of other programs without running anything that they contain.

- `read_pickle`: files of tensors and plain values, by `torch.load(weights_only=True)`.
- `read_checkpoint`: also training checkpoints, whose pickles name classes of other packages. No
  such class is imported or called: each object becomes a `Placeholder` with its arguments and
  state, except for the few functions in `REBUILD`. Tensors are read on demand, so that optimizer
  state costs no memory.
- `lookup`: a value inside what `read_checkpoint` returned, by its path of keys.
"""

import errno
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

PICKLE_FILE = "pytorch_model.bin"
ZIP_MAGIC = b"PK\x03\x04"
STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}  # weights; tensors of other types, such as random states, become placeholders


def read_pickle(path: Path) -> Any:
    """Return what `torch.load(weights_only=True)` reads.

    Raises:
        ValueError: The file is damaged, or holds more than tensors and plain values; the message
            says how to get a file that can be read.
    """
    with path.open("rb"):  # a missing or unreadable file raises its own error
        pass
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise nearly every kind
        _refuse(
            error,
            f"{path} cannot be read as tensors alone: it is damaged, or it holds more, and could "
            "then run code when read. If it was downloaded, get it again, best as "
            "model.safetensors. If you trust it, load it where it was written and save it again: "
            "torch.save(weights, NEW) for weights by name; for a training checkpoint torch.save("
            "{key: checkpoint[key] for key in ('model', 'state_dict', 'ema') if key in checkpoint}"
            ", NEW), since its EMA weights are under 'ema'",
        )


def read_checkpoint(path: Path) -> Any:
    """Return the contents of a checkpoint: `StoredTensor` for tensors, `Placeholder` for objects.

    Files older than torch 1.6, which are not zip files, go through `read_pickle`.

    Raises:
        ValueError: The file is damaged or cut short, or it is an old one that holds objects.
    """
    with path.open("rb") as file:
        if file.read(4) != ZIP_MAGIC:
            return read_pickle(path)
    try:
        return _Unpickler(_Archive(path)).load()
    except Exception as error:
        _refuse(error, f"{path} is damaged or cut short, or not a PyTorch checkpoint; get it again")


def lookup(value: Any, *keys: str) -> Any:
    """Return the value at a path of keys, through dictionaries and placeholders, or None."""
    value = _unwrapped(value)
    for key in keys:
        value = _unwrapped(value.get(key)) if isinstance(value, dict) else None
    return value


def _unwrapped(value: Any) -> Any:
    """Return the content of an OmegaConf node; of another placeholder, its state and entries."""
    for _ in range(8):  # nodes may hold nodes; a hostile file may make a circle
        if not isinstance(value, Placeholder):
            break
        state = value.entries if value.state is None else value.state
        if isinstance(state, dict):
            state = {**value.entries, **state}
            state = state.get("_content", state.get("_val", state))
        value = state
    return value


class Global(NamedTuple):
    """A class or function that a pickle names; it is never imported."""

    name: str


@dataclass(eq=False, repr=False)
class Placeholder:
    """An object of a class that is not imported: its class name, arguments and state."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None  # the argument of its `__setstate__`, mostly a dictionary of attributes
    items: list[Any] = field(default_factory=list)  # of a subclass of list or set
    entries: dict[Any, Any] = field(default_factory=dict)  # of a subclass of dict

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    def append(self, item: Any) -> None:  # this and the next two are called by the unpickler
        self.items.append(item)

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value


class Storage(NamedTuple):
    """Where the numbers of one or more tensors lie in a file."""

    path: Path
    start: int
    size: int  # bytes, by the file's directory
    dtype: torch.dtype


class StoredTensor(NamedTuple):
    """A tensor in a file, read by `load`.

    The shape is what the file claims: check it before `load`.
    """

    storage: Storage
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def span(self) -> int:
        """Return the number of elements from the first to the last one."""
        steps = zip(self.shape, self.stride, strict=True)
        return 0 if 0 in self.shape else 1 + sum((n - 1) * step for n, step in steps)

    def load(self) -> Tensor:
        """Read the tensor."""
        path, start, _, dtype = self.storage
        numbers = torch.empty(self.span(), dtype=dtype)
        raw: Any = numbers.view(torch.uint8).numpy()
        with path.open("rb") as file:
            file.seek(start + self.offset * dtype.itemsize)
            if file.readinto(raw) != len(raw):
                raise ValueError(f"{path} was cut short while it was read")
        return numbers.as_strided(self.shape, self.stride).contiguous()


class _Archive:
    """The records of a zip file, which must be stored uncompressed.

    A compressed record could be much larger than the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.records = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
        if "byteorder" in self.records and self.read("byteorder") != b"little":
            raise zipfile.BadZipFile("its numbers are big-endian; only little-endian is supported")

    def place(self, name: str) -> tuple[int, int]:
        """Return where a record starts in the file, and its size in bytes."""
        if (info := self.records.get(name)) is None:
            raise zipfile.BadZipFile(f"record {name} is missing")
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        inside = start + info.file_size <= self.path.stat().st_size
        if info.compress_type != zipfile.ZIP_STORED or not inside:
            raise zipfile.BadZipFile(f"record {name} is compressed or reaches beyond the file")
        return start, info.file_size

    def read(self, name: str) -> bytes:
        """Return the bytes of a record."""
        start, size = self.place(name)
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(size)


class _Unpickler(pickle._Unpickler):
    """An unpickler that calls nothing but the functions in `REBUILD`.

    It extends the one written in Python, whose opcodes can be replaced one by one; the one in C
    also allocates as much memory for its memo as the file demands.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(self, archive: _Archive) -> None:
        raw = archive.read("data.pkl")
        super().__init__(io.BytesIO(raw))
        self.archive = archive
        self.room = 1000 + 4 * len(raw)  # elements that may be copied; a file may share its lists

    def find_class(self, module: str, name: str) -> Global:
        return Global(f"{module.replace('__builtin__', 'builtins')}.{name}")

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"extension {code} is not supported")

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", Global(name), str(key), *_) if name in STORAGES:
                place = self.archive.place(f"data/{key}")
                return Storage(self.archive.path, *place, STORAGES[name])
        return Placeholder("storage")

    def _instantiate(self, kind: Any, args: Any) -> None:
        """Push what represents `kind(*args)`; the opcodes INST and OBJ end here too."""
        name = kind.name if isinstance(kind, Global) else "result of a call"
        rebuild = REBUILD.get(name)
        self.room -= sum(len(arg) for arg in args if hasattr(arg, "__len__"))
        if self.room < 0:
            raise pickle.UnpicklingError("it copies one object over and over")
        self.stack.append(rebuild(*args) if rebuild else Placeholder(name, tuple(args)))

    def _load_call(self) -> None:
        args = self.stack.pop()
        self._instantiate(self.stack.pop(), args)

    def _load_call_ex(self) -> None:
        self.stack.pop()  # keyword arguments
        self._load_call()

    def _load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Placeholder):
            self.stack[-1].state = state

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _load_call
    dispatch[pickle.NEWOBJ_EX[0]] = _load_call_ex
    dispatch[pickle.BUILD[0]] = _load_build
    del dispatch[pickle.BYTEARRAY8[0]]  # it allocates as much memory as the file demands


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Any:
    """Return a `StoredTensor`, or a placeholder for a tensor of an unsupported kind.

    `rest` is requires_grad, backward hooks, and metadata such as a conjugate bit.
    """
    if not isinstance(storage, Storage) or any(rest[2:]):
        return Placeholder("tensor")
    tensor = StoredTensor(storage, offset, tuple(shape), tuple(stride))
    numbers = (offset, *tensor.shape, *tensor.stride)
    valid = all(type(number) is int and number >= 0 for number in numbers)
    if not valid or (offset + tensor.span()) * storage.dtype.itemsize > storage.size:
        raise pickle.UnpicklingError(f"a tensor of shape {tensor.shape} exceeds its storage")
    return tensor


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Return bytes; in pickles of protocol 2, which torch writes, they are text."""
    return str.encode(text, "latin1")


def _number(dtype: Any, raw: Any) -> Any:
    """Return a NumPy scalar as a Python number."""
    code = dtype.args[0]  # such as "f8"; the byte order is in the state
    if not re.fullmatch(r"[fiu][1248]|b1", code):
        return Placeholder("numpy.scalar")
    return np.frombuffer(raw, f"{'>' if '>' in dtype.state else '<'}{code}")[0].item()


REBUILD: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    "collections.defaultdict": lambda *args: {},
    "builtins.set": set,
    "builtins.bytes": _bytes,
    "_codecs.encode": _bytes,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}


def _refuse(error: Exception, message: str) -> NoReturn:
    """Raise a ValueError; or the error itself if the file is not the cause."""
    failing = isinstance(error, OSError) and error.errno != errno.EINVAL  # a seek in a short file
    if failing or isinstance(error, MemoryError) or "allocate memory" in str(error):
        raise error
    lines = [line.strip() for line in str(error).splitlines()]
    # torch's message has many lines of advice; one of them has the reason
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    reason = named[0] if named else lines[0] if len(lines) == 1 else ""
    found = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    raise ValueError(f"{message}. Reason: {found}") from error
