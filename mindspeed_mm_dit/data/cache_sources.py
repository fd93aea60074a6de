"""The files that a cache was made from: their sizes, times and digests, and which of them have changed since then.

    sources.jsonl   a line for each file: path below data_folder, bytes, modification time in ns, digest

A file of another size has changed, and one that is absent is not needed. Otherwise the digest decides, except that a
file with the recorded time counts as unchanged, unread, if the files have more than READ_BYTES in all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm_dit.configs.files import UnusableFile, digest_of, read_bytes
from mindspeed_mm_dit.data.rows import PROBLEMS_SHOWN, Rows
from mindspeed_mm_dit.data.threads import in_threads
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.terminal import progress

SOURCES = "sources.jsonl"
READ_BYTES = 256 * 2**20
"""Files of up to this size in all are read by every run, which takes less than a second."""
NOT_RECORDED = "does not record its source files (it is of an earlier version), so changes of them are not noticed"


class SourceFile(NamedTuple):
    """A file as it was when a cache was made."""

    path: str
    """Relative to ``data_folder``."""
    size: int
    """In bytes."""
    mtime_ns: int
    digest: str


def source_files(rows: Rows, folder: str) -> list[SourceFile]:
    """Return the files that ``rows`` are read from, each read once; raises DataError if one cannot be read."""

    def look(path: str) -> SourceFile:
        stat = os.stat(path)
        return SourceFile(os.path.relpath(path, folder), stat.st_size, stat.st_mtime_ns, digest_of(path).hex())

    paths = [path for path in dict.fromkeys(rows.files or rows.paths) if os.path.isfile(path)]
    try:
        return list(progress("reading files", in_threads(look, paths), total=len(paths), unit="file", delay=2))
    except (UnusableFile, OSError) as error:
        raise DataError(folder, f"a file cannot be read: {error}", "run the command again") from None


def digest_of_sources(files: Iterable[SourceFile]) -> str:
    """Return a digest of the paths and contents of ``files``, whatever their times are."""
    lines = sorted(f"{file.path}\0{file.digest}\n" for file in files)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def sources_json(files: Iterable[SourceFile]) -> str:
    """Return the content of SOURCES."""
    return "".join(json.dumps(file) + "\n" for file in files)


def check_sources(cache: Path, setting: str, folder: str, listed: Sequence[str] = ()) -> tuple[str, ...]:
    """Return notes on the source files of a ``cache``; ``setting``: the key of data.json that names it.

    folder: where the files are looked for; listed: files that the cache must have been made from, if it records any.
    Raises DataError, naming those that changed or were added since the cache was made.
    """
    if not os.path.isdir(folder):
        return ()
    if not (cache / SOURCES).exists():
        return (f"note: {cache} {NOT_RECORDED}; mm-dit cache-latents into another folder makes one that does",)
    try:
        files = [SourceFile(*json.loads(line)) for line in read_bytes(cache / SOURCES).splitlines()]
        changed, touched = _compared(files, folder)
        changed += sorted({os.path.relpath(path, folder) for path in listed} - {file.path for file in files})
    except (UnusableFile, ValueError, TypeError, RecursionError) as error:
        cure = "run mm-dit cache-latents again: it keeps what is encoded"
        raise DataError(f"{setting} = {cache}", f"{SOURCES} cannot be read: {error}", cure) from None
    if changed:
        names = ", ".join(changed[:PROBLEMS_SHOWN]) + (", ..." if len(changed) > PROBLEMS_SHOWN else "")
        raise DataError(
            f"{setting} = {cache}",
            f"was made before files in {folder} were changed or added, {len(changed):,} in all: {names}",
            "make the cache again, in an empty folder: mm-dit cache-latents --model ... --data ... --output ...",
        )
    if touched:
        return (
            f"note: {touched:,} source files of {cache} have new modification times but the same bytes, and were read; "
            "mm-dit cache-latents into the same folder records the new times",
        )
    return ()


def _compared(files: Sequence[SourceFile], folder: str) -> tuple[list[str], int]:
    """Return the names of the files that changed, and how many others had only another time and were read."""
    reads_all = sum(file.size for file in files) <= READ_BYTES

    def look(file: SourceFile) -> str:
        path = os.path.join(folder, file.path)
        try:
            stat = os.stat(path)
            if stat.st_size != file.size:
                return "changed"
            has_time = stat.st_mtime_ns == file.mtime_ns
            if has_time and not reads_all:
                return ""
            if digest_of(path).hex() != file.digest:
                return "changed"
            return "" if has_time or reads_all else "touched"
        except (UnusableFile, OSError, ValueError):  # (absent or not readable: it is not needed)
            return ""

    looks = in_threads(look, files)
    states = list(progress("comparing files", looks, total=len(files), unit="file", delay=2))
    return [file.path for file, state in zip(files, states) if state == "changed"], states.count("touched")
