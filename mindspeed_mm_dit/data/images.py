"""Images read from their files, and kept where all of them fit into memory."""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit.data.folder import ImageIndex
from mindspeed_mm_dit.data.transforms import UNREADABLE, load_pixels
from mindspeed_mm_dit.errors import DataError

CACHE_BYTES = 256 * 2**20
"""Data sets whose pixels fit in this are decoded once and kept."""


class ImageReader:
    """The pixels of an index's images; safe to call from several threads."""

    def __init__(self, index: ImageIndex, size: int, channels: int) -> None:
        self.index, self.size, self.channels = index, size, channels
        keep = len(index) * channels * size * size <= CACHE_BYTES
        self._decoded: dict[int, np.ndarray] | None = {} if keep else None

    def read(self, images: np.ndarray, flipped: np.ndarray) -> dict[str, np.ndarray]:
        """Return pixels (B, channels, size, size) uint8 of ``images`` (B,), mirrored where ``flipped`` (B,)."""
        pixels = np.stack([self._pixels(image) for image in images.tolist()])
        pixels[flipped] = pixels[flipped, :, :, ::-1]
        return {"pixels": pixels}

    def _pixels(self, image: int) -> np.ndarray:
        if self._decoded is not None and image in self._decoded:
            return self._decoded[image]
        try:
            pixels = load_pixels(self.index.paths[image], self.size, self.channels)
        except UNREADABLE as error:
            raise DataError(
                self.index.paths[image],
                f"cannot be decoded: {error}",
                "repair or remove the file; training can be resumed from the last checkpoint",
            ) from None
        if self._decoded is not None:
            self._decoded[image] = pixels
        return pixels
