"""Checks that a command will be able to write its output, before it spends time on it."""

from __future__ import annotations

import os
from pathlib import Path

from mindspeed_mm_dit.configs.limits import check_path
from mindspeed_mm_dit.errors import ConfigError

_CURE = "choose another place, or change its permissions"


def check_output_file(flag: str, path: str | Path, make: bool = True) -> None:
    """Make the folder of the file ``path`` and raise ConfigError unless the file can be written there.

    ``flag`` is the option that named it, e.g. "--output". The file itself is not touched; without ``make``, neither is
    its folder.
    """
    check_path(flag, str(path))
    what, path = f"{flag} = {path}", Path(os.path.realpath(path))  # where a link leads
    if os.path.isdir(path):  # (Path.is_dir would raise where permission is missing)
        raise ConfigError(what, "is a folder", "name a file in it")
    if make:
        _make_folder(what, path.parent)
    if os.path.exists(path):
        if not os.access(path, os.W_OK):
            raise ConfigError(what, "exists and cannot be written: permission denied", _CURE)
    elif not _takes_files(_nearest(path.parent)):
        raise ConfigError(what, f"no file can be made in {_nearest(path.parent)}", _CURE)


def check_output_folder(flag: str, path: str | Path, make: bool = True) -> None:
    """Make the folder ``path`` and raise ConfigError unless files can be made in it; without ``make``, only check."""
    check_path(flag, str(path))
    path = Path(path)
    what = f"{flag} = {path}"
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(what, "is a file, but must be a folder", "choose another place")
    if make:
        _make_folder(what, path)
    nearest = _nearest(path)
    if not os.path.isdir(nearest):
        raise ConfigError(what, f"the folder {path} cannot be made: {nearest} is a file", "choose another place")
    if not _takes_files(nearest):
        raise ConfigError(what, "no file can be made in it", _CURE)


def _nearest(folder: Path) -> Path:
    """Return ``folder`` or its nearest parent that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))


def _make_folder(what: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            what, f"the folder {folder} cannot be made: {error.strerror}", "choose another place"
        ) from None


def _takes_files(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)
