"""Score samples of models of the demo data at the end of a run, moving digits among them.

Of a clip of moving digits: is the digit the requested one, and is the direction? The judge is a classifier of
scikit-learn's digits. It is fitted in a second, and is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.configs.source import format_sizes
from mindspeed_mm_dit.data.clip_reader import resize_levels
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.evaluate.demo import (
    CANVAS,
    CAPTIONS,
    DIRECTIONS,
    HELD_OUT,
    NAMES,
    OFFSETS,
    SHAPES,
    ZOOM,
    moving,
)
from mindspeed_mm_dit.tools.evaluate.digits import (
    FITTED_ON,
    PHRASINGS,
    cut_out,
    real_digits,
    score_captioned_digits,
    score_line,
)

Values = Mapping[str, Sequence[Any]]
DARK = 64
"""Levels below this do not count as ink, so that leftover noise is ignored."""
DIGIT, SIDE = 8, CANVAS // ZOOM
"""Rows and columns of a digit in scikit-learn, and of a clip at that scale."""
SMALL = tuple(sorted({(height // ZOOM, width // ZOOM) for _, height, width in SHAPES}))
"""(H, W) of all embedded clips at that scale."""


@dataclass(frozen=True)
class Judge:
    """Recognises samples of a built-in data set."""

    conditions: Values
    """For each condition, its value for every sample."""
    displayed: slice
    """The samples that the picture shows."""
    score: Callable[[np.ndarray, Values], str]
    """(samples, their conditions) -> a line with the number of samples that match."""


@dataclass(frozen=True)
class MovingDigitsScores:
    """Fractions of the generated clips that show what was requested, each in [0, 1]."""

    digit: float
    """Fraction that a classifier of real digits classifies as requested."""
    direction: float
    """Fraction whose ink moves in the requested direction, by at least half of a real clip's distance."""
    both: float
    """Fraction for which both is true; 1 in 40 by chance."""
    both_held_out: float | None
    """The same for captions that no clip of the training set has; None if there are none."""
    clips: int
    """Number of clips scored."""

    @property
    def line(self) -> str:
        """Return the last line of a run."""
        words = (
            f"moving digits score: {self.both:.1%} of {self.clips} clips show the requested digit moving as "
            f"requested (digit {self.digit:.1%}, direction {self.direction:.1%})"
        )
        if self.both_held_out is None:
            return words
        return f"{words}; of captions never trained on {self.both_held_out:.1%}"


def score_moving_digits(clips: np.ndarray, captions: Sequence[str]) -> MovingDigitsScores:
    """Score ``clips`` (N, F, H, W) uint8, grey, sampled for ``captions`` (N,); H and W are multiples of one of SMALL.

    Raises:
        DataError: clips are of another size, or a caption is none of CAPTIONS.
    """
    _small_of(clips)
    for caption in captions:
        if caption not in CAPTIONS:
            raise DataError(f"The caption {caption!r} names no digit and direction. Write it as in {CAPTIONS[0]!r}.")
    words = [caption.split() for caption in captions]
    digit = read_digits(clips) == [NAMES.index(name) for _, name, _, _ in words]
    direction = np.array(read_directions(clips)) == [direction for _, _, _, direction in words]
    both, held_out = digit & direction, np.isin(captions, HELD_OUT)
    return MovingDigitsScores(
        digit=float(digit.mean()),
        direction=float(direction.mean()),
        both=float(both.mean()),
        both_held_out=float(both[held_out].mean()) if held_out.any() else None,
        clips=len(clips),
    )


def digits_line(clips: np.ndarray, labels: Sequence[int]) -> str:
    """Return the last line of a run with clips (N, F, H, W) uint8 sampled for the digits ``labels`` (N,) alone."""
    accuracy = float((read_digits(clips) == labels).mean())
    moves = sum(direction is not None for direction in read_directions(clips)) / len(clips)
    return f"moving digits score: {accuracy:.1%} of {len(clips)} clips show the requested digit; {moves:.1%} move"


def read_digits(clips: np.ndarray) -> np.ndarray:
    """Return the digit that each of ``clips`` (N, F, H, W) uint8 is read as, (N,) int64."""
    return np.asarray(_classifier().predict(mean_ink(downscale(clips))))


def read_directions(clips: np.ndarray) -> list[str | None]:
    """Return the direction that the ink of each of ``clips`` (N, F, H, W) uint8 moves in, or None if it rests."""
    first, last = downscale(clips[:, [0, -1]]).transpose(1, 0, 2, 3)  # 2 x (N, 12, 12)
    moved = _centres(last) - _centres(first)  # (N, 2)
    return [_direction(rows, columns) for rows, columns in moved.tolist()]


def _direction(rows: float, columns: float) -> str | None:
    """Return the direction of a movement, by the larger of its two parts; None if it is too small."""
    if not max(abs(rows), abs(columns)) >= (SIDE - DIGIT) / 2:  # (without ink it is nan)
        return None
    vertical = abs(rows) > abs(columns)
    step = (int(np.sign(rows)), 0) if vertical else (0, int(np.sign(columns)))
    return next(name for name, known in DIRECTIONS.items() if known == step)


