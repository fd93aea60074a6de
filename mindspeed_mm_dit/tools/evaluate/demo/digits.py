"""The built-in images: scikit-learn's digits, written as an ordinary image folder."""

from __future__ import annotations

import csv
import gzip
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mindspeed_mm_dit.data.builtin import BuiltinData, written_aside
from mindspeed_mm_dit.data.draws import philox
from mindspeed_mm_dit.errors import not_installed
from mindspeed_mm_dit.tools.evaluate.demo import caption_phrases

INVERTED_EACH = 4
CANVASES, OFFSET_STEP = ((12, 12), (8, 16), (16, 8)), 4
"""For digits on rectangles: (H, W) of each canvas, and the pixels between two possible offsets of a digit."""


class Digits(NamedTuple):
    """Handwritten digits."""

    images: Any
    """(N, 8, 8) float64, whole numbers from 0 to 16; when written, N images of any size, uint8."""
    labels: np.ndarray
    """(N,) int64."""


def read_digits() -> Digits:
    """Return scikit-learn's 1,797 digits, read from its data file: importing scikit-learn would take half a second.

    Raises:
        PlatformError: it is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise not_installed("dataset_param.source", "scikit-learn", "scores")
    with gzip.open(Path(package.origin).parent / "datasets/data/digits.csv.gz", "rt", encoding="utf-8") as file:
        rows = np.array([line.split(",") for line in file], np.float64)
    return Digits(rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64))


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits (8 x 8, grey, classes 0-9) and labels.csv to ``folder``.

    Pixel values 0 ... 16 become 0 ... 255. The folder is written aside and renamed, so if it exists it is complete.
    """
    _write_images(folder, _pixels())


def write_captioned_digits(folder: Path) -> None:
    """Write the same images with captions.csv, which has CAPTIONS_EACH lines per image, each with a caption.

    The phrasings of an image are drawn by its number, from those seen in training.
    """
    _write_images(folder, _pixels(), "captions.csv", caption_phrases.draw_captions)


def write_inverted_digits(folder: Path) -> None:
    """Write the first INVERTED_EACH images of each digit, black on white, with labels.csv: a set to fine-tune on."""
    pixels, labels = _pixels()
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:INVERTED_EACH] for label in range(10)]))
    _write_images(folder, Digits(255 - pixels[chosen], labels[chosen]))


def write_digits_buckets(folder: Path) -> None:
    """Write the same digits with labels.csv, each on one of CANVASES in turn, at a random offset by its number."""
    pixels, labels = _pixels()
    placed = [_placed(number, image) for number, image in enumerate(pixels)]
    _write_images(folder, Digits(placed, labels))


def _placed(number: int, digit: np.ndarray) -> np.ndarray:
    """Return a black canvas with ``digit`` (8, 8) on it, offset from its corner by multiples of PLACE."""
    canvas = np.zeros(CANVASES[number % len(CANVASES)], np.uint8)
    draw = philox((0, 3), (0, 0, number, 0))
    row, column = (OFFSET_STEP * int(draw.integers((side - 8) // OFFSET_STEP + 1)) for side in canvas.shape)
    canvas[row : row + 8, column : column + 8] = digit
    return canvas


def _pixels() -> Digits:
    """Return the digits as images, (N, 8, 8) uint8."""
    digits = read_digits()
    return Digits(np.round(digits.images * (255 / 16)).astype(np.uint8), digits.labels)


def _write_images(
    folder: Path, digits: Digits, index: str = "labels.csv", captions: Callable[[int, int], list[str]] | None = None
) -> None:
    """Write the images and ``index``; ``captions``: (number of an image, its label) -> its captions, a line each."""
    with written_aside(folder) as aside:
        for label in range(10):
            (aside / str(label)).mkdir(parents=True, exist_ok=True)
        with open(aside / index, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["image_path", "label", *(["caption"] if captions else [])])
            for number, (image, label) in enumerate(zip(digits.images, digits.labels.tolist())):
                path = f"{label}/{number:04d}.png"
                Image.fromarray(image).save(aside / path)
                caption_columns = [[caption] for caption in captions(number, label)] if captions else [[]]
                writer.writerows([path, label, *words] for words in caption_columns)


DIGITS = BuiltinData(write_digits, num_images=1797, num_classes=10)
CAPTIONED_DIGITS = BuiltinData(write_captioned_digits, num_images=1797, num_classes=10)
INVERTED_DIGITS = BuiltinData(write_inverted_digits, num_images=10 * INVERTED_EACH, num_classes=10)
DIGITS_BUCKETS = BuiltinData(write_digits_buckets, num_images=1797, num_classes=10)
