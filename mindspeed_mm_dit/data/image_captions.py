"""Captions of images from files: a .txt or .json next to an image, or after it in a tar.

A location is written ".txt" for a file's ending, ".json:caption" for a key of a JSON object. A text file has one
caption per line; a JSON value is one caption or a list. There may be several locations, e.g. one per language; an image
gets the captions of all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, lines_of, read_bytes
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.data.captions import first_problems
from mindspeed_mm_dit.data.labels import composed
from mindspeed_mm_dit.data.threads import in_threads
from mindspeed_mm_dit.terminal import progress

MOST_BYTES = 1 << 20
"""Largest size of a file of captions."""
SAVE_AS_UTF_8 = "(save it as UTF-8)"
"""The end of each problem with a caption in another encoding."""


class ImageCaptions(NamedTuple):
    """The captions of one image."""

    captions: tuple[str, ...] = ()
    problem: str = ""
    """Why the image cannot be used, worded to follow its name; "" for a good one."""

    @property
    def other_encoding(self) -> bool:
        """Whether there is a caption, but not in UTF-8."""
        return self.problem.endswith(SAVE_AS_UTF_8)


def merge_captions(parts: Sequence[ImageCaptions], locations: Sequence[str]) -> ImageCaptions:
    """Join the captions of one image: ``parts`` has those of the ``locations`` that exist."""
    problem = next((part.problem for part in parts if part.problem), "")
    captions = tuple(caption for part in parts for caption in part.captions)
    return ImageCaptions(
        captions, problem or ("" if captions else f"has no caption: there is no {' or '.join(locations)}")
    )


def checked(
    captions: Sequence[ImageCaptions], checks: Sequence[Callable[[Sequence[str]], list[str]]]
) -> list[ImageCaptions]:
    """Return ``captions`` with the problems that the text encoders' ``checks`` (``captions.caption_problems``) find."""
    problems = first_problems([image.captions for image in captions], checks)
    return [
        image if image.problem else ImageCaptions(image.captions, problem) for image, problem in zip(captions, problems)
    ]


def endings_of(locations: Sequence[str]) -> set[str]:
    """Return the endings of the files that ``locations`` name."""
    return {location.partition(":")[0] for location in locations if location.startswith(".")}


def read_sidecar_captions(images: Sequence[Path], locations: Sequence[str]) -> list[ImageCaptions]:
    """Return the captions of each of ``images`` from the files next to it, named like the image but for the ending.

    If there is no such file, one is used whose name is written with other Unicode characters that look the same, whose
    ending has capital letters, or whose name has the image's ending too (x.png.txt).
    """
    folders = {folder: _NamesIn(folder) for folder in {image.parent for image in images}}
    looking = in_threads(lambda image: _sidecar_captions(image, locations, folders[image.parent]), images)
    return list(progress("reading captions", looking, total=len(images), unit="image", delay=2))


class _NamesIn:
    """The names in a folder, looked up also by other spellings."""

    def __init__(self, folder: Path) -> None:
        try:
            self._exact = set(os.listdir(folder))
        except OSError:  # (each image is checked by itself)
            self._exact = set()
        self._alike: dict[str, list[str]] = {}
        for name in sorted(self._exact):
            self._alike.setdefault(_normalized(name).casefold(), []).append(name)

    def matching(self, stem: str, ending: str) -> list[str]:
        """Return the name that is ``stem`` and ``ending``, or those like it; letters of the stem keep their case."""
        if stem + ending in self._exact:
            return [stem + ending]
        alike = self._alike.get(_normalized(stem + ending).casefold(), [])
        return [name for name in alike if _normalized(name).startswith(_normalized(stem))]


def _normalized(name: str) -> str:
    return composed([name])[0]


def _sidecar_captions(image: Path, locations: Sequence[str], names: _NamesIn) -> ImageCaptions:
    parts = []
    for location in locations:
        ending = location.partition(":")[0]
        matches = names.matching(image.stem, ending) or names.matching(image.name, ending)
        if len(matches) > 1:
            parts.append(ImageCaptions(problem=f"has captions in {' and in '.join(matches)}: keep one"))
        elif matches and image.with_name(matches[0]).is_file():
            parts.append(_read_sidecar(image.with_name(matches[0]), location))
    return merge_captions(parts, [image.stem + location for location in locations])


def _read_sidecar(path: Path, location: str) -> ImageCaptions:
    try:
        check_size(path.name, check_file(path))
        return parse_caption_file(path.name, read_bytes(path), location)
    except UnusableFile as problem:
        return ImageCaptions(problem=f"has a caption in {path.name}, which {problem}")


def check_size(name: str, size: int) -> None:
    """Raise UnusableFile if a file of ``size`` bytes is too large to hold captions."""
    if size > MOST_BYTES:
        raise UnusableFile(f"has {size:,} bytes, too many for captions ({name})")


def parse_caption_file(name: str, content: bytes, location: str) -> ImageCaptions:
    """Return the captions in a file called ``name``; ``location``: its ending and, for JSON, the key."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        where = f"{name}, line {line}, byte {content[error.start]:#04x}"
        return ImageCaptions(problem=f"has a caption that is not UTF-8: {where} {SAVE_AS_UTF_8}")
    key = location.partition(":")[2]
    captions = _in_json(text, key) if key else [line.strip() for line in lines_of(text)]
    if captions is None:
        return ImageCaptions(problem=f"has no caption: {name} is not a JSON object with texts in {key!r}")
    captions = [caption for caption in captions if caption.strip()]
    if any("\0" in caption for caption in captions):
        return ImageCaptions(problem=f"has a caption that is not text: {name} holds a NUL byte {SAVE_AS_UTF_8}")
    return ImageCaptions(tuple(captions), "" if captions else f"has no caption: {name} is empty")


def _in_json(text: str, key: str) -> list[str] | None:
    """Return the captions of a JSON object: [] if it lacks the key, None if it is not such an object."""
    try:
        content: Any = json.loads(text)
        texts = texts_of(content.get(key, []))
        "".join(texts or ()).encode()  # (JSON can contain half a surrogate pair)
    except (ValueError, AttributeError, RecursionError):
        return None
    return texts


def texts_of(value: Any) -> list[str] | None:
    """Return a text or a list of texts as a list, [] for None, and None for anything else."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return values if all(isinstance(item, str) for item in values) else None


def parse_captions(value: Any, where: str) -> ImageCaptions:
    """Return the captions in ``value``, the field ``where`` of a table."""
    texts = texts_of(value)
    if texts is None:
        return ImageCaptions(problem=f"has a {where} that is not text: {short_repr(value)}")
    return ImageCaptions(tuple(text for text in texts if text.strip()))
