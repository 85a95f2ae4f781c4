"""The models that come with the package: one folder each beside this file.

Weights are stored at half precision, with tokenizer and model card. `tracformer.load("stories")`
opens one by its name; commands that name no model use `DEFAULT`.
"""

from pathlib import Path

DEFAULT = "stories"
_HERE = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Return the names of the bundled models."""
    return tuple(sorted(path.parent.name for path in _HERE.glob("*/config.json")))


def folder(name: str) -> Path | None:
    """Return the folder of the bundled model of that name, or None if there is none."""
    return _HERE / name if name in names() else None
