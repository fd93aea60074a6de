"""Memory of the machine this process runs on. Needs no framework."""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with a container's limit: of control groups version 2, and version 1."""


def host_memory_bytes() -> int:
    """Return the bytes of memory that processes of this machine, or of this container, can have together."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [path.read_text().strip() for path in _LIMITS if path.is_file()]
    return min([installed, *(int(limit) for limit in limits if limit.isdigit())])
