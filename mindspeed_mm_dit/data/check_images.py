"""Checks every image of a data set before a run.

Whether it is usable, how large it is, and which are byte for byte the same.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, digest_of
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.source import ColorProfiles, Size
from mindspeed_mm_dit.data.colours import Colours, colours_of, is_grey
from mindspeed_mm_dit.data.threads import in_threads
from mindspeed_mm_dit.data.transforms import BACKGROUND, of_8_bits, opacity_of, open_image, upright_size
from mindspeed_mm_dit.terminal import progress

ImageFile = Path | Callable[[], bytes]
"""A file, or a function that reads its content."""

LARGEST_ENLARGEMENT = 4
"""A run warns of images that are enlarged by more than this factor in height and width."""

LONG = 2.0
"""Aspect ratio at which an image loses half of its area to a square crop."""

HUGE_MEGAPIXELS = 89.478485
"""Pillow warns of images of this size or more, and refuses those with twice as many pixels."""

OPAQUE = (255, 255)
"""``Look.opacity`` of an image without transparency."""


class Look(NamedTuple):
    """The result of checking one file."""

    problem: str | None = None
    """Why it cannot be used, worded to follow its name; None for a good one."""
    size: int = 0
    """Bytes of the file."""
    height: int = 0
    """Height of the upright image, in pixels."""
    width: int = 0
    """Width of the upright image, in pixels."""
    is_grey: bool = False
    """Whether its mode has no colour."""
    colours: Colours = Colours.SRGB
    """What its header states about its colours."""
    moves: bool = False
    """Whether it has frames or pages after the first."""
    opacity: tuple[int, int] = OPAQUE
    """The least and the greatest opacity of a pixel; known only if it was decoded."""

    @property
    def shorter_side(self) -> int:
        """Shorter side of the image, in pixels."""
        return min(self.height, self.width)


def look_at(files: Sequence[ImageFile], image_size: int | Size, decode: bool) -> list[Look]:
    """Check each image, only its header unless ``decode``; in threads, with a progress bar if it takes long."""
    looks = in_threads(lambda file: _look(file, image_size, decode), files)
    return list(progress("checking images", looks, total=len(files), unit="image", delay=2))


def _look(file: ImageFile, image_size: int | Size, decode: bool) -> Look:
    try:
        content = file() if callable(file) else file
        with open_image(content, image_size) as image:
            colours = colours_of(image)
            if decode:
                image.load()
            num_bytes = len(content) if isinstance(content, bytes) else check_file(content)
            opacity = opacity_of(of_8_bits(image)) if decode else None
            extrema: Any = opacity.getextrema() if opacity else OPAQUE
            return Look(None, num_bytes, *upright_size(image), is_grey(image.mode), colours, _moves(image), extrema)
    except UnusableFile as problem:
        return Look(str(problem))


def _moves(image: Image.Image) -> bool:
    """Return whether ``image`` has frames or pages after the first; the previews in a camera's JPEG do not count."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception:  # its later frames are damaged, but the first may be intact
        return True


def notes_on(
    paths: Sequence[str], looks: Sequence[Look], param: DatasetParam, shapes: np.ndarray | None = None
) -> tuple[str, ...]:
    """Return notes on images that are far smaller than their target size, on what others lose, and on colours.

    shapes: (N, 2) target size of each image, if it is not ``param.image_size``.
    """
    targets = np.full((len(looks), 2), param.image_size) if shapes is None else shapes
    what = "their buckets" if shapes is not None else f"image_size {param.image_size}"
    sides, total = np.array([(look.height, look.width) for look in looks], np.float64).reshape(-1, 2), f"{len(looks):,}"
    shorter, longer, megapixels = sides.min(1), sides.max(1), sides.prod(1) / 1e6
    squares = (targets[:, 0] == targets[:, 1]).all()
    return (
        *_note(enlargements(sides, targets) > LARGEST_ENLARGEMENT, -shorter, lambda count, n:
               f"warning: {count:,} of {total} images are enlarged more than {LARGEST_ENLARGEMENT} times to {what}; "
               f"the shorter side of {paths[n]} has {looks[n].shorter_side} pixel(s)"),
        *_note(megapixels > HUGE_MEGAPIXELS, megapixels, lambda count, n:
               f"warning: {count:,} of {total} images have more than {HUGE_MEGAPIXELS:.0f} megapixels, and each is "
               f"decoded whole every time it is read; {paths[n]} has {megapixels[n]:.0f}: scale them down"),
        *_note_of_lost(paths, [look.moves for look in looks], "are animated or have several pages, and only "
                       "the first frame is learned"),
        *_note_of_lost(paths, [look.opacity[0] < 255 for look in looks],
                       f"have transparent parts, and are learned on a {BACKGROUND} background, as a viewer shows them"),
        *_note_of_lost(paths, [look.opacity[1] == 0 for look in looks], "are fully transparent, so that only "
                       f"{BACKGROUND} is learned", "warning"),
        *notes_on_colours(paths, [look.colours for look in looks], param.color_profiles),
        *_note(squares & (longer > LONG * shorter), longer / np.maximum(shorter, 1), lambda count, n:
               f"note: {count:,} of {total} images are more than {LONG:g} times as long as wide or high, and a square "
               f"of their middle is learned: {paths[n]} is {looks[n].width} x {looks[n].height}"),
    )  # fmt: skip


