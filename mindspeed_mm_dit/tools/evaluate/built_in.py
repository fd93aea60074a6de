"""What to sample and how to score it for models of built-in data, by ``source`` and condition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.tools.evaluate import demo
from mindspeed_mm_dit.tools.evaluate.digits import CAPTIONS, cut_out, score_captioned_digits, score_line
from mindspeed_mm_dit.tools.evaluate.moving_digits import digits_line, score_moving_digits

Values = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Judge:
    """Recognises samples of a built-in data set."""

    conditions: Values
    """For each condition, its value for every sample."""
    displayed: slice
    """The samples that the picture shows."""
    score: Callable[[np.ndarray, Values], str]
    """(samples, their conditions) -> a line with the number of samples that match."""


_TWENTY_EACH = {"label": np.repeat(np.arange(10), 20).tolist()}
BUILT_IN: dict[tuple[str, ...], Judge] = {
    ("digits", "label"): Judge(
        _TWENTY_EACH,
        slice(None),
        lambda images, request: score_line(images, np.array(request["label"])),
    ),
    ("captioned_digits", "caption"): Judge(
        {"caption": CAPTIONS},
        slice(0, None, 25),
        lambda images, request: score_captioned_digits(images, request["caption"]).line,
    ),
    ("inverted_digits", "label"): Judge(
        _TWENTY_EACH,
        slice(None),
        lambda images, request: f"inverted, {score_line(255 - images, np.array(request['label']))}",
    ),
    ("digits_buckets", "label"): Judge(
        _TWENTY_EACH,
        slice(None),
        lambda images, request: score_line(cut_out(images), np.array(request["label"])),
    ),
    ("moving_digits", "label"): Judge(
        {"label": np.repeat(np.arange(10), 12).tolist()},
        slice(0, None, 12),
        lambda videos, request: digits_line(videos[..., 0], request["label"]),
    ),
    ("moving_digits", "caption"): Judge(
        {"caption": demo.CAPTIONS * 3},
        slice(0, 40, 5),  # so that digits and directions differ
        lambda videos, request: score_moving_digits(videos[..., 0], request["caption"]).line,
    ),
}
BUILT_IN["moving_digits_buckets", "label"] = BUILT_IN["moving_digits", "label"]


def judge_of(source: str, items: Sequence[str]) -> Judge | None:
    """Return the judge for samples of a built-in data set, for a model with these conditions; None if there is none.

    Raises:
        PlatformError: scikit-learn, whose classifier it uses, is not installed.
    """
    judge = BUILT_IN.get((source, *items))
    if judge is not None:
        COMMANDS["evaluate"].check("evaluate")
    return judge
