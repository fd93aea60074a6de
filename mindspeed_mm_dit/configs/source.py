"""The interface that all kinds of section ``dataset_param`` share, and their buckets.

Buckets are the several shapes that samples are brought to, either listed or made from a budget of pixels.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mindspeed_mm_dit.configs.limits import (
    MAX_FRAMES,
    MAX_PIXELS,
    MAX_SAMPLES,
    Between,
    Fraction,
    PathText,
    Probability,
    Section,
    check_between,
    shorten_repr,
)
from mindspeed_mm_dit.errors import ConfigError, not_known
from mindspeed_mm_dit.registry import Registry

if TYPE_CHECKING:
    from typing_extensions import Self

Size = tuple[int, int]
"""(H, W) in pixels."""
Shape = tuple[int, ...]
"""(H, W) of an image, (F, H, W) of a video."""
MAX_GRAPHS = 16
"""Most shapes that --torch-compile compiles one by one."""
AXES = {2: "[height, width]", 3: "[frames, height, width]"}
MAX_SHAPES = 4096
"""Most shapes of a data set: each is checked with autoencoder and network before a run."""
ColorProfiles = Literal["convert", "ignore"]
"""How the colour profile in an image file is used: see ``SourceParam.color_profiles``."""


@dataclass(frozen=True)
class Budget(Section):
    """``dataset_param.buckets`` as a budget: the largest rectangles that it allows."""

    area: Annotated[int, Between(1, MAX_PIXELS**2)]
    """Most pixels of a shape; at least ``multiple_of`` squared."""
    multiple_of: Annotated[int, Between(1, MAX_PIXELS)]
    """Height and width are multiples of this, in pixels: the autoencoder's factor times the patch size, or a multiple
    of that. 1 to 32,768."""
    max_aspect_ratio: Annotated[float, Between(1, 16)] = 2.0
    """Largest ratio of longer to shorter side, 1 to 16."""
    frames: tuple[Annotated[int, Between(1, MAX_FRAMES)], ...] = ()
    """For videos: numbers of frames, each combined with every rectangle. Leave it out for images."""

    section = "dataset_param.buckets"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.area < self.multiple_of**2:
            raise self.error(
                "area",
                f"is too small for any shape: the smallest, {self.multiple_of} x {self.multiple_of}, has "
                f"{self.multiple_of**2} pixels. Raise area, or lower multiple_of.",
            )

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every rectangle of the budget; for videos, with each number of frames."""
        rectangles = self.rectangles
        return tuple((f, *size) for f in self.frames for size in rectangles) if self.frames else rectangles

    @property
    def rectangles(self) -> tuple[Size, ...]:
        """Rectangles within the budget that no other one contains, and the largest square; tallest first."""
        candidates: list[Size] = []
        units = self.area // self.multiple_of**2  # (all sides in units of multiple_of)
        for height in range(math.isqrt(units * math.ceil(self.max_aspect_ratio)), 0, -1):
            width = min(units // height, int(height * self.max_aspect_ratio))
            if height <= width * self.max_aspect_ratio and (not candidates or width > candidates[-1][1]):
                candidates.append((height, width))
        ordered = sorted({*candidates, (math.isqrt(units),) * 2}, reverse=True)
        return tuple((height * self.multiple_of, width * self.multiple_of) for height, width in ordered)

    def check(self, axes: int) -> None:
        """Raise ConfigError unless the numbers of frames are those of samples with ``axes`` axes."""
        count = len(self.rectangles) * max(1, len(self.frames))
        if count > MAX_SHAPES:
            raise ConfigError(f"{_too_many(count)} Use a larger multiple_of, or fewer numbers of frames.")
        if axes == 2 and self.frames:
            raise self.error("frames", "is for videos, and these are images. Drop it.")
        if axes == 3 and (not self.frames or len(set(self.frames)) < len(self.frames)):
            raise self.error("frames", "must list different numbers of frames. Write e.g. [1, 17, 49].")


Buckets = tuple[Shape, ...] | Budget


def _too_many(count: int) -> str:
    return f"dataset_param.buckets has {count:,} shapes, more than {MAX_SHAPES:,}."


def format_sizes(shapes: Sequence[Shape]) -> str:
    """Return shapes as text, e.g. "256 x 256 or 320 x 192"."""
    return " or ".join(" x ".join(map(str, shape)) for shape in shapes)


def check_listed(shapes: Sequence[Shape], axes: int) -> None:
    """Raise ConfigError unless ``dataset_param.buckets`` lists different shapes of ``axes`` axes."""
    if not shapes:
        raise ConfigError(f"dataset_param.buckets = [] lists no shape. Write [{AXES[axes]}, ...].")
    if len(shapes) > MAX_SHAPES:
        raise ConfigError(f"{_too_many(len(shapes))} List fewer.")
    for number, shape in enumerate(shapes):
        what = f"dataset_param.buckets[{number}]"
        if len(shape) != axes:
            raise ConfigError(f"{what} = {shorten_repr(list(shape))} is not {AXES[axes]}. Write {axes} numbers.")
        for side, most in zip(shape, (MAX_FRAMES, MAX_PIXELS, MAX_PIXELS)[-axes:]):
            check_between(what, side, 1, most)
        if shape in shapes[:number]:
            raise ConfigError(f"{what} = {list(shape)} is listed twice. Drop one of them.")


class SourceParam(Section, ABC):
    """Base of the classes of section ``dataset_param``: frozen dataclasses with a field ``dataset_type``."""

    section = "dataset_param"
    dataset_type: str
    noun: ClassVar[str] = "image"
    """Word for a sample in messages."""
    data_folder: str
    valid_fraction: float = 0.0
    valid_by_class: bool = False
    """Whether the same fraction of each class is held out."""
    caption_dropout_prob: float = 0.1
    cache_key: ClassVar[str] = "dataset_param.cache"
    """Key of ``cache`` in data.json."""
    source: str | None = None
    """Name of built-in data."""
    built_in: ClassVar[str] = ""
    """Kind of the built-in data (``registry.py``) that ``source`` may name."""
    buckets: Buckets | None = None
    """Shapes that samples are scaled and cropped to, if there are several; None: all have ``sample_size``."""
    bucket_group: int = 1
    """Number of samples of one shape in a row."""
    skip_key: ClassVar[str] = "dataset_param.skip_bad"
    """Key of ``skip_bad`` in data.json."""

    extra_images: Mapping[str, str] = MappingProxyType({})
    """Additional images of a sample: the name of their array in a batch -> the annotation key that names the file."""

    color_profiles: ColorProfiles = "convert"
    """Whether the pixels of an image are converted to sRGB if an embedded profile says that they are not."""

    @property
    @abstractmethod
    def items(self) -> tuple[str, ...]:
        """The items of a sample besides its image or video: "label", "caption", "vector"."""

    @property
    @abstractmethod
    def sample_size(self) -> tuple[int, ...]:
        """Size (H, W) of an image or (F, H, W) of a video, in pixels, known without reading any."""

    @property
    def sizes(self) -> tuple[Shape, ...]:
        """All sizes that samples may have; most data sets have one."""
        if self.buckets is None:
            return (self.sample_size,)
        return self.buckets.shapes if isinstance(self.buckets, Budget) else self.buckets

    @property
    def largest(self) -> Shape:
        """The size with the most pixels."""
        return max(self.sizes, key=math.prod)

    @property
    def frame(self) -> tuple[int, int]:
        """Smallest (H, W) that every size fits into."""
        return max(size[-2] for size in self.sizes), max(size[-1] for size in self.sizes)

    @property
    def bucket_text(self) -> str:
        """The shapes and the group size, as text; empty without buckets."""
        return "" if self.buckets is None else f"{format_sizes(self.sizes)}, {self.bucket_group} in a row"

    @property
    def profiles_text(self) -> str:
        """How colour profiles are used, as text for a cache; empty for conversion, as in older caches."""
        return "" if self.color_profiles == "convert" else ", colour profiles ignored"

    @property
    def has_listed_shapes(self) -> bool:
        """Whether the shapes are listed, rather than made from a budget."""
        return not isinstance(self.buckets, Budget)

    @property
    @abstractmethod
    def where(self) -> str:
        """The setting that names the samples, as shown in errors."""

    @property
    @abstractmethod
    def size_setting(self) -> str:
        """The setting that decides their size, as shown in errors."""

    @abstractmethod
    def pixel_cache_key(self) -> str:
        """Return how files become pixels, as text; a cache made otherwise is refused.

        Raises ConfigError if a sample's pixels are random, so that it cannot be cached.
        """

    @property
    def cache(self) -> str | None:
        """Folder that mm-dit cache-latents filled; samples are read from it instead of being decoded and encoded."""
        return vars(self).get(self.cache_key.rpartition(".")[2])

    @property
    def skip_bad(self) -> bool:
        """Whether samples that cannot be used are skipped and counted, instead of stopping."""
        return vars(self).get(self.skip_key.rpartition(".")[2], False)

    def without_cache(self) -> Self:
        """Return the same data set, read from its files."""
        return self if self.cache is None else self._with(self.cache_key, None)

    def without_bad(self) -> Self:
        """Return the same data set, skipping samples that cannot be used."""
        return self._with(self.skip_key, True)

    def _with(self, key: str, value: Any) -> Self:
        return dataclasses.replace(self, **{key.rpartition(".")[2]: value})  # type: ignore[type-var]

    def check_buckets(self, axes: int, *size_keys: str) -> None:
        """Raise ConfigError unless there are either buckets with ``axes`` axes, or all the settings ``size_keys``."""
        for name in size_keys:
            value = getattr(self, name)
            if value is None and self.buckets is None:
                raise ConfigError(f"dataset_param.{name} is required and missing. Write it, or buckets.")
            if value is not None and self.buckets is not None:
                raise self.error(name, "contradicts buckets, which name shapes. Drop one.")
        if isinstance(self.buckets, Budget):
            self.buckets.check(axes)
        elif self.buckets is not None:
            check_listed(self.buckets, axes)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = Registry[Any](self.built_in)
        if self.source is not None and self.source not in known:
            raise not_known(f"dataset_param.source = {shorten_repr(self.source)}", self.source, known)

    def check_items(self, required: Iterable[str]) -> None:
        """Raise ConfigError unless samples have every item that the predictor's conditions need (``required``)."""
        for item in required:
            if item not in self.items:
                items = " and ".join(self.items) or "no label or caption"
                raise ConfigError(
                    f"data.json: dataset_param.dataset_type = {self.dataset_type!r} has samples with {items}, but the "
                    f"predictor is conditioned on the {item}. Use a data set whose samples have one, or a predictor "
                    "with other conditions."
                )


@dataclass(frozen=True)
class FilesParam(SourceParam):
    """Base of the sections for images and for clips in files: the keys that both have."""

    data_folder: PathText
    """Folder of the files; the paths in a table or an annotation start there. A relative one starts at the working
    directory."""
    _: KW_ONLY
    caption_dropout_prob: Probability = 0.1
    """Probability that a training sample loses its caption; in [0, 1]."""
    valid_fraction: Fraction = 0.0
    """Fraction of the samples held out for --eval-interval, in [0, 1); the seed decides which."""
    buckets: tuple[tuple[int, ...], ...] | Budget | None = None
    """Shapes in pixels, [height, width] of images or [frames, height, width] of clips. Each sample is scaled and
    cropped to the shape that keeps most of it; a clip only to one that it is long enough for, and an image among clips
    to a shape of one frame. Or a budget from which the shapes are made."""
    bucket_group: Annotated[int, Between(1, MAX_SAMPLES)] = 16
    """Number of samples of one shape in a row in the sample order; must be a multiple of --micro-batch-size."""
    color_profiles: ColorProfiles = "convert"
    """Convert images to sRGB by the colour profile in their file, as viewers do, or "ignore" it."""
