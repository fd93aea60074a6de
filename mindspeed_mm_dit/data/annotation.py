"""Reads an annotation of clips in MindSpeed-MM's format: one JSON list, or one JSON object per line.

    {"path": "videos/1.mp4", "cap": "A dog runs.", "num_frames": 81, "fps": 24, "resolution": {"height": 480, ...}}

``cap`` may be a list, one of which is chosen at random each time. The resolution may be a pair [height, width].
num_frames, fps and resolution are optional: the video file has them too. No video is opened here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.data.labels import ANY_CLASSES
from mindspeed_mm_dit.data.tables import JSONL, json_lines, json_list, path_inside, read_text
from mindspeed_mm_dit.errors import DataError

KEYS = ("path", "cap", "num_frames", "fps", "resolution")
CUTTING_KEYS = ("cut", "crop")
"""Keys with which some MindSpeed-MM models select part of a video. Ignoring them would train on other clips."""


class UnusableEntry(Exception):
    """An entry that names no clip. The message continues after "line 7"."""


class ClipEntry(NamedTuple):
    """A clip as the annotation describes it."""

    line: int
    """Line of the annotation where the entry begins, from 1."""
    path: str
    """Normalized path of the video or image, relative to ``data_folder``."""
    captions: tuple[str, ...]
    """Captions of the clip; if there are several, one is chosen at random each time."""
    num_frames: int | None = None
    """Number of frames to use; later frames of the video are ignored."""
    fps: float | None = None
    """Frames per second."""
    size: tuple[int, int] | None = None
    """(H, W) of a frame, in pixels."""
    label: int | str | None = None
    """Class of the clip, if labels are requested."""


class AnnotationLine(NamedTuple):
    """An object of the annotation, not checked yet."""

    line: int
    content: Any


def read_annotation(path: Path) -> list[AnnotationLine]:
    """Return the objects of a .json or .jsonl file; raises DataError with file and line if it is not valid."""
    text = read_text(path, "dataset_param.json_path", "Correct the path, or write the annotation there.")
    entries = json_lines(path, text) if path.suffix == JSONL else json_list(path, text)
    lines = [AnnotationLine(*entry) for entry in entries]
    if not lines:
        raise DataError(f"dataset_param.json_path = {path} lists no clips. Write an object for each clip.")
    return lines


def parse_entry(line: AnnotationLine, captioned: bool = True, label_key: str | None = None) -> ClipEntry:
    """Parse an object of the annotation; raises UnusableEntry.

    captioned: whether captions are requested; label_key: key of the class, if labels are requested.
    """
    content = line.content
    if not isinstance(content, dict):
        raise UnusableEntry(f"is not an object with path and cap, but {shorten_repr(content)}")
    for key in CUTTING_KEYS:
        if content.get(key) is not None:
            raise UnusableEntry(f"has the key {key}, which selects part of a video: drop it, and cut the file instead")
    path, captions = _path_of(content, "path"), _captions_of(content) if captioned else ()
    num_frames, fps, label = content.get("num_frames"), content.get("fps"), content.get(label_key)
    if num_frames is not None and (type(num_frames) is not int or num_frames < 1):
        raise UnusableEntry(f"has num_frames = {shorten_repr(num_frames)}, which is not a positive whole number")
    if fps is not None and (type(fps) not in (int, float) or not 0 < fps < 1e6):
        raise UnusableEntry(f"has fps = {shorten_repr(fps)}, which is not a positive number")
    size = _size_of(content.get("resolution"))
    is_name, is_number = isinstance(label, str) and label.strip(), type(label) is int and 0 <= label < ANY_CLASSES
    if label_key is not None and not is_name and not is_number:
        raise UnusableEntry(f"has {label_key} = {shorten_repr(label)}: a label is a number from 0 on, or a name")
    return ClipEntry(line.line, path, captions, num_frames, fps, size, label)


def image_paths(line: AnnotationLine, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the normalized paths of the images that an object names under ``keys``; raises UnusableEntry."""
    return tuple(_path_of(line.content, key) for key in keys)


def _path_of(content: dict[str, Any], key: str) -> str:
    path = content.get(key)
    if path in (None, ""):
        raise UnusableEntry(f"has no {key}")
    if not isinstance(path, str) or not path.strip():
        raise UnusableEntry(f"has {key} = {shorten_repr(path)}, which is not a path")
    if (short := path_inside(path)) is None:
        raise UnusableEntry(f"names {path}, which leaves dataset_param.data_folder")
    return short


def _captions_of(content: dict[str, Any]) -> tuple[str, ...]:
    if "cap" not in content:
        raise UnusableEntry(f"has no caption (key cap); its keys are {shorten_repr(list(content))}")
    value = content["cap"]
    if value in (None, "", []):
        raise UnusableEntry("has no caption")
    captions = tuple(value) if isinstance(value, list) else (value,)
    if any(not isinstance(caption, str) or not caption.strip() for caption in captions):
        raise UnusableEntry(f"has the caption {shorten_repr(value)}, which is not a text")
    return captions


def _size_of(resolution: Any) -> tuple[int, int] | None:
    """Return (H, W) from an object {height, width} or a pair."""
    if resolution is None:
        return None
    pair = (resolution.get("height"), resolution.get("width")) if isinstance(resolution, dict) else resolution
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise UnusableEntry(
            f"has the resolution {shorten_repr(resolution)}: write [height, width], or an object with height and width"
        )
    return pair[0], pair[1]
