"""Sets of images to score, from ADM's ``.npz`` or a folder: headers are checked first, pixels read in batches."""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.files import (
    UNREADABLE,
    Header,
    UnusableFile,
    add_content,
    check_file,
    check_unfolded,
    error_text,
    read_header,
    read_npz,
    suggest_path,
)
from mindspeed_mm_dit.configs.limits import check_path, shorten_repr
from mindspeed_mm_dit.configs.source import Size
from mindspeed_mm_dit.data.check_images import check_image_files
from mindspeed_mm_dit.data.images import DECODE_CHECK_LIMIT
from mindspeed_mm_dit.data.labels import normalize_names
from mindspeed_mm_dit.data.listing import is_hidden
from mindspeed_mm_dit.data.transforms import MAX_SCALED_PIXELS, height_and_width, load_pixels, readable_formats
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.tools.evaluate.metrics import Gaussian

INCEPTION = (
    "Run mm-dit get Inception, or download https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
    "weights-inception-2015-12-05-6726825d.pth, and name the file with --inception."
)
"""What to do if the Inception's weights are missing."""
POOL, SPATIAL = 2048, 17 * 17 * 7
"""Number of Inception features per image: of the last pooling, and of 7 channels of ``mixed_6/conv``."""
IMAGES, LABELS = "arr_0", "arr_1"
"""Names in an npz: the images, and their labels, which are optional."""
INCEPTION_SHA256, SCALED_AND_JPEGS = "inception_sha256", "scaled_and_jpegs"
"""Names next to our statistics: SHA-256 of the Inception's weights; numbers of scaled images and of JPEGs."""
STATISTICS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}
"""Names of mean and covariance of the features of a reference."""
WIDTHS = {"mu": POOL, "mu_s": SPATIAL}
BATCH_BYTES = 1 << 26
"""Bytes of an npz that are read at once (at least one image); scores take 8 times as much memory."""
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
Batches = Callable[[int], Iterator[np.ndarray]]


@dataclass(frozen=True)
class ImageSet:
    """Images of one size, or the statistics of their features, or both."""

    what: str
    """The flag and its value, for error messages."""
    count: int
    """Number of images; 0 if there are statistics only."""
    shape: tuple[int, int, int]
    """Height, width, channels (1 or 3) of each."""
    batches: Batches
    """Maximum batch size -> all images in order, (B, H, W, C) uint8."""
    labels: np.ndarray | None = None
    """(count,) int64, if they are known."""
    classes: tuple[str, ...] = ()
    """Name of each label; empty if they are not known."""
    statistics: dict[str, Gaussian] | None = None
    """Statistics of the "pool" and perhaps "spatial" features, possibly over more images than these."""
    inception_sha256: str = ""
    """SHA-256 of the Inception's weights behind the statistics; empty if unknown."""
    resized: int = 0
    """Number of images that were scaled or cropped; for statistics, of the images behind them."""
    jpegs: int = 0
    """Number of images that come from a JPEG, likewise."""
    grey: int = 0
    """Number of images in grey, by their format."""
    left_out: int = 0
    """Number of images that are ignored because they are outside of the class folders, or in hidden folders."""
    skipped: tuple[str, ...] = ()
    """Names of damaged images that are skipped."""


def open_image_set(
    flag: str, path: str | Path, image_size: int | Size | None = None, skip_bad: bool = False, by_class: bool = True
) -> ImageSet:
    """Open an npz or a folder of images; no image is decoded yet, except to find damaged ones.

    image_size: (H, W), or the side of a square, to which images of a folder are scaled and cropped, as DiT prepares
    ImageNet; None if all have the same size. skip_bad: skip damaged images of a folder, as a run may do. by_class:
    folders are classes, and images outside of them are ignored.

    Raises:
        ConfigError, DataError: the path does not exist or cannot be scored.
    """
    check_path(flag, str(path))
    what, path = f"{flag} = {path}", Path(path)
    if path.is_dir():
        return _open_folder(what, path, image_size, skip_bad, by_class)
    try:
        check_file(path)
    except UnusableFile as problem:
        words = "does not exist" if not os.path.lexists(path) else str(problem)
        raise ConfigError(
            f"{what} {words}. {suggest_path(path, 'digits')}Name an .npz or a folder of images."
        ) from None
    if not zipfile.is_zipfile(path):
        raise DataError(f"{what} is no .npz, or is cut short. Name a file that np.savez wrote, or a folder of images.")
    return _Npz(what, path).images()


# --- npz -------------------------------------------------------------------------------------------------------


