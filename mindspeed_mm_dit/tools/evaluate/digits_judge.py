"""The judge of generated digits: ``--reference digits``."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.evaluate.cautions import cautions
from mindspeed_mm_dit.tools.evaluate.digits import real_digits, score_digits, scores_of_real_digits
from mindspeed_mm_dit.tools.evaluate.evaluation import Candidates, Judgement
from mindspeed_mm_dit.tools.evaluate.image_set import ImageSet
from mindspeed_mm_dit.tools.evaluate.images_judge import check_count, judgement_of

DIGITS = "digits"
"""Name of the built-in reference; write ./digits for a folder of that name."""
_SHAPE = (8, 8, 1)
_CLASSES = 10


class DigitsJudge:
    """Scores of digits against scikit-learn's real ones; needs no network and no framework."""

    def check(self, images: Candidates) -> None:
        if images.shape != _SHAPE:
            size = " x ".join(map(str, images.shape))
            words = f"are real digits of 8 x 8, grey, and {images.what} has images of {size}"
            raise ConfigError(f"--reference = {DIGITS}", words, "name a reference of such images and --inception")
        if not images.num_labels:
            words = "has no labels (arr_1), which this score needs"
            raise ConfigError(images.what, words, "add them to the npz")
        if images.num_labels > _CLASSES:
            words = f"has labels up to {images.num_labels - 1}, and digits are 0 ... {_CLASSES - 1}"
            raise ConfigError(images.what, words, "name a reference of such images and --inception")
        check_count(images)

    def judge(self, samples: ImageSet) -> Judgement:
        assert samples.labels is not None
        scores = score_digits(np.concatenate(list(samples.batches(1000))), samples.labels)
        yardstick = {**asdict(scores_of_real_digits(samples.count)), "copies": None}
        what = {"what": "the digits of scikit-learn, all 1,797"}
        return judgement_of(asdict(scores), yardstick, real_digits(), what, cautions(samples))
