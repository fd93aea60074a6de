"""The judge that compares with your own images: ``--reference`` without ``--inception``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
from einops import reduce

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.evaluate.evaluation import Candidates, Judgement, cautions, check_size
from mindspeed_mm_dit.tools.evaluate.image_set import INCEPTION, ImageSet
from mindspeed_mm_dit.tools.evaluate.metrics import NEIGHBOURS
from mindspeed_mm_dit.tools.evaluate.real_images import (
    COPY_QUANTILE,
    HELD_OUT,
    MIN_IMAGES,
    PCA_VARIANCE,
    RealImages,
    Scores,
)

SIDE = 32
"""Larger images are averaged down to about this side in pixels."""
MAX_REFERENCE_IMAGES = 5_000
"""Maximum number of reference images; of more, this many are chosen evenly."""
COPIES_WORTH_A_NOTE = 0.5
"""A note is written if at least this fraction of the samples are copies."""
QUALITY_SCORES = ("accuracy", "precision", "recall")
"""Scores that are left out if images with destroyed shapes reach at least half the score of intact ones."""
MIN_REAL_ACCURACY = 0.5
"""Minimum accuracy on real images; below it there is no verdict."""


@dataclass(frozen=True)
class SelfTest:
    """The scores of held-out real images: intact, and with their shapes destroyed."""

    whole: Mapping[str, Any]
    """By name; empty if too few were held out."""
    destroyed: Mapping[str, Mapping[str, Any]]
    """Name of the corruption -> scores by name."""

    @classmethod
    def of(cls, real: RealImages) -> SelfTest:
        """Score the held-out images like samples."""
        if (~real.reference).sum() <= NEIGHBOURS:
            return cls({}, {})
        destroyed = {name: asdict(scores) for name, scores in real.score_destroyed().items()}
        return cls(asdict(real.score_held_out()), destroyed)

    @property
    def best_destroyed(self) -> dict[str, float]:
        """The best of each score among destroyed images."""
        if not self.destroyed:
            return {}
        best = {name: max(scores[name] for scores in self.destroyed.values()) for name in QUALITY_SCORES}
        return best | {"frechet": min(scores["frechet"] for scores in self.destroyed.values())}

    def tells(self, name: str) -> bool:
        """Return whether this score of QUALITY_SCORES distinguishes intact images from destroyed ones."""
        can_read = bool(self.whole) and self.whole["accuracy"] >= MIN_REAL_ACCURACY
        return can_read and self.best_destroyed[name] < self.whole[name] / 2

    def informative_scores(self, scores: Scores) -> dict[str, Any]:
        """Return the scores by name; those that say nothing on these images are None."""
        names = [name for name in QUALITY_SCORES if not self.tells("accuracy") or not self.tells(name)]
        return asdict(scores) | dict.fromkeys(names)

    def __str__(self) -> str:
        """Describe how reliable the scores are on these images, in a sentence."""
        if not self.whole:
            return f"no verdict: none can be held out of fewer than {HELD_OUT} real images a class"
        destroyed = ", ".join(f"{name} {scores['accuracy']:.0%}" for name, scores in self.destroyed.items())
        summary = f"the classifier recognises {self.whole['accuracy']:.0%} of held-out real images"
        if self.tells("accuracy"):
            return f"{summary}; with their shapes destroyed few: {destroyed}"
        return f"no verdict: {summary}, and with their shapes destroyed: {destroyed}. It hardly sees shapes here"


def self_test(images: np.ndarray, labels: np.ndarray) -> SelfTest:
    """Return the self-test of real images (N, H, W, C) uint8 with labels (N,); N at least MIN_IMAGES."""
    return SelfTest.of(RealImages.of(_averaged(images), labels))


class ImagesJudge:
    """Scores of images against real ones of the same size; needs no network and no framework."""

    def __init__(self, reference: ImageSet) -> None:
        """Raise ConfigError for a reference with statistics only, or with too few images."""
        if not reference.count:
            raise ConfigError(
                f"{reference.what} holds statistics of the Inception's features and no images, so it needs "
                f"--inception. {INCEPTION}"
            )
        if reference.count < MIN_IMAGES:
            raise ConfigError(
                f"{reference.what} has {reference.count} image(s), and scores without --inception need at least "
                f"{MIN_IMAGES}. Use more."
            )
        self._reference = reference

    def check(self, images: Candidates) -> None:
        reference = self._reference
        check_size(reference, images)
        check_count(images)
        self._by_class = reference.labels is not None and images.num_labels > 0
        if self._by_class:
            _check_classes(reference, images)
        classes, named = reference.classes, images.classes if reference.classes else ()
        self._numbers = [classes.index(name) for name in named] if self._by_class else []
        self._grey = 1 in (reference.shape[2], images.shape[2])
        chosen = np.unique(np.linspace(0, reference.count - 1, MAX_REFERENCE_IMAGES).round().astype(int))
        self._real = RealImages.of(_pixels(reference, self._grey)[chosen], self._labels(reference)[chosen])
        self._test = SelfTest.of(self._real)

    def judge(self, samples: ImageSet) -> Judgement:
        reference, real, test = self._reference, self._real, self._test
        scores = real.score(_pixels(samples, self._grey), self._labels(samples, self._numbers))
        held_out = int((~real.reference).sum())
        what = {"what": reference.what, "images": len(real.pixels), "held out": held_out}
        notes = [*_notes(reference, held_out, scores.copies / samples.count), *cautions(samples, reference)]
        judgement = make_judgement(test.informative_scores(scores), test.whole, real, what, notes)
        return replace(judgement, destroyed=test.best_destroyed, tells=str(test))

    def _labels(self, images: ImageSet, numbers: Sequence[int] = ()) -> np.ndarray:
        """Return the reference's label of each image; ``numbers`` maps the images' labels to the reference's."""
        if not self._by_class or images.labels is None:
            return np.zeros(images.count, np.int64)
        return np.array(numbers)[images.labels] if numbers else images.labels


