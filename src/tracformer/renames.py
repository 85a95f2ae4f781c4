"""Names that changed after files were written: old files load, and hashes stay as they were.

A rename is one entry, old name -> present name, in the table of the class whose names are stored:

- `ModelConfig.old_config_keys`: keys of `config.json`;
- `ModelConfig.old_tensor_names`: tensors of `model.safetensors` and of training checkpoints;
- `training.train_config.OLD_KEYS`: training keys, in presets, in `recipe.json` and in checkpoints.

Entries are never removed, are listed in the order in which the renames were made, and their old
names are not used again.
"""

import re
from collections.abc import Mapping
from typing import Any

Renames = Mapping[str, str]  # old name -> present name


def present_names(values: Mapping[str, Any], renames: Renames) -> dict[str, Any]:
    """Return a copy of `values` in which every old key has its present name.

    A name with dots is a path into nested groups, or the whole key where the groups are flat.

    Raises:
        ValueError: if a key is given under its old and under its present name.

    >>> present_names({"optimizer": {"rate": 0.1}}, {"optimizer.rate": "optimizer.lr"})
    {'optimizer': {'lr': 0.1}}
    >>> present_names({"optimizer.rate": 0.1}, {"optimizer.rate": "optimizer.lr"})
    {'optimizer.lr': 0.1}
    """
    renamed = _copy(values)
    for old, present in renames.items():
        if not _move(renamed, old, present):
            both = f"{old!r} is the old name of {present!r}, and both are given"
            raise ValueError(f"{both}; remove {old!r}")
    return renamed


def first_names(values: Mapping[str, Any], renames: Renames) -> dict[str, Any]:
    """Return a copy of `values` in which every key has the first name it ever had.

    Hashes are taken over these, so that a rename does not change them.

    >>> first_names({"layers": 2, "width": 8}, {"n_layer": "depth", "depth": "layers"})
    {'width': 8, 'n_layer': 2}
    """
    renamed = _copy(values)
    for old, present in reversed(list(renames.items())):
        _move(renamed, present, old)
    return renamed


def present_tensor_name(name: str, renames: Renames) -> str:
    """Return the present name of a tensor; `*` in the table stands for any text, such as a number.

    >>> present_tensor_name("blocks.3.fc.weight", {"blocks.*.fc.*": "layers.*.up.*"})
    'layers.3.up.weight'
    """
    for pattern, replacement in tensor_patterns(renames).items():
        name = re.sub(pattern, replacement, name)
    return name


def tensor_patterns(renames: Renames) -> dict[str, str]:
    r"""Return a table of tensor names as regular expressions and their replacements.

    >>> tensor_patterns({"blocks.*.fc": "layers.*.up"})
    {'^blocks\\.(.+)\\.fc$': 'layers.\\1.up'}
    """
    patterns = {}
    for old, present in renames.items():
        if old.count("*") != present.count("*"):
            raise ValueError(f"{old!r} and {present!r} must have the same number of *")
        first, *rest = present.split("*")
        replacement = first + "".join(f"\\{number}{part}" for number, part in enumerate(rest, 1))
        patterns["^" + re.escape(old).replace(r"\*", "(.+)") + "$"] = replacement
    return patterns


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(v) if isinstance(v, Mapping) else v for key, v in values.items()}


def _move(values: dict[str, Any], source: str, target: str) -> bool:
    """Rename one key in place if it is there; return False if the target is there too."""
    flat = any("." in key for key in values)
    *groups, key = [source] if flat else source.split(".")
    group: Any = values
    for name in groups:
        group = group.get(name, {}) if isinstance(group, dict) else {}
    if not isinstance(group, dict) or key not in group:
        return True
    value = group.pop(key)
    *groups, key = [target] if flat else target.split(".")
    group = values
    for name in groups:
        group = group.setdefault(name, {})
    if key in group:
        return False
    group[key] = value
    return True
