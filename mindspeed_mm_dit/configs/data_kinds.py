"""The kinds of data.json, by ``dataset_param.dataset_type``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.clips import ClipsConfig, ClipsParam, load_clips_config
from mindspeed_mm_dit.configs.data import DataConfig, DatasetParam, load_data_config
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError, nearest

IMAGES = ("image_folder", "parquet", "webdataset")
"""Kinds of images with labels."""
DATA_CONFIGS: dict[str, Callable[[str | Path, str], DataConfig | ClipsConfig]] = {
    **dict.fromkeys(IMAGES, load_data_config),
    ClipsParam.dataset_type: load_clips_config,
}


def load_any_data_config(path: str | Path, flag: str = "--mm-data") -> DataConfig | ClipsConfig:
    """Read the data.json that ``flag`` names, whatever its kind; raises ConfigError naming file, key and cure."""
    kind = dataset_type(path, flag)
    if not isinstance(kind, str) or kind not in DATA_CONFIGS:
        raise ConfigError(
            f"{path}: dataset_param.dataset_type = {shown(kind)}",
            "unknown kind of data set",
            f"{nearest(str(kind), DATA_CONFIGS)}Known here: {', '.join(DATA_CONFIGS)}",
        )
    return DATA_CONFIGS[kind](path, flag)


def dataset_type(path: str | Path, flag: str) -> Any:
    """Return what the data.json that ``flag`` names says of its kind; images where it says nothing."""
    section, images = read_json(path, flag).get("dataset_param"), DatasetParam.dataset_type
    return section.get("dataset_type", images) if isinstance(section, dict) else images
