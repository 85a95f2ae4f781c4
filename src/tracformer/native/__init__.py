"""Compile and load the C++ operations for the CPU, `torch.ops.tracformer.*`.

The C++ files beside this one hold the two attentions, rotary positions, products with few rows, the
one-token step of generation, and the choice of tokens. They are compiled at first use into the
user's cache folder. The name of the library is a hash of everything that the machine code depends
on: sources, flags, PyTorch, compiler and processor. The file gets that name only when it is
complete, so several processes can build at the same time.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from tracformer.files import cache_folder, write_atomically

SOURCE = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp", "-Wno-psabi")
COMPILERS = ("c++", "g++", "clang++")
# lines of /proc/cpuinfo that tell processors apart, on x86 and on ARM
FEATURES = ("flags", "Features")
KIND = (*FEATURES, "vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")

log = logging.getLogger("tracformer")
_lock = threading.Lock()
_loaded: bool | None = None
_absent = False  # no library was found when `ready` last looked


class BuildError(Exception):
    """The C++ code cannot be compiled; the message is one line."""


def available() -> bool:
    """Return whether the operations `torch.ops.tracformer.*` are available.

    The first call of a process compiles and loads them.
    """
    return load() if _loaded is None else _loaded


def ready() -> bool:
    """Return whether the operations can be used without compiling them now."""
    global _absent
    if _loaded is None and not _absent:
        try:
            _absent = not built_library(find_compiler()).exists()
        except BuildError:
            _absent = True
        return not _absent and load()
    return bool(_loaded)


def load() -> bool:
    """Load the operations, compiling them if needed; return whether this succeeded."""
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                torch.ops.load_library(str(library()))
                _loaded = True
            except (BuildError, OSError, RuntimeError) as error:
                log.warning("native code is not available, falling back to PyTorch: %s", error)
                _loaded = False
        return _loaded


def library() -> Path:
    """Return the compiled library, from the cache or built now."""
    compiler = find_compiler()
    built = built_library(compiler)
    if not built.exists():
        compile_to(built, compiler, sorted(SOURCE.glob("*.cpp")))
    return built


def built_library(compiler: str) -> Path:
    """Return the path of the compiled library, whether it is built or not."""
    digest = hashlib.sha256("\0".join((*FLAGS, torch.__version__, target(compiler))).encode())
    for path in sorted(path for path in SOURCE.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(path.name.encode() + path.read_bytes())
    return cache_folder() / f"native-{digest.hexdigest()[:24]}.so"


def find_compiler() -> str:
    """Return the path of a C++ compiler: $CXX, or the first of COMPILERS."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else COMPILERS:
        found = shutil.which(candidate)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({named or ', '.join(COMPILERS)})")


def target(compiler: str) -> str:
    """Return the compiler's predefined macros, with its version and the processor's features.

    Running the compiler takes longer than loading the library, so the macros are kept in the cache
    folder, for this file of the compiler and this processor.
    """
    command = (compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)
    try:
        processor, file = processor_kind(), os.stat(compiler)
    except OSError:
        return run(*command)
    known = (os.path.realpath(compiler), str(file.st_size), str(file.st_mtime_ns), processor)
    kept = cache_folder() / f"target-{hashlib.sha256('|'.join(known).encode()).hexdigest()[:24]}.h"
    with suppress(OSError):
        return kept.read_text(encoding="utf-8")
    macros = run(*command)
    with suppress(OSError):  # a cache folder that cannot be written
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, macros)
    return macros


def processor_kind() -> str:
    """Return what /proc/cpuinfo says of the first processor's kind and features.

    Raises:
        OSError: The system has no such file, or it does not say.
    """
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    kind = [line for line in first.splitlines() if line.partition("\t")[0].strip(": ") in KIND]
    if not any(line.startswith(FEATURES) for line in kind):
        raise OSError("/proc/cpuinfo names no features")
    return "\n".join(kind)


def compile_to(built: Path, compiler: str, sources: list[Path]) -> None:
    """Compile the sources, in parallel, into the library `built`."""
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
    """Run a compiler command and return its output.

    Raises:
        BuildError: The command failed; the message is its first error.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        first_error = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            f"exit code {done.returncode}",
        )
        raise BuildError(f"{Path(command[0]).name}: {first_error.strip()}")
    return done.stdout


__all__ = ["available", "ready"]
