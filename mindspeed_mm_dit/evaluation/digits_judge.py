"""The judge of drawn digits: ``--reference digits``."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version

import numpy as np

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.evaluation.digits import (
    FEWEST_IMAGES,
    NEAREST_SHARE,
    VARIANCE_KEPT,
    real_digits,
    score_digits,
    scores_of_real_digits,
)
from mindspeed_mm_dit.evaluation.evaluation import Judgement
from mindspeed_mm_dit.evaluation.pictures import Pictures
from mindspeed_mm_dit.evaluation.traps import traps

DIGITS = "digits"
"""The reference of this name is the built-in one; a folder of that name is ./digits."""
_SHAPE = (8, 8, 1)


class DigitsJudge:
    """Scores of digits against scikit-learn's real ones; needs no network and no framework."""

    def check(self, what: str, shape: tuple[int, int, int], count: int, has_labels: bool) -> None:
        """Raise ConfigError unless ``count`` images of ``shape`` (H, W, C), which ``what`` names, can be scored."""
        flag = f"--reference = {DIGITS}"
        if shape != _SHAPE:
            words = f"are real digits of 8 x 8, grey, and {what} has images of {shape[0]} x {shape[1]} x {shape[2]}"
            raise ConfigError(flag, words, "name a reference of such images and --inception")
        if not has_labels:
            raise ConfigError(what, "has no labels (arr_1): what was asked for is not known", "add them to the npz")
        if count < FEWEST_IMAGES:
            raise ConfigError(
                what, f"{count} image(s): variety within a class wants at least {FEWEST_IMAGES}", "use more"
            )

    def judge(self, samples: Pictures) -> Judgement:
        """Score ``samples``."""
        assert samples.labels is not None
        found = score_digits(np.concatenate(list(samples.batches(1000))), samples.labels)
        return Judgement(
            scores=_numbers(asdict(found)), yardstick=_numbers(asdict(scores_of_real_digits(samples.count))),
            reference={"what": "the digits of scikit-learn, all 1,797", "scikit-learn": version("scikit-learn")},
            features={"space": f"principal components with {VARIANCE_KEPT:.0%} of the variance of the reference",
                      "components": real_digits().components.shape[1], "copy_quantile": NEAREST_SHARE,
                      "copy_distance": real_digits().copy_distance},
            notes=traps(samples),
        )  # fmt: skip


def _numbers(scores: dict[str, float]) -> dict[str, float | None]:
    """Leave out how many images there are: that is no score."""
    return {name: value for name, value in scores.items() if name != "images"}
