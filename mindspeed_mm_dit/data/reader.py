"""Where the images of a batch come from: their files (ImageReader) or a latent cache (LatentReader)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class Read(NamedTuple):
    """What a reader returns."""

    arrays: dict[str, np.ndarray]
    """By the names that a batch has for them."""
    images: np.ndarray
    """(B,) int64: the images that were read; another than asked for where that one cannot be."""


class Reader(Protocol):
    """Reads images by their number in the index; called from several threads."""

    def read(self, images: np.ndarray, flipped: np.ndarray) -> Read:
        """Return the arrays of ``images`` (B,) int64, mirrored where ``flipped`` (B,) bool."""
