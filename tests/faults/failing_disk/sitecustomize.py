"""On PYTHONPATH, a disk that is full for some files: FULL_FOR is a pattern of paths that cannot be opened to write."""

import builtins
import errno
import io
import os
import re

_FULL_FOR = os.environ.get("FULL_FOR")
_open = io.open


def _full(file, mode="r", *more, **named):
    if "w" in mode and re.search(_FULL_FOR, os.fspath(file) if not isinstance(file, int) else ""):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)
    return _open(file, mode, *more, **named)


if _FULL_FOR:
    builtins.open = io.open = _full