def notes_on_colours(
    paths: Sequence[str], colours: Sequence[Colours], color_profiles: ColorProfiles
) -> tuple[str, ...]:
    """Return notes that count the images whose files do not say, or imply, that they are in sRGB."""
    converted = ", and are learned as a viewer shows them"
    ignored = ', which dataset_param.color_profiles = "ignore" leaves alone'
    profiles = Colours.PROFILE.value + (converted if color_profiles == "convert" else ignored)
    words = {Colours.PROFILE: profiles, Colours.BROKEN: Colours.BROKEN.value, Colours.UNCLEAR: Colours.UNCLEAR.value}
    notes = (_note_of_lost(paths, [entry is kind for entry in colours], text) for kind, text in words.items())
    return tuple(note for lines in notes for note in lines)


def enlargements(sizes: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the factor by which each sample is enlarged to cover its shape, (N,) float64.

    sizes, shapes: (N, 2) height and width, or (N, 3) with frames before them, which are not enlarged.
    """
    return (shapes / sizes)[:, -2:].max(1)


def _note(which: np.ndarray, values: np.ndarray, message: Callable[[int, int], str]) -> tuple[str, ...]:
    """Return ``message(count, index)`` of the images in ``which``, if any; index: that of the largest value."""
    return (message(int(which.sum()), int(np.where(which, values, -np.inf).argmax())),) if which.any() else ()


def _note_of_lost(paths: Sequence[str], lost: Sequence[bool], what: str, level: str = "note") -> tuple[str, ...]:
    """Return a note that counts the images that lose something, and names the first of them, if there are any."""
    which, counted = np.array(lost, bool), f"of {len(lost):,} images {what}"
    return _note(which, np.zeros(len(lost)), lambda count, first: f"{level}: {count:,} {counted}: {paths[first]}")


def similar_name(path: Path) -> str:
    """Return "Did you mean 'x'? " if the folder of a missing file has a file of the same letters, else ""."""
    if "\\" in path.name and not os.path.lexists(path):
        return "Write / between folders. "
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return ""
    same = [name for name in names if _plain(name) == _plain(path.name) and name != path.name]
    return f"Did you mean {same[0]!r} ({same[0]!a})? " if same else ""


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


class Copy(NamedTuple):
    """Two images with the same content, by their numbers."""

    image: int
    earlier: int


def find_copies(paths: Sequence[str]) -> list[Copy]:
    """Return each image that has the bytes of an earlier one; only files of equal size are read."""
    sizes = [_size_of(path) for path in paths]
    common = Counter(sizes)
    suspects = [image for image, size in enumerate(sizes) if size is not None and common[size] > 1]
    digests = list(in_threads(lambda image: _digest_of(paths[image]), suspects))
    first: dict[bytes, int] = {}
    copies = []
    for image, digest in zip(suspects, digests):
        if digest is not None and first.setdefault(digest, image) != image:
            copies.append(Copy(image, first[digest]))
    return copies


def _size_of(path: str) -> int | None:
    try:
        return check_file(path)
    except UnusableFile:  # (it is gone, which is reported when it is read)
        return None


def _digest_of(path: str) -> bytes | None:
    try:
        return digest_of(path)
    except UnusableFile:
        return None
