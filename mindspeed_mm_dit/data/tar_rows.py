"""Pictures in tar files, in webdataset's layout: KEY.jpg and KEY.cls, whose text is the label, one after the other."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.data.files import UnusableFile, check_file, reason_of
from mindspeed_mm_dit.data.labels_csv import NUMBER
from mindspeed_mm_dit.data.scanned import Scanned
from mindspeed_mm_dit.data.transforms import readable_formats
from mindspeed_mm_dit.errors import DataError

LABEL = ".cls"
MOST_LABEL_BYTES = 1000


def scan(path: Path, label_column: str) -> Scanned:
    """Return labels and places of the samples of a file: (offset, bytes). Only headers and labels are read.

    Raises:
        DataError: it is no tar file, or is cut short.
    """
    labels: list[str] = []
    where: list[tuple[int, int]] = []
    left_out = 0
    try:
        check_file(path)
        for sample in _samples(path):
            picture = next((place for suffix, place in sample.items() if suffix in readable_formats()), None)
            if picture is None or LABEL not in sample:
                left_out += 1
                continue
            labels.append(_read(path, *sample[LABEL]).decode().strip())
            where.append(picture)
    except (tarfile.TarError, UnusableFile, OSError, ValueError) as error:
        raise DataError(str(path), f"is no whole tar file: {reason_of(error)}", "fetch it again") from None
    return Scanned(_numbers_or_names(labels), np.array(where, np.int64).reshape(-1, 2), left_out=left_out)


class TarReader:
    """Reads pictures by their place; safe to call from several threads."""

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Return the file that stands there; raises UnusableFile."""
        check_file(path)
        try:
            content = _read(path, offset, size)
        except OSError as error:
            raise UnusableFile(f"cannot be read: {reason_of(error)}") from None
        if len(content) < size:
            raise UnusableFile(f"is cut short: {path.name} ends before it")
        return content


def _samples(path: Path) -> Iterator[dict[str, tuple[int, int]]]:
    """Yield the files of each sample: {suffix: (offset, bytes)} of those in a row that share a key."""
    sample: dict[str, tuple[int, int]] = {}
    current = None
    with tarfile.open(path, "r:") as archive:
        end = os.path.getsize(path)
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # (they would all be kept)
            if not member.isfile():
                continue
            if member.offset_data + member.size > end:
                raise tarfile.ReadError(f"{member.name} goes on after its end")
            folder, _, name = member.name.rpartition("/")
            stem, dot, suffix = name.partition(".")
            if (folder, stem) != current and sample:
                yield sample
                sample = {}
            current = folder, stem
            sample[(dot + suffix).lower()] = (member.offset_data, member.size)
    if sample:
        yield sample


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)


def _numbers_or_names(labels: list[str]) -> np.ndarray:
    if all(map(NUMBER.fullmatch, labels)):
        return np.array([int(label) for label in labels], np.int64)
    return np.array(labels, np.str_)
