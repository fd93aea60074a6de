"""The index of an image folder: which files there are, and the class of each."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from mindspeed_mm_dit.configs.data import DatasetParam
from mindspeed_mm_dit.data.draws import Stream, generator
from mindspeed_mm_dit.data.latents import read_cache_index, read_cached_rows
from mindspeed_mm_dit.data.listing import list_images
from mindspeed_mm_dit.data.transforms import UNREADABLE
from mindspeed_mm_dit.errors import DataError

DECODE_CHECK_LIMIT = 20_000
"""Of up to so many images every byte is checked before a run; of more, only the headers."""


PROBLEMS_KEPT = 5


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
    classes: tuple[str, ...] = ()
    """Name of each label; where labels are numbers, these."""
    problems: tuple[str, ...] = ()
    """The first PROBLEMS_KEPT files that were left out, with the reason; none where a cache leaves them out."""

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, rows: np.ndarray) -> ImageIndex:
        """Return the images at ``rows``."""
        return dataclasses.replace(
            self,
            paths=tuple(self.paths[row] for row in rows.tolist()),
            labels=self.labels[rows],
            rows=None if self.rows is None else self.rows[rows],
        )


def open_index(param: DatasetParam, num_classes: int) -> ImageIndex:
    """List the images of ``param`` and check that each is there, can be decoded, and has a label in range.

    Raises:
        DataError: naming the first bad image and how many there are (``skip_bad_images`` leaves them out).
    """
    if param.latents is not None:
        return _open_cached_index(param, num_classes)
    folder = Path(param.data_folder)
    rows, classes = list_images(param)
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
    labels = np.array([label for _, label in good], np.int64)
    return ImageIndex(
        tuple(path for path, _ in good),
        labels,
        len(problems),
        classes=classes or _numbers_of(rows),
        problems=tuple(problems[:PROBLEMS_KEPT]),
    )


def _open_cached_index(param: DatasetParam, num_classes: int) -> ImageIndex:
    """Return the index of a latent cache. The images need not be there; if they are, they must be the same."""
    assert param.latents is not None
    cache, folder = Path(param.latents), Path(param.data_folder)
    index = read_cache_index(cache)
    rows, classes, skipped = read_cached_rows(cache), index.classes, index.skipped
    _check_labels(rows, num_classes, cache)
    if folder.is_dir():
        present, classes = list_images(param)
        missing = sorted(set(rows) - set(present))
        if missing or len(present) != len(rows) + skipped:
            raise DataError(
                f"dataset_param.latents = {cache}",
                f"was made of {len(rows) + skipped} images, {folder} holds {len(present)}"
                + (f"; {missing[0][0]} is gone or has another label" if missing else ""),
                "make the cache again, in an empty folder: mm-dit cache-latents",
            )
    labels = np.array([label for _, label in rows], np.int64)
    paths = tuple(str(folder / path) for path, _ in rows)
    return ImageIndex(paths, labels, skipped, np.arange(len(rows)), classes or _numbers_of(rows))


def _numbers_of(rows: list[tuple[str, int]]) -> tuple[str, ...]:
    """Return the labels themselves as names."""
    return tuple(map(str, range(1 + max(label for _, label in rows))))


def split_index(index: ImageIndex, valid_fraction: float, seed: int) -> tuple[ImageIndex, ImageIndex]:
    """Split into (training, validation); the choice depends on the seed alone."""
    shuffled = generator(seed, Stream.VALID_SPLIT, 0).permutation(len(index))
    held_out = round(len(index) * valid_fraction)
    return index.subset(np.sort(shuffled[held_out:])), index.subset(np.sort(shuffled[:held_out]))


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
