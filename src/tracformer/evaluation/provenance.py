"""The manifest of a result: what identifies it, and the circumstances in which it was made.

A result is identified by its model's name, mode, task and options, and by three entries of the
manifest: `hashes` (weights, tokenizer, data, contexts), `schemas` (numbers of the family and the
task, raised by hand when their figures change) and `dtype`. No source file enters: moving or
renaming code leaves every result valid. The other entries are for information. No entry names the
machine's folders.
"""

import dataclasses
import datetime
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import tracformer
from tracformer.baselines import schema_of
from tracformer.model.base import ConditionalModel
from tracformer.model.config import ModelConfig
from tracformer.renames import first_names

if TYPE_CHECKING:
    from tracformer.evaluation.task import Subject


PACKAGE = Path(tracformer.__file__).parent


def describe(subject: "Subject", task_schema: int, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a result.

    Args:
        subject: The model that answers.
        task_schema: `Task.schema` of the task.
        inputs: Hashes of what the model is shown, by name.
    """
    return {
        "hashes": {
            "weights": subject.weights,
            "tokenizer": "" if subject.tokenizer is None else subject.tokenizer.fingerprint,
            **inputs,
        },
        "schemas": {"family": schema_of(subject.family), "task": task_schema},
        "dtype": str(subject.model.head.dtype).removeprefix("torch."),
        "model": describe_model(subject.model),
        **code_version(),
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
    """Return a model's sizes and its whole configuration."""
    sizes = {
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(embeddings=False),
    }
    return {**sizes, "config": model.config.to_dict()}


def weights_hash(model: ConditionalModel) -> str:
    """Return the SHA-256 of a model's configuration and of the contents of its tensors.

    Tensors enter as the sorted list of (dtype, shape, SHA-256 of the bytes), without their names: a
    renamed parameter, class or module leaves the hash as it is. So do two equally shaped tensors
    that change places; code that reads the same file differently must raise its family's schema.
    """
    contents = []
    for tensor in model.tensors().values():
        held = tensor.detach().cpu().contiguous()
        content = hashlib.sha256(held.flatten().view(torch.uint8).numpy().data).hexdigest()
        contents.append(f"{held.dtype} {tuple(held.shape)} {content}")
    parts = [config_hash(model.config), *sorted(contents)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def config_hash(config: ModelConfig) -> str:
    """Return the SHA-256 of a configuration; neither a renamed nor a new key changes it.

    Each field enters under the first name that it had (`ModelConfig.old_config_keys`), beside the
    family's name in `config.json`. A field at its default is left out, so that models made before
    the field existed keep their hash.
    """
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.default is dataclasses.MISSING or getattr(config, field.name) != field.default
    }
    named = {"model_type": config.model_type, **first_names(values, config.old_config_keys)}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def array_hash(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    """Return the SHA-256 of arrays with their types and shapes."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(f"{array.dtype.str} {array.shape}".encode())
        whole.update(np.ascontiguousarray(array).data)
    return whole.hexdigest()


@cache
def code_version() -> dict[str, str]:
    """Return the package's version and, where it runs from a git checkout, the commit.

    The commit ends in `+changes` if files of the package differ from it, and is empty elsewhere.
    """
    commit = ""
    if _git("ls-files", "--error-unmatch", "__init__.py"):  # else some other project's repository
        changes = "+changes" if _git("status", "--porcelain", ".") else ""
        commit = _git("rev-parse", "HEAD") + changes
    return {"code": tracformer.__version__, "commit": commit}


def _git(*words: str) -> str:
    """Return what a git command prints in the package's folder; empty if it fails."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 10}
    try:
        done = subprocess.run(["git", *words], cwd=PACKAGE, **how)
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(done.stdout).strip()


def command_line(words: list[str]) -> str:
    """Return the command as it was typed, each path cut to its last name.

    In a folder that holds all these files, the command repeats the run.
    """
    if not words:
        return ""
    program = Path(words[0])
    # python -m tracformer
    ours = program.parent.name == "cli" or (program.parent.name, program.name) == (
        "tracformer",
        "__main__.py",
    )
    name = "tracformer" if ours else program.name
    return " ".join([name, *map(_cut, words[1:])])


def _cut(word: str) -> str:
    """Return a word with local paths cut: `ratios:data=/home/me/text` -> `ratios:data=text`."""
    parts = []
    for part in word.split(","):
        key, equals, value = part.rpartition("=")
        looks_local = value.startswith(("/", "~", "./", "../")) or (
            ("/" in value or "\\" in value) and Path(value).exists()
        )
        parts.append(f"{key}{equals}{Path(value).name if looks_local else value}")
    return ",".join(parts)


def device_name(device: torch.device) -> str:
    """Return the kind of a device, with the model of a GPU."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
