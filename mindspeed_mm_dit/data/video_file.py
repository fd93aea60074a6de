"""Reads and writes the frames of video files with PyAV (FFmpeg), as a player shows them. No framework.

Frames become RGB by the file's own matrix and range, with square pixels, upright, over a background.
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

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, error_text
from mindspeed_mm_dit.configs.images import Display
from mindspeed_mm_dit.configs.source import Size
from mindspeed_mm_dit.data.transforms import BACKGROUND, MAX_SCALED_PIXELS, flattened_frame
from mindspeed_mm_dit.errors import PlatformError

BT709_FROM = (577, 1280)
"""A video that names no matrix is in BT.709 from this height or width on, as mpv has it; a smaller one in BT.601."""

# All codes here are those of ITU-T H.273, which libswscale takes, too.
_BT601, _BT709 = 5, 1
_UNSPECIFIED = (0, 2, 3)
"""Matrices that do not specify pixels in YUV: RGB, unspecified, reserved."""
_MATRICES = {1: "BT.709", 4: "FCC's matrix", _BT601: "", 6: "", 7: "SMPTE 240M", 9: "BT.2020"}
"""The matrices from YUV to RGB that can be converted, in words; "" for the plain BT.601."""
_FULL_RANGE = 2
_WIDE_GAMUT = (9, 11, 12)
"""Primaries of BT.2020, DCI-P3 and Display P3."""
_HDR = (16, 18)
"""Transfer functions of HDR: PQ and HLG."""


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
        import av.video.reformatter
    except ImportError as error:
        raise PlatformError(
            f"Videos (dataset_type = 'clips') are decoded with PyAV, which cannot be used here: {error_text(error)}. "
            "Install the packages of requirements/video.txt, or only PyAV with pip install av."
        ) from None
    return av


def read_video_facts(path: str | Path, decode: bool, display: Display = "shown") -> VideoFacts:
    """Return the facts of a video. Decodes its first frame, or all with ``decode``. Raises UnusableFile."""
    with _opened(path) as (container, stream):
        fps = float(stream.average_rate) if stream.average_rate else None
        frames = _frames(container, stream)
        first = next(frames, None)
        if first is None:
            raise UnusableFile("holds no frame that can be decoded")
        screen = _Screen(stream, first, display)
        pixels = screen.show(first)
        remarks = tuple(screen.remarks(first))
        doubts = tuple(_doubts(stream.codec_context, first))
        times = [first.time, *(frame.time for frame in frames)] if decode else _times_of_packets(path)
    size, fps = (pixels.shape[0], pixels.shape[1]), fps if len(times) > 1 else None
    return VideoFacts(len(times), fps, size, (first.height, first.width), _uneven(times), remarks, doubts)


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
            screen = screen or _Screen(stream, frame, display)
            if number in needed:
                frames[number] = screen.show(frame)
    if count <= last:
        raise UnusableFile(f"has {count} frames, but frame {last + 1} is needed")
    return np.stack([frames[number] for number in numbers.tolist()])


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


# --- from the file to decoded frames ----------------------------------------------------------------------------------


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[Any, Any]]:
    """Open a file and its video stream. Raises UnusableFile for anything wrong, here or in the ``with`` block."""
    if check_file(path) == 0:
        raise UnusableFile("is empty")
    try:
        with _container(path) as container:
            yield container, _video_stream(container, path)
    except UnusableFile:
        raise
    except Exception as error:  # a decoder can raise anything on damaged bytes
        raise UnusableFile(f"cannot be decoded: {error_text(error)}") from error


def _container(path: str | Path) -> Any:
    av = pyav()
    # PyAV before 19 stops at a title that is not in UTF-8; since then it reads any, and has no such setting.
    tolerant = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
    return av.open(str(path), **tolerant)


def _video_stream(container: Any, path: str | Path) -> Any:
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


# --- from decoded frames to what is shown -----------------------------------------------------------------------------


class _Screen:
    """Converts the frames of one video to RGB at one size. Not for several threads."""

    def __init__(self, stream: Any, first: Any, display: Display) -> None:
        """``first``: the first frame. Raises UnusableFile if its pixels are so narrow that it would not fit."""
        self._as_player, self._is_transparent = display == "shown", False
        self._reformatter = pyav().video.reformatter.VideoReformatter()
        self._square = self._stored = (first.height, first.width)
        if self._as_player:
            self._square = _squared(self._stored, stream.sample_aspect_ratio)

    def show(self, frame: Any) -> np.ndarray:
        """Return a frame as (H, W, 3) uint8 RGB. Raises UnusableFile for colours that cannot be converted."""
        has_opacity = any(component.is_alpha for component in frame.format.components)
        (height, width), form = self._square, "rgba" if self._as_player and has_opacity else "rgb24"
        # PyAV tells libswscale of matrix and range only if those of the target are others; RGB ignores its own.
        matrix = self._matrix_of(frame)
        other = _BT601 if matrix in (None, _BT709) else _BT709
        colours = {
            "src_colorspace": matrix or other,
            "dst_colorspace": other,
            "src_color_range": int(frame.color_range),
        }
        shown = self._reformatter.reformat(frame, width, height, form, interpolation="BILINEAR", **colours)
        pixels = shown.to_ndarray()
        self._is_transparent = pixels.shape[2] == 4 and pixels[..., 3].min() < 255
        if self._as_player:
            return np.ascontiguousarray(_upright(flattened_frame(pixels), frame.side_data.get("DISPLAYMATRIX")))
        return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))

    def _matrix_of(self, frame: Any) -> int | None:
        """Return the code of the matrix from YUV to RGB; None for frames in RGB or grey, whatever the file states."""
        if frame.format.is_rgb or len(frame.format.components) < 3:
            return None
        if frame.colorspace in _UNSPECIFIED:
            is_large = frame.height >= BT709_FROM[0] or frame.width >= BT709_FROM[1]
            return _BT709 if is_large and self._as_player else _BT601
        if frame.colorspace not in _MATRICES:
            code = int(frame.colorspace)
            raise UnusableFile(f"has colours that cannot be converted here (matrix {code} of ITU-T H.273)")
        return int(frame.colorspace)

    def remarks(self, first: Any) -> Iterator[str]:
        """Yield how the video differs from a plain one, after its ``first`` frame was shown."""
        matrix = self._matrix_of(first)
        words = "" if matrix is None else _MATRICES[matrix]
        if words:
            yield f"in {words}" + (" by their size" if first.colorspace in _UNSPECIFIED else "")
        if first.color_range == _FULL_RANGE and not first.format.is_rgb:
            yield "in full range"
        if self._square != self._stored:
            yield "with pixels that are not square"
        if "DISPLAYMATRIX" in first.side_data:
            yield "rotated or mirrored"
        if self._is_transparent:
            yield f"on a {BACKGROUND} background where they are transparent"


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
    """Yield what is not learned as a player shows it."""
    if codec.color_trc in _HDR:
        yield "are in HDR and learned without tone mapping, paler than a player shows them: convert them to BT.709"
    elif codec.color_primaries in _WIDE_GAMUT:
        yield "have primaries of a wide gamut, and are learned with those of BT.709, paler than a player shows them"
    if first.interlaced_frame:
        yield "are interlaced, and the two fields of a frame are learned as one"
