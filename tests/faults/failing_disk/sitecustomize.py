"""On PYTHONPATH, a disk that fails for some files.

FULL_FOR     a pattern of paths that cannot be written
FULL_AS      the name of the error, ENOSPC by default; EROFS for a disk that has become read-only
FULL_AFTER   the number of bytes that can be written before it; without it the file cannot even be opened
"""

import builtins
import errno
import io
import os
import re

_FULL_FOR = os.environ.get("FULL_FOR")
_NUMBER = getattr(errno, os.environ.get("FULL_AS", "ENOSPC"))
_AFTER = os.environ.get("FULL_AFTER")
_open = io.open


class _Filling(io.FileIO):
    left = int(_AFTER or 0)

    def write(self, data):
        self.left -= memoryview(data).nbytes
        if self.left < 0:
            raise OSError(_NUMBER, os.strerror(_NUMBER), self.name)
        return super().write(data)


def _full(file, mode="r", *more, **named):
    if not ({*mode} & {"w", "x"} and not isinstance(file, int) and re.search(_FULL_FOR, os.fspath(file))):
        return _open(file, mode, *more, **named)
    if _AFTER is None:
        raise OSError(_NUMBER, os.strerror(_NUMBER), file)
    return io.BufferedWriter(_Filling(file, mode.replace("b", "")))


if _FULL_FOR:
    builtins.open = io.open = _full
