"""Data sets of images, in folders or in shards: their rows, each one checked, and the reader of their pixels."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, is_folder
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.source import ColorProfiles, Size
from mindspeed_mm_dit.data.buckets import shapes_of
from mindspeed_mm_dit.data.captions import ImageCaptions, checked
from mindspeed_mm_dit.data.check_images import ImageCheck, check_image_files, similar_name, size_notes
from mindspeed_mm_dit.data.labels import check_labels, names_for_labels, repeats_of
from mindspeed_mm_dit.data.listing import list_images
from mindspeed_mm_dit.data.order import Stream, bernoulli
from mindspeed_mm_dit.data.shards import ShardRows, list_shards, shard_files
from mindspeed_mm_dit.data.sources import CACHE_AGAIN, ReadSamples, Rows, Source, SourceRequest
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.terminal import logger

DECODE_CHECK_LIMIT = 20_000
"""Up to this many images, a run checks every byte and searches for copies; beyond, it checks only the headers."""

CACHE_BYTES = 256 * 2**20
"""Data sets whose pixels fit in this are decoded once and cached."""

REPLACEMENT_TRIES = 100
"""This many unreadable images in a row mean that something else is wrong."""


def open_folder(param: DatasetParam, request: SourceRequest) -> Rows:
    """List the images of ``param`` and check that each is there, can be decoded, and has a label in range.

    Raises:
        DataError: naming the first bad image and how many there are (``skip_bad_images`` leaves them out).
    """
    folder, labelled = Path(param.data_folder), _wants_labels(param, request)
    listed, classes, notes, captions = list_images(param, labelled, request.classes)
    names, labels = [path for path, _ in listed], np.array([label for _, label in listed], np.int64)
    paths = tuple(str(folder / path) for path in names)
    if labelled:
        check_labels(labels, request.num_classes, paths.__getitem__, classes)
    decode = request.decode_all or len(paths) <= DECODE_CHECK_LIMIT
    looks = check_image_files([Path(path) for path in paths], param.sample_size, decode)
    repeats, note = repeats_of(names, param, request.classes)
    rows = Rows(paths, {"label": labels} if labelled else {}, classes, repeats=repeats)
    rows, good = _usable(rows, param, request, looks, captions)
    if not decode:
        notes += (f"note: of {len(rows):,} images only the headers were checked, and copies were not searched",)
    lines = []
    for number in good.tolist():
        texts = "".join(f"\0{caption}" for caption in captions[number].captions) if captions else ""
        lines.append(f"{names[number]}\0{labels[number]}\0{looks[number].size}{texts}\n")
    digest = hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()
    return replace(rows, notes=notes + note + rows.notes, digest=f"{len(rows):,} images, {digest[:12]}")


def open_shards(param: DatasetParam, request: SourceRequest) -> Rows:
    """Return the images in shards; if they are more than DECODE_CHECK_LIMIT, none is opened before it is read."""
    labelled = _wants_labels(param, request)
    paths, labels, classes, notes, digest, captions = list_shards(param, labelled, request.classes)
    if labelled:
        check_labels(labels, request.num_classes, paths.__getitem__, classes)
    rows = Rows(paths, {"label": labels} if labelled else {}, classes, digest=digest, files=paths.files)
    looks = list[ImageCheck]()
    if len(paths) > DECODE_CHECK_LIMIT and not request.decode_all and param.buckets is None:
        notes += (f"note: of {len(paths):,} images in shards none is opened before it is read",)
    else:
        looks = check_image_files(
            [partial(paths.content, number) for number in range(len(paths))], param.sample_size, True
        )
    rows, _ = _usable(rows, param, request, looks, captions)
    return replace(rows, notes=notes + rows.notes)


def _wants_labels(param: DatasetParam, request: SourceRequest) -> bool:
    """Return whether labels are read; a data set of captions may have none."""
    return "label" in request.items or param.captions is None


def _usable(
    rows: Rows,
    param: DatasetParam,
    request: SourceRequest,
    looks: Sequence[ImageCheck],
    captions: Sequence[ImageCaptions],
) -> tuple[Rows, np.ndarray]:
    """Return the usable rows, with their captions, shapes and notes, and their numbers (n,).

    ``looks`` and ``captions`` may be empty. Raises DataError if some rows are bad and not to be skipped.
    """
    captions = checked(captions, request.caption_problems)
    pairs = list(zip_longest((look.problem for look in looks), (image.problem for image in captions)))
    wrong = {number: problem for number, pair in enumerate(pairs) if (problem := pair[0] or pair[1])}
    problems = tuple(f"{rows.paths[number]} {problem}" for number, problem in wrong.items())
    if wrong and not (param.skip_bad_images and len(wrong) < len(rows)):
        hint = "" if rows.files else similar_name(Path(rows.paths[next(iter(wrong))]))
        repair = "Write the shard again without them" if rows.files else "Repair or remove them"
        if " has no caption" in problems[0] and not rows.files:
            repair = "Write their captions, or correct dataset_param.captions"
        raise DataError(
            f"{len(wrong)} of {len(rows)} images cannot be used. The first: {problems[0]}. {hint}{repair}"
            f"{', or set dataset_param.skip_bad_images to true' * (len(wrong) < len(rows))}."
        )
    good = np.array([number for number in range(len(rows)) if number not in wrong], np.int64)
    rows, looks = rows.subset(good), [looks[number] for number in good.tolist()] if looks else []
    sizes = shapes = None
    if param.buckets is not None:
        sizes = np.array([(look.height, look.width) for look in looks], np.int64)
        shapes = shapes_of(sizes[rows.entries], param)[np.unique(rows.entries, return_index=True)[1]]
    items = dict(rows.items)
    if captions:
        items["caption"] = tuple(captions[number].captions for number in good.tolist())
    classes = names_for_labels(rows.classes, rows.labels) if "label" in items else ()
    notes = size_notes(rows.paths, looks, param, shapes) if looks else ()
    rows = replace(rows, items=items, classes=classes, skipped=len(wrong), problems=problems)
    return replace(rows, notes=notes, shapes=shapes, sizes=sizes), good


def folder_as_listed(param: DatasetParam, rows: Rows) -> Rows:
    """Return the rows of a cache with the class names from the folder; the images may be absent.

    Raises:
        DataError: the images are there, but are not those that the cache was made from.
    """
    folder = Path(param.data_folder)
    repeats, note = repeats_of([os.path.relpath(path, folder) for path in rows.paths], param, rows.classes)
    rows = replace(rows, repeats=repeats, notes=note)
    if not is_folder(folder):
        return rows
    labelled = "label" in rows.items
    present, classes, notes, captions = list_images(param, labelled, rows.classes)
    labels = rows.labels.tolist() if labelled else [0] * len(rows)
    cached = [(os.path.relpath(path, folder), label) for path, label in zip(rows.paths, labels)]
    missing = sorted(set(cached) - set(present))
    if missing or not len(rows) <= len(present) <= len(rows) + rows.skipped:  # (what was skipped may be gone)
        gone = f", and {missing[0][0]} is gone or has another label" if missing else ""
        raise DataError(
            f"dataset_param.latents = {param.latents} was made of {len(rows) + rows.skipped} images, but {folder} "
            f"holds {len(present)}{gone}. {CACHE_AGAIN}"
        )
    listed: Mapping[str, ImageCaptions] = dict(zip((path for path, _ in present), captions))
    for path, texts in zip(rows.paths, rows.captions) if listed else ():
        if listed[os.path.relpath(path, folder)].captions != texts:
            raise DataError(
                f"dataset_param.latents = {param.latents} was made with other captions of {path}. {CACHE_AGAIN}"
            )
    return replace(rows, classes=(classes or rows.classes) if labelled else (), notes=notes + note)


def shards_as_listed(param: DatasetParam, rows: Rows) -> Rows:
    """Return the rows of a cache with the shards that are there now; they may be absent."""
    folder = Path(param.data_folder)
    return replace(rows, files=tuple(map(str, shard_files(folder, param)))) if is_folder(folder) else rows


class ImageReader:
    """Reads the pixels of images (``VisualReader``): view 0 plain, view 1 mirrored; safe to call from several threads.

    skip_bad: if an image cannot be decoded, read the next row that can (large data sets are checked by their headers
    alone). The replacement depends on the files alone, so it is the same on every rank and after a resume.
    """

    views = 2

    def __init__(
        self,
        rows: Rows,
        size: int | Size,
        channels: int,
        skip_bad: bool = False,
        flip_prob: float = 0.0,
        color_profiles: ColorProfiles = "convert",
    ) -> None:
        """``size``: (H, W) or the side of a square, for rows without ``shapes``."""
        self.channels, self.skip_bad = channels, skip_bad
        self._rows, self._flip_prob, self._color_profiles = rows, flip_prob, color_profiles
        self._shapes = np.broadcast_to(size, (len(rows), 2)) if rows.shapes is None else rows.shapes
        keep = channels * self._shapes.prod(1).sum() <= CACHE_BYTES
        self._decoded: dict[tuple[int, Size], np.ndarray] | None = {} if keep else None
        self._bad: dict[int, str] = {}
        self._bad_changes = threading.Lock()

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        """Return which samples are mirrored, (B,) bool."""
        return bernoulli(seed, Stream.FLIP, sample_indices, self._flip_prob)

    def read(self, rows: np.ndarray, views: np.ndarray) -> ReadSamples:
        """Return pixels (B, channels, H, W) uint8 of ``rows`` (B,), all of one shape.

        Images whose view in ``views`` (B,) is 1 are mirrored.

        Raises:
            DataError: naming a file that cannot be read, and why.
        """
        loaded = [self._readable(image) for image in rows.tolist()]
        pixels = np.stack([pixels for _, pixels in loaded])
        mirrored = views.astype(bool)
        pixels[mirrored] = pixels[mirrored, :, :, ::-1]
        return ReadSamples({"pixels": pixels}, np.array([image for image, _ in loaded], np.int64))

    def _readable(self, image: int) -> tuple[int, np.ndarray]:
        """Return ``image`` or its replacement, and the pixels."""
        tries = min(REPLACEMENT_TRIES, len(self._rows)) if self.skip_bad else 1
        height, width = self._shapes[image].tolist()
        for candidate in range(image, image + tries):
            pixels = self._pixels(candidate % len(self._rows), (height, width))
            if pixels is not None:
                return candidate % len(self._rows), pixels
        path, problem = self._rows.paths[image], self._bad[image]
        if self.skip_bad:
            problem += f", and the {tries - 1} images after it cannot be read either"
        raise DataError(
            f"{path} {problem}. Repair or remove the file, or set dataset_param.skip_bad_images to train without it; "
            "the run can be resumed from its last checkpoint."
        )

    def _pixels(self, image: int, size: Size) -> np.ndarray | None:
        """Return the pixels of ``image``, (channels, *size), or None if it cannot be decoded."""
        if self._decoded is not None and (image, size) in self._decoded:
            return self._decoded[image, size]
        if image in self._bad:
            return None
        try:
            pixels = load_pixels(image_content(self._rows, image), size, self.channels, self._color_profiles)
        except UnusableFile as problem:
            with self._bad_changes:
                if self.skip_bad and image not in self._bad:
                    path = self._rows.paths[image]
                    logger.warning(f"warning: {path} {problem}; it is skipped")
                self._bad[image] = str(problem)
            return None
        if self._decoded is not None:
            self._decoded[image, size] = pixels
        return pixels


def image_content(rows: Rows, row: int) -> str | bytes:
    """Return the path of an image, or its content if it is in a shard; raises UnusableFile."""
    return rows.paths.content(row) if isinstance(rows.paths, ShardRows) else rows.paths[row]


def _reader(rows: Rows, param: DatasetParam, channels: int) -> ImageReader:
    flip_prob = 0.5 if param.random_flip else 0.0
    return ImageReader(rows, param.sample_size, channels, param.skip_bad_images, flip_prob, param.color_profiles)


IMAGE_FOLDER = Source(DatasetParam, open_folder, _reader, as_listed=folder_as_listed)
SHARDS = Source(DatasetParam, open_shards, _reader, as_listed=shards_as_listed)
