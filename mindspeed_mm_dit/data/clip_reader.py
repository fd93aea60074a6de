"""A clip and its pixels: which frames of its file it has, and how they become pixels of one size.

Frames are scaled to cover the target, then center-cropped to it. ``crop="mindspeed_mm"`` reproduces MindSpeed-MM's
ResizeVideo and CenterCropResizeVideo, whose sizes are products of Python floats truncated by int().
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.configs.limits import MAX_FRAMES
from mindspeed_mm_dit.configs.source import Size
from mindspeed_mm_dit.data.order import Stream, uniforms
from mindspeed_mm_dit.data.sources import ReadSamples, Rows
from mindspeed_mm_dit.data.tables import ClipEntry
from mindspeed_mm_dit.data.transforms import MAX_SCALED_PIXELS, load_still, readable_formats
from mindspeed_mm_dit.data.video_file import read_frames
from mindspeed_mm_dit.errors import DataError

CACHE_BYTES = 256 * 2**20
"""Clips whose pixels fit in this are decoded once and cached, if a clip always takes the same frames."""
SAME_RATE = 0.1
"""Frame rates that differ by less than this, in frames per second, count as the same: 23.976 is 24."""
EARLY = 0.05
"""A frame that comes this much late, in frames of the clip, is on time: containers round to a millisecond."""


class Clip(NamedTuple):
    """A clip that can be used."""

    entry: ClipEntry
    """Its entry in the annotation."""
    step: float
    """Frames of the video from one frame of the clip to the next, on average."""
    num_frames: int
    """Usable frames of the video."""
    size: Size
    """(H, W) of a frame, in pixels."""
    due_frames: np.ndarray | None = None
    """If frames are chosen by time: when each is due and the last ends, in frames of the clip, (num_frames + 1,)."""
    images: tuple[str, ...] = ()
    """Paths of its first and last image, relative to ``data_folder``, if the annotation names them."""

    @property
    def longest(self) -> int:
        """Frames of the longest clip that fits in the video."""
        if self.due_frames is not None:
            return min(MAX_FRAMES, math.ceil(self.due_frames[-1] - EARLY))
        numbers = frame_numbers(math.ceil(self.num_frames / self.step) + 1, self.step)
        return int((numbers < self.num_frames).sum())

    def numbers(self, num_frames: int, first: int = 0) -> np.ndarray:
        """Return the frames of the video for a clip that begins with frame ``first``, (num_frames,) int64."""
        if self.due_frames is None:
            return frame_numbers(num_frames, self.step, first)
        return (
            np.searchsorted(self.due_frames, self.due_frames[first] + np.arange(num_frames) + EARLY, side="right") - 1
        )

    def num_later_starts(self, num_frames: int) -> int:
        """Return how many frames after the first a clip of ``num_frames`` may begin."""
        if self.due_frames is None:
            return self.num_frames - 1 - int(self.numbers(num_frames)[-1])
        return int(np.searchsorted(self.due_frames, self.due_frames[-1] - (num_frames - 1) - EARLY)) - 1


def is_still(path: Path) -> bool:
    """Return whether a clip is an image, by its name. A GIF counts as a video, even with one frame."""
    suffix = path.suffix.lower()
    return suffix in readable_formats() and suffix != ".gif"


def step_between(fps: float | None, train_fps: float | None) -> float:
    """Return the frames of a video of ``fps`` per frame of its clip; below 1 some frames are repeated."""
    if train_fps is None or fps is None or abs(fps - train_fps) < SAME_RATE:
        return 1.0
    return fps / train_fps


def frame_numbers(num_frames: int, step: float, start: int = 0) -> np.ndarray:
    """Return the frame numbers of a clip, (num_frames,) int64: every ``step``-th from ``start`` on, rounded down."""
    return np.floor(start + step * np.arange(num_frames)).astype(np.int64)


# --- pixels of one size -----------------------------------------------------------------------------------------------


def covering_size(size: Size, target: Size) -> Size:
    """Return the smallest size with the aspect ratio of ``size`` that covers ``target``, in integer arithmetic."""
    (h, w), (high, wide) = size, target
    return (high, w * high // h) if h * wide < w * high else (h * wide // w, wide)


def covering_size_of_mindspeed_mm(size: Size, target: Size) -> Size:
    """Return the covering size as MindSpeed-MM's ``shortsideresize`` computes it, in floats."""
    (h, w), (high, wide) = size, target
    return (high, int(high / h * w)) if h / w < high / wide else (int(wide / w * h), wide)


def crop_of_mindspeed_mm(size: Size, target: Size) -> Size:
    """Return the size that CenterCropResizeVideo cuts out of ``size`` before stretching it to ``target``."""
    (h, w), proportion = size, target[0] / target[1]
    return (int(w * proportion), w) if h / w > proportion else (h, int(h / proportion))


