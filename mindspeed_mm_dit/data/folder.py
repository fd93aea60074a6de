"""Opens the rows of an image folder or a folder of shards: the usable images and their classes."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.files import is_folder
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.buckets import shapes_of
from mindspeed_mm_dit.data.captions import ImageCaptions, checked
from mindspeed_mm_dit.data.check_images import Look, look_at, notes_on, similar_name
from mindspeed_mm_dit.data.labels import check_labels, named_to_the_last, repeats_of
from mindspeed_mm_dit.data.listing import list_images
from mindspeed_mm_dit.data.rows import Rows, SourceRequest
from mindspeed_mm_dit.data.shards import list_shards, shard_files
from mindspeed_mm_dit.errors import DataError

DECODE_CHECK_LIMIT = 20_000
"""Up to this many images, a run checks every byte and searches for copies; beyond, it checks only the headers."""


def open_folder(param: DatasetParam, request: SourceRequest) -> Rows:
    """List the images of ``param`` and check that each is there, can be decoded, and has a label in range.

    Raises:
        DataError: naming the first bad image and how many there are (``skip_bad_images`` leaves them out).
    """
    folder, labelled = Path(param.data_folder), wants_labels(param, request)
    rows, classes, notes, captions = list_images(param, labelled, request.classes)
    labels = np.array([label for _, label in rows], np.int64)
    if labelled:
        check_labels(labels, request.num_classes, lambda row: str(folder / rows[row][0]), classes)
    decode = request.decode_all or len(rows) <= DECODE_CHECK_LIMIT
    looks = look_at([folder / path for path, _ in rows], param.sample_size, decode)
    captions = checked(captions, request.caption_problems)
    good, wrong = _sorted_out(looks, captions)
    problems = tuple(f"{folder / rows[number][0]} {problem}" for number, problem in wrong.items())
    repeats, note = repeats_of([path for path, _ in rows], param, request.classes)
    bad = list(wrong)
    if bad and not (param.skip_bad_images and good):
        hint = similar_name(folder / rows[bad[0]][0])
        raise DataError(
            problems[0],
            f"{len(bad)} of {len(rows)} images cannot be used",
            f"{hint}repair or remove them, or set dataset_param.skip_bad_images to true",
        )
    rows, looks, labels = [rows[number] for number in good], [looks[number] for number in good], labels[good]
    captions = [captions[number] for number in good] if captions else []
    repeats = None if repeats is None else repeats[good]
    paths = tuple(str(folder / path) for path, _ in rows)
    if not decode:
        notes += (f"note: of {len(paths):,} images only the headers were checked, and copies were not searched",)
    sizes, shapes = _shapes(looks, param, repeats)
    return Rows(
        paths,
        _items(labels if labelled else None, captions),
        named_to_the_last(classes, labels) if labelled else (),
        len(bad),
        problems,
        notes + note + notes_on(paths, looks, param, shapes),
        _digest_of(rows, [look.size for look in looks], captions),
        shapes=shapes,
        sizes=sizes,
        repeats=repeats,
    )


def _shapes(
    looks: Sequence[Look], param: DatasetParam, repeats: np.ndarray | None = None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the size and the bucket of each image, both (N, 2); None without buckets. ``repeats``: as in ``Rows``."""
    if param.buckets is None:
        return None, None
    sizes = np.array([(look.height, look.width) for look in looks], np.int64)
    entries = np.repeat(np.arange(len(sizes)), 1 if repeats is None else repeats)
    return sizes, shapes_of(sizes[entries], param)[np.unique(entries, return_index=True)[1]]


def wants_labels(param: DatasetParam, request: SourceRequest) -> bool:
    """Return whether labels are read; a data set of captions may have none."""
    return "label" in request.items or param.captions is None


def _items(labels: np.ndarray | None, captions: Sequence[ImageCaptions]) -> dict[str, Any]:
    items: dict[str, Any] = {} if labels is None else {"label": labels}
    return items | ({"caption": tuple(image.captions for image in captions)} if captions else {})


def _sorted_out(looks: Sequence[Look], captions: Sequence[ImageCaptions]) -> tuple[list[int], dict[int, str]]:
    """Return the usable rows, and the reason for each of the others; ``looks`` or ``captions`` may be empty."""
    pairs = list(zip_longest((look.problem for look in looks), (image.problem for image in captions)))
    wrong = {number: problem for number, pair in enumerate(pairs) if (problem := pair[0] or pair[1])}
    return [number for number in range(len(pairs)) if number not in wrong], wrong


