"""What the other rooms ask of section ``dataset_param``, whatever kind of data set it names."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_mm_dit.configs.buckets import Buckets, Budget, Shape, check_buckets, size_words
from mindspeed_mm_dit.configs.limits import MOST_SAMPLES, check_between, check_path
from mindspeed_mm_dit.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


class SourceParam(ABC):
    """Base of the classes of section ``dataset_param``: frozen dataclasses with a field ``dataset_type``."""

    dataset_type: str
    noun: ClassVar[str] = "image"
    """What a sample is."""
    data_folder: str
    valid_fraction: float = 0.0
    valid_by_class: bool = False
    """Whether each class has its share of what is held out."""
    caption_dropout_prob: float = 0.1
    cache: str | None = None
    """Folder that mm-dit cache-latents filled; samples are then neither decoded nor encoded again."""
    cache_key: ClassVar[str] = "dataset_param.cache"
    """What the folder of the cache is called in data.json."""
    source: str | None = None
    """Built-in data of this name."""
    buckets: Buckets | None = None
    """What shapes samples are brought to where that is not one; None: all have ``sample_size``."""
    bucket_group: int = 1
    """Samples of one shape that follow each other."""
    skip_bad: bool = False
    """Whether samples that cannot be used are left out and counted, instead of stopping."""
    skip_key: ClassVar[str] = "dataset_param.skip_bad"
    """What that is called in data.json."""

    @property
    @abstractmethod
    def items(self) -> tuple[str, ...]:
        """What a sample has besides its image or video: "label", "caption", "vector"."""

    @property
    @abstractmethod
    def sample_size(self) -> tuple[int, ...]:
        """(H, W) of an image or (F, H, W) of a video, in pixels, known before any is read."""

    @property
    def sizes(self) -> tuple[Shape, ...]:
        """Every size that samples may have; of most data sets one."""
        if self.buckets is None:
            return (self.sample_size,)
        return self.buckets.shapes if isinstance(self.buckets, Budget) else self.buckets

    @property
    def largest(self) -> Shape:
        """The size of most pixels."""
        return max(self.sizes, key=math.prod)

    @property
    def frame(self) -> tuple[int, int]:
        """(H, W) in which every size has room."""
        return max(size[-2] for size in self.sizes), max(size[-1] for size in self.sizes)

    @property
    def bucket_words(self) -> str:
        """The shapes, and how many samples of one stand together; empty without buckets."""
        return "" if self.buckets is None else f"{size_words(self.sizes)}, {self.bucket_group} in a row"

    @property
    def has_listed_shapes(self) -> bool:
        """Whether the shapes are written down, rather than made of a budget."""
        return not isinstance(self.buckets, Budget)

    @property
    @abstractmethod
    def where(self) -> str:
        """The setting that names the samples, as an error shows it."""

    @property
    @abstractmethod
    def size_setting(self) -> str:
        """The setting that says how large they are, as an error shows it."""

    @abstractmethod
    def pixels_made_by(self) -> str:
        """Return in words what makes pixels of a file; caches of other pixels are refused.

        Raises ConfigError for samples that are other pixels each time, which cannot be cached.
        """

    def without_cache(self) -> Self:
        """Return the same samples, read from their files."""
        return self if self.cache is None else self._with(self.cache_key, None)

    def without_bad(self) -> Self:
        """Return the same samples, those that cannot be used left out."""
        return self._with(self.skip_key, True)

    def _with(self, key: str, value: Any) -> Self:
        return dataclasses.replace(self, **{key.rpartition(".")[2]: value})  # type: ignore[type-var]

    def check_buckets(self, axes: int, *of_one_size: str) -> None:
        """Raise ConfigError unless there are either buckets of so many axes, or all settings ``of_one_size``."""
        check_between("dataset_param.bucket_group", self.bucket_group, 1, MOST_SAMPLES)
        for name in of_one_size:
            value = getattr(self, name)
            if value is None and self.buckets is None:
                raise ConfigError(f"dataset_param.{name}", "this key is required and missing", "or name buckets")
            if value is not None and self.buckets is not None:
                raise ConfigError(
                    f"dataset_param.{name} = {value}", "contradicts buckets, which name shapes", "drop one"
                )
        if self.buckets is not None:
            check_buckets(self.buckets, axes)

    def check_common(self, *paths: str) -> None:
        """Raise ConfigError for fractions outside [0, 1], and for ``paths``, keys of the section, that cannot be."""
        for name in paths:
            check_path(f"dataset_param.{name}", getattr(self, name))
        if self.cache is not None:
            check_path(self.cache_key, self.cache)
        if not 0.0 <= self.valid_fraction < 1.0:
            raise ConfigError(f"dataset_param.valid_fraction = {self.valid_fraction}", "must lie in [0, 1)")
        check_between("dataset_param.caption_dropout_prob", self.caption_dropout_prob, 0, 1)

    def check_gives(self, wanted: Iterable[str]) -> None:
        """Raise ConfigError unless samples have every item of ``wanted``, which the predictor is steered by."""
        for item in wanted:
            if item not in self.items:
                raise ConfigError(
                    f"data.json: dataset_param.dataset_type = {self.dataset_type!r}",
                    f"its samples have {' and '.join(self.items) or 'no label or caption'}, and the predictor is "
                    f"steered by its {item}",
                    "use a data set whose samples have one, or a predictor that is steered otherwise",
                )
