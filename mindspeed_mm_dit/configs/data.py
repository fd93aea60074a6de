"""data.json: which images a run learns from, and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mindspeed_mm_dit.configs.limits import check_between, check_path
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class DatasetParam:
    """Section ``dataset_param``."""

    data_folder: str
    """Folder of the images; relative paths start at the working directory."""
    image_size: int
    """Images are scaled and centre-cropped to this height and width, in pixels."""
    index: str | None = None
    """CSV inside ``data_folder`` with columns image_path,label, paths below it; null: every sub-folder is a class."""
    single_class: bool = False
    """All pictures below ``data_folder`` are of one class, which has the folder's name."""
    source: Literal["digits"] | None = None
    """Built-in images, "digits" (scikit-learn), written to ``data_folder``, a path that ends in digits."""
    random_flip: bool = False
    """Mirror a training image left-right with probability 1/2."""
    valid_fraction: float = 0.0
    """Part of the images held out for --eval-interval, chosen from the seed; in [0, 1)."""
    skip_bad_images: bool = False
    """Leave out missing or undecodable images, and count them, instead of stopping."""
    latents: str | None = None
    """Folder that mm-dit cache-latents filled from these images; they are then not decoded or encoded again."""
    dataset_type: Literal["image_folder", "parquet", "webdataset"] = "image_folder"
    """Kind of data set: image files, or a folder of shards, Parquet as on the Hugging Face hub or webdataset's tar."""
    split: str | None = None
    """Of shards: only those whose names begin so, such as "train"."""
    label_column: str = "label"
    """Of Parquet: the column of the labels."""

    def __post_init__(self) -> None:
        for name in ("data_folder", "index", "latents"):
            if getattr(self, name) is not None:
                check_path(f"dataset_param.{name}", getattr(self, name))
        if self.single_class and self.index is not None:
            raise ConfigError(
                "dataset_param.single_class = true",
                f"contradicts index = {self.index}, which names classes",
                "drop one",
            )
        if self.dataset_type != "image_folder" and (self.index or self.single_class or self.source):
            raise ConfigError(
                f"dataset_param.dataset_type = {self.dataset_type!r}",
                "shards say the class of each picture themselves",
                "drop index, single_class and source",
            )
        if self.image_size < 1:
            raise ConfigError(f"dataset_param.image_size = {self.image_size}", "must be positive")
        if not 0.0 <= self.valid_fraction < 1.0:
            raise ConfigError(f"dataset_param.valid_fraction = {self.valid_fraction}", "must lie in [0, 1)")

    @property
    def cache(self) -> str | None:
        """Where encoded images are read from instead of their files."""
        return self.latents


@dataclass(frozen=True)
class DataloaderParam:
    """Section ``dataloader_param``."""

    shuffle: bool = True
    """Reshuffle every epoch from --seed; false keeps the index order."""
    prefetch_batches: int = 4
    """Micro-batches prepared ahead by the workers of --num-workers."""

    def __post_init__(self) -> None:
        check_between("dataloader_param.prefetch_batches", self.prefetch_batches, 1, 1024, "the examples have 4 and 8")


@dataclass(frozen=True)
class DataConfig:
    """All of data.json."""

    dataset_param: DatasetParam
    """The images."""
    dataloader_param: DataloaderParam = field(default_factory=DataloaderParam)
    """How they are read."""
    note: str = ""
    """Free text: what the data are."""


def load_data_config(path: str | Path, flag: str = "--mm-data") -> DataConfig:
    """Read the data.json that ``flag`` names; raises ConfigError naming the file, the key and the cure."""
    content = read_json(path, flag)
    kind = content["dataset_param"].get("dataset_type") if isinstance(content.get("dataset_param"), dict) else None
    if kind == "clips":
        raise ConfigError(
            f"{path}: dataset_param.dataset_type = {kind!r}", "this command is for images with labels",
            "clips are looked at (pretrain_dit.py --dry-run), trained on (pretrain_dit.py), cached (mm-dit "
            "cache-latents) and drawn (mm-dit sample --prompt)",
        )  # fmt: skip
    for name, cls in (("dataset_param", DatasetParam), ("dataloader_param", DataloaderParam)):
        if name in content:
            content[name] = from_mapping(cls, content[name], f"{path}: {name}")
    return from_mapping(DataConfig, content, str(path))
