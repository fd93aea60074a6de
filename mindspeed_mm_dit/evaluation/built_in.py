"""What to sample and how to score it for models of built-in data, by ``source`` and condition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.data import moving_digits
from mindspeed_mm_dit.evaluation.captioned_digits import ASKED, score_captioned_digits
from mindspeed_mm_dit.evaluation.digits import cut_out, score_line
from mindspeed_mm_dit.evaluation.moving_digits import digits_line, score_moving_digits

Values = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class BuiltIn:
    """A data set whose samples a program can recognise."""

    asked: Values
    """What to sample: for each condition, its value for every sample."""
    shown: slice
    """Which of the samples the picture shows."""
    score: Callable[[np.ndarray, Values], str]
    """(samples, what was asked for) -> a line that tells how many show it."""


_TWENTY_EACH = {"label": np.repeat(np.arange(10), 20).tolist()}
BUILT_IN = {
    ("digits", "label"): BuiltIn(
        _TWENTY_EACH,
        slice(None),
        lambda images, asked: score_line(images, np.array(asked["label"])),
    ),
    ("captioned_digits", "caption"): BuiltIn(
        {"caption": ASKED},
        slice(0, None, 25),
        lambda images, asked: score_captioned_digits(images, asked["caption"]).line,
    ),
    ("inverted_digits", "label"): BuiltIn(
        _TWENTY_EACH,
        slice(None),
        lambda images, asked: f"inverted, {score_line(255 - images, np.array(asked['label']))}",
    ),
    ("digits_buckets", "label"): BuiltIn(
        _TWENTY_EACH,
        slice(None),
        lambda images, asked: score_line(cut_out(images), np.array(asked["label"])),
    ),
    ("moving_digits", "label"): BuiltIn(
        {"label": np.repeat(np.arange(10), 12).tolist()},
        slice(0, None, 12),
        lambda videos, asked: digits_line(videos[..., 0], asked["label"]),
    ),
    ("moving_digits", "caption"): BuiltIn(
        {"caption": moving_digits.CAPTIONS * 3},
        slice(0, 40, 5),  # so that digits and directions differ
        lambda videos, asked: score_moving_digits(videos[..., 0], asked["caption"]).line,
    ),
}
BUILT_IN["moving_digits_buckets", "label"] = BUILT_IN["moving_digits", "label"]
