"""What the other rooms ask of section ``dataset_param``, whatever kind of data set it names."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_mm_dit.configs.limits import check_between, check_path
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
    buckets: Any = None
    """What shapes samples are brought to where that is not one; None: all have ``sample_size``."""
    bucket_words: str = ""
    """The same in words."""
    skip_bad: bool = False
    """Whether samples that cannot be used are left out and counted, instead of stopping."""

    @property
    @abstractmethod
    def items(self) -> tuple[str, ...]:
        """What a sample has besides its image or video: "label", "caption", "vector"."""

    @property
    @abstractmethod
    def sample_size(self) -> tuple[int, ...]:
        """(H, W) of an image or (F, H, W) of a video, in pixels, known before any is read."""

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Every size that samples may have; of most data sets one."""
        return (self.sample_size,)

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
        if self.cache is None:
            return self
        return dataclasses.replace(self, **{self.cache_key.rpartition(".")[2]: None})  # type: ignore[type-var]

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
