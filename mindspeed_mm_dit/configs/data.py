"""data.json: the samples that a run trains on, and how they are batched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.limits import check_between, short_repr
from mindspeed_mm_dit.configs.mixed import MixedParam
from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.registry import Configs, Registry

SOURCE_CONFIGS = Configs("data_source")
"""Class of section ``dataset_param`` by ``dataset_type``; ``data/sources.py`` opens each."""
DIALECTS = Registry[Callable[[Mapping[str, Any], str], dict[str, Any]]]("data_dialect")
"""(content of a data.json, its path) -> the same in our keys; raises ConfigError."""


@dataclass(frozen=True)
class DataloaderParam:
    """Section ``dataloader_param``."""

    shuffle: bool = True
    """Reshuffle every epoch, from --seed; false keeps the order of the data set."""
    prefetch_batches: int = 4
    """Micro-batches that the threads of --num-workers prepare ahead, 1 to 1024; at least one a thread."""

    def __post_init__(self) -> None:
        check_between("dataloader_param.prefetch_batches", self.prefetch_batches, 1, 1024, "the examples have 4 and 8")


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
    content = dict(read_json(path, flag))
    for in_our_words in DIALECTS.values():
        content = in_our_words(content, str(path))
    if "dataset_param" in content:
        content["dataset_param"] = _samples(content["dataset_param"], f"{path}: dataset_param")
    if "dataloader_param" in content:
        content["dataloader_param"] = from_mapping(
            DataloaderParam, content["dataloader_param"], f"{path}: dataloader_param"
        )
    return from_mapping(DataConfig, content, str(path))


def _samples(section: Any, where: str) -> SourceParam:
    """Return section ``dataset_param``, or one of its ``sources``."""
    if isinstance(section, dict) and isinstance(section.get("sources"), list):
        sources = [_samples(source, f"{where}.sources[{number}]") for number, source in enumerate(section["sources"])]
        return from_mapping(MixedParam, {**section, "sources": sources}, where)
    kind = section.get("dataset_type", "image_folder") if isinstance(section, dict) else "image_folder"
    if not isinstance(kind, str) or kind not in SOURCE_CONFIGS:
        raise ConfigError(
            f"{where}.dataset_type = {short_repr(kind)}",
            "unknown kind of data set",
            f"{nearest(str(kind), SOURCE_CONFIGS)}Known: {', '.join(SOURCE_CONFIGS)}",
        )
    return from_mapping(SOURCE_CONFIGS[kind], section, where)
