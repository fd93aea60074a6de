"""Score examples/dit/moving_digits_i2v: begin clips with digits that no training clip shows, and judge how they go on.

python benchmarks/moving_digits_i2v.py outputs/moving_digits_i2v/checkpoints picture.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.data.clip_reader import resize_levels
from mindspeed_mm_dit.sampling.outputs import draw_strips
from mindspeed_mm_dit.tools.evaluate.demo import DIRECTIONS, NAMES, NUM_CLIPS, OFFSETS, moving, read_digits
from mindspeed_mm_dit.tools.evaluate.demo_judges import DIGIT, downscale, ink_levels, mean_ink, read_directions
from mindspeed_mm_dit.tools.evaluate.digits import real_digits

CLIPS, SHOWN = 120, 8


def asked(count: int) -> tuple[np.ndarray, list[str]]:
    """Return first frames (N, 12, 12) uint8 of unseen digits, each in a corner, and captions."""
    digits, ways = read_digits(), [(direction, place) for direction in DIRECTIONS for place in OFFSETS]
    rows = range(NUM_CLIPS, NUM_CLIPS + count)
    chosen = [ways[number % len(ways)] for number in range(count)]
    frames = np.stack([moving(digits.images[row], *way)[0] for row, way in zip(rows, chosen)])  # (N, 48, 48, 3)
    captions = [f"a {NAMES[digits.labels[row]]} moves {way[0]}" for row, way in zip(rows, chosen)]
    return resize_levels(frames, (12, 12))[..., 0], captions


@dataclass(frozen=True)
class BegunScores:
    """How far generated clips keep the digit of the frame that they were given, and move as asked."""

    kept: float
    """Fraction whose later frames are nearer to the given digit than to another real one of its class, drawn at random;
    a half by chance, if only the class is kept."""
    direction: float
    """Fraction whose ink moves in the direction asked for."""
    distance: float
    """Mean distance of the later frames' digit to the given one, in units of a pixel's level, 0 ... 16."""
    distance_of_others: float
    """The same to the other digit of the class."""
    clips: int
    """Number of clips scored."""

    @property
    def line(self) -> str:
        """Return the scores in words."""
        return (
            f"moving digits score: {self.kept:.1%} of {self.clips} clips keep the digit they were given (distance "
            f"{self.distance:.1f}; to another of its class {self.distance_of_others:.1f}), "
            f"{self.direction:.1%} move as asked"
        )


def score_begun(clips: np.ndarray, captions: Sequence[str], given: np.ndarray) -> BegunScores:
    """Score ``clips`` (N, F, H, W) uint8, grey, that were asked to begin with the frames ``given`` (N, H, W).

    captions (N,): as in CAPTIONS. Raises DataError for clips of another size.
    """
    real, draw = real_digits(), np.random.default_rng(0)
    classes = [NAMES.index(caption.split()[1]) for caption in captions]
    others = [draw.choice(real.pixels[real.labels == label]).reshape(DIGIT, DIGIT) for label in classes]
    frames = np.stack([moving(image, "right", OFFSETS[0])[0, ..., 0] for image in others])  # (N, 48, 48)
    digits = (mean_ink(downscale(some[:, None])) * (255 / 16) for some in (given, frames))  # 2 x (N, 64)
    own, other = (_distances(downscale(clips[:, 1:]), some.reshape(-1, DIGIT, DIGIT)) for some in digits)
    moves = np.array(read_directions(clips)) == [caption.split()[-1] for caption in captions]
    return BegunScores(
        float((own < other).mean()), float(moves.mean()), float(own.mean()), float(other.mean()), len(clips)
    )


def _distances(clips: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """Return how far the ink of each clip (N, F, H, W) is from a digit (N, 8, 8), wherever it stands in a frame, (N,).

    In a digit's own levels, 0 ... 16: the root mean square over its pixels, and the mean over the frames.
    """
    ink = np.pad(ink_levels(clips), ((0, 0), (0, 0), (2, 2), (2, 2)))  # a digit's edge is often empty
    squares = np.lib.stride_tricks.sliding_window_view(ink, (1, 1, DIGIT, DIGIT))[..., 0, 0, :, :]  # (N, F, h, w, 8, 8)
    squared = ((squares - ink_levels(digits)[:, None, None, None]) ** 2).mean((-2, -1))  # (N, F, h, w)
    return np.asarray(np.sqrt(squared.min((2, 3))).mean(1) * (16 / 255))


def main(checkpoint: str, picture: str) -> None:
    """Draw, print the score, and write strips of the first clips."""
    frames, captions = asked(CLIPS)
    pipe = dit.load(checkpoint)
    clips = pipe.sample(prompts=captions, image=[frame[..., None] for frame in frames], steps=20, guidance=2.0).arrays
    print(score_begun(clips[..., 0], captions, frames).line)
    strips = np.concatenate([frames[:SHOWN, None, ..., None], clips[:SHOWN]], 1)
    draw_strips(strips, captions[:SHOWN]).save(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