class _Npz:
    """An npz whose images are read on demand; pickled objects, which could run code, are never loaded."""

    def __init__(self, what: str, path: Path) -> None:
        self._what, self._path = what, path
        with zipfile.ZipFile(path) as archive:
            self._names = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}

    def images(self) -> ImageSet:
        """Return the content of the file."""
        statistics = self._statistics()
        if IMAGES not in self._names:
            if statistics:
                no_images: Batches = lambda size: iter(())  # noqa: E731
                sha256 = self._inception_sha256()
                return ImageSet(self._what, 0, (0, 0, 0), no_images, statistics=statistics, inception_sha256=sha256)
            names = ", ".join(sorted(self._names)) or "nothing"
            raise DataError(f"{self._what} holds {names}, and neither images ({IMAGES}) nor statistics (mu, sigma).")
        shape = self._image_shape()
        resized, jpegs = self._scaled_and_jpegs()
        labels, sha256, grey = self._labels(shape[0]), self._inception_sha256(), shape[0] if shape[3] == 1 else 0
        known = labels, (), statistics, sha256, resized, jpegs, grey
        return ImageSet(self._what, shape[0], shape[1:], self._batches, *known)

    def _image_shape(self) -> tuple[int, int, int, int]:
        with zipfile.ZipFile(self._path) as archive, archive.open(f"{IMAGES}.npy") as member:
            shape, fortran, dtype = self._header(member, archive.getinfo(f"{IMAGES}.npy").file_size)
        if dtype != np.uint8:
            raise DataError(f"{self._what}: {IMAGES} must be uint8, and is {dtype}. Save 0 ... 255.")
        if len(shape) != 4 or shape[3] not in (1, 3) or min(shape) < 1:
            raise DataError(
                f"{self._what}: {IMAGES} must have the shape (N, height, width, 3 or 1), and has {shorten_repr(shape)}."
            )
        if fortran:
            raise DataError(f"{self._what}: {IMAGES} is in Fortran's order. Write it again with np.savez.")
        if shape[1] * shape[2] >= MAX_SCALED_PIXELS:
            raise DataError(
                f"{self._what}: {IMAGES} holds images of {shape[1]:,} x {shape[2]:,} pixels, more than "
                f"{MAX_SCALED_PIXELS:,}. Scale them down."
            )
        try:
            check_unfolded(self._path.stat().st_size, math.prod(shape))
        except UnusableFile as problem:
            raise DataError(f"{self._what}: {IMAGES} {problem}. Write it with np.savez, uncompressed.") from None
        self._check_whole()
        return shape  # type: ignore[return-value]

    def _check_whole(self) -> None:
        """Read all images once to verify their checksum, so that damage shows before the long computation."""
        try:
            with zipfile.ZipFile(self._path) as archive, archive.open(f"{IMAGES}.npy") as member:
                while member.read(1 << 24):
                    pass
        except UNREADABLE as error:
            raise DataError(f"{self._what}: {IMAGES} is damaged: {error_text(error)}. Copy it again.") from None

    def _batches(self, size: int) -> Iterator[np.ndarray]:
        with zipfile.ZipFile(self._path) as archive, archive.open(f"{IMAGES}.npy") as member:
            (count, *shape), _, _ = self._header(member, archive.getinfo(f"{IMAGES}.npy").file_size)
            size = min(size, max(1, BATCH_BYTES // math.prod(shape)))
            for start in range(0, count, size):
                length = min(size, count - start)
                yield np.frombuffer(member.read(length * int(np.prod(shape))), np.uint8).reshape(length, *shape)

    def _labels(self, count: int) -> np.ndarray | None:
        if LABELS not in self._names:
            return None
        labels = self._array(LABELS)
        if labels.shape != (count,) or labels.dtype.kind not in "iu":
            raise DataError(
                f"{self._what}: {LABELS} must have the shape ({count},) and integers, and has "
                f"{shorten_repr(labels.shape)} and {labels.dtype}."
            )
        if labels.min() < 0:
            raise DataError(f"{self._what}: {LABELS} holds {labels.min()}, and labels are numbered from 0.")
        return labels.astype(np.int64)

    def _statistics(self) -> dict[str, Gaussian] | None:
        pairs = {kind: pair for kind, pair in STATISTICS.items() if set(pair) <= self._names}
        return {kind: self._gaussian(*pair) for kind, pair in pairs.items()} if "pool" in pairs else None

    def _gaussian(self, mean_name: str, covariance_name: str) -> Gaussian:
        mean, covariance = self._array(mean_name), self._array(covariance_name)
        what, width = f"{self._what}: {mean_name} and {covariance_name}", WIDTHS[mean_name]
        kinds = mean.dtype.kind + covariance.dtype.kind
        if (mean.shape, covariance.shape, kinds) != ((width,), (width, width), "ff"):
            raise DataError(
                f"{what} must be real numbers of the shapes ({width},) and ({width}, {width}), and are {mean.dtype} "
                f"{mean.shape} and {covariance.dtype} {covariance.shape}. They may be of another network."
            )
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
            raise DataError(f"{what} hold numbers that are not finite. Copy or make the file again.")
        return Gaussian(mean.astype(np.float64), covariance.astype(np.float64))

    def _inception_sha256(self) -> str:
        return str(self._array(INCEPTION_SHA256)) if INCEPTION_SHA256 in self._names else ""

    def _scaled_and_jpegs(self) -> tuple[int, int]:
        resized, jpegs = self._array(SCALED_AND_JPEGS).tolist() if SCALED_AND_JPEGS in self._names else (0, 0)
        return resized, jpegs

    def _array(self, name: str) -> np.ndarray:
        try:
            return read_npz(self._path, [name])[name]
        except UnusableFile as problem:
            raise DataError(f"{self._what}: {name} {problem}. Copy the file again.") from None

    def _header(self, member: IO[bytes], size: int) -> Header:
        try:
            return read_header(member, size)
        except UnusableFile as problem:
            raise DataError(f"{self._what}: {IMAGES} {problem}. Write it again with np.savez.") from None
        except UNREADABLE as error:
            raise DataError(f"{self._what}: {IMAGES} cannot be read: {error_text(error)}. Copy it again.") from None


# --- a folder --------------------------------------------------------------------------------------------------


def _open_folder(what: str, folder: Path, image_size: int | Size | None, skip_bad: bool, by_class: bool) -> ImageSet:
    """Return the images below ``folder``, sorted by name; folders in it are classes, as in training."""
    images = (path for path in folder.rglob("*") if path.suffix.lower() in readable_formats())
    image_paths = sorted(path for path in images if not path.name.startswith("."))
    paths = [path for path in image_paths if not any(map(is_hidden, path.relative_to(folder).parts[:-1]))]
    in_folders = [path for path in paths if path.parent != folder]
    paths = in_folders if by_class and in_folders else paths
    if not paths:
        raise DataError(f"{what} holds no images. Name a folder of images, or an .npz.")
    size = _size_of(what, paths[0]) if image_size is None else height_and_width(image_size)
    looks = check_image_files(paths, size, decode=skip_bad and len(paths) <= DECODE_CHECK_LIMIT)
    bad = [(path, look.problem) for path, look in zip(paths, looks) if look.problem is not None]
    if bad and not (skip_bad and len(bad) < len(paths)):
        raise DataError(
            f"{what}: {len(bad)} of {len(paths)} images cannot be scored; the first is {bad[0][0]}, which {bad[0][1]}. "
            "Repair or remove them."
        )
    paths = [path for path, look in zip(paths, looks) if look.problem is None]
    looks = [look for look in looks if look.problem is None]
    off = [path for path, look in zip(paths, looks) if (look.height, look.width) != size]
    if off and image_size is None:
        square = " x ".join(map(str, size))
        raise DataError(f"{what}: {off[0].name} is not {square}, as {paths[0].name} is. Add --image-size.")
    labels, classes = _labels_of(folder, paths) if by_class else (None, ())
    return ImageSet(
        what,
        len(paths),
        (*size, 3),
        lambda batch: _decoded(paths, size, batch),
        labels,
        classes,
        resized=len(off),
        jpegs=sum(path.suffix.lower() in _JPEG for path in paths),
        grey=sum(look.is_grey for look in looks),
        left_out=len(image_paths) - len(paths) - len(bad),
        skipped=tuple(str(path.relative_to(folder)) for path, _ in bad),
    )


def _size_of(what: str, path: Path) -> Size:
    (look,) = check_image_files([path], 1, decode=False)
    if look.problem is not None:
        raise DataError(f"{path} {look.problem}. Repair or remove it.")
    if look.width != look.height:
        raise DataError(f"{what}: {path.name} is {look.width} x {look.height}, which is no square. Add --image-size.")
    return look.height, look.width


def _decoded(paths: list[Path], size: Size, batch: int) -> Iterator[np.ndarray]:
    for start in range(0, len(paths), batch):
        yield np.stack([_pixels(path, size) for path in paths[start : start + batch]])


def _pixels(path: Path, size: Size) -> np.ndarray:
    try:
        return rearrange(load_pixels(str(path), size, 3), "c h w -> h w c")
    except UnusableFile as problem:
        raise DataError(f"{path} {problem}. Repair or remove it.") from None


def _labels_of(folder: Path, paths: list[Path]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return the class of each image, by its folder, and the class names; None if there is only one folder."""
    classes = normalize_names(path.relative_to(folder).parts[0] if path.parent != folder else "" for path in paths)
    as_numbers = all(map(str.isdecimal, classes))
    names = tuple(sorted(set(classes), key=lambda name: (int(name) if as_numbers else 0, name)))
    return (np.array([names.index(name) for name in classes], np.int64), names) if len(names) > 1 else (None, ())


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files below a folder."""
    root, digest = Path(path), hashlib.sha256()
    files = sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]
    for file in files:
        digest.update(b"" if file == root else f"{file.relative_to(root)}\0".encode("utf-8", "surrogateescape"))
        add_content(digest, file)
    return digest.hexdigest()
