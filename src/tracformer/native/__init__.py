"""Compile and load the C++ operations.

Compiles the C++ beside this file at first use, and keeps the result in the user's cache folder.

The file's name is a hash of everything that the machine code depends on: source, flags, PyTorch,
compiler, processor. It appears under that name only when whole, so that processes which build at
the same time do no harm.

C++ for the CPU, compiled at first use: the attentions, and products with few rows.
`torch.ops.tracformer.*` once it is loaded.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tracformer.files import cache_folder

SOURCE = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp", "-Wno-psabi")
COMPILERS = ("c++", "g++", "clang++")

log = logging.getLogger("tracformer")
_lock = threading.Lock()
_loaded: bool | None = None
_absent = False  # nothing was built when `ready` last looked


class BuildError(Exception):
    """Why there is no native code, in one line."""


def available() -> bool:
    """Return whether the operations `torch.ops.tracformer.*` are available.

    The first call of a process compiles and loads them.
    """
    return load() if _loaded is None else _loaded


def ready() -> bool:
    """Whether they can be had at once: nothing is compiled for this answer."""
    global _absent
    if _loaded is None and not _absent:
        try:
            _absent = not built_library(find_compiler()).exists()
        except BuildError:
            _absent = True
        return not _absent and load()
    return bool(_loaded)


def load() -> bool:
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                torch.ops.load_library(str(library()))
                _loaded = True
            except (BuildError, OSError, RuntimeError) as error:
                log.warning("native code is not available, PyTorch does its work: %s", error)
                _loaded = False
        return _loaded


def library() -> Path:
    """The compiled library, from the cache or built now."""
    compiler = find_compiler()
    built = built_library(compiler)
    if not built.exists():
        compile_to(built, compiler, sorted(SOURCE.glob("*.cpp")))
    return built


def built_library(compiler: str) -> Path:
    """Where the compiled library lies once it is built."""
    digest = hashlib.sha256("\0".join((*FLAGS, torch.__version__, target(compiler))).encode())
    for path in sorted(path for path in SOURCE.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(path.name.encode() + path.read_bytes())
    return cache_folder() / f"native-{digest.hexdigest()[:24]}.so"


def find_compiler() -> str:
    named = os.environ.get("CXX")
    for candidate in (named,) if named else COMPILERS:
        found = shutil.which(candidate)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({named or ', '.join(COMPILERS)})")


def target(compiler: str) -> str:
    """The compiler's predefined macros: its version, and what this processor can do."""
    return run(compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)


def compile_to(built: Path, compiler: str, sources: list[Path]) -> None:
    log.info("compiling native code, once, to %s", built)
    torch_folder = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    linked = (f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu")
    built.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=built.parent, prefix="building-") as folder,
        ThreadPoolExecutor() as at_once,
    ):
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        options = (*FLAGS, abi, "-isystem", str(torch_folder / "include"), "-c")
        list(
            at_once.map(
                lambda pair: run(compiler, *options, str(pair[0]), "-o", str(pair[1])),
                zip(sources, objects, strict=True),
            )
        )
        result = Path(folder) / built.name
        run(compiler, *FLAGS, "-shared", *map(str, objects), "-o", str(result), *linked)
        result.replace(built)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        first_error = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            f"exit code {done.returncode}",
        )
        raise BuildError(f"{Path(command[0]).name}: {first_error.strip()}")
    return done.stdout


__all__ = ["available", "ready"]
