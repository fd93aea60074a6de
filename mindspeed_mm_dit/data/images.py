"""Images read from their files, and kept where all of them fit into memory."""

from __future__ import annotations

import sys
import threading

import numpy as np

from mindspeed_mm_dit.data.files import UnusableFile
from mindspeed_mm_dit.data.folder import ImageIndex
from mindspeed_mm_dit.data.reader import Read
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.errors import DataError

CACHE_BYTES = 256 * 2**20
"""Data sets whose pixels fit in this are decoded once and kept."""

STAND_IN_TRIES = 100
"""So many unreadable images in a row mean that something else is wrong."""


class ImageReader:
    """The pixels of an index's images; safe to call from several threads.

    skip_bad: in the place of an image that cannot be decoded, read the next one of the index that can (large data
    sets are checked by their headers alone). So an image stands in by the files alone, on every rank and resume.
    """

    def __init__(self, index: ImageIndex, size: int, channels: int, skip_bad: bool = False) -> None:
        self.index, self.size, self.channels, self.skip_bad = index, size, channels, skip_bad
        keep = len(index) * channels * size * size <= CACHE_BYTES
        self._decoded: dict[int, np.ndarray] | None = {} if keep else None
        self._bad: dict[int, str] = {}
        self._bad_changes = threading.Lock()

    def read(self, images: np.ndarray, flipped: np.ndarray) -> Read:
        """Return pixels (B, channels, size, size) uint8 of ``images`` (B,), mirrored where ``flipped`` (B,).

        Raises:
            DataError: naming a file that cannot be read, and why.
        """
        found = [self._readable(image) for image in images.tolist()]
        pixels = np.stack([pixels for _, pixels in found])
        pixels[flipped] = pixels[flipped, :, :, ::-1]
        return Read({"pixels": pixels}, np.array([image for image, _ in found], np.int64))

    def _readable(self, image: int) -> tuple[int, np.ndarray]:
        """Return ``image``, or the one that stands in for it, and its pixels."""
        tries = min(STAND_IN_TRIES, len(self.index)) if self.skip_bad else 1
        for candidate in range(image, image + tries):
            pixels = self._pixels(candidate % len(self.index))
            if pixels is not None:
                return candidate % len(self.index), pixels
        path, problem = self.index.paths[image], self._bad[image]
        if self.skip_bad:
            problem += f", nor can any of the {tries - 1} images after it"
        raise DataError(
            path,
            problem,
            "repair or remove the file, or let training go on without it: dataset_param.skip_bad_images; a run can be "
            "resumed from its last checkpoint",
        )

    def _pixels(self, image: int) -> np.ndarray | None:
        """Return the pixels of ``image``, None if it cannot be decoded."""
        if self._decoded is not None and image in self._decoded:
            return self._decoded[image]
        if image in self._bad:
            return None
        try:
            pixels = load_pixels(self.index.picture(image), self.size, self.channels)
        except UnusableFile as problem:
            self._note_bad(image, str(problem))
            return None
        if self._decoded is not None:
            self._decoded[image] = pixels
        return pixels

    def _note_bad(self, image: int, problem: str) -> None:
        with self._bad_changes:
            if self.skip_bad and image not in self._bad:
                path = self.index.paths[image]
                print(f"warning: {path} {problem}; it is skipped", file=sys.stderr, flush=True)
            self._bad[image] = problem
