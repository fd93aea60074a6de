"""Terminal output: control characters are escaped, and writing to a closed stream does not fail."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, TextIO, TypeVar

Text = TypeVar("Text", bound=str)

LONG_SECONDS = 30
"""After this time ``doing`` reports what the program is doing."""
_CODES = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)]
"""Characters that move the cursor, change colours or reverse the text direction, and undecodable bytes."""
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _CODES if chr(code) not in "\n\t"}


def plain(text: Text) -> Text:
    """Return ``text`` with terminal control codes and undecodable bytes escaped: ``\\x1b``."""
    return text.translate(_ESCAPES)  # type: ignore[return-value]  # (a Markup stays one)


def echo(text: Any = "", file: TextIO | None = None, end: str = "\n") -> None:
    """Print ``text`` unbuffered to standard output or ``file``; control and unencodable characters are escaped."""
    escaped, stream = plain(str(text)), file or sys.stdout
    try:
        print(escaped, file=stream, end=end, flush=True)
    except UnicodeEncodeError:
        escaped = escaped.encode(stream.encoding, "backslashreplace").decode(stream.encoding)
        print(escaped, file=stream, end=end, flush=True)


class TerminalHandler(logging.Handler):
    """Prints records as ``echo`` does, warnings to standard error; if the stream was closed, discards them."""

    def emit(self, record: logging.LogRecord) -> None:
        file = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        try:
            echo(record.getMessage(), file)
        except OSError:
            print_nowhere(file.fileno())


logger = logging.getLogger("mindspeed_mm_dit")
logger.setLevel(logging.INFO)
logger.propagate = False
logger.addHandler(TerminalHandler())


@contextmanager
def doing(what: str, report: Callable[[str], object] = logger.info) -> Iterator[None]:
    """Report ``what`` once it has taken LONG_SECONDS: a log without new lines looks like a program that hangs."""
    timer = Timer(LONG_SECONDS, report, [f" {what} ... (for {LONG_SECONDS} s so far)"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_reporting_rank() -> bool:
    """Return whether this process reports for the others: the first of each node, or of all under msrun."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", os.environ.get("RANK_ID", "0"))) == "0"


class _Lines:
    """A file for tqdm without a terminal: each update becomes a log line instead of overwriting the last."""

    def write(self, text: str) -> None:
        if text := text.strip():
            logger.warning(f" {text}")

    def flush(self) -> None:
        pass


def progress(
    what: str, items: Iterable[Any] | None = None, *, total: int, unit: str, delay: int = 0, unit_scale: bool = False
) -> Any:
    """Return tqdm's bar for ``items``, or for calls of its ``update``, after ``delay`` seconds; on reporting ranks.

    unit_scale: print large numbers as 1.2M.

    If standard error is not a terminal, the progress is logged every LONG_SECONDS instead.
    """
    from tqdm import tqdm

    settings: dict[str, Any] = {"desc": what, "total": total, "unit": unit, "disable": not is_reporting_rank()}
    settings["unit_scale"] = unit_scale
    if sys.stderr.isatty():
        return tqdm(items, **settings, delay=delay)
    bar_format = "{desc}: {n_fmt} of {total_fmt} {unit}s in {elapsed}, {remaining} left"
    intervals = dict.fromkeys(("delay", "mininterval", "maxinterval"), LONG_SECONDS)
    return tqdm(items, **settings, **intervals, bar_format=bar_format, file=_Lines(), leave=False)


def print_nowhere(*streams: int) -> None:
    """Discard what is printed to the file descriptors ``streams`` from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def open_streams() -> None:
    """Make standard input, output and error usable, whatever started this process.

    A closed stream is opened to the null device; otherwise the next file opened would get its descriptor and output.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            assert os.open(os.devnull, os.O_RDWR) == number, "the lowest number that is free"
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
