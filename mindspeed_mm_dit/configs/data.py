"""data.json: the samples that a run trains on, and how they are batched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from mindspeed_mm_dit.configs.limits import Between, Fraction, Section, shorten_repr
from mindspeed_mm_dit.configs.source import Shape, SourceParam
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import ConfigError, not_known
from mindspeed_mm_dit.registry import Configs, Registry

SOURCE_CONFIGS = Configs("data_source")
"""Class of section ``dataset_param`` by ``dataset_type``; ``data/sources.py`` opens each."""
DATA_CONFIG_FORMATS = Registry[Callable[[dict[str, Any], str], dict[str, Any]]]("data_config_format")
"""Forms that a data.json has in other programs: (its content, its path) -> the content in our form."""


@dataclass(frozen=True)
class MixedParam(SourceParam):
    """Several sections ``dataset_param`` as one. Samples have their own shapes; an image is a video of one frame."""

    sources: tuple[Any, ...]
    """List of two or more sections ``dataset_param``, each with the keys of its own kind."""
    weights: tuple[Annotated[int, Between(1, 1000)], ...]
    """Weight of each source, a whole number from 1 to 1000. It counts groups of ``bucket_group`` samples: with [3, 1]
    the first source gives three of every four groups."""
    valid_fraction: Fraction = 0.0
    """Fraction of all samples held out for --eval-interval, in [0, 1); the seed decides which."""
    dataset_type: Literal["mixed"] = "mixed"
    """Kind of data set."""

    noun, where, size_setting = "sample", "dataset_param.sources", "dataset_param.sources"
    data_folder = ""

    def __post_init__(self) -> None:
        if len(self.sources) < 2 or len(self.weights) != len(self.sources):
            raise self.error(
                "weights",
                f"has {len(self.weights)} numbers for {len(self.sources)} sources. List two or more sources, and a "
                "weight for each.",
            )
        super().__post_init__()
        for number, source in enumerate(self.sources):
            where = f"dataset_param.sources[{number}]"
            if source.cache is not None or isinstance(source, MixedParam):
                raise ConfigError(
                    f"{where} is a cache or a mix itself. List data sets of files: a mix is encoded during training."
                )
            if source.valid_fraction:
                raise ConfigError(
                    f"{where}.valid_fraction would hold out samples of one source only. Set "
                    "dataset_param.valid_fraction."
                )
        for key in ("bucket_group", "caption_dropout_prob"):
            values = [getattr(source, key) for source in self.sources]
            if len(set(values)) > 1:
                raise ConfigError(
                    f"dataset_param.sources: {key} = {values} must be the same for all sources, whose samples are "
                    "grouped, and lose their captions, in the same way. Write one number."
                )

    @property
    def items(self) -> tuple[str, ...]:
        """Items that the samples of every source have."""
        first, *others = (source.items for source in self.sources)
        return tuple(item for item in first if all(item in other for other in others))

    @property
    def buckets(self) -> tuple[Shape, ...]:  # type: ignore[override]
        """The shapes of all sources."""
        axes = max(len(source.sample_size) for source in self.sources)
        shapes = [shape for source in self.sources for shape in source.sizes]
        return tuple(dict.fromkeys((1,) * (axes - len(shape)) + shape for shape in shapes))

    @property
    def extra_images(self) -> dict[str, str]:  # type: ignore[override]
        """Additional images of the samples of any source."""
        return {name: key for source in self.sources for name, key in source.extra_images.items()}

    @property
    def sample_size(self) -> Shape:
        """The largest of all shapes."""
        return self.largest

    @property
    def bucket_group(self) -> int:  # type: ignore[override]
        """Number of samples of one source and shape in a row."""
        return int(self.sources[0].bucket_group)

    @property
    def caption_dropout_prob(self) -> float:  # type: ignore[override]
        """The common value of all sources."""
        return float(self.sources[0].caption_dropout_prob)

    @property
    def skip_bad(self) -> bool:
        """Whether every source skips samples that cannot be used."""
        return all(source.skip_bad for source in self.sources)

    @property
    def bucket_text(self) -> str:
        """The shapes and the weights, as text."""
        return f"{super().bucket_text}, shares {' : '.join(map(str, self.weights))}"

    def without_bad(self) -> MixedParam:
        """Return the same data sets, skipping samples that cannot be used."""
        return replace(self, sources=tuple(source.without_bad() for source in self.sources))

    def pixel_cache_key(self) -> str:
        """Raise ConfigError: a cache holds one data set."""
        raise ConfigError("dataset_param.sources cannot be cached together. Train without a cache.")


@dataclass(frozen=True)
class DataloaderParam(Section):
    """Section ``dataloader_param``."""

    shuffle: bool = True
    """Reshuffle every epoch, from --seed; false keeps the order of the data set."""
    prefetch_batches: Annotated[int, Between(1, 1024, "The examples have 4 and 8.")] = 4
    """Micro-batches that the threads of --num-workers prepare ahead, 1 to 1024; at least one a thread."""

    section = "dataloader_param"


@dataclass(frozen=True)
class DataConfig:
    """All of data.json."""

    dataset_param: Any
    """The samples: an instance of one of SOURCE_CONFIGS."""
    dataloader_param: DataloaderParam = field(default_factory=DataloaderParam)
    """How they are read."""
    note: str = ""
    """Free text, e.g. what the data are."""


def load_data_config(path: str | Path, flag: str = "--mm-data") -> DataConfig:
    """Read the data.json that ``flag`` names; raises ConfigError naming the file and the key."""
    content = read_json(path, flag)
    for translate in DATA_CONFIG_FORMATS.values():
        content = translate(content, str(path))
    if "dataset_param" in content:
        content["dataset_param"] = _samples(content["dataset_param"], f"{path}: dataset_param")
    return from_mapping(DataConfig, content, str(path))


def _samples(section: Any, where: str) -> SourceParam:
    """Return section ``dataset_param``, or one of its ``sources``."""
    if isinstance(section, dict) and isinstance(section.get("sources"), list):
        sources = [_samples(source, f"{where}.sources[{number}]") for number, source in enumerate(section["sources"])]
        return from_mapping(MixedParam, {**section, "sources": sources}, where)
    kind = section.get("dataset_type", "image_folder") if isinstance(section, dict) else "image_folder"
    if not isinstance(kind, str) or kind not in SOURCE_CONFIGS:
        raise not_known(f"{where}.dataset_type = {shorten_repr(kind)}", str(kind), SOURCE_CONFIGS)
    return from_mapping(SOURCE_CONFIGS[kind], section, where)
