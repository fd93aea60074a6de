"""Finds images of a data set that are byte for byte the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, digest_of
from mindspeed_mm_dit.data.threads import in_threads


class Copy(NamedTuple):
    """Two images with the same content, by their numbers."""

    image: int
    earlier: int


def find_copies(paths: Sequence[str]) -> list[Copy]:
    """Return each image that has the bytes of an earlier one; only files of equal size are read."""
    sizes = [_size_of(path) for path in paths]
    common = Counter(sizes)
    suspects = [image for image, size in enumerate(sizes) if size is not None and common[size] > 1]
    digests = list(in_threads(lambda image: _digest_of(paths[image]), suspects))
    first: dict[bytes, int] = {}
    copies = []
    for image, digest in zip(suspects, digests):
        if digest is not None and first.setdefault(digest, image) != image:
            copies.append(Copy(image, first[digest]))
    return copies


def _size_of(path: str) -> int | None:
    try:
        return check_file(path)
    except UnusableFile:  # (it is gone, which is reported when it is read)
        return None


def _digest_of(path: str) -> bytes | None:
    try:
        return digest_of(path)
    except UnusableFile:
        return None
