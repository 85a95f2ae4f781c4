"""Read and write a model folder: `config.json`, `model.safetensors` and `checksums.json`.

The folder of a Tracformer also holds `modeling_tracformer.py`, for use without this library, which
never runs that copy. Files are written atomically. Reading is strict: unknown keys and missing,
unexpected or mis-shaped tensors are errors. No file is a pickle.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tracformer.files import remove_checksums, write_atomically, write_checksums
from tracformer.model.config import ModelConfig
from tracformer.renames import Renames, present_tensor_name

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# Code with which transformers loads a folder where this library is not installed.
CODE_FILE = "modeling_tracformer.py"
CODE = Path(__file__).with_name(CODE_FILE)
C = TypeVar("C", bound=ModelConfig)
# Keys that `transformers` adds to config.json: the first four at every save, the others once its
# Trainer has trained the model.
FOREIGN_KEYS = {
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "auto_map",  # written by `save` too
}


def save(
    folder: str | PathLike[str],
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model folder; `dtype` rounds the weights."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()
    }

    def write(part: Path) -> None:
        save_tensors(tensors, part)
        remove_checksums(path)  # only now: if writing fails, the old folder stays as it was

    write_atomically(path / WEIGHTS_FILE, write)
    document = {"model_type": config.model_type, **config.to_dict()}
    if config.auto_map:
        document["auto_map"] = dict(config.auto_map)
        write_code(path)
    write_atomically(path / CONFIG_FILE, json.dumps(document, indent=2) + "\n")
    write_checksums(path)


def write_code(folder: Path) -> None:
    """Copy the code for use without this library into a model folder."""
    write_atomically(folder / CODE_FILE, CODE.read_text(encoding="utf-8"))


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the usual permissions; a full disk raises an OSError."""
    path.touch()
    # Those of the umask: safetensors replaces the file by one that only the owner can read.
    permissions = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name} could not be written: {error}") from error
    path.chmod(permissions)


def load_document(folder: str | PathLike[str]) -> dict[str, Any]:
    """Return the content of a folder's `config.json`, whatever wrote it."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no model: there is no {CONFIG_FILE} in it")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}; expected a JSON object")
    return document


def load_config(
    folder: str | PathLike[str], kind: type[C], document: Mapping[str, Any] | None = None
) -> C:
    """Return the checked configuration of a folder.

    Args:
        folder: A model's folder.
        kind: Configuration class that the folder must hold.
        document: Content of its `config.json`, if the caller has read it already.
    """
    document = load_document(folder) if document is None else document
    path = Path(folder) / CONFIG_FILE
    if document.get("model_type") != kind.model_type:
        raise ValueError(
            f"{path} describes a model of type {document.get('model_type')!r}; expected "
            f"{kind.model_type!r}"
        )
    values = {
        key: value
        for key, value in document.items()
        if key != "model_type" and key not in FOREIGN_KEYS
    }
    try:
        if "modes" in values and not values["modes"]:
            raise ValueError(
                f"modes is {values['modes']!r}; it must name at least one of: "
                f"{', '.join(kind.possible_modes)}"
            )
        return kind.from_dict(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


@contextmanager
def on_meta() -> Iterator[None]:
    """Build models without memory for their weights, which are then loaded from a folder."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Skip `nn.init`.

    It has no effect on the meta device, but its first random call there imports torch's compiler,
    which takes longer than the rest of loading.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def load_weights(
    folder: str | PathLike[str],
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: str | torch.device,
    old_names: Renames | None = None,
) -> dict[str, Tensor]:
    """Return all tensors of a folder, with the names and shapes that the configuration implies.

    Args:
        folder: A model's folder.
        expected: Shape of each tensor by its present name.
        dtype: Type of the returned tensors.
        device: Where the returned tensors are put.
        old_names: Names of tensors in older files, as in `ModelConfig.old_tensor_names`.
    """
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no weights: there is no {WEIGHTS_FILE} in it")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            saved = {present_tensor_name(name, old_names or {}): name for name in file.keys()}  # noqa: SIM118
            found = {name: tuple(file.get_slice(saved[name]).get_shape()) for name in saved}
            compare(path, found, expected)
            tensors = {name: file.get_tensor(saved[name]) for name in expected}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    require_finite(path, tensors)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def require_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that names a tensor of a file with infinite or undefined values."""
    for name, tensor in tensors.items():
        # The sum is faster, but that of large values overflows.
        if tensor.is_floating_point() and not (tensor.sum().isfinite() or tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise ValueError(
                f"{path}: {count} of {tensor.numel()} values of {name} are infinite or NaN; the "
                "file is damaged, or training diverged"
            )


def compare(
    path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError if tensors of a file are missing, unexpected or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    problems += [
        f"{name} has shape {found[name]} where the configuration calls for {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (
            f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        )
        raise ValueError(f"{path} does not match its configuration: {shown}")
