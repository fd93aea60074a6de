"""The index of an image folder: which files there are, and the class of each."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.data import DatasetParam
from mindspeed_mm_dit.data.check import look_at, notes_on_sizes, similar_name
from mindspeed_mm_dit.data.files import is_folder
from mindspeed_mm_dit.data.latents import read_cache_index, read_cached_rows
from mindspeed_mm_dit.data.listing import list_images
from mindspeed_mm_dit.data.order import split
from mindspeed_mm_dit.data.shards import ShardRows, list_shards
from mindspeed_mm_dit.errors import DataError

DECODE_CHECK_LIMIT = 20_000
"""Of up to so many images every byte is checked before a run, and copies are searched; of more, only the headers."""

PROBLEMS_KEPT = 5


@dataclass(frozen=True)
class ImageIndex:
    """Images and their classes, in a fixed order."""

    paths: Sequence[str]
    """Files of the images; of those in shards, shard and row in words."""
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
    notes: tuple[str, ...] = ()
    """What else a user should know of these images: lines that begin with "note: " or "warning: "."""
    pictures: str = ""
    """How many images there are and a digest of their names, sizes and labels; empty where it is not known."""

    def __len__(self) -> int:
        return len(self.paths)

    def picture(self, image: int) -> str | bytes:
        """Return the file of an image, or the content of one that is in a shard; raises UnusableFile."""
        return self.paths.content(image) if isinstance(self.paths, ShardRows) else self.paths[image]

    def subset(self, rows: np.ndarray) -> ImageIndex:
        """Return the images at ``rows``."""
        return dataclasses.replace(
            self,
            paths=self.paths.subset(rows)
            if isinstance(self.paths, ShardRows)
            else tuple(self.paths[row] for row in rows.tolist()),
            labels=self.labels[rows],
            rows=None if self.rows is None else self.rows[rows],
        )


def open_index(param: DatasetParam, num_classes: int, decode_all: bool = False) -> ImageIndex:
    """List the images of ``param`` and check that each is there, can be decoded, and has a label in range.

    ``decode_all``: decode them all, however many there are.

    Raises:
        DataError: naming the first bad image and how many there are (``skip_bad_images`` leaves them out).
    """
    if param.latents is not None:
        return _open_cached_index(param, num_classes)
    if param.dataset_type != "image_folder":
        return _open_shards(param, num_classes, decode_all)
    folder = Path(param.data_folder)
    rows, classes, notes = list_images(param)
    _check_labels(rows, num_classes, folder)
    decode = decode_all or len(rows) <= DECODE_CHECK_LIMIT
    looks = look_at([folder / path for path, _ in rows], param.image_size, decode)
    good = [number for number, look in enumerate(looks) if look.problem is None]
    bad = [number for number, look in enumerate(looks) if look.problem is not None]
    problems = tuple(f"{folder / rows[number][0]} {looks[number].problem}" for number in bad)
    if bad and not (param.skip_bad_images and good):
        hint = similar_name(folder / rows[bad[0]][0])
        raise DataError(
            problems[0],
            f"{len(bad)} of {len(rows)} images cannot be used",
            f"{hint}repair or remove them, or set dataset_param.skip_bad_images to true",
        )
    rows, looks = [rows[number] for number in good], [looks[number] for number in good]
    paths = tuple(str(folder / path) for path, _ in rows)
    if not decode:
        notes += (f"note: of {len(paths):,} images only the headers were checked, and copies were not searched",)
    return ImageIndex(
        paths,
        np.array([label for _, label in rows], np.int64),
        len(bad),
        classes=classes or _numbers_of(rows),
        problems=problems[:PROBLEMS_KEPT],
        notes=notes + notes_on_sizes(paths, looks, param.image_size),
        pictures=_digest_of(rows, [look.size for look in looks]),
    )


def _open_shards(param: DatasetParam, num_classes: int, decode_all: bool) -> ImageIndex:
    """Return the index of pictures in shards; of more than DECODE_CHECK_LIMIT none is opened before it is drawn."""
    rows, labels, classes, notes, pictures = list_shards(param)
    outside = (labels < 0) | (labels >= num_classes)
    if outside.any():
        first = int(outside.argmax())
        raise _outside(rows[first], int(labels[first]), num_classes)
    classes += tuple(map(str, range(len(classes), 1 + int(labels.max()))))  # where the features name fewer, or none
    index = ImageIndex(rows, labels, classes=classes, notes=notes, pictures=pictures)
    if len(rows) > DECODE_CHECK_LIMIT and not decode_all:
        said = f"note: of {len(rows):,} images in shards none is opened before it is drawn"
        return dataclasses.replace(index, notes=(*notes, said))
    looks = look_at([partial(rows.content, number) for number in range(len(rows))], param.image_size, decode=True)
    bad = [number for number, look in enumerate(looks) if look.problem is not None]
    problems = tuple(f"{rows[number]} {looks[number].problem}" for number in bad)
    if bad and not (param.skip_bad_images and len(bad) < len(rows)):
        cure = "write the shard again without them, or set dataset_param.skip_bad_images to true"
        raise DataError(problems[0], f"{len(bad)} of {len(rows)} images cannot be used", cure)
    good = np.array([number for number, look in enumerate(looks) if look.problem is None])
    index = index.subset(good)
    sizes = notes_on_sizes(index.paths, [looks[number] for number in good.tolist()], param.image_size)
    return dataclasses.replace(index, skipped=len(bad), problems=problems[:PROBLEMS_KEPT], notes=notes + sizes)


def _digest_of(rows: list[tuple[str, int]], sizes: list[int]) -> str:
    """Return what tells data sets apart at little cost: how many images, and a digest of names, labels and sizes."""
    lines = sorted(f"{path}\0{label}\0{size}\n" for (path, label), size in zip(rows, sizes))
    digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape"))
    return f"{len(rows):,} images, {digest.hexdigest()[:12]}"


def _open_cached_index(param: DatasetParam, num_classes: int) -> ImageIndex:
    """Return the index of a latent cache. The images need not be there; if they are, they must be the same."""
    assert param.latents is not None
    cache, folder = Path(param.latents), Path(param.data_folder)
    index = read_cache_index(cache)
    rows, classes, skipped = read_cached_rows(cache, index.num_images), index.classes, index.skipped
    _check_labels(rows, num_classes, cache)
    notes: tuple[str, ...] = ()
    if is_folder(folder) and param.dataset_type == "image_folder":
        present, classes, notes = list_images(param)
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
    numbers = np.arange(len(rows))
    classes = classes or _numbers_of(rows)
    return ImageIndex(paths, labels, skipped, numbers, classes, notes=notes, pictures=index.pictures)


def _numbers_of(rows: list[tuple[str, int]]) -> tuple[str, ...]:
    """Return the labels themselves as names."""
    return tuple(map(str, range(1 + max(label for _, label in rows))))


def split_index(index: ImageIndex, valid_fraction: float, seed: int) -> tuple[ImageIndex, ImageIndex]:
    """Split into (training, validation); the choice depends on the seed alone."""
    train, valid = split(len(index), valid_fraction, seed)
    return index.subset(train), index.subset(valid)


def _check_labels(rows: list[tuple[str, int]], num_classes: int, folder: Path) -> None:
    for path, label in rows:
        if not 0 <= label < num_classes:
            raise _outside(str(folder / path), label, num_classes)


def _outside(image: str, label: int, num_classes: int) -> DataError:
    return DataError(
        f"{image}: label {label}",
        f"is outside 0 ... {num_classes - 1} (predictor.num_classes = {num_classes})",
        "correct the label, or num_classes in model.json",
    )
