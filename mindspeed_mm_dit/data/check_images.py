"""Checks every image of a data set before a run: whether it is usable, how large it is, and whether it has copies."""

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
from mindspeed_mm_dit.data.sources import map_in_threads
from mindspeed_mm_dit.data.transforms import (
    BACKGROUND,
    Colours,
    colours_of,
    is_grey,
    opacity_of,
    open_image,
    to_8_bits,
    upright_size,
)

ImageFile = Path | Callable[[], bytes]
"""A file, or a function that reads its content."""

MAX_ENLARGEMENT = 4
"""A run warns of images that are enlarged by more than this factor in height and width."""

LONG = 2.0
"""Aspect ratio at which an image loses half of its area to a square crop."""

HUGE_MEGAPIXELS = 89.478485
"""Pillow warns of images of this size or more, and refuses those with twice as many pixels."""

OPAQUE = (255, 255)
"""``ImageCheck.opacity`` of an image without transparency."""


class ImageCheck(NamedTuple):
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
    is_animated: bool = False
    """Whether it has frames or pages after the first."""
    opacity: tuple[int, int] = OPAQUE
    """The least and the greatest opacity of a pixel; known only if it was decoded."""

    @property
    def shorter_side(self) -> int:
        """Shorter side of the image, in pixels."""
        return min(self.height, self.width)


def check_image_files(files: Sequence[ImageFile], image_size: int | Size, decode: bool) -> list[ImageCheck]:
    """Check each image, only its header unless ``decode``; in threads, with a progress bar if it takes long."""
    return list(map_in_threads(lambda file: _check_image(file, image_size, decode), files, "checking images", "image"))


def _check_image(file: ImageFile, image_size: int | Size, decode: bool) -> ImageCheck:
    try:
        content = file() if callable(file) else file
        with open_image(content, image_size) as image:
            colours = colours_of(image)
            if decode:
                image.load()
            num_bytes = len(content) if isinstance(content, bytes) else check_file(content)
            opacity = opacity_of(to_8_bits(image)) if decode else None
            extrema: Any = opacity.getextrema() if opacity else OPAQUE
            return ImageCheck(
                None, num_bytes, *upright_size(image), is_grey(image.mode), colours, _moves(image), extrema
            )
    except UnusableFile as problem:
        return ImageCheck(str(problem))


