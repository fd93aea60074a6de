"""Score examples/dit/moving_digits_i2v: begin clips with digits that no training clip shows, and judge how they go on.

python benchmarks/moving_digits_i2v.py outputs/moving_digits_i2v/checkpoints picture.png
"""

from __future__ import annotations

import sys

import numpy as np

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.data.frames import resize_levels
from mindspeed_mm_dit.sampling.video_files import draw_strips
from mindspeed_mm_dit.wings.scores.demo.digits import read_digits
from mindspeed_mm_dit.wings.scores.demo.moving_digits import DIRECTIONS, NAMES, NUM_CLIPS, PLACES, moving
from mindspeed_mm_dit.wings.scores.moving_digits import score_begun

CLIPS, SHOWN = 120, 8


def asked(count: int) -> tuple[np.ndarray, list[str]]:
    """Return first frames (N, 12, 12) uint8 of unseen digits, each in a corner, and captions."""
    digits, ways = read_digits(), [(direction, place) for direction in DIRECTIONS for place in PLACES]
    rows = range(NUM_CLIPS, NUM_CLIPS + count)
    chosen = [ways[number % len(ways)] for number in range(count)]
    frames = np.stack([moving(digits.images[row], *way)[0] for row, way in zip(rows, chosen)])  # (N, 48, 48, 3)
    captions = [f"a {NAMES[digits.labels[row]]} moves {way[0]}" for row, way in zip(rows, chosen)]
    return resize_levels(frames, (12, 12))[..., 0], captions


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
