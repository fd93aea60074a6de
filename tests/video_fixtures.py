"""Films of a few frames that say of their display what a test asks for: written without loss, with PyAV."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.stream import Disposition


def film(path: Path, frames: list[Any], times: list[int] | None = None, rate: int = 8, cover: Any = None,
         disposition: Any = Disposition.attached_pic, **tags: Any) -> Path:  # fmt: skip
    """Write ``frames``, shown ``times`` milliseconds after the start or ``rate`` a second.

    cover: (H, W, 3) uint8, a picture in the first track, marked by ``disposition``.
    tags: what the stream says, by PyAV's names (``colorspace``, ...).
    """
    with av.open(str(path), "w") as container:
        codec, form = ("mjpeg", "yuvj420p") if path.suffix == ".mkv" else ("png", "rgb24")
        picture = container.add_stream(codec, rate=1) if cover is not None else None
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width, stream.pix_fmt = frames[0].height, frames[0].width, frames[0].format.name
        stream.options = {"qp": "0", "bf": "0"}
        unit = Fraction(1, rate if times is None else 1000)
        stream.time_base = stream.codec_context.time_base = unit
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)
        if picture is not None:
            picture.height, picture.width, picture.pix_fmt = *cover.shape[:2], form
            picture.disposition = disposition.value
            container.mux([*picture.encode(av.VideoFrame.from_ndarray(cover)), *picture.encode()])
        for number, frame in enumerate(frames):
            frame.pts, frame.time_base = number if times is None else times[number], unit
            frame.colorspace, frame.color_range = tags.get("colorspace", 2), tags.get("color_range", 0)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def flat(yuv: list[int], size: tuple[int, int] = (16, 16), form: str = "yuv420p") -> Any:
    """A frame of one colour, given as levels of its planes."""
    frame = av.VideoFrame(size[1], size[0], form)
    for plane, level in zip(frame.planes, yuv):
        dtype = np.dtype(np.uint16 if "10" in form else np.uint8)
        plane.update(np.full(plane.buffer_size // dtype.itemsize, level, dtype).tobytes())
    return frame


def drawn(pixels: np.ndarray) -> Any:
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels, np.uint8), format="rgb24")
    return frame.reformat(format="yuv420p")


def grey(*levels: int, size: tuple[int, int] = (16, 16)) -> list[Any]:
    return [drawn(np.full((*size, 3), level)) for level in levels]
