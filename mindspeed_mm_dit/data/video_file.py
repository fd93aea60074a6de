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

from mindspeed_mm_dit.configs.buckets import Size
from mindspeed_mm_dit.configs.clips import Display
from mindspeed_mm_dit.configs.files import UnusableFile, check_file, reason_of
from mindspeed_mm_dit.data.video_display import Screen
from mindspeed_mm_dit.errors import PlatformError


class VideoFacts(NamedTuple):
    """Properties of a video."""

    num_frames: int
    """Number of frames: counted if all were decoded, else the number of packets."""
    fps: float | None
    """Average frames per second; None for a still, or if the file does not have it."""
    size: Size
    """(H, W) of a frame as displayed, in pixels."""
    stored_size: Size
    """(H, W) before pixels are made square and frames rotated."""
    times: np.ndarray | None = None
    """Where the rate varies: seconds from the first frame to each and to the end, (num_frames + 1,)."""
    remarks: tuple[str, ...] = ()
    """How the video differs from a plain one, worded to follow "N videos"."""
    doubts: tuple[str, ...] = ()
    """What is not learned as a player shows it, worded to follow "N of M videos"."""


@lru_cache(maxsize=1)
def pyav() -> ModuleType:
    """Import PyAV; raises PlatformError if it is not installed."""
    try:
        import av
    except ImportError as error:
        raise PlatformError(
            "dataset_type = 'clips'",
            f"videos are decoded with PyAV, which cannot be used here: {error}",
            "install the packages of requirements/video.txt, or pip install av",
        ) from None
    return av


def look_at_video(path: str | Path, decode: bool, display: Display = "shown") -> VideoFacts:
    """Return the facts of a video. Decodes its first frame, or all with ``decode``. Raises UnusableFile."""
    with _opened(path) as (container, stream):
        fps = float(stream.average_rate) if stream.average_rate else None
        frames = _frames(container, stream)
        first = next(frames, None)
        if first is None:
            raise UnusableFile("holds no frame that can be decoded")
        screen = Screen(pyav(), stream, first, display)
        times = [first.time, *(frame.time for frame in frames)] if decode else _times_of_packets(path)
    several = len(times) > 1
    return VideoFacts(
        len(times),
        fps if several else None,
        screen.size,
        screen.stored_size,
        _uneven(times),
        screen.remarks,
        screen.doubts,
    )


def _times_of_packets(path: str | Path) -> list[float | None]:
    with _opened(path) as (container, stream):
        packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
        return [None if packet.pts is None else float(packet.pts * packet.time_base) for packet in packets]


def _uneven(times: list[float | None]) -> np.ndarray | None:
    """Return ``VideoFacts.times``; None where times are unknown, or even: no frame is off by half a frame or more."""
    known = np.sort([time for time in times if time is not None])
    if len(known) < len(times) or len(times) < 3:
        return None
    seconds = np.append(known, 2 * known[-1] - known[-2]) - known[0]
    even = np.linspace(0, seconds[-2], len(known))
    return seconds if np.abs(seconds[:-1] - even).max() > even[1] / 2 else None


def read_frames(path: str | Path, numbers: np.ndarray, display: Display = "shown") -> np.ndarray:
    """Return the frames ``numbers`` (F,), ascending from 0, of a video as (F, H, W, 3) uint8 RGB, as displayed.

    Raises:
        UnusableFile: it cannot be decoded up to the last of them, or ends before it.
    """
    last = int(numbers[-1])
    needed, frames, count, screen = set(numbers.tolist()), {}, 0, None
    with _opened(path) as (container, stream):
        for number, frame in enumerate(islice(_frames(container, stream), last + 1)):
            count = number + 1
            screen = screen or Screen(pyav(), stream, frame, display)
            if number in needed:
                frames[number] = screen.show(frame)
    if count <= last:
        raise UnusableFile(f"has {count} frames, and frame {last + 1} is needed")
    return np.stack([frames[number] for number in numbers.tolist()])


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[Any, Any]]:
    """Open a file and its video stream. Raises UnusableFile for anything wrong, here or in the ``with`` block."""
    if check_file(path) == 0:
        raise UnusableFile("is empty")
    try:
        with _container(path) as container:
            yield container, _film_of(container, path)
    except UnusableFile:
        raise
    except Exception as error:  # a decoder can raise anything on damaged bytes
        raise UnusableFile(f"cannot be decoded: {reason_of(error)}") from error


def _container(path: str | Path) -> Any:
    av = pyav()
    # PyAV before 19 stops at a title that is not in UTF-8; since then it reads any, and has no such setting.
    tolerant = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
    return av.open(str(path), **tolerant)


def _film_of(container: Any, path: str | Path) -> Any:
    """Return the first video stream that is no cover or still, one marked as default before others.

    Raises UnusableFile.
    """
    if not container.streams.video:
        raise UnusableFile("holds no video, or is damaged")
    marks = pyav().stream.Disposition
    films = [stream for stream in container.streams.video if not stream.disposition & marks.attached_pic]
    if not films:
        raise UnusableFile("holds no video but a cover picture")
    films.sort(key=lambda stream: not stream.disposition & marks.default)
    film = container.streams[_first_moving(path, [stream.index for stream in films])] if films[1:] else films[0]
    if film.codec_context is None:  # (PyAV would take the process down with it)
        raise UnusableFile("cannot be decoded: its codec is unknown here")
    return film


def _first_moving(path: str | Path, indices: list[int]) -> int:
    """Return the first of the streams ``indices`` with more than one packet; the first of all if none has."""
    with _container(path) as container:
        counts = dict.fromkeys(indices, 0)
        for packet in container.demux([container.streams[index] for index in indices]):
            counts[packet.stream.index] += bool(packet.size)
            if counts[indices[0]] > 1:
                break
    return max(indices, key=lambda index: counts[index] > 1)


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the frames in display order; raises UnusableFile at one that the decoder marks as corrupt."""
    for number, frame in enumerate(container.decode(stream)):
        if frame.is_corrupt:
            raise UnusableFile(f"cannot be decoded: frame {number + 1} is damaged")
        yield frame


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
