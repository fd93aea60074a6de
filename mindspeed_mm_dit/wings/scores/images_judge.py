"""The judge of your own images: ``--reference`` without ``--inception``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np
from einops import reduce

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.wings.scores.cautions import cautions
from mindspeed_mm_dit.wings.scores.evaluation import Candidates, Judgement
from mindspeed_mm_dit.wings.scores.image_set import INCEPTION, ImageSet
from mindspeed_mm_dit.wings.scores.metrics import NEIGHBOURS
from mindspeed_mm_dit.wings.scores.real_images import (
    FEWEST_IMAGES,
    HELD_OUT,
    NEAREST_SHARE,
    VARIANCE_KEPT,
    RealImages,
    Scores,
)

SIDE = 32
"""Larger images are averaged down to about this side in pixels."""
MOST_IMAGES = 5_000
"""Most images of a reference that are used; of more, this many are chosen evenly."""


class ImagesJudge:
    """Scores of images against real ones of the same size; needs no network and no framework."""

    def __init__(self, reference: ImageSet) -> None:
        """Raise ConfigError for a reference with statistics only, or with too few images."""
        if not reference.count:
            words = "is needed: the reference holds statistics of the Inception's features, and no images"
            raise ConfigError("--inception", words, INCEPTION)
        if reference.count < FEWEST_IMAGES:
            words = f"{reference.count} image(s): scores without --inception need at least {FEWEST_IMAGES}"
            raise ConfigError(reference.what, words, "use more")
        self._reference = reference
        self._names: tuple[str, ...] = ()

    def check(self, images: Candidates) -> None:
        reference = self._reference
        if reference.shape[:2] != images.shape[:2]:
            sizes = [" x ".join(map(str, shape[:2])) for shape in (reference.shape, images.shape)]
            raise ConfigError(reference.what, f"has images of {sizes[0]}, and {images.what} of {sizes[1]}",
                              "score against a reference of the same size")  # fmt: skip
        check_count(images)
        if reference.labels is not None and images.num_labels:
            self._names = images.classes
            _check_classes(reference, images)

    def judge(self, samples: ImageSet) -> Judgement:
        reference, by_class = self._reference, self._reference.labels is not None and samples.labels is not None
        grey = 1 in (reference.shape[2], samples.shape[2])
        chosen = np.unique(np.linspace(0, reference.count - 1, MOST_IMAGES).round().astype(int))
        real = RealImages.of(_pixels(reference, grey)[chosen], _labels(reference, None, by_class)[chosen])
        found = real.score(_pixels(samples, grey), _labels(samples, self._numbers(), by_class))
        held_out = int((~real.reference).sum())
        yardstick = asdict(real.score_held_out()) if held_out > NEIGHBOURS else {}
        return judgement_of(
            found, yardstick, real, {"what": reference.what, "images": len(chosen), "held out": held_out},
            [*cautions(samples, reference), *_notes(reference, held_out)],
        )  # fmt: skip

    def _numbers(self) -> np.ndarray | None:
        """Return the reference's number of each class of the samples, if both have names."""
        there = self._reference.classes
        return np.array([there.index(name) for name in self._names]) if self._names and there else None


def judgement_of(
    found: Scores, yardstick: Mapping[str, Any], real: RealImages, reference: Mapping[str, Any], notes: list[str]
) -> Judgement:
    """Return the judgement of images that were scored against ``real`` ones."""
    space = f"principal components with {VARIANCE_KEPT:.0%} of the variance of the reference"
    return Judgement(
        scores=asdict(found), yardstick=yardstick, reference={**reference, "scikit-learn": version("scikit-learn")},
        features={"space": space, "components": real.components.shape[1], "copy_quantile": NEAREST_SHARE,
                  "copy_distance": real.copy_distance}, notes=notes,
    )  # fmt: skip


def check_count(images: Candidates) -> None:
    """Raise ConfigError for too few images to score."""
    if images.count < FEWEST_IMAGES:
        words = f"{images.count} image(s): variety within a class wants at least {FEWEST_IMAGES}"
        raise ConfigError(images.counted_by, words, "use more")


def _check_classes(reference: ImageSet, images: Candidates) -> None:
    missing = [name for name in images.classes if name not in reference.classes]
    if missing and reference.classes:
        raise ConfigError(reference.what, f"has no class {missing[0]!r}, which {images.what} has",
                          f"its folders are {', '.join(reference.classes[:20])}")  # fmt: skip
    count = len(reference.classes) or int(reference.labels.max()) + 1  # type: ignore[union-attr]
    if images.num_labels > count:
        raise ConfigError(images.what, f"has {images.num_labels} classes, and {reference.what} has {count}",
                          "name a reference of the same classes")  # fmt: skip


def _notes(reference: ImageSet, held_out: int) -> list[str]:
    notes = [
        f"the scores of real images are those of {held_out:,} that were held out, every {HELD_OUT}rd of a class: "
        "samples cannot be expected to be read better than these; of few images, some are near to each other by chance"
    ]
    if reference.count > MOST_IMAGES:
        notes.append(
            f"{MOST_IMAGES:,} of {reference.count:,} real images were used: a copy of another one is not found"
        )
    return notes


def _pixels(images: ImageSet, grey: bool) -> np.ndarray:
    """Return (N, D) float64 in [0, 1], of images averaged down; without colours if ``grey``."""
    times = -(-max(images.shape[:2]) // SIDE)
    height, width = (side // times * times for side in images.shape[:2])
    into = "n h w" if grey else "n h w c"
    small = [
        reduce(images[:, :height, :width] / 255, f"n (h a) (w b) c -> {into}", "mean", a=times, b=times)
        for images in images.batches(256)
    ]
    return np.concatenate(small).reshape(images.count, -1)


def _labels(images: ImageSet, numbers: np.ndarray | None, by_class: bool) -> np.ndarray:
    if not by_class:
        return np.zeros(images.count, np.int64)
    assert images.labels is not None
    return images.labels if numbers is None else numbers[images.labels]
