"""What our processes print: names that strangers gave are shown, not obeyed, and closed streams take everything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, TextIO, TypeVar

Text = TypeVar("Text", bound=str)

LONG_SECONDS = 30
"""After which ``doing`` says what a program is at."""
_CODES = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)]
"""What moves a cursor, changes colours, or turns the direction of a text around; and bytes that are no text."""
_SHOWN = {code: repr(chr(code))[1:-1] for code in _CODES if chr(code) not in "\n\t"}


def plain(text: Text) -> Text:
    """Return ``text`` with codes that a terminal would obey, and bytes that are no text, written out: ``\\x1b``."""
    return text.translate(_SHOWN)  # type: ignore[return-value]  # (a Markup stays one)


def echo(text: Any = "", file: TextIO | None = None, end: str = "\n") -> None:
    """Print ``text`` at once, to standard output or ``file``; what a terminal would obey, or lacks, is written out."""
    shown, stream = plain(str(text)), file or sys.stdout
    try:
        print(shown, file=stream, end=end, flush=True)
    except UnicodeEncodeError:
        print(
            shown.encode(stream.encoding, "backslashreplace").decode(stream.encoding), file=stream, end=end, flush=True
        )


def echo_if_open(text: Any, file: TextIO | None = None) -> None:
    """Print as ``echo`` does; if the reader is gone, as of a pipe or a terminal, print nowhere and go on."""
    try:
        echo(text, file)
    except OSError:
        print_nowhere((file or sys.stdout).fileno())


@contextmanager
def doing(what: str, report: Callable[[str], object] = echo_if_open) -> Iterator[None]:
    """Report ``what`` once it has taken LONG_SECONDS: a log that stands still looks like a program that hangs."""
    timer = Timer(LONG_SECONDS, report, [f" {what} ... (for {LONG_SECONDS} s so far)"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_reporting_rank() -> bool:
    """Return whether this process reports what all of them find: the first of each node, or of all under msrun."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", os.environ.get("RANK_ID", "0"))) == "0"


class _Lines:
    """A file for tqdm that is no terminal: what would be drawn over becomes a line of a log."""

    def write(self, text: str) -> None:
        if text := text.strip():
            echo_if_open(f" {text}", sys.stderr)

    def flush(self) -> None:
        pass


def progress(
    what: str, items: Iterable[Any] | None = None, *, total: int, unit: str, delay: int = 0, unit_scale: bool = False
) -> Any:
    """Return tqdm's bar for ``items``, or for calls of its ``update``, after ``delay`` seconds; on reporting ranks.

    unit_scale: print large numbers as 1.2M.

    Where standard error is no terminal, a line says every LONG_SECONDS how far the work is.
    """
    from tqdm import tqdm

    usual: dict[str, Any] = {"desc": what, "total": total, "unit": unit, "disable": not is_reporting_rank()}
    usual["unit_scale"] = unit_scale
    if sys.stderr.isatty():
        return tqdm(items, **usual, delay=delay)
    form = "{desc}: {n_fmt} of {total_fmt} {unit}s in {elapsed}, {remaining} left"
    rarely = dict.fromkeys(("delay", "mininterval", "maxinterval"), LONG_SECONDS)
    return tqdm(items, **usual, **rarely, bar_format=form, file=_Lines(), leave=False)


def print_nowhere(*streams: int) -> None:
    """Discard what is printed to the file descriptors ``streams`` from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def open_streams() -> None:
    """Make standard input, output and error usable, whatever started this process.

    A closed one is opened to nowhere: the next file would get its number, and what is printed.
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
