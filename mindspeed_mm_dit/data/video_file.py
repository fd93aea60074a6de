"""Reads and writes video files with PyAV (FFmpeg).

Frames as a player shows them, upright RGB with square pixels. No framework.
"""

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
from mindspeed_mm_dit.configs.images import Display
from mindspeed_mm_dit.configs.source import Size
from mindspeed_mm_dit.data.transforms import BACKGROUND, MAX_SCALED_PIXELS, flattened_frame
from mindspeed_mm_dit.errors import PlatformError

BT709_FROM = (577, 1280)
"""A video that names no matrix is in BT.709 from this height or width on, as mpv has it; a smaller one in BT.601."""

_UNSPECIFIED = (0, 2, 3)
"""Matrices that do not specify pixels in YUV: RGB, unspecified, reserved. All codes here are ITU-T H.273's."""
_BT601 = 5
_MATRICES = {
    **{1: ("bt709", "BT.709"), 4: ("fcc", "FCC's matrix"), _BT601: ("bt601", ""), 6: ("bt601", "")},
    **{7: ("smpte240m", "SMPTE 240M"), 9: ("bt2020", "BT.2020")},
}
"""Name of each matrix in FFmpeg's filter, and in words if it is not the plain BT.601."""
_FULL_RANGE = 2
_WIDE_GAMUT = (9, 11, 12)
"""Primaries of BT.2020, DCI-P3 and Display P3."""
_HDR = (16, 18)
"""Transfer functions of HDR: PQ and HLG."""


class Screen:
    """Converts the frames of one video to RGB at one size. Not for several threads."""

    def __init__(self, av: Any, stream: Any, first: Any, display: Display) -> None:
        """``first``: the first frame. Raises UnusableFile if it cannot be converted."""
        self._av, self._as_player = av, display == "shown"
        self.stored_size: Size = (first.height, first.width)
        self._square = _squared(self.stored_size, stream.sample_aspect_ratio) if self._as_player else self.stored_size
        self._layout: tuple[Any, ...] = ()
        self._graph: Any = None
        height, width, _ = self.show(first).shape
        self.size: Size = (height, width)
        """(H, W) of a frame as shown, in pixels."""
        self.remarks = tuple(self._remarks(first))
        """How the video differs from a plain one, worded to follow "N videos"."""
        self.doubts = tuple(_doubts(stream.codec_context, first))
        """What is not learned as a player shows it, worded to follow "N of M videos"."""

    def show(self, frame: Any) -> np.ndarray:
        """Return a frame as (H, W, 3) uint8 RGB. Raises UnusableFile for colours that cannot be converted."""
        matrix = self._matrix_of(frame)
        layout = (frame.width, frame.height, frame.format.name, int(frame.colorspace), int(frame.color_range))
        if layout != self._layout:
            self._graph, self._layout = self._converter(frame, matrix), layout
        self._graph.vpush(frame)
        pixels = self._graph.vpull().to_ndarray()
        self._is_transparent = pixels.shape[2] == 4 and pixels[..., 3].min() < 255
        if self._as_player:
            return np.ascontiguousarray(_upright(flattened_frame(pixels), frame.side_data.get("DISPLAYMATRIX")))
        return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))

    def _matrix_of(self, frame: Any) -> str:
        """Return FFmpeg's name of the matrix from YUV to RGB."""
        if frame.format.is_rgb or len(frame.format.components) < 3:
            frame.colorspace = 0 if frame.format.is_rgb else 2  # (whatever the file states, there is no matrix)
            return "auto"
        if frame.colorspace in _UNSPECIFIED:
            frame.colorspace = 2  # (the filter refuses the others)
            is_large = frame.height >= BT709_FROM[0] or frame.width >= BT709_FROM[1]
            return "bt709" if is_large and self._as_player else "bt601"
        if frame.colorspace not in _MATRICES:
            code = int(frame.colorspace)
            raise UnusableFile(f"has colours that cannot be converted here (matrix {code} of ITU-T H.273)")
        return _MATRICES[frame.colorspace][0]

    def _converter(self, frame: Any, matrix: str) -> Any:
        """Return the filters that frames like this are pushed into, and come out of as RGB with square pixels."""
        graph, (height, width) = self._av.filter.Graph(), map(str, self._square)
        colours = {"colorspace": str(int(frame.colorspace)), "range": str(int(frame.color_range))}
        size = f"{frame.width}x{frame.height}"
        return graph.link_nodes(
            graph.add("buffer", video_size=size, pix_fmt=frame.format.name, time_base="1/1", **colours),
            graph.add("scale", w=width, h=height, in_color_matrix=matrix, flags="bilinear", threads="1"),
            graph.add("format", "rgba" if self._as_player and _has_opacity(frame) else "rgb24"),
            graph.add("buffersink"),
        )

    def _remarks(self, first: Any) -> Iterator[str]:
        matrix = self._matrix_of(first)
        named = first.colorspace not in _UNSPECIFIED
        words = dict(_MATRICES.values()).get(matrix)
        if words:
            yield f"in {words}" + ("" if named else " by their size")
        if first.color_range == _FULL_RANGE and not first.format.is_rgb:
            yield "in full range"
        if self._square != self.stored_size:
            yield "with pixels that are not square"
        if "DISPLAYMATRIX" in first.side_data:
            yield "rotated or mirrored"
        if self._is_transparent:
            yield f"on a {BACKGROUND} background where they are transparent"


def _has_opacity(frame: Any) -> bool:
    return any(component.is_alpha for component in frame.format.components)


def _squared(size: Size, ratio: Fraction | None) -> Size:
    """Return the size of a frame with square pixels; ``ratio`` is the width of a stored one by its height.

    The shorter axis is enlarged, so that nothing is lost. Raises UnusableFile if that would not fit into memory.
    """
    height, width = size
    if ratio:
        height, width = (height, round(width * ratio)) if ratio > 1 else (round(height / ratio), width)
    if height * width >= MAX_SCALED_PIXELS:
        raise UnusableFile(
            f"has pixels of {ratio}: its frames of {size[0]} x {size[1]} would become {height} x {width}"
        )
    return height, width


def _upright(pixels: np.ndarray, matrix: Any) -> np.ndarray:
    """Turn and mirror pixels (h, w, 3) as a display matrix says: x' = a x + c y, y' = b x + d y."""
    if matrix is None:
        return pixels
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    if abs(a) < abs(b):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _doubts(codec: Any, first: Any) -> Iterator[str]:
    if codec.color_trc in _HDR:
        yield "are in HDR and learned without tone mapping, paler than a player shows them: convert them to BT.709"
    elif codec.color_primaries in _WIDE_GAMUT:
        yield "have primaries of a wide gamut, and are learned with those of BT.709, paler than a player shows them"
    if first.interlaced_frame:
        yield "are interlaced, and the two fields of a frame are learned as one"


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
