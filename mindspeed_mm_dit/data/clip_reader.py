"""Reads clips from their files: the chosen frames, as pixels of one size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.clips import ClipsParam
from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.data.clips import Clip, is_still
from mindspeed_mm_dit.data.draws import Stream, uniforms
from mindspeed_mm_dit.data.frames import fit_frames
from mindspeed_mm_dit.data.rows import Read, Rows
from mindspeed_mm_dit.data.transforms import load_still
from mindspeed_mm_dit.data.video_file import read_frames
from mindspeed_mm_dit.errors import DataError

CACHE_BYTES = 256 * 2**20
"""Clips whose pixels fit in this are decoded once and cached, if a clip always takes the same frames."""


class ClipReader:
    """Reads the pixels of clips (``Visuals``); safe to call from several threads.

    With ``clip_start`` "random" a view is where the clip begins, in [0, 1): from the first frame of the video to the
    last that leaves the clip long enough.
    """

    def __init__(self, rows: Rows, param: ClipsParam, channels: int = 3) -> None:
        self._rows, self._param, self._channels = rows, param, channels
        self.views = 1 if param.clip_start == "first" else None
        self._shapes = np.broadcast_to(param.sample_size, (len(rows), 3)) if rows.shapes is None else rows.shapes
        bytes_a_value = 1 if param.crop == "exact" else 4
        fits = 3 * self._shapes.prod(1).sum() * bytes_a_value <= CACHE_BYTES
        self._decoded: dict[int, np.ndarray] | None = {} if fits and self.views else None

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        """Return where each clip begins, (B,) in [0, 1)."""
        if self.views:
            return np.zeros(len(sample_indices))
        return uniforms(seed, Stream.CLIP_START, sample_indices)

    def read(self, rows: np.ndarray, views: np.ndarray) -> Read:
        """Return pixels (B, 3 or 1, F, H, W) of ``rows`` (B,), all of one shape, uint8 (float32 with ``crop``
        "mindspeed_mm"), and the images that come with them, (B, 3 or 1, H, W).

        Raises:
            DataError: naming a file that cannot be read, and why.
        """
        pixels = np.stack([self._pixels(row, view) for row, view in zip(rows.tolist(), views.tolist())])
        images = {
            name: np.stack([self._image(row, position) for row in rows.tolist()])
            for position, name in enumerate(self._param.extra_images)
        }
        return Read({"pixels": pixels, **images}, rows)

    def _pixels(self, row: int, start: float) -> np.ndarray:
        if self._decoded is not None and row in self._decoded:
            return self._decoded[row]
        path, clip = Path(self._rows.paths[row]), self._rows.facts[row]
        frames = int(self._shapes[row][0])
        pixels = self._fitted(row, path, lambda: self._frames(path, clip, frames, start))
        if self._decoded is not None:
            self._decoded[row] = pixels
        return pixels

    def _image(self, row: int, position: int) -> np.ndarray:
        """Return an image that comes with a clip, (3 or 1, H, W)."""
        path = Path(self._param.data_folder) / self._rows.facts[row].images[position]
        return self._fitted(row, path, lambda: self._still(path))[:, 0]

    def _fitted(self, row: int, path: Path, frames: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the ``frames`` of a file of ``row`` at the size of its clip, (3 or 1, F, H, W)."""
        try:
            pixels = fit_frames(frames(), tuple(self._shapes[row][1:].tolist()), self._param.crop)
            return pixels if self._channels == 3 else grey(pixels)
        except UnusableFile as problem:
            raise DataError(
                str(path),
                f"{problem} (line {self._rows.facts[row].entry.line} of {self._param.json_path})",
                "repair the file or take its line out; a run can be resumed from its last checkpoint",
            ) from None

    def _still(self, path: Path) -> np.ndarray:
        return load_still(path, max(self._param.frame), self._param.color_profiles)[None]

    def _frames(self, path: Path, clip: Clip, num_frames: int, start: float) -> np.ndarray:
        """Return frames (F, h, w, 3) uint8 at the size of the file."""
        if is_still(path):
            return self._still(path)
        first = int(start * (clip.spare(num_frames) + 1))
        return read_frames(path, clip.numbers(num_frames, first), self._param.display)


def grey(pixels: np.ndarray) -> np.ndarray:
    """Return the luma (1, F, H, W) of RGB pixels (3, F, H, W), in their dtype (ITU-R BT.601, as Pillow's mode L)."""
    luma = np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), pixels, 1)[None]
    return np.round(luma).astype(pixels.dtype) if pixels.dtype == np.uint8 else luma
