"""Score digits sampled from captions: how many are read as asked, in phrasings of the training set and in others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.evaluate.demo.caption_phrases import DIGIT_OF, SEEN, UNSEEN, captions_of
from mindspeed_mm_dit.tools.evaluate.digits import digits_accuracy

EACH = 20
"""Samples of each digit that are asked for in phrasings of either kind."""
ASKED = tuple(
    caption
    for patterns in (SEEN, UNSEEN)
    for digit in range(10)
    for caption in islice(cycle(captions_of(digit, patterns)), 5 * digit, 5 * digit + EACH)
)
"""The captions: each digit in every phrasing of UNSEEN, and in some of SEEN, which differ from digit to digit."""
_SEEN = frozenset(caption for digit in range(10) for caption in captions_of(digit, SEEN))


@dataclass(frozen=True)
class CaptionedDigitsScores:
    """Fractions of samples that a classifier of real digits reads as the digit asked for, in [0, 1]."""

    seen: float
    """In phrasings of the training set."""
    unseen: float
    """In others."""
    images: int
    """Number of images scored."""

    @property
    def line(self) -> str:
        """Return the last line of a run."""
        return (
            f"captioned digits score: of {self.images} images {self.seen:.1%} are read as asked in phrasings seen in "
            f"training, {self.unseen:.1%} in phrasings never seen"
        )


def score_captioned_digits(images: np.ndarray, captions: Sequence[str]) -> CaptionedDigitsScores:
    """Score ``images`` (N, 8, 8, 1) uint8 sampled for ``captions`` (N,), of both kinds of phrasings.

    Raises:
        DataError: a caption is no phrasing of the embedded digits.
    """
    for caption in captions:
        if caption not in DIGIT_OF:
            raise DataError(f"caption {caption!r}", "asks for no digit that is known", "say it as in 'the number 7'")
    digits, seen = np.array([DIGIT_OF[own] for own in captions]), np.array([own in _SEEN for own in captions])
    of_seen, of_unseen = (digits_accuracy(images[kind], digits[kind]) for kind in (seen, ~seen))
    return CaptionedDigitsScores(of_seen, of_unseen, len(images))
