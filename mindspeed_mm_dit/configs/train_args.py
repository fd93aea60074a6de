"""train.args: the flags of a config folder, in shell syntax with comments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.files import lines_of
from mindspeed_mm_dit.configs.strict import read_text
from mindspeed_mm_dit.errors import ConfigError


def read_train_args(path: str | Path, setting: str = "train.args") -> list[str]:
    """Return the flags and values in the file ``path``; ``setting`` is the option that named it.

    Quotes group words within a line; "#" at the start of a word starts a comment. A backslash at the end of a line, as
    in a shell script, is ignored.

    Raises:
        ConfigError: the file cannot be read, or a quote is not closed; names the line.
    """
    words: list[str] = []
    for number, line in enumerate(lines_of(read_text(path, setting)), 1):
        if "\0" in line:
            raise ConfigError(
                f"{path}, line {number}", "contains a NUL byte, so it is not a text file", "write the file again"
            )
        try:
            words += _Words(_CONTINUED.sub(r"\1", line))
        except ValueError as error:  # "No closing quotation", "No escaped character"
            raise ConfigError(f"{path}, line {number}", f"{error}: {line.strip()}") from None
    return words


_CONTINUED = re.compile(r"(?<!\\)((?:\\\\)*)\\\s*$")
"""A backslash that ends a line and is not escaped."""


class _Words(shlex.shlex):
    """Splits one line into words like a POSIX shell."""

    def __init__(self, line: str) -> None:
        super().__init__(line, posix=True)
        self.whitespace_split = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Follow the parser's state: inside a word (state "a") "#" is an ordinary character."""
        super().__setattr__(name, value)
        if name == "state":
            super().__setattr__("commenters", "" if value == "a" else "#")
