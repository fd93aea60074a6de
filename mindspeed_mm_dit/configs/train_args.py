"""train.args: the flags of a config folder, written as a shell's words, with comments."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.strict import read_text
from mindspeed_mm_dit.errors import ConfigError


def read_train_args(path: str | Path, setting: str = "train.args") -> list[str]:
    """Return the words of the file ``path``; ``setting`` is how the user named it.

    Quotes keep spaces together, within a line; "#" starts a comment where a word could start.

    Raises:
        ConfigError: the file cannot be read, or a quote has no partner; names the line.
    """
    words: list[str] = []
    for number, line in enumerate(read_text(path, setting).splitlines(), 1):
        if "\0" in line:
            raise ConfigError(f"{path}, line {number}", "holds a NUL byte: this is no text", "write the file again")
        try:
            words += _Words(line)
        except ValueError as error:  # "No closing quotation", "No escaped character"
            raise ConfigError(f"{path}, line {number}", f"{error}: {line.strip()}") from None
    return words


class _Words(shlex.shlex):
    """The words of one line as a POSIX shell has them."""

    def __init__(self, line: str) -> None:
        super().__init__(line, posix=True)
        self.whitespace_split = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Follow the reader's state: within a word ("a") a "#" is a letter."""
        super().__setattr__(name, value)
        if name == "state":
            super().__setattr__("commenters", "" if value == "a" else "#")
