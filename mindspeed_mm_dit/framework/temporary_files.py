"""Temporary files of this process, which even an immediate exit removes."""

from __future__ import annotations

import atexit
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

own_files = ExitStack()
"""Closing it removes the files; that is done at the end of the process, and may be done before."""
atexit.register(own_files.close)


def written(name: str, text: str) -> Path:
    """Write ``text`` to a file in a folder of its own, and return its path."""
    folder = own_files.enter_context(tempfile.TemporaryDirectory(prefix="mindspeed_mm_dit_"))
    path = Path(folder) / name
    path.write_text(text, encoding="utf-8")
    return path


def leave(code: int) -> NoReturn:
    """End this process at once, whatever its threads are doing."""
    own_files.close()
    os._exit(code)
