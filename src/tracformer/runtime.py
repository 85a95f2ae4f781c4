"""Settings of the process that a command may take; a library call never does."""

import ctypes
import ctypes.util
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # names and values of glibc's mallopt(3)


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory instead of handing it back: large tensors then reuse warm pages.

    By default glibc maps every large tensor anew, and the page faults cost more than the arithmetic (measured: encoder attention at
    T = 16384 takes half the time with this, a training step of preset `laptop-long` 0.83 of it). Returns whether it took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(ctypes.util.find_library("c")).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
