"""Reads and writes the frames of video files with PyAV (FFmpeg). No framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, reason_of
from mindspeed_mm_dit.errors import PlatformError


class VideoFacts(NamedTuple):
    """Properties of a video."""

    num_frames: int
    """Number of frames: counted if all were decoded, else the number of packets."""
    fps: float | None
    """Average frames per second; None for a still, or if the file does not have it."""
    size: tuple[int, int]
    """(H, W) of a frame as displayed, in pixels."""


@lru_cache(maxsize=1)
def pyav() -> ModuleType:
    """Import PyAV; raises PlatformError if it is not installed."""
    try:
        import av
    except ImportError as error:
        raise PlatformError(
            "dataset_type = 'clips'", f"videos are decoded with PyAV, which cannot be used here: {error}",
            "install the packages of requirements/video.txt, or pip install av",
        ) from None  # fmt: skip
    return av


def look_at_video(path: str | Path, decode: bool) -> VideoFacts:
    """Return the facts of a video. Decodes its first frame, or all with ``decode``. Raises UnusableFile."""
    with _opened(path) as (container, stream):
        fps = float(stream.average_rate) if stream.average_rate else None
        frames = _frames(container, stream)
        try:
            height, width, _ = _upright(next(frames)).shape
        except StopIteration:
            raise UnusableFile("holds no frame that can be decoded") from None
        if decode:
            return _facts(1 + sum(1 for _ in frames), fps, (height, width))
    return _facts(_count_packets(path), fps, (height, width))


def _facts(num_frames: int, fps: float | None, size: tuple[int, int]) -> VideoFacts:
    return VideoFacts(num_frames, fps if num_frames > 1 else None, size)


def _count_packets(path: str | Path) -> int:
    with _opened(path) as (container, stream):
        return sum(1 for packet in container.demux(stream) if packet.size)


def read_frames(path: str | Path, numbers: np.ndarray) -> np.ndarray:
    """Return the frames ``numbers`` (F,), ascending from 0, of a video as (F, H, W, 3) uint8 RGB.

    Raises:
        UnusableFile: it cannot be decoded up to the last of them, or ends before it.
    """
    last = int(numbers[-1])
    wanted, found, there = set(numbers.tolist()), {}, 0
    with _opened(path) as (container, stream):
        for number, frame in enumerate(islice(_frames(container, stream), last + 1)):
            there = number + 1
            if number in wanted:
                found[number] = _upright(frame)
    if there <= last:
        raise UnusableFile(f"has {there} frames, and frame {last + 1} is needed")
    return np.stack([found[number] for number in numbers.tolist()])


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[Any, Any]]:
    """Open a file and its first video stream. Raises UnusableFile for anything wrong, here or in the ``with`` block."""
    av = pyav()
    if check_file(path) == 0:
        raise UnusableFile("is empty")
    try:
        with av.open(str(path), metadata_errors="ignore") as container:
            if not container.streams.video:
                raise UnusableFile("holds no video, or is damaged")
            yield container, container.streams.video[0]
    except UnusableFile:
        raise
    except Exception as error:  # a decoder can raise anything on damaged bytes
        raise UnusableFile(f"cannot be decoded: {reason_of(error)}") from error


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the frames in display order; raises UnusableFile at one that the decoder marks as corrupt."""
    for number, frame in enumerate(container.decode(stream)):
        if frame.is_corrupt:
            raise UnusableFile(f"cannot be decoded: frame {number + 1} is damaged")
        yield frame


def _upright(frame: Any) -> np.ndarray:
    """Return a frame as (H, W, 3) uint8 RGB, rotated for display as the file says."""
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)))


def write_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write frames (F, H, W, 3) uint8, H and W even, as MPEG-4, at a quality hard to tell from the originals."""
    av = pyav()
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", 1
        stream.codec_context.qmin = stream.codec_context.qmax = 1
        stream.codec_context.bit_rate = 1 << 25
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
