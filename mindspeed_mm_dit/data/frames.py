"""Choose the frames of a clip, and turn them into pixels of one size.

Frames are scaled to cover the target, then center-cropped to it. ``crop="mindspeed_mm"`` reproduces MindSpeed-MM's
ResizeVideo and CenterCropResizeVideo, whose sizes are products of Python floats truncated by int().
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.data.transforms import MAX_SCALED_PIXELS

SAME_RATE = 0.1
"""Frame rates that differ by less than this, in frames per second, count as the same: 23.976 is 24."""

Size = tuple[int, int]
"""(H, W) in pixels."""


def step_between(fps: float | None, train_fps: float | None) -> float:
    """Return the frames of a video of ``fps`` per frame of its clip; below 1 some frames are repeated."""
    if train_fps is None or fps is None or abs(fps - train_fps) < SAME_RATE:
        return 1.0
    return fps / train_fps


def frame_numbers(num_frames: int, step: float, start: int = 0) -> np.ndarray:
    """Return the frame numbers of a clip, (num_frames,) int64: every ``step``-th from ``start`` on, rounded down."""
    return np.floor(start + step * np.arange(num_frames)).astype(np.int64)


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
        resized = resize_levels(frames, covering_size(size, target))
        pixels = _centre(resized, target)
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
