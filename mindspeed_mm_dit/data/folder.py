"""The rows of an image folder, or of a folder of shards: which images there are, and the class of each."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from functools import partial
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.files import is_folder
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.check import look_at, notes_on_sizes, similar_name
from mindspeed_mm_dit.data.listing import list_images
from mindspeed_mm_dit.data.rows import Rows, Wanted
from mindspeed_mm_dit.data.shards import list_shards
from mindspeed_mm_dit.errors import DataError

DECODE_CHECK_LIMIT = 20_000
"""Of up to so many images every byte is checked before a run, and copies are searched; of more, only the headers."""

ANY_CLASSES = 1_000_000
"""Classes that a model could have."""


def open_folder(param: DatasetParam, wanted: Wanted) -> Rows:
    """List the images of ``param`` and check that each is there, can be decoded, and has a label in range.

    Raises:
        DataError: naming the first bad image and how many there are (``skip_bad_images`` leaves them out).
    """
    folder = Path(param.data_folder)
    rows, classes, notes = list_images(param)
    _check_labels(rows, wanted.num_classes, folder)
    decode = wanted.decode_all or len(rows) <= DECODE_CHECK_LIMIT
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
    return Rows(
        paths,
        {"label": np.array([label for _, label in rows], np.int64)},
        classes or _numbers_of(rows),
        len(bad),
        problems,
        notes + notes_on_sizes(paths, looks, param.image_size),
        _digest_of(rows, [look.size for look in looks]),
    )


def open_shards(param: DatasetParam, wanted: Wanted) -> Rows:
    """Return the images in shards; of more than DECODE_CHECK_LIMIT none is opened before it is drawn."""
    rows, labels, classes, notes, digest = list_shards(param)
    outside = (labels < 0) | (labels >= _most(wanted.num_classes))
    if outside.any():
        first = int(outside.argmax())
        raise _outside(rows[first], int(labels[first]), wanted.num_classes)
    classes += tuple(map(str, range(len(classes), 1 + int(labels.max()))))  # where the features name fewer, or none
    index = Rows(rows, {"label": labels}, classes, notes=notes, digest=digest)
    if len(rows) > DECODE_CHECK_LIMIT and not wanted.decode_all:
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
    small = notes_on_sizes(index.paths, [looks[number] for number in good.tolist()], param.image_size)
    return dataclasses.replace(index, skipped=len(bad), problems=problems, notes=notes + small)


def _digest_of(rows: list[tuple[str, int]], sizes: list[int]) -> str:
    """Return what tells data sets apart at little cost: how many images, and a digest of names, labels and sizes."""
    lines = sorted(f"{path}\0{label}\0{size}\n" for (path, label), size in zip(rows, sizes))
    digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape"))
    return f"{len(rows):,} images, {digest.hexdigest()[:12]}"


def as_listed(param: DatasetParam, rows: Rows) -> Rows:
    """Return the rows of a cache with what the folder says of its classes; the images need not be there.

    Raises:
        DataError: they are there, and are others than the cache was made of.
    """
    folder = Path(param.data_folder)
    if not is_folder(folder):
        return rows
    present, classes, notes = list_images(param)
    kept = [(os.path.relpath(path, folder), label) for path, label in zip(rows.paths, rows.labels.tolist())]
    missing = sorted(set(kept) - set(present))
    if missing or len(present) != len(rows) + rows.skipped:
        raise DataError(
            f"dataset_param.latents = {param.latents}",
            f"was made of {len(rows) + rows.skipped} images, {folder} holds {len(present)}"
            + (f"; {missing[0][0]} is gone or has another label" if missing else ""),
            "make the cache again, in an empty folder: mm-dit cache-latents",
        )
    return dataclasses.replace(rows, classes=classes or rows.classes, notes=notes)


def _numbers_of(rows: list[tuple[str, int]]) -> tuple[str, ...]:
    """Return the labels themselves as names."""
    return tuple(map(str, range(1 + max(label for _, label in rows))))


def _check_labels(rows: list[tuple[str, int]], num_classes: int | None, folder: Path) -> None:
    for path, label in rows:
        if not 0 <= label < _most(num_classes):
            raise _outside(str(folder / path), label, num_classes)


def check_labels(rows: Rows, num_classes: int) -> None:
    """Raise DataError for a row whose label is no class of a model of ``num_classes``."""
    for path, label in zip(rows.paths, rows.labels.tolist()):
        if not 0 <= label < num_classes:
            raise _outside(path, label, num_classes)


def _most(num_classes: int | None) -> int:
    """Return what labels lie below: without a model any label goes that a model could have."""
    return ANY_CLASSES if num_classes is None else num_classes


def _outside(image: str, label: int, num_classes: int | None) -> DataError:
    return DataError(
        f"{image}: label {label}",
        f"is outside 0 ... {_most(num_classes) - 1} (predictor.num_classes = {_most(num_classes)})",
        "correct the label, or num_classes in model.json",
    )
