"""What tests need of the machine and of files outside the package."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tracformer import native

needs_compiler = pytest.mark.skipif(not native.available(), reason="no native code on this machine")


ROOT = Path(__file__).parents[1]


def soak_factor() -> int:
    """Return by how much the hostile suites are longer than by default."""
    return int(os.environ.get("TRACFORMER_SOAK", "1"))


def script(path: str) -> ModuleType:
    """Return the file at this path of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str((ROOT / path).parent) not in sys.path:  # as when it is run as a script
        sys.path.insert(0, str((ROOT / path).parent))
    spec.loader.exec_module(module)
    return module


def example(name: str) -> ModuleType:
    return script(f"examples/{name}.py")