def fit_frames(frames: np.ndarray, target: Size, crop: str = "exact") -> np.ndarray:
    """Turn frames (F, h, w, 3) uint8 into pixels (3, F, H, W) of the size ``target``, levels 0 ... 255.

    Pixels are uint8 with ``crop`` "exact" and float32 with "mindspeed_mm": there a crop that lost a row or column is
    stretched, and levels are not rounded afterwards.

    Raises UnusableFile for frames so narrow that they would not fit into memory.
    """
    size = (frames.shape[1], frames.shape[2])
    check_proportions(size, target)
    if crop == "exact":
        pixels = _centre(resize_levels(frames, covering_size(size, target)), target)
    else:
        resized = resize_levels(frames, covering_size_of_mindspeed_mm(size, target))
        cut = _centre(resized, crop_of_mindspeed_mm((resized.shape[1], resized.shape[2]), target))
        pixels = _stretch(cut.astype(np.float32), target)
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))


def check_proportions(size: Size, target: Size) -> None:
    """Raise UnusableFile for a frame so narrow that, scaled to cover ``target``, it would not fit into memory."""
    high, wide = covering_size(size, target)
    if high * wide >= MAX_SCALED_PIXELS:
        raise UnusableFile(f"is too narrow: its frames of {size[0]} x {size[1]} would become {high} x {wide}")


def resize_levels(frames: np.ndarray, size: Size) -> np.ndarray:
    """Scale frames (F, h, w, 3) uint8 bilinearly with antialiasing, rounded to whole levels."""
    if frames.shape[1:3] == size:
        return frames
    scaled = (Image.fromarray(frame).resize(size[::-1], Image.Resampling.BILINEAR) for frame in frames)
    return np.stack([np.asarray(frame) for frame in scaled])


def _centre(frames: np.ndarray, size: Size) -> np.ndarray:
    """Cut the centre; odd margins are rounded by Python's round(), as in MindSpeed-MM."""
    top, left = (round((whole - part) / 2) for whole, part in zip(frames.shape[1:3], size))
    return frames[:, top : top + size[0], left : left + size[1]]


def _stretch(frames: np.ndarray, size: Size) -> np.ndarray:
    """Scale frames (F, h, w, 3) float32 bilinearly."""
    if frames.shape[1:3] == size:
        return frames
    planes = (Image.fromarray(plane) for frame in frames for plane in frame.transpose(2, 0, 1))
    scaled = [np.asarray(plane.resize(size[::-1], Image.Resampling.BILINEAR)) for plane in planes]
    return np.stack(scaled).reshape(len(frames), 3, *size).transpose(0, 2, 3, 1)


def grey(pixels: np.ndarray) -> np.ndarray:
    """Return the luma (1, F, H, W) of RGB pixels (3, F, H, W), in their dtype (ITU-R BT.601, as Pillow's mode L)."""
    luma = np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), pixels, 1)[None]
    return np.round(luma).astype(pixels.dtype) if pixels.dtype == np.uint8 else luma


class ClipReader:
    """Reads the pixels of clips (``VisualReader``); safe to call from several threads.

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
        return np.zeros(len(sample_indices)) if self.views else uniforms(seed, Stream.CLIP_START, sample_indices)

    def read(self, rows: np.ndarray, views: np.ndarray) -> ReadSamples:
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
        return ReadSamples({"pixels": pixels, **images}, rows)

    def _pixels(self, row: int, start: float) -> np.ndarray:
        if self._decoded is not None and row in self._decoded:
            return self._decoded[row]
        path, clip, num_frames = Path(self._rows.paths[row]), self._rows.facts[row], int(self._shapes[row][0])

        def frames() -> np.ndarray:  # (F, h, w, 3) uint8, at the size of the file
            if is_still(path):
                return self._still(path)
            first = int(start * (clip.num_later_starts(num_frames) + 1))
            return read_frames(path, clip.numbers(num_frames, first), self._param.display)

        pixels = self._fitted(row, path, frames)
        if self._decoded is not None:
            self._decoded[row] = pixels
        return pixels

    def _image(self, row: int, position: int) -> np.ndarray:
        """Return an image that comes with a clip, (3 or 1, H, W)."""
        path = Path(self._param.data_folder) / self._rows.facts[row].images[position]
        return self._fitted(row, path, lambda: self._still(path))[:, 0]

    def _still(self, path: Path) -> np.ndarray:
        return load_still(path, max(self._param.frame), self._param.color_profiles)[None]

    def _fitted(self, row: int, path: Path, frames: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the ``frames`` of a file of ``row`` at the size of its clip, (3 or 1, F, H, W)."""
        try:
            pixels = fit_frames(frames(), tuple(self._shapes[row][1:].tolist()), self._param.crop)
            return pixels if self._channels == 3 else grey(pixels)
        except UnusableFile as problem:
            raise DataError(
                f"{path}, of line {self._rows.facts[row].entry.line} in {self._param.json_path}, {problem}. Repair the "
                "file or take its line out; the run can be resumed from its last checkpoint."
            ) from None
