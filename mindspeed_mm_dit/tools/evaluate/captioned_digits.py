"""Score digits sampled from captions: classification accuracy for phrasings of the training set, and for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.evaluate.demo.caption_phrases import DIGIT_OF, SEEN, UNSEEN, captions_of
from mindspeed_mm_dit.tools.evaluate.digits import digits_accuracy

EACH = 20
"""Samples per digit, for each kind of phrasing."""
CAPTIONS = tuple(
    caption
    for patterns in (SEEN, UNSEEN)
    for digit in range(10)
    for caption in islice(cycle(captions_of(digit, patterns)), 5 * digit, 5 * digit + EACH)
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
            raise DataError(f"caption {caption!r}", "names no known digit", "write it as in 'the number 7'")
    digits = np.array([DIGIT_OF[caption] for caption in captions])
    is_seen = np.array([caption in _TRAINING_CAPTIONS for caption in captions])
    seen_accuracy, unseen_accuracy = (digits_accuracy(images[kind], digits[kind]) for kind in (is_seen, ~is_seen))
    return CaptionedDigitsScores(seen_accuracy, unseen_accuracy, len(images))
