"""Where a figure came from: hashes of everything that went into it, and the circumstances, without a word about the machine's folders."""

import datetime
import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import tracformer
from tracformer.model.base import ConditionalModel

if TYPE_CHECKING:
    from tracformer.evaluation.tasks import Subject

PACKAGE = Path(tracformer.__file__).parent
SHOWING = (
    "cli/",
    "client.py",
    "hf/",
    "server/",
    "evaluation/report/",
    "evaluation/reproduce.py",
    "evaluation/plan.py",
    "evaluation/pilots.py",
    "evaluation/curves.py",
)  # parts of the package that cannot change a figure


def describe(subject: "Subject", inputs: Mapping[str, str]) -> dict[str, Any]:
    """`hashes` and `dtype` decide whether a result is the one asked for; the rest tells how it was made."""
    return {
        "hashes": {
            "weights": subject.weights,
            "tokenizer": "" if subject.tokenizer is None else subject.tokenizer.fingerprint,
            "code": source_hash(),
            **inputs,
        },
        "dtype": str(subject.model.head.dtype).removeprefix("torch."),
        "model": describe_model(subject.model),
        "code": tracformer.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": device_name(subject.device),
        "processes": subject.ranks.world,
        "batch": subject.batch,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
    }


def describe_model(model: ConditionalModel) -> dict[str, Any]:
    """Its sizes and its whole configuration."""
    sizes = {"parameters": model.num_parameters(), "parameters_without_embeddings": model.num_parameters(embeddings=False)}
    return {**sizes, "config": model.config.to_dict()}


def weights_hash(model: ConditionalModel) -> str:
    """SHA-256 over names, types, shapes and bytes of what a folder of this model would hold, and its configuration."""
    whole = hashlib.sha256(repr((model.config.model_type, sorted(model.config.to_dict().items()))).encode())
    for name, tensor in sorted(model.tensors().items()):
        held = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {held.dtype} {tuple(held.shape)}".encode())
        whole.update(held.flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def array_hash(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    """SHA-256 of arrays with their types and shapes."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(f"{array.dtype.str} {array.shape}".encode())
        whole.update(np.ascontiguousarray(array).data)
    return whole.hexdigest()


def source_hash() -> str:
    """SHA-256 of the package's source, save the parts that only show results, as it was when this process began."""
    return SOURCE


def _hash_source() -> str:
    whole = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix in (".py", ".cpp", ".h") and not name.startswith(SHOWING):
            whole.update(f"{name}\n".encode())
            whole.update(path.read_bytes())
    return whole.hexdigest()


SOURCE = _hash_source()  # now: hours later the folder may hold other code than what runs


def command_line(words: list[str]) -> str:
    """The command as it was typed, each path cut to its last name; it repeats the run from a folder that holds them all."""
    if not words:
        return ""
    program = Path(words[0])
    ours = program.parent.name == "cli" or (program.parent.name, program.name) == ("tracformer", "__main__.py")  # python -m tracformer
    name = "tracformer" if ours else program.name
    return " ".join([name, *map(_cut, words[1:])])


def _cut(word: str) -> str:
    """`name=/home/me/runs/a` -> `name=a`; the same inside `ratios:data=/home/me/data,mean=10`."""
    parts = []
    for part in word.split(","):
        key, equals, value = part.rpartition("=")
        looks_local = value.startswith(("/", "~", "./", "../")) or (("/" in value or "\\" in value) and Path(value).exists())
        parts.append(f"{key}{equals}{Path(value).name if looks_local else value}")
    return ",".join(parts)


def device_name(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