def open_shards(param: DatasetParam, request: SourceRequest) -> Rows:
    """Return the images in shards; if they are more than DECODE_CHECK_LIMIT, none is opened before it is read."""
    labelled = wants_labels(param, request)
    rows, labels, classes, notes, digest, captions = list_shards(param, labelled, request.classes)
    if labelled:
        check_labels(labels, request.num_classes, rows.__getitem__, classes)
    classes = named_to_the_last(classes, labels)
    captions = checked(captions, request.caption_problems)
    items = _items(labels if labelled else None, captions)
    classes = classes if labelled else ()
    index, looks = Rows(rows, items, classes, notes=notes, digest=digest, files=rows.files), list[Look]()
    if len(rows) > DECODE_CHECK_LIMIT and not request.decode_all and param.buckets is None:
        note = f"note: of {len(rows):,} images in shards none is opened before it is read"
        index = dataclasses.replace(index, notes=(*notes, note))
        if not captions:
            return index
    else:
        looks = look_at([partial(rows.content, number) for number in range(len(rows))], param.sample_size, decode=True)
    good, wrong = _sorted_out(looks, captions)
    problems = tuple(f"{rows[number]} {problem}" for number, problem in wrong.items())
    if wrong and not (param.skip_bad_images and good):
        cure = "write the shard again without them, or set dataset_param.skip_bad_images to true"
        raise DataError(problems[0], f"{len(wrong)} of {len(rows)} images cannot be used", cure)
    index = index.subset(np.array(good))
    looks = [looks[number] for number in good] if looks else []
    sizes, shapes = _shapes(looks, param)
    notes = index.notes + (notes_on(index.paths, looks, param, shapes) if looks else ())
    return dataclasses.replace(index, skipped=len(wrong), problems=problems, notes=notes, shapes=shapes, sizes=sizes)


def _digest_of(rows: list[tuple[str, int]], sizes: list[int], captions: Sequence[ImageCaptions]) -> str:
    """Return a cheap fingerprint of the data set: image count, and a digest of names, labels, sizes and captions."""
    texts = ["".join(f"\0{caption}" for caption in image.captions) for image in captions] or [""] * len(rows)
    lines = sorted(f"{path}\0{label}\0{size}{text}\n" for (path, label), size, text in zip(rows, sizes, texts))
    digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape"))
    return f"{len(rows):,} images, {digest.hexdigest()[:12]}"


def as_listed(param: DatasetParam, rows: Rows) -> Rows:
    """Return the rows of a cache with the class names from the folder; the images may be absent.

    Raises:
        DataError: the images are there, but are not those that the cache was made from.
    """
    folder = Path(param.data_folder)
    repeats, note = repeats_of([os.path.relpath(path, folder) for path in rows.paths], param, rows.classes)
    rows = dataclasses.replace(rows, repeats=repeats, notes=note)
    if not is_folder(folder):
        return rows
    labelled = "label" in rows.items
    present, classes, notes, captions = list_images(param, labelled, rows.classes)
    labels = rows.labels.tolist() if labelled else [0] * len(rows)
    cached = [(os.path.relpath(path, folder), label) for path, label in zip(rows.paths, labels)]
    missing = sorted(set(cached) - set(present))
    if missing or not len(rows) <= len(present) <= len(rows) + rows.skipped:  # (what was skipped may be gone)
        raise DataError(
            f"dataset_param.latents = {param.latents}",
            f"was made of {len(rows) + rows.skipped} images, {folder} holds {len(present)}"
            + (f"; {missing[0][0]} is gone or has another label" if missing else ""),
            "make the cache again, in an empty folder: mm-dit cache-latents",
        )
    _check_captions(param, rows, dict(zip((path for path, _ in present), captions)))
    return dataclasses.replace(rows, classes=(classes or rows.classes) if labelled else (), notes=notes + note)


def shards_as_listed(param: DatasetParam, rows: Rows) -> Rows:
    """Return the rows of a cache with the shards that are there now; they may be absent."""
    folder = Path(param.data_folder)
    return dataclasses.replace(rows, files=tuple(map(str, shard_files(folder, param)))) if is_folder(folder) else rows


def _check_captions(param: DatasetParam, rows: Rows, listed: Mapping[str, ImageCaptions]) -> None:
    """Raise DataError if the captions of a cache differ from ``listed``, by the path of the image."""
    for path, captions in zip(rows.paths, rows.captions) if listed else ():
        if listed[os.path.relpath(path, param.data_folder)].captions != captions:
            raise DataError(
                f"dataset_param.latents = {param.latents}",
                f"was made of other captions: those of {path} have changed",
                "make the cache again, in an empty folder: mm-dit cache-latents",
            )
