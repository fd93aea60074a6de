"""Remove a machine's folders from the facts of a run, for files that leave it: absolute paths become bare names."""

from __future__ import annotations

import os
from typing import Any

COMMAND = "command"
"""Key of run.json: the flags of the run, and the folder that it was started in."""

_FOLDER = "folder"


def without_places(value: Any) -> Any:
    """Return facts as JSON has them, with each absolute path replaced by its last name.

    The folder that a command was started in loses even that: it may be a user's own.
    """
    if isinstance(value, dict):
        facts = {key: without_places(item) for key, item in value.items()}
        is_somewhere = os.path.isabs(str(value.get(_FOLDER, "")))
        return facts | {_FOLDER: "."} if is_somewhere else facts
    if isinstance(value, (list, tuple)):
        return [without_places(item) for item in value]
    return _name(value) if isinstance(value, str) else value


def below(word: str, folder: str) -> str:
    """Return a word of a command line; a path inside ``folder`` becomes relative to it."""
    flag, mark, path = _parts(word)
    inside = os.path.isabs(path) and os.path.commonpath([path, folder]) == folder
    return f"{flag}{mark}{os.path.relpath(path, folder)}" if inside else word


def _name(word: str) -> str:
    flag, mark, path = _parts(word)
    return f"{flag}{mark}{os.path.basename(os.path.normpath(path)) or '.'}" if os.path.isabs(path) else word


def _parts(word: str) -> tuple[str, str, str]:
    """Return ("--flag", "=", value), or ("", "", word) if the word is no flag with a value."""
    flag, mark, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return flag, mark + value[: len(value) - len(value.lstrip())], value.lstrip()
