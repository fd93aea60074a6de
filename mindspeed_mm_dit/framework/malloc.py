"""Let the C library keep the memory that tensors on a CPU free.

glibc returns each large block to the system and requests it again; the system then clears every page again. A training
step allocates gigabytes, so this took 8 to 10 % of its time (benchmarks/results/2026-11-21-freed_memory.md). A step
needs the retained memory anyway: the peak size of the process stays the same.
"""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER_TRIM, _NO_MAPPED_BLOCKS = -1, 0  # mallopt(3)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next allocation; return whether it does.

    Do nothing if the C library is another one, or if the user has tuned it by MALLOC_... variables.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, _NO_MAPPED_BLOCKS), (_M_TRIM_THRESHOLD, _NEVER_TRIM))
    return all(library.mallopt(name, value) == 1 for name, value in settings)
