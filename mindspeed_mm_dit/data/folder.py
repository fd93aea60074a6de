"""The index of an image folder: which files there are, and the class of each."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from mindspeed_mm_dit.configs.data import DatasetParam
from mindspeed_mm_dit.data.builtin import BUILTIN_SOURCES
from mindspeed_mm_dit.data.draws import Stream, generator
from mindspeed_mm_dit.data.latents import read_cache_index, read_cached_rows
from mindspeed_mm_dit.data.transforms import UNREADABLE
from mindspeed_mm_dit.errors import DataError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}

DECODE_CHECK_LIMIT = 20_000
"""Of up to so many images every byte is checked before a run; of more, only the headers."""


@dataclass(frozen=True)
class ImageIndex:
    """Image files and their classes, in a fixed order."""

    paths: tuple[str, ...]
    """Files of the images."""
    labels: np.ndarray
    """(len(paths),) int64."""
    skipped: int = 0
    """Images left out because they could not be read."""
    rows: np.ndarray | None = None
    """(len(paths),) int64 rows of the latent cache that data.json names; None without one."""

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, rows: np.ndarray) -> ImageIndex:
        """Return the images at ``rows``."""
        cached = None if self.rows is None else self.rows[rows]
        return ImageIndex(tuple(self.paths[row] for row in rows.tolist()), self.labels[rows], self.skipped, cached)


def open_index(param: DatasetParam, num_classes: int) -> ImageIndex:
    """List the images of ``param`` and check that each is there, can be decoded, and has a label in range.

    Raises:
        DataError: naming the first bad image and how many there are (``skip_bad_images`` leaves them out).
    """
    if param.latents is not None:
        return _open_cached_index(param, num_classes)
    folder = Path(param.data_folder)
    rows = list_images(param)
    _check_labels(rows, num_classes, folder)
    good, problems = [], []
    for (path, label), problem in zip(rows, _problems([folder / path for path, _ in rows])):
        if problem is None:
            good.append((str(folder / path), label))
        else:
            problems.append(f"{folder / path} {problem}")
    if problems and not (param.skip_bad_images and good):
        raise DataError(
            problems[0],
            f"{len(problems)} of {len(rows)} images cannot be used",
            "repair or remove them, or set dataset_param.skip_bad_images to true",
        )
    return ImageIndex(tuple(p for p, _ in good), np.array([label for _, label in good], np.int64), len(problems))


def list_images(param: DatasetParam) -> list[tuple[str, int]]:
    """Return (path below data_folder, label) of every image, in the order of the index; no image is opened."""
    folder = Path(param.data_folder)
    if param.source is not None and not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        BUILTIN_SOURCES[param.source](folder)
    if not folder.is_dir():
        raise DataError(f"dataset_param.data_folder = {folder}", "is not a folder", "correct the path in data.json")
    rows = _rows_of_csv(folder / param.index) if param.index else _rows_of_folders(folder)
    if not rows:
        raise DataError(
            f"dataset_param.data_folder = {folder}",
            "holds no images",
            "put one folder of images per class there, or name an index with image_path,label",
        )
    return rows


def _open_cached_index(param: DatasetParam, num_classes: int) -> ImageIndex:
    """Return the index of a latent cache. The images need not be there; if they are, they must be the same."""
    assert param.latents is not None
    cache, folder = Path(param.latents), Path(param.data_folder)
    skipped = read_cache_index(cache).skipped
    rows = read_cached_rows(cache)
    _check_labels(rows, num_classes, cache)
    if folder.is_dir():
        present = list_images(param)
        missing = sorted(set(rows) - set(present))
        if missing or len(present) != len(rows) + skipped:
            raise DataError(
                f"dataset_param.latents = {cache}",
                f"was made of {len(rows) + skipped} images, {folder} holds {len(present)}"
                + (f"; {missing[0][0]} is gone or has another label" if missing else ""),
                "make the cache again, in an empty folder: mm-dit cache-latents",
            )
    labels = np.array([label for _, label in rows], np.int64)
    return ImageIndex(tuple(str(folder / path) for path, _ in rows), labels, skipped, np.arange(len(rows)))


def split_index(index: ImageIndex, valid_fraction: float, seed: int) -> tuple[ImageIndex, ImageIndex]:
    """Split into (training, validation); the choice depends on the seed alone."""
    shuffled = generator(seed, Stream.VALID_SPLIT, 0).permutation(len(index))
    held_out = round(len(index) * valid_fraction)
    return index.subset(np.sort(shuffled[held_out:])), index.subset(np.sort(shuffled[:held_out]))


def _rows_of_folders(folder: Path) -> list[tuple[str, int]]:
    """Every sub-folder is a class, numbered in the order of their names."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [
        (str(image.relative_to(folder)), label)
        for label, directory in enumerate(classes)
        for image in sorted(directory.rglob("*"))
        if image.suffix.lower() in IMAGE_SUFFIXES
    ]


def _rows_of_csv(path: Path) -> list[tuple[str, int]]:
    """Read image_path,label; labels that are not numbers are class names, numbered in sorted order."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if not {"image_path", "label"} <= set(reader.fieldnames or ()):
                raise DataError(
                    str(path), f"has the columns {reader.fieldnames}", "its first line must name image_path,label"
                )
            rows = [(row["image_path"], row["label"]) for row in reader]
    except OSError as error:
        raise DataError(f"dataset_param.index = {path}", f"cannot be read: {error.strerror}") from None
    return list(zip((image for image, _ in rows), _numbered([label for _, label in rows])))


def _numbered(labels: Iterable[str]) -> list[int]:
    labels = [label.strip() for label in labels]
    if all(label.lstrip("-").isdigit() for label in labels):
        return [int(label) for label in labels]
    numbers = {name: number for number, name in enumerate(sorted(set(labels)))}
    return [numbers[label] for label in labels]


def _check_labels(rows: list[tuple[str, int]], num_classes: int, folder: Path) -> None:
    for path, label in rows:
        if not 0 <= label < num_classes:
            raise DataError(
                f"{folder / path}: label {label}",
                f"is outside 0 ... {num_classes - 1} (predictor.num_classes = {num_classes})",
                "correct the label, or num_classes in model.json",
            )


def _problems(paths: list[Path]) -> list[str | None]:
    """Return why each file is no usable image, or None; in threads, with a progress bar for many files."""
    decode = len(paths) <= DECODE_CHECK_LIMIT
    with ThreadPoolExecutor() as pool:
        checked = pool.map(lambda path: _problem_of(path, decode), paths)
        return list(tqdm(checked, "checking images", len(paths), unit="image", delay=2, disable=None))


def _problem_of(path: Path, decode: bool) -> str | None:
    try:
        with Image.open(path) as image:
            if decode:
                image.load()
    except FileNotFoundError:
        return "is listed but missing"
    except UNREADABLE as error:
        return f"cannot be decoded: {error}"
    return None