def _moves(image: Image.Image) -> bool:
    """Return whether ``image`` has frames or pages after the first; the previews in a camera's JPEG do not count."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception:  # its later frames are damaged, but the first may be intact
        return True


def size_notes(
    paths: Sequence[str], looks: Sequence[ImageCheck], param: DatasetParam, shapes: np.ndarray | None = None
) -> tuple[str, ...]:
    """Return notes on images that are far smaller than their target size, on what others lose, and on colours.

    shapes: (N, 2) target size of each image, if it is not ``param.image_size``.
    """
    targets = np.full((len(looks), 2), param.image_size) if shapes is None else shapes
    what = "their buckets" if shapes is not None else f"image_size {param.image_size}"
    sides = np.array([(look.height, look.width) for look in looks], np.float64).reshape(-1, 2)
    total, shorter, longer, megapixels = f"{len(looks):,}", sides.min(1), sides.max(1), sides.prod(1) / 1e6
    notes = []
    is_enlarged = enlargements(sides, targets) > MAX_ENLARGEMENT
    if is_enlarged.any():
        n = int(np.where(is_enlarged, shorter, np.inf).argmin())
        notes.append(
            f"warning: {is_enlarged.sum():,} of {total} images are enlarged more than {MAX_ENLARGEMENT} times to "
            f"{what}; the shorter side of {paths[n]} has {looks[n].shorter_side} pixel(s)"
        )
    is_huge = megapixels > HUGE_MEGAPIXELS
    if is_huge.any():
        n = int(megapixels.argmax())
        notes.append(
            f"warning: {is_huge.sum():,} of {total} images have more than {HUGE_MEGAPIXELS:.0f} megapixels, and each "
            f"is decoded whole every time it is read; {paths[n]} has {megapixels[n]:.0f}: scale them down"
        )
    moves, opacities = [look.is_animated for look in looks], [look.opacity for look in looks]
    lost = "are animated or have several pages, and only the first frame is learned"
    notes += _note_of_lossy(paths, moves, lost)
    lost = f"have transparent parts, and are learned on a {BACKGROUND} background, as a viewer shows them"
    notes += _note_of_lossy(paths, [least < 255 for least, _ in opacities], lost)
    lost = f"are fully transparent, so that only {BACKGROUND} is learned"
    notes += _note_of_lossy(paths, [greatest == 0 for _, greatest in opacities], lost, "warning")
    notes += colour_notes(paths, [look.colours for look in looks], param.color_profiles)
    is_long = (targets[:, 0] == targets[:, 1]).all() & (longer > LONG * shorter)
    if is_long.any():
        n = int(np.where(is_long, longer / np.maximum(shorter, 1), -np.inf).argmax())
        notes.append(
            f"note: {is_long.sum():,} of {total} images are more than {LONG:g} times as long as wide or high, and a "
            f"square of their middle is learned: {paths[n]} is {looks[n].width} x {looks[n].height}"
        )
    return tuple(notes)


def colour_notes(paths: Sequence[str], colours: Sequence[Colours], color_profiles: ColorProfiles) -> tuple[str, ...]:
    """Return notes that count the images whose files do not say, or imply, that they are in sRGB."""
    converted = ", and are learned as a viewer shows them"
    ignored = ', which dataset_param.color_profiles = "ignore" leaves alone'
    endings = {Colours.PROFILE: converted if color_profiles == "convert" else ignored}
    notes: list[str] = []
    for kind in (Colours.PROFILE, Colours.BROKEN, Colours.UNCLEAR):
        notes += _note_of_lossy(paths, [entry is kind for entry in colours], kind.value + endings.get(kind, ""))
    return tuple(notes)


def _note_of_lossy(paths: Sequence[str], is_lossy: Sequence[bool], loss: str, level: str = "note") -> list[str]:
    """Return a note that counts the images that lose something, and names the first of them, if there are any."""
    if not any(is_lossy):
        return []
    return [f"{level}: {sum(is_lossy):,} of {len(is_lossy):,} images {loss}: {paths[is_lossy.index(True)]}"]


def enlargements(sizes: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the factor by which each sample is enlarged to cover its shape, (N,) float64.

    sizes, shapes: (N, 2) height and width, or (N, 3) with frames before them, which are not enlarged.
    """
    return (shapes / sizes)[:, -2:].max(1)


def similar_name(path: Path) -> str:
    """Return "Did you mean 'x'? " if the folder of a missing file has a file of the same letters, else ""."""
    if "\\" in path.name and not os.path.lexists(path):
        return "Write / between folders. "

    def plain(name: str) -> str:
        return unicodedata.normalize("NFC", name).casefold()

    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return ""
    same = [name for name in names if plain(name) == plain(path.name) and name != path.name]
    return f"Did you mean {same[0]!r} ({same[0]!a})? " if same else ""


class DuplicateImage(NamedTuple):
    """Two images with the same content, by their numbers."""

    image: int
    earlier: int


def find_copies(paths: Sequence[str]) -> list[DuplicateImage]:
    """Return each image that has the bytes of an earlier one; only files of equal size are read."""

    def unless_gone(read: Callable[[str], Any], path: str) -> Any:
        try:
            return read(path)
        except UnusableFile:  # (it is gone, which is reported when a run reads it)
            return None

    sizes = [unless_gone(check_file, path) for path in paths]
    counts = Counter(sizes)
    suspects = [image for image, size in enumerate(sizes) if size is not None and counts[size] > 1]
    digests = list(map_in_threads(lambda image: unless_gone(digest_of, paths[image]), suspects))
    first: dict[bytes, int] = {}
    copies = []
    for image, digest in zip(suspects, digests):
        if digest is not None and first.setdefault(digest, image) != image:
            copies.append(DuplicateImage(image, first[digest]))
    return copies
