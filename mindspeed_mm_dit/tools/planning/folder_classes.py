"""Detect how an image folder encodes its classes: by an index, by folders, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm_dit.configs.files import is_folder, nearest_to
from mindspeed_mm_dit.configs.images import ImageFiles
from mindspeed_mm_dit.data.labels_csv import is_index
from mindspeed_mm_dit.data.listing import (
    CURE_OF_LOST_FOLDERS,
    class_folders,
    images_of_lost_folders,
    indices_in,
    of_folders,
)
from mindspeed_mm_dit.data.shards import KINDS
from mindspeed_mm_dit.errors import ConfigError

LABELS = "labels.csv"
"""Name of the index to use if a folder has several CSV files."""
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")
"""Names of folders that are splits, not classes; the training split comes first."""


@dataclass(frozen=True)
class FolderClasses:
    """How the images encode their classes or captions: the fields are keys of dataset_param in data.json."""

    data_folder: str
    index: str | None
    single_class: bool
    reason: str
    """What the folder contains, as an explanation for the user."""
    dataset_type: ImageFiles = "image_folder"
    split: str | None = None
    captions: str | None = None


def classes_of_folder(images: str) -> FolderClasses:
    """Return how ``images``, a folder or an index in one, encodes its classes.

    Raises:
        ConfigError: the path does not exist, or its layout is ambiguous.
    """
    path = Path(images)
    if not is_folder(path):
        if not is_index(path):
            raise ConfigError(f"IMAGES = {images}", _reason(path), nearest_to(path) + "name a folder of images")
        return FolderClasses(str(path.parent), path.name, False, f"{path.name} names the class of each image")
    if shards := shards_in(path):
        return shards
    indices = indices_in(path)
    if LABELS in indices or len(indices) == 1:
        index = LABELS if LABELS in indices else indices[0]
        return FolderClasses(images, index, False, f"{index} names the class of each image")
    if indices:
        raise ConfigError(
            f"IMAGES = {images}", f"holds several indices: {', '.join(indices)}", f"name one: {path / indices[0]}"
        )
    if (path / LABELS).is_file():
        raise ConfigError(
            f"IMAGES = {images}", f"its {LABELS} does not begin with the columns image_path,label, in UTF-8",
            "correct its first line or save it as UTF-8; to ignore it, rename it",
        )  # fmt: skip
    folders = class_folders(path)
    splits = sorted((folder.name for folder in folders if folder.name.lower() in SPLITS),
                    key=lambda name: SPLITS.index(name.lower()))  # fmt: skip
    if splits and len(splits) == len(folders):
        raise ConfigError(
            f"IMAGES = {images}", f"holds {', '.join(splits)}, which are no classes", f"name {path / splits[0]}"
        )
    if of_folders(path).rows:
        return FolderClasses(images, None, False, "every folder in it is a class")
    if lost := images_of_lost_folders(entry.name for entry in path.iterdir()):
        raise ConfigError(f"IMAGES = {images}", f"has files such as {lost[0]}, and a backslash is no folder here",
                          CURE_OF_LOST_FOLDERS)  # fmt: skip
    return FolderClasses(images, None, True, "no folder in it holds images, so all are of one class")


def shards_in(path: Path) -> FolderClasses | None:
    """Return the layout of a folder with shards in it or, as on the hub, in its folder ``data``."""
    for name, kind in KINDS.items():
        suffix = kind.suffix
        names = [file.name for folder in (path, path / "data") for file in folder.glob(f"*{suffix}")]
        if names:
            split = "train" if any(file.startswith("train") for file in names) else None
            return FolderClasses(
                str(path), None, False, f"shards that end in {suffix} say the class of each row", name, split
            )
    return None


def _reason(path: Path) -> str:
    if not path.exists():
        return "is a link to nothing" if path.is_symlink() else "is not there"
    return "is a file, and no index with the columns image_path,label"
