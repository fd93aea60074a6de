"""Checks that a command will be able to write its output, before it spends time on it."""

from __future__ import annotations

import os
from pathlib import Path

from mindspeed_mm_dit.configs.limits import check_path
from mindspeed_mm_dit.errors import ConfigError

_CURE = "choose another path, or change its permissions"


def check_output_file(flag: str, path: str | Path, make: bool = True) -> None:
    """Create the folder of the file ``path`` and raise ConfigError unless the file can be written there.

    ``flag`` is the option that named it, e.g. "--output". The file itself is not touched; without ``make``, neither is
    its folder.
    """
    check_path(flag, str(path))
    what, path = f"{flag} = {path}", Path(os.path.realpath(path))  # where a link leads
    if os.path.isdir(path):  # (Path.is_dir would raise where permission is missing)
        raise ConfigError(what, "is a folder", "give the path of a file")
    if make:
        _make_folder(what, path.parent)
    if os.path.exists(path):
        if not os.access(path, os.W_OK):
            raise ConfigError(what, "exists and cannot be written: permission denied", _CURE)
    elif not _takes_files(_nearest(path.parent)):
        raise ConfigError(what, f"no file can be created in {_nearest(path.parent)}", _CURE)


def check_output_folder(flag: str, path: str | Path, make: bool = True) -> None:
    """Create the folder ``path`` and raise ConfigError unless it is writable; without ``make``, only check."""
    check_path(flag, str(path))
    path = Path(path)
    what = f"{flag} = {path}"
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(what, "is a file, but must be a folder", "choose another path")
    if make:
        _make_folder(what, path)
    nearest = _nearest(path)
    if not os.path.isdir(nearest):
        raise ConfigError(what, f"the folder {path} cannot be created: {nearest} is a file", "choose another path")
    if not _takes_files(nearest):
        raise ConfigError(what, "no file can be created in it", _CURE)


def _nearest(folder: Path) -> Path:
    """Return ``folder`` or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))


def _make_folder(what: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            what, f"the folder {folder} cannot be created: {error.strerror}", "choose another path"
        ) from None


def _takes_files(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)
