"""Buckets: the several shapes that samples are brought to, either listed or made from a budget of pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_mm_dit.configs.limits import MOST_FRAMES, MOST_PIXELS, check_between, short_repr
from mindspeed_mm_dit.errors import ConfigError

Size = tuple[int, int]
"""(H, W) in pixels."""
Shape = tuple[int, ...]
"""(H, W) of an image, (F, H, W) of a video."""
MOST_GRAPHS = 16
"""Most shapes that --torch-compile compiles one by one."""
AXES = {2: "[height, width]", 3: "[frames, height, width]"}
MOST_SHAPES = 4096
"""Most shapes of a data set: each is checked with autoencoder and network before a run."""
MOST_ASPECT = 16.0
"""Largest ratio of longer to shorter side; images beyond it are not worth training on."""


@dataclass(frozen=True)
class Budget:
    """``dataset_param.buckets`` as a budget: the largest rectangles that it allows."""

    area: int
    """Most pixels of a shape; at least ``multiple_of`` squared."""
    multiple_of: int
    """Height and width are multiples of this, in pixels: the autoencoder's factor times the patch size, or a multiple
    of that. 1 to 32,768."""
    max_aspect_ratio: float = 2.0
    """Largest ratio of longer to shorter side, 1 to 16."""
    frames: tuple[int, ...] = ()
    """For videos: numbers of frames, each combined with every rectangle. Leave it out for images."""

    def __post_init__(self) -> None:
        check_between("buckets.multiple_of", self.multiple_of, 1, MOST_PIXELS)
        check_between("buckets.max_aspect_ratio", self.max_aspect_ratio, 1, MOST_ASPECT)
        check_between("buckets.area", self.area, 1, MOST_PIXELS**2)
        if self.area < self.multiple_of**2:
            raise ConfigError(
                f"buckets.area = {self.area}", f"is too small for any shape: the smallest, {self.multiple_of} x "
                f"{self.multiple_of}, has {self.multiple_of**2} pixels", "raise area, or lower multiple_of",
            )  # fmt: skip

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every rectangle of the budget; for videos, with each number of frames."""
        rectangles = self.rectangles
        return tuple((f, *size) for f in self.frames for size in rectangles) if self.frames else rectangles

    @property
    def rectangles(self) -> tuple[Size, ...]:
        """Rectangles within the budget that no other one contains, and the largest square; tallest first."""
        candidates: list[Size] = []
        for height in range(math.isqrt(self._units * self._most), 0, -1):
            width = self._widest(height)
            if height <= width * self.max_aspect_ratio and (not candidates or width > candidates[-1][1]):
                candidates.append((height, width))
        square = math.isqrt(self._units)
        ordered = sorted({*candidates, (square, square)}, reverse=True)
        return tuple((height * self.multiple_of, width * self.multiple_of) for height, width in ordered)

    @property
    def _units(self) -> int:
        return self.area // self.multiple_of**2

    @property
    def _most(self) -> int:
        return math.ceil(self.max_aspect_ratio)

    def _widest(self, height: int) -> int:
        """Return the largest width for a height, both in units of ``multiple_of``."""
        return min(self._units // height, int(height * self.max_aspect_ratio))


Buckets = tuple[Shape, ...] | Budget


def size_words(shapes: Sequence[Shape]) -> str:
    """Return shapes as text, e.g. "256 x 256 or 320 x 192"."""
    return " or ".join(" x ".join(map(str, shape)) for shape in shapes)


def check_buckets(buckets: Buckets, axes: int) -> None:
    """Raise ConfigError unless ``dataset_param.buckets`` is a budget, or lists different shapes of ``axes`` axes."""
    count = len(buckets.rectangles) * max(1, len(buckets.frames)) if isinstance(buckets, Budget) else len(buckets)
    if count > MOST_SHAPES:
        cure = "use a larger multiple_of, or fewer numbers of frames" if isinstance(buckets, Budget) else "list fewer"
        raise ConfigError("dataset_param.buckets", f"makes {count:,} shapes, more than {MOST_SHAPES:,}", cure)
    if isinstance(buckets, Budget):
        _check_frames(buckets.frames, axes)
        return
    if not buckets:
        raise ConfigError("dataset_param.buckets = []", "lists no shape", f"write [{AXES[axes]}, ...]")
    for number, shape in enumerate(buckets):
        what = f"dataset_param.buckets[{number}]"
        if len(shape) != axes:
            raise ConfigError(f"{what} = {short_repr(list(shape))}", f"is not {AXES[axes]}", f"write {axes} numbers")
        for side, most in zip(shape, (MOST_FRAMES, MOST_PIXELS, MOST_PIXELS)[-axes:]):
            check_between(what, side, 1, most)
        if shape in buckets[:number]:
            raise ConfigError(f"{what} = {list(shape)}", "is listed twice", "drop one of them")


def _check_frames(frames: Sequence[int], axes: int) -> None:
    what = f"dataset_param.buckets.frames = {short_repr(list(frames))}"
    if axes == 2 and frames:
        raise ConfigError(what, "images have no frames", "drop it")
    if axes == 3 and (not frames or len(set(frames)) < len(frames)):
        raise ConfigError(what, "must list different numbers of frames", "write e.g. [1, 17, 49]")
    for number in frames:
        check_between("dataset_param.buckets.frames", number, 1, MOST_FRAMES)
