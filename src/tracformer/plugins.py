"""Systems and tasks of other packages and of single files.

An installed package names them as entry points:

    [project.entry-points."tracformer.models"]
    window = "my_package:FAMILY"                  # a `tracformer.baselines.Family`
    [project.entry-points."tracformer.tasks"]
    lengths = "my_package.tasks:Lengths"          # a subclass of `tracformer.Task`

A file calls `tracformer.register_model` or `register_task` when it runs. `tracformer COMMAND
--include FILE.py` runs it; the environment variable TRACFORMER_INCLUDE names such files for every
process, separated as in PATH. Packages are imported only if a name is not known otherwise, or if
all names are listed.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

MODELS, TASKS = "tracformer.models", "tracformer.tasks"  # groups of entry points
VARIABLE = "TRACFORMER_INCLUDE"

_files: dict[str, Path] = {}  # name of the module -> the file that it was made of
_read: set[str] = set()  # groups of entry points that were read


def include(path: str | os.PathLike[str]) -> None:
    """Run a file, here and in processes that this one starts.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It fails.
    """
    place = Path(path).resolve()
    if not place.is_file():
        raise FileNotFoundError(f"there is no file {path} to include")
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    if str(place) not in named:
        os.environ[VARIABLE] = os.pathsep.join([*filter(None, named), str(place)])
    run_included()


def run_included() -> None:
    """Run the files of TRACFORMER_INCLUDE that have not been run."""
    for place in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(place)
        name = f"tracformer_included.{path.stem}"
        if _files.get(name) == path:
            continue
        if name in _files:
            raise ValueError(
                f"{path} and {_files[name]} have the same name; rename one of the included files"
            )
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{path} is not a Python file; --include takes a file such as my.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name], _files[name] = module, path  # found by `Family.module`
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name], _files[name]
            raise ValueError(f"{path} failed: {type(error).__name__}: {error}") from error


def read_entry_points(group: str, known: Callable[[str], bool]) -> Iterator[tuple[EntryPoint, str]]:
    """Yield the entry points of a group that is read for the first time, each with its package.

    Entry points with a name that is taken are left out with a warning.

    Args:
        group: `MODELS` or `TASKS`.
        known: Returns whether a name is taken.
    """
    if group in _read:
        return
    _read.add(group)
    for entry in entry_points(group=group):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "?"
        if known(entry.name):
            warnings.warn(
                f"{entry.name!r} of the package {package} is left out: the name is taken",
                stacklevel=3,
            )
        else:
            yield entry, package


def load_entry_point(entry: EntryPoint, package: str) -> object:
    """Return what an entry point names; None, with a warning, if it cannot be imported."""
    try:
        return entry.load()
    except Exception as error:  # a broken package must not break the others
        warnings.warn(
            f"{entry.name!r} of the package {package} is left out: {type(error).__name__}: {error}",
            stacklevel=3,
        )
        return None


def file_of(module: str) -> str:
    """Return the included file that a module was made of; empty if it was not included."""
    return str(_files[module]) if module in _files else ""
