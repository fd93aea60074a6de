"""Reads the orientation that a PNG stores after its pixels, which Pillow reads only once it has decoded them."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from typing import Any

from PIL import Image

HEADER_BYTES = 33
"""Bytes of the signature and the first chunk, IHDR."""
MOST_BYTES = 1 << 22
"""Larger chunks are skipped."""
_KINDS = (b"eXIf", b"iTXt", b"zTXt", b"tEXt")
"""Chunks that may hold EXIF or XMP."""
_KEYS = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
"""Where Pillow keeps them."""


def read_late_metadata(image: Image.Image) -> None:
    """Put EXIF and XMP from behind the pixels of a PNG just opened where Pillow looks for them; decodes nothing."""
    if image.format != "PNG" or image.fp is None or "exif" in image.info:
        return
    position = image.fp.tell()
    image.fp.seek(0)
    header = image.fp.read(HEADER_BYTES)
    late = _late_chunks(image.fp)
    image.fp.seek(position)
    if late:
        with suppress(Exception):  # damaged metadata can raise anything, but the pixels may be intact
            # (the same file without pixels, so that Pillow finds the chunks before them)
            info = Image.open(io.BytesIO(header + late + struct.pack(">I4sI", 0, b"IDAT", 0)), formats=["PNG"]).info
            image.info.update({key: info[key] for key in _KEYS if key in info and key not in image.info})


def _late_chunks(file: Any) -> bytes:
    """Return the chunks of _KINDS after the first IDAT of a PNG whose first chunk has been read."""
    chunks, has_pixels = b"", False
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        has_pixels = has_pixels or kind == b"IDAT"
        if has_pixels and kind in _KINDS and len(chunks) + length <= MOST_BYTES:
            chunks += head + file.read(length + 4)
        else:
            file.seek(length + 4, io.SEEK_CUR)
    return chunks
