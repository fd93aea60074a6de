"""Turns decoded frames into what a player shows: RGB by the file's own matrix and range, square pixels, upright."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.buckets import Size
from mindspeed_mm_dit.configs.clips import Display
from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.data.transforms import MAX_SCALED_PIXELS
from mindspeed_mm_dit.data.transparency import BACKGROUND, flattened_frame

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