def make_judgement(
    scores: Mapping[str, Any],
    yardstick: Mapping[str, Any],
    real: RealImages,
    what: Mapping[str, Any],
    notes: Sequence[str],
) -> Judgement:
    """Return the judgement of images whose scores against ``real`` ones are ``scores``."""
    source = "pixels" if real.pixels.ndim == 2 else "shapes"
    space = f"principal components with {PCA_VARIANCE:.0%} of the variance of the reference's {source}"
    copies = {"copy_quantile": COPY_QUANTILE, "copy_distance": real.copy_distance}
    features = {"space": space, "components": len(real.space.components_), **copies}
    return Judgement(scores, yardstick, {**what, "scikit-learn": version("scikit-learn")}, features, notes)


def check_count(images: Candidates) -> None:
    """Raise ConfigError for too few images to score."""
    if images.count < MIN_IMAGES:
        raise ConfigError(
            f"{images.counted_by} gives {images.count} image(s), and variety within a class needs at least "
            f"{MIN_IMAGES}. Use more."
        )


def _check_classes(reference: ImageSet, images: Candidates) -> None:
    missing = [name for name in images.classes if name not in reference.classes]
    if missing and reference.classes:
        raise ConfigError(
            f"{reference.what} has no class {missing[0]!r}, which {images.what} has. Its folders are "
            f"{', '.join(reference.classes[:20])}."
        )
    count = len(reference.classes) or int(reference.labels.max()) + 1  # type: ignore[union-attr]
    if images.num_labels > count:
        raise ConfigError(
            f"{images.what} has {images.num_labels} classes, and {reference.what} has {count}. Name a reference of the "
            "same classes."
        )


def _notes(reference: ImageSet, held_out: int, copied: float) -> list[str]:
    notes = [
        f"the scores of real images are those of {held_out:,} that were held out, every {HELD_OUT}rd of a class: "
        "samples cannot be expected to be read better than these; of few images, some are near to each other by chance"
    ]
    if copied > COPIES_WORTH_A_NOTE:
        notes.insert(
            0,
            f"{copied:.0%} of the samples are nearly images of the reference: they show that the model has "
            "learned these by heart, and not what else it can draw",
        )
    if reference.count > MAX_REFERENCE_IMAGES:
        notes.append(
            f"{MAX_REFERENCE_IMAGES:,} of {reference.count:,} real images were used: a copy of another one is not found"
        )
    return notes


def _pixels(images: ImageSet, grey: bool) -> np.ndarray:
    """Return downscaled images, (N, H, W, C) float64 in [0, 1]; converted to grey if ``grey``."""
    return np.concatenate([_averaged(images, grey) for images in images.batches(256)])


def _averaged(images: np.ndarray, grey: bool = False) -> np.ndarray:
    times = -(-max(images.shape[1:3]) // SIDE)
    height, width = (side // times * times for side in images.shape[1:3])
    into = "n h w ()" if grey else "n h w c"
    return reduce(images[:, :height, :width] / 255, f"n (h a) (w b) c -> {into}", "mean", a=times, b=times)
