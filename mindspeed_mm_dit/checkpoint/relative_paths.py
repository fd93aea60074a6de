"""Remove a machine's folders from the facts of a run, for files that leave it: absolute paths become bare names."""

from __future__ import annotations

import os
from typing import Any

COMMAND = "command"
"""Key of run.json: the flags of the run, and the folder that it was started in."""

_FOLDER = "folder"


def without_places(value: Any) -> Any:
    """Return facts as JSON has them, with each absolute path replaced by its last name.

    Of the folder that a command was started in not even the name is left, as it may be that of a user.
    """
    if isinstance(value, dict):
        facts = {key: without_places(item) for key, item in value.items()}
        is_somewhere = os.path.isabs(str(value.get(_FOLDER, "")))
        return facts | {_FOLDER: "."} if is_somewhere else facts
    if isinstance(value, (list, tuple)):
        return [without_places(item) for item in value]
    return _name(value) if isinstance(value, str) else value


def below(argument: str, folder: str) -> str:
    """Return an argument of a command line; a path inside ``folder`` becomes relative to it."""
    flag, mark, path = _parts(argument)
    is_inside = os.path.isabs(path) and os.path.commonpath([path, folder]) == folder
    return f"{flag}{mark}{os.path.relpath(path, folder)}" if is_inside else argument


def _name(argument: str) -> str:
    flag, mark, path = _parts(argument)
    return f"{flag}{mark}{os.path.basename(os.path.normpath(path)) or '.'}" if os.path.isabs(path) else argument


def _parts(argument: str) -> tuple[str, str, str]:
    """Return ("--flag", "=", value), or ("", "", argument) if it is no flag with a value."""
    flag, mark, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return flag, mark + value[: len(value) - len(value.lstrip())], value.lstrip()