def _centres(frames: np.ndarray) -> np.ndarray:
    """Return row and column of the centre of mass of the ink of ``frames`` (N, H, W), as (N, 2); nan without ink."""
    ink = ink_levels(frames)
    with np.errstate(invalid="ignore"):
        weights = ink / ink.sum((1, 2), keepdims=True)
    return np.stack([weights.sum(2) @ np.arange(ink.shape[1]), weights.sum(1) @ np.arange(ink.shape[2])], 1)


def mean_ink(clips: np.ndarray) -> np.ndarray:
    """Return each clip's mean over its frames of the 8 x 8 pixels with most ink, (N, 64) in [0, 16]."""
    squares = np.lib.stride_tricks.sliding_window_view(clips, (1, 1, DIGIT, DIGIT))  # (N, F, h, w, 1, 1, 8, 8)
    N, F, h, w = squares.shape[:4]
    fullest = _most_ink(clips).reshape(N, F, h * w).argmax(2)
    chosen = squares[np.arange(N)[:, None], np.arange(F), fullest // w, fullest % w]  # (N, F, 1, 1, 8, 8)
    return ink_levels(chosen).mean(1).reshape(N, DIGIT * DIGIT) * (16 / 255)


def _small_of(clips: np.ndarray) -> tuple[int, int]:
    """Return the size in SMALL of which clips (N, F, H, W) are a multiple; raises DataError if there is none."""
    height, width = clips.shape[2:]
    for high, wide in SMALL:
        if height * wide == width * high and height % high == 0:
            return high, wide
    raise DataError(
        f"The clips are {height} x {width} pixels, and must be a multiple of {format_sizes(SMALL)}, where a digit has "
        f"its original {DIGIT} x {DIGIT} pixels. Those of the demo data are {ZOOM} times as large."
    )


def downscale(clips: np.ndarray) -> np.ndarray:
    """Return ``clips`` (N, F, H, W) scaled as those of a data set, (N, F, 12, 12) uint8 or another size in SMALL."""
    size = _small_of(clips)
    if clips.shape[2:] == size:
        return clips
    frames = np.repeat(clips.reshape(-1, *clips.shape[2:], 1), 3, 3)  # (N F, H, W, 3)
    return resize_levels(frames, size)[..., 0].reshape(*clips.shape[:2], *size)


def _most_ink(clips: np.ndarray) -> np.ndarray:
    """Return the ink in the 8 x 8 pixels that start at each row and column, (N, F, H - 7, W - 7)."""
    sums = np.pad(ink_levels(clips).cumsum(2).cumsum(3), ((0, 0), (0, 0), (1, 0), (1, 0)))
    rows = sums[:, :, DIGIT:] - sums[:, :, :-DIGIT]
    return rows[..., DIGIT:] - rows[..., :-DIGIT]


def ink_levels(levels: np.ndarray) -> np.ndarray:
    """Return ``levels`` as float64, without those below DARK."""
    return np.where(levels < DARK, 0, levels).astype(np.float64)


@lru_cache(maxsize=1)
def _classifier() -> Any:
    """Return an SVM fitted on clips of the first 1,200 real digits; its accuracy on the other 597 is 96 %."""
    from sklearn.svm import SVC

    real = real_digits()
    images = real.pixels[:FITTED_ON].reshape(-1, 8, 8)
    motions = list(product(DIRECTIONS, OFFSETS))
    clips = np.stack([moving(image, *motion)[::2, ..., 0] for motion in motions for image in images])
    return SVC(C=5.0, gamma=0.001).fit(mean_ink(downscale(clips)), np.tile(real.labels[:FITTED_ON], len(motions)))


_TWENTY_EACH = {"label": np.repeat(np.arange(10), 20).tolist()}
BUILT_IN: dict[tuple[str, ...], Judge] = {
    ("digits", "label"): Judge(
        _TWENTY_EACH, slice(None), lambda images, request: score_line(images, np.array(request["label"]))
    ),
    ("captioned_digits", "caption"): Judge(
        {"caption": PHRASINGS},
        slice(0, None, 25),
        lambda images, request: score_captioned_digits(images, request["caption"]).line,
    ),
    ("inverted_digits", "label"): Judge(
        _TWENTY_EACH,
        slice(None),
        lambda images, request: f"inverted, {score_line(255 - images, np.array(request['label']))}",
    ),
    ("digits_buckets", "label"): Judge(
        _TWENTY_EACH, slice(None), lambda images, request: score_line(cut_out(images), np.array(request["label"]))
    ),
    ("moving_digits", "label"): Judge(
        {"label": np.repeat(np.arange(10), 12).tolist()},
        slice(0, None, 12),
        lambda videos, request: digits_line(videos[..., 0], request["label"]),
    ),
    ("moving_digits", "caption"): Judge(
        {"caption": CAPTIONS * 3},
        slice(0, 40, 5),  # so that digits and directions differ
        lambda videos, request: score_moving_digits(videos[..., 0], request["caption"]).line,
    ),
}
BUILT_IN["moving_digits_buckets", "label"] = BUILT_IN["moving_digits", "label"]


def builtin_judge(source: str, items: Sequence[str]) -> Judge | None:
    """Return the judge for samples of a built-in data set, for a model with these conditions; None if there is none.

    Raises:
        PlatformError: scikit-learn, whose classifier it uses, is not installed.
    """
    judge = BUILT_IN.get((source, *items))
    if judge is not None:
        COMMANDS["evaluate"].check("evaluate")
    return judge
