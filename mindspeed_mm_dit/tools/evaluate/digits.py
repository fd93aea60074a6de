"""Score generated digits against scikit-learn's 1,797 real ones: accuracy, variety and copies.

The feature space is fixed: the principal components of the real digits that hold 95 % of their variance (29 of 64), in
grey levels of 0 to 16. The classifier is that of scikit-learn's example for its digits, SVC(gamma=0.001), fitted on the
first 1,200 real ones; its accuracy on the other 597 is 97 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import cycle, islice

import numpy as np

from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.tools.evaluate.demo import DIGIT_OF, OFFSET_STEP, SEEN, UNSEEN, captions_of, read_digits
from mindspeed_mm_dit.tools.evaluate.evaluation import Candidates, Judgement, cautions
from mindspeed_mm_dit.tools.evaluate.image_set import ImageSet
from mindspeed_mm_dit.tools.evaluate.images_judge import check_count, make_judgement
from mindspeed_mm_dit.tools.evaluate.real_images import RealImages, Scores

FITTED_ON = 1200


def score_line(images: np.ndarray, labels: np.ndarray) -> str:
    """Return the last line of a run: the scores of ``images`` (N, 8, 8, 1) uint8 sampled for ``labels`` (N,)."""
    scores = score_digits(images, labels)
    return (
        f"digits score: {scores.accuracy:.1%} of {len(images)} samples are classified as the requested digit, "
        f"variety {scores.variety:.0%} of real digits', copies of training images: {scores.copies}"
    )


def cut_out(images: np.ndarray) -> np.ndarray:
    """Return the 8 x 8 pixels with most ink of images (N, H, W, 1) uint8, among the possible offsets of a digit."""
    squares = np.lib.stride_tricks.sliding_window_view(images, (1, 8, 8, 1))[:, ::OFFSET_STEP, ::OFFSET_STEP]
    squares = squares.reshape(len(images), -1, 8, 8, 1)
    return squares[np.arange(len(images)), squares.sum((2, 3, 4), dtype=np.int64).argmax(1)]


def digits_accuracy(images: np.ndarray, labels: np.ndarray) -> float:
    """Return the fraction of ``images`` (N, 8, 8, 1) uint8 that the classifier labels as ``labels`` (N,)."""
    reads = real_digits().reads
    assert reads is not None
    return float(np.mean(reads(pixels_of(images)) == labels))


def score_digits(images: np.ndarray, labels: np.ndarray) -> Scores:
    """Score ``images`` (N, 8, 8, 1) uint8 sampled for ``labels`` (N,); N at least MIN_IMAGES."""
    return real_digits().score(pixels_of(images), labels)


def scores_of_real_digits(count: int) -> Scores:
    """Return the scores of ``count`` real digits, or of all if there are fewer, as a baseline for generated ones.

    They are chosen evenly over the set. All of them count as copies, and precision is 1 for the same reason.
    """
    real = real_digits()
    chosen = np.unique(np.linspace(0, len(real.pixels) - 1, count).round().astype(int))
    images = np.round(real.pixels[chosen] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    return score_digits(images, real.labels[chosen])


@lru_cache(maxsize=1)
def real_digits() -> RealImages:
    """Return scikit-learn's digits with their principal components."""
    from sklearn.svm import SVC

    digits = read_digits()
    pixels, everyone = digits.images.reshape(-1, 64), np.ones(len(digits.labels), bool)
    classifier = SVC(gamma=0.001).fit(pixels[:FITTED_ON], digits.labels[:FITTED_ON])
    return RealImages.with_classifier(pixels, digits.labels, everyone, classifier.predict)


def pixels_of(images: np.ndarray) -> np.ndarray:
    """Return images (N, 8, 8, 1) uint8 as (N, 64) float64 in the data set's grey levels, [0, 16]."""
    return images.reshape(len(images), -1).astype(np.float64) * (16 / 255)


DIGITS = "digits"
"""Name of the built-in reference; write ./digits for a folder of that name."""
_SHAPE = (8, 8, 1)
_CLASSES = 10


class DigitsJudge:
    """Scores of digits against scikit-learn's real ones; needs no network and no framework."""

    def check(self, images: Candidates) -> None:
        if images.shape != _SHAPE:
            size = " x ".join(map(str, images.shape))
            raise ConfigError(
                f"--reference = {DIGITS} is for grey images of 8 x 8, and {images.what} has images of {size}. Name a "
                "reference of such images and --inception."
            )
        if not images.num_labels:
            raise ConfigError(f"{images.what} has no labels (arr_1), which --reference = {DIGITS} needs. Add them.")
        if images.num_labels > _CLASSES:
            raise ConfigError(
                f"{images.what} has labels up to {images.num_labels - 1}, and digits are 0 ... {_CLASSES - 1}. Name a "
                "reference of such images and --inception."
            )
        check_count(images)

    def judge(self, samples: ImageSet) -> Judgement:
        assert samples.labels is not None
        scores = score_digits(np.concatenate(list(samples.batches(1000))), samples.labels)
        yardstick = {**asdict(scores_of_real_digits(samples.count)), "copies": None}
        what = {"what": "the digits of scikit-learn, all 1,797"}
        return make_judgement(asdict(scores), yardstick, real_digits(), what, cautions(samples))


SAMPLES_PER_CAPTION = 20
"""Samples per digit, for each kind of phrasing."""
PHRASINGS = tuple(
    caption
    for patterns in (SEEN, UNSEEN)
    for digit in range(10)
    for caption in islice(cycle(captions_of(digit, patterns)), 5 * digit, 5 * digit + SAMPLES_PER_CAPTION)
)
"""The captions: each digit in every phrasing of UNSEEN, and in some of SEEN, which differ from digit to digit."""
_TRAINING_CAPTIONS = frozenset(caption for digit in range(10) for caption in captions_of(digit, SEEN))


@dataclass(frozen=True)
class CaptionedDigitsScores:
    """Fractions of samples that a classifier of real digits classifies as requested, in [0, 1]."""

    seen: float
    """For phrasings of the training set."""
    unseen: float
    """For other phrasings."""
    images: int
    """Number of images scored."""

    @property
    def line(self) -> str:
        """Return the last line of a run."""
        return (
            f"captioned digits score: of {self.images} images {self.seen:.1%} are classified as requested for "
            f"phrasings seen in training, {self.unseen:.1%} for phrasings never seen"
        )


def score_captioned_digits(images: np.ndarray, captions: Sequence[str]) -> CaptionedDigitsScores:
    """Score ``images`` (N, 8, 8, 1) uint8 sampled for ``captions`` (N,), of both kinds of phrasings.

    Raises:
        DataError: a caption is not a phrasing of the built-in digits.
    """
    for caption in captions:
        if caption not in DIGIT_OF:
            raise DataError(f"The caption {caption!r} names no known digit. Write it as in 'the number 7'.")
    digits = np.array([DIGIT_OF[caption] for caption in captions])
    is_seen = np.array([caption in _TRAINING_CAPTIONS for caption in captions])
    seen_accuracy, unseen_accuracy = (digits_accuracy(images[kind], digits[kind]) for kind in (is_seen, ~is_seen))
    return CaptionedDigitsScores(seen_accuracy, unseen_accuracy, len(images))
