"""Built-in image data sets: images from an installed package, written as an ordinary image folder."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.files import is_folder, reason_of
from mindspeed_mm_dit.data import caption_phrases
from mindspeed_mm_dit.data.draws import philox
from mindspeed_mm_dit.errors import DataError


class BuiltinData(NamedTuple):
    """A built-in data set."""

    write: Callable[[Path], None]
    """Writes it to a folder that does not exist yet."""
    num_images: int
    num_classes: int
    """Labels are 0 ... num_classes - 1."""


class Digits(NamedTuple):
    """Handwritten digits."""

    images: Any
    """(N, 8, 8) float64, whole numbers from 0 to 16; when written, N images of any size, uint8."""
    labels: np.ndarray
    """(N,) int64."""


def read_digits() -> Digits:
    """Return scikit-learn's 1,797 digits, read from its data file: importing scikit-learn would take half a second."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None, "requirements/base.txt names it"
    with gzip.open(Path(package.origin).parent / "datasets/data/digits.csv.gz", "rt", encoding="utf-8") as file:
        rows = np.array([line.split(",") for line in file], np.float64)
    return Digits(rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64))


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits (8 x 8, grey, classes 0-9) and labels.csv to ``folder``.

    Pixel values 0 ... 16 become 0 ... 255. The folder is written aside and renamed, so if it exists it is complete.
    """
    _write_images(folder, _pixels(), ("image_path", "label"), "labels.csv", lambda number, label: [()])


def write_captioned_digits(folder: Path) -> None:
    """Write the same images with captions.csv, which has CAPTIONS_EACH lines per image, each with a caption.

    The phrasings of an image are drawn by its number, from those seen in training.
    """
    _write_images(
        folder, _pixels(), ("image_path", "label", "caption"), "captions.csv",
        lambda number, label: [(caption,) for caption in caption_phrases.drawn(number, label)],
    )  # fmt: skip


def write_inverted_digits(folder: Path) -> None:
    """Write the first INVERTED_EACH images of each digit, black on white, with labels.csv: a set to fine-tune on."""
    pixels, labels = _pixels()
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:INVERTED_EACH] for label in range(10)]))
    few = Digits(255 - pixels[chosen], labels[chosen])
    _write_images(folder, few, ("image_path", "label"), "labels.csv", lambda number, label: [()])


def write_digits_buckets(folder: Path) -> None:
    """Write the same digits with labels.csv, each on one of CANVASES in turn, at a place drawn by its number."""
    pixels, labels = _pixels()
    placed = [_placed(number, image) for number, image in enumerate(pixels)]
    _write_images(folder, Digits(placed, labels), ("image_path", "label"), "labels.csv", lambda number, label: [()])


def _placed(number: int, digit: np.ndarray) -> np.ndarray:
    """Return a black canvas with ``digit`` (8, 8) on it, offset from its corner by multiples of PLACE."""
    canvas = np.zeros(CANVASES[number % len(CANVASES)], np.uint8)
    draw = philox((0, 3), (0, 0, number, 0))
    row, column = (PLACE * int(draw.integers((side - 8) // PLACE + 1)) for side in canvas.shape)
    canvas[row : row + 8, column : column + 8] = digit
    return canvas


def _pixels() -> Digits:
    """Return the digits as images, (N, 8, 8) uint8."""
    digits = read_digits()
    return Digits(np.round(digits.images * (255 / 16)).astype(np.uint8), digits.labels)


def _write_images(
    folder: Path,
    digits: Digits,
    columns: tuple[str, ...],
    index: str,
    more: Callable[[int, int], Sequence[tuple[str, ...]]],
) -> None:
    """Write the images and ``index``; ``more``: (number of an image, its label) -> further columns of its lines."""
    with written_aside(folder) as aside:
        for label in range(10):
            (aside / str(label)).mkdir(parents=True, exist_ok=True)
        with open(aside / index, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            for number, (image, label) in enumerate(zip(digits.images, digits.labels.tolist())):
                path = f"{label}/{number:04d}.png"
                Image.fromarray(image).save(aside / path)
                writer.writerows([path, label, *words] for words in more(number, label))


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yield a path beside ``folder`` that is renamed to it at the end, unless another rank was first."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        yield aside
        if not folder.exists():
            os.rename(aside, folder)
    except OSError:
        if not folder.exists():  # (else another rank was first)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


_written: list[tuple[Path, list[Path]]] = []
"""Built-in data written by this process, each with the parent folders that had to be made."""
INVERTED_EACH = 4
CANVASES, PLACE = ((12, 12), (8, 16), (16, 8)), 4
"""For digits on rectangles: (H, W) of each canvas, and the pixels between two possible places of a digit."""
BUILTIN_SOURCES = {
    "digits": BuiltinData(write_digits, num_images=1797, num_classes=10),
    "captioned_digits": BuiltinData(write_captioned_digits, num_images=1797, num_classes=10),
    "inverted_digits": BuiltinData(write_inverted_digits, num_images=10 * INVERTED_EACH, num_classes=10),
    "digits_buckets": BuiltinData(write_digits_buckets, num_images=1797, num_classes=10),
}


def provide(source: str, folder: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill ``folder`` with the built-in data set ``source``, unless the folder exists.

    Raises:
        DataError: the folder is not named like the data set, or cannot be written. The name is checked so that a
            mistyped path, or a ``source`` copied from another file, does not yield the wrong images.
    """
    there = is_folder(folder)
    if os.path.basename(os.path.abspath(folder)) != source:
        raise DataError(
            f"dataset_param.data_folder = {folder}",
            f"{'is there' if there else 'there is no such folder'}, and dataset_param.source is {source!r}, "
            f"built-in data whose folder must be named {source}",
            f'for data of your own {"" if there else "correct data_folder and "}drop "source" from data.json; '
            f"for the built-in data name a folder .../{source}",
        )
    if there:
        return
    missing = [place for place in folder.absolute().parents if not place.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        write(folder)
        _written.append((folder, missing))
    except (OSError, ValueError) as error:
        raise DataError(
            f"dataset_param.data_folder = {folder}",
            f"the built-in {source} cannot be written there: {reason_of(error)}",
            "name a folder on a disk that has room and may be written",
        ) from None


def take_back() -> None:
    """Remove what :func:`provide` wrote in this process, so that a --dry-run leaves nothing behind."""
    while _written:
        folder, made = _written.pop()
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # something else is in it by now
                parent.rmdir()


def check_is_source(source: str, folder: Path, labels: list[int], labelled: bool) -> None:
    """Raise DataError if images with these ``labels`` are not the built-in data set ``source``.

    labelled: whether the labels are known; if not, only the number of images is checked.
    """
    wanted = BUILTIN_SOURCES[source]
    if len(labels) != wanted.num_images or (labelled and set(labels) != set(range(wanted.num_classes))):
        classes = f" of {len(set(labels))} classes" if labelled else ""
        raise DataError(
            f"dataset_param.source = {source!r}",
            f"{folder} holds {len(labels)} images{classes}, where the built-in {source} are "
            f"{wanted.num_images} of {wanted.num_classes}",
            f'drop "source" to train on what is there, or move {folder} away to have the {source} written again',
        )
