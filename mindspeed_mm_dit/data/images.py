"""Reads images from their files, and caches them if all fit into memory."""

from __future__ import annotations

import threading

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.configs.source import ColorProfiles, Size
from mindspeed_mm_dit.data.order import Stream, coins
from mindspeed_mm_dit.data.rows import Read, Rows
from mindspeed_mm_dit.data.shards import ShardRows
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.terminal import logger

CACHE_BYTES = 256 * 2**20
"""Data sets whose pixels fit in this are decoded once and cached."""

STAND_IN_TRIES = 100
"""This many unreadable images in a row mean that something else is wrong."""


class ImageReader:
    """Reads the pixels of images (``Visuals``): view 0 plain, view 1 mirrored; safe to call from several threads.

    skip_bad: if an image cannot be decoded, read the next row that can (large data sets are checked by their headers
    alone). The replacement depends on the files alone, so it is the same on every rank and after a resume.
    """

    views = 2

    def __init__(
        self,
        rows: Rows,
        size: int | Size,
        channels: int,
        skip_bad: bool = False,
        flip_prob: float = 0.0,
        color_profiles: ColorProfiles = "convert",
    ) -> None:
        """``size``: (H, W) or the side of a square, for rows without ``shapes``."""
        self.channels, self.skip_bad = channels, skip_bad
        self._rows, self._flip_prob, self._color_profiles = rows, flip_prob, color_profiles
        self._shapes = np.broadcast_to(size, (len(rows), 2)) if rows.shapes is None else rows.shapes
        keep = channels * self._shapes.prod(1).sum() <= CACHE_BYTES
        self._decoded: dict[tuple[int, Size], np.ndarray] | None = {} if keep else None
        self._bad: dict[int, str] = {}
        self._bad_changes = threading.Lock()

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        """Return which samples are mirrored, (B,) bool."""
        return coins(seed, Stream.FLIP, sample_indices, self._flip_prob)

    def read(self, rows: np.ndarray, views: np.ndarray) -> Read:
        """Return pixels (B, channels, H, W) uint8 of ``rows`` (B,), all of one shape.

        Images whose view in ``views`` (B,) is 1 are mirrored.

        Raises:
            DataError: naming a file that cannot be read, and why.
        """
        loaded = [self._readable(image) for image in rows.tolist()]
        pixels = np.stack([pixels for _, pixels in loaded])
        mirrored = views.astype(bool)
        pixels[mirrored] = pixels[mirrored, :, :, ::-1]
        return Read({"pixels": pixels}, np.array([image for image, _ in loaded], np.int64))

    def _readable(self, image: int) -> tuple[int, np.ndarray]:
        """Return ``image`` or its replacement, and the pixels."""
        tries = min(STAND_IN_TRIES, len(self._rows)) if self.skip_bad else 1
        height, width = self._shapes[image].tolist()
        for candidate in range(image, image + tries):
            pixels = self._pixels(candidate % len(self._rows), (height, width))
            if pixels is not None:
                return candidate % len(self._rows), pixels
        path, problem = self._rows.paths[image], self._bad[image]
        if self.skip_bad:
            problem += f", nor can any of the {tries - 1} images after it"
        raise DataError(
            path,
            problem,
            "repair or remove the file, or set dataset_param.skip_bad_images to train without it; a run can be resumed "
            "from its last checkpoint",
        )

    def _pixels(self, image: int, size: Size) -> np.ndarray | None:
        """Return the pixels of ``image``, (channels, *size), or None if it cannot be decoded."""
        if self._decoded is not None and (image, size) in self._decoded:
            return self._decoded[image, size]
        if image in self._bad:
            return None
        try:
            pixels = load_pixels(content_of(self._rows, image), size, self.channels, self._color_profiles)
        except UnusableFile as problem:
            self._note_bad(image, str(problem))
            return None
        if self._decoded is not None:
            self._decoded[image, size] = pixels
        return pixels

    def _note_bad(self, image: int, problem: str) -> None:
        with self._bad_changes:
            if self.skip_bad and image not in self._bad:
                path = self._rows.paths[image]
                logger.warning(f"warning: {path} {problem}; it is skipped")
            self._bad[image] = problem


def content_of(rows: Rows, row: int) -> str | bytes:
    """Return the path of an image, or its content if it is in a shard; raises UnusableFile."""
    return rows.paths.content(row) if isinstance(rows.paths, ShardRows) else rows.paths[row]
