"""Reads an annotation of clips in MindSpeed-MM's format: one JSON list, or one JSON object per line.

    {"path": "videos/1.mp4", "cap": "A dog runs.", "num_frames": 81, "fps": 24, "resolution": {"height": 480, ...}}

``cap`` may be a list, one of which is chosen at random each time. The resolution may be a pair [height, width].
num_frames, fps and resolution are optional: the video file has them too. No video is opened here.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.configs.files import UnusableFile, read_bytes
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.data.labels import ANY_CLASSES
from mindspeed_mm_dit.errors import DataError

KEYS = ("path", "cap", "num_frames", "fps", "resolution")
CUTTING_KEYS = ("cut", "crop")
"""Keys with which some MindSpeed-MM models select part of a video. Ignoring them would train on other clips."""

_SPACE = re.compile(r"[ \t\r\n]*")
_PAIR_IN_BRACES = re.compile(r"\{\s*\d+\s*,\s*\d+\s*\}")


class UnusableEntry(Exception):
    """An entry that names no clip. The message continues after "line 7"."""


class Entry(NamedTuple):
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


class Line(NamedTuple):
    """An object of the annotation, not checked yet."""

    line: int
    content: Any


def read_annotation(path: Path) -> list[Line]:
    """Return the objects of a .json or .jsonl file; raises DataError with file and line if it is not valid."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnusableFile as problem:
        cure = "correct the path, or write the annotation there"
        raise DataError(f"dataset_param.json_path = {path}", str(problem), cure) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = f"byte {error.object[error.start]:#04x}"
        raise DataError(f"{path}: line {line}", f"is not UTF-8: {byte}", "save the file as UTF-8") from None
    lines = list(_objects_by_line(path, text) if path.suffix == ".jsonl" else _objects_of_list(path, text))
    if not lines:
        raise DataError(f"dataset_param.json_path = {path}", "lists no clips", "write an object for each clip")
    return lines


def entry_of(line: Line, captioned: bool = True, label_key: str | None = None) -> Entry:
    """Parse an object of the annotation; raises UnusableEntry.

    captioned: whether captions are requested; label_key: key of the class, if labels are requested.
    """
    content = line.content
    if not isinstance(content, dict):
        raise UnusableEntry(f"is not an object with path and cap, but {short_repr(content)}")
    for key in CUTTING_KEYS:
        if content.get(key) is not None:
            raise UnusableEntry(f"has the key {key}, which selects part of a video: drop it, and cut the file instead")
    return Entry(
        line.line,
        _path_of(content),
        _captions_of(content) if captioned else (),
        _whole_number(content, "num_frames"),
        _rate_of(content),
        _size_of(content.get("resolution")),
        None if label_key is None else _label_of(content, label_key),
    )


def image_paths(line: Line, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the normalized paths of the images that an object names under ``keys``; raises UnusableEntry."""
    return tuple(_path_of(line.content, key) for key in keys)


def _objects_by_line(path: Path, text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield Line(number, json.loads(line, object_pairs_hook=_object))
            except (ValueError, RecursionError) as error:
                raise _not_json(path, number, error, line) from None


def _objects_of_list(path: Path, text: str) -> Iterator[Line]:
    """Yield each object of a JSON list with the line where it begins."""
    decoder, at, line = json.JSONDecoder(object_pairs_hook=_object), _after_space(text, 0), 1
    try:
        if text[at : at + 1] != "[":
            raise json.JSONDecodeError("the annotation is not a list: expecting '['", text, at)
        at, counted = _after_space(text, at + 1), 0
        while text[at : at + 1] != "]":
            line, counted = line + text.count("\n", counted, at), at
            content, at = decoder.raw_decode(text, at)
            yield Line(line, content)
            at = _after_space(text, at)
            if text[at : at + 1] == ",":
                at = _after_space(text, at + 1)
                if text[at : at + 1] == "]":
                    raise json.JSONDecodeError("there is a comma after the last object", text, at)
            elif text[at : at + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        at = _after_space(text, at + 1)
        if at < len(text):
            raise json.JSONDecodeError("there is more after the end of the list", text, at)
    except json.JSONDecodeError as error:
        raise _not_json(path, error.lineno, error, text[max(0, error.pos - 40) :][:120]) from None
    except (ValueError, RecursionError) as error:
        raise _not_json(path, line, error, "") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {short_repr(twice)} occurs twice in one object")
    return content


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, "the pattern also matches the empty string"
    return match.end()


def _not_json(path: Path, line: int, error: Exception, around: str) -> DataError:
    pair = _PAIR_IN_BRACES.search(around)
    if pair:
        return DataError(
            f"{path}: line {line}",
            f"is not JSON: {pair[0]} is neither an object nor a list (MindSpeed-MM's tutorial prints it so)",
            'write "resolution": [480, 832], or {"height": 480, "width": 832}',
        )
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error) or type(error).__name__
    cure = "write one object a line, as json.dump does"
    if path.suffix == ".json":
        cure = "write a list of objects, as json.dump does; one object a line is a .jsonl"
    return DataError(f"{path}: line {line}", f"is not JSON: {reason}", cure)


def _path_of(content: dict[str, Any], key: str = "path") -> str:
    path = content.get(key)
    if not isinstance(path, str) or not path.strip():
        raise UnusableEntry(
            f"has no {key}" if path in (None, "") else f"has {key} = {short_repr(path)}, which is not a path"
        )
    short = posixpath.normpath(path)
    if short.startswith(("/", "../")) or short in ("..", "."):
        raise UnusableEntry(f"names {path}, which leaves dataset_param.data_folder")
    return short


def _captions_of(content: dict[str, Any]) -> tuple[str, ...]:
    if "cap" not in content:
        raise UnusableEntry(f"has no caption (key cap); its keys are {short_repr(list(content))}")
    value = content["cap"]
    captions = tuple(value) if isinstance(value, list) else (value,)
    if not captions or any(not isinstance(caption, str) or not caption.strip() for caption in captions):
        raise UnusableEntry(
            "has no caption" if value in (None, "", []) else f"has the caption {short_repr(value)}, which is not a text"
        )
    return captions


def _label_of(content: dict[str, Any], key: str) -> int | str:
    value = content.get(key)
    if not (isinstance(value, str) and value.strip()) and not (type(value) is int and 0 <= value < ANY_CLASSES):
        raise UnusableEntry(f"has {key} = {short_repr(value)}: a label is a number from 0 on, or a name")
    return value


def _whole_number(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise UnusableEntry(f"has {key} = {short_repr(value)}, which is not a positive whole number")
    return value


def _rate_of(content: dict[str, Any]) -> float | None:
    value = content.get("fps")
    if value is not None and (type(value) not in (int, float) or not 0 < value < 1e6):
        raise UnusableEntry(f"has fps = {short_repr(value)}, which is not a positive number")
    return value


def _size_of(resolution: Any) -> tuple[int, int] | None:
    """Return (H, W) from an object {height, width} or a pair."""
    if resolution is None:
        return None
    pair = (resolution.get("height"), resolution.get("width")) if isinstance(resolution, dict) else resolution
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise UnusableEntry(
            f"has the resolution {short_repr(resolution)}: write [height, width], or an object with height and width"
        )
    return pair[0], pair[1]
