"""The built-in clips: scikit-learn's handwritten digits, each moving over a dark canvas, with a caption.

    annotation.json            path, cap, num_frames, fps and resolution of each clip, and the digit as its label
    videos/0000.mp4 ...        48 x 48 pixels, 9 frames, 8 per second; SHAPES for ``moving_digits_buckets``
    tokenizer/, text_encoder/  an encoder of the captions (``small_text_encoder``)

"a seven moves left": the digit starts at the right edge, in a random row, and moves two pixels per frame, in larger
shapes across the whole canvas. A few captions have no clip: samples for them show whether a network has learned digits
and directions separately.

The canvas gets a little brighter to the right, downwards and with time. Wan's position embeddings are relative: over a
black canvas left and right, before and after look alike to a network, which then learns the axis of a motion but not
its sign.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.buckets import Shape
from mindspeed_mm_dit.data.builtin import BuiltinData, written_aside
from mindspeed_mm_dit.data.draws import philox
from mindspeed_mm_dit.data.video_file import write_video
from mindspeed_mm_dit.tools.evaluate.demo.caption_phrases import NAMES as NAMES
from mindspeed_mm_dit.tools.evaluate.demo.digits import read_digits
from mindspeed_mm_dit.tools.evaluate.demo.small_text_encoder import write_text_encoder, write_tokenizer

NUM_CLIPS = 1000
CANVAS, NUM_FRAMES, FPS = 48, 9, 8
"""Height and width in pixels; frames of a clip; frames per second."""
SHAPE = (NUM_FRAMES, CANVAS, CANVAS)
"""(F, H, W) of ``moving_digits``."""
SHAPES = tuple((frames, *size) for frames in (NUM_FRAMES, 17) for size in ((CANVAS, CANVAS), (32, 64), (64, 32)))
"""The shapes of ``moving_digits_buckets``. Along an axis where the canvas is no larger than a digit, none moves."""
ZOOM = 4
"""Pixels of a clip per pixel of a digit, in height and width."""
LIGHT = 20
"""Levels, of 255, that the canvas gains along frames, rows and columns each; all three add up to less than ink."""
OFFSETS = (0, CANVAS - 8 * ZOOM)
"""Rows in which a digit moves left or right, columns for up and down: few, so that little data suffices."""
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Steps (rows, columns) of each word."""
CAPTIONS = tuple(f"a {name} moves {direction}" for name in NAMES for direction in DIRECTIONS)
"""Every possible caption."""
HELD_OUT = ("a zero moves left", "a three moves right", "a five moves up", "a eight moves down")
"""Captions without a clip, though each of their words occurs in others."""


def write_moving_digits(folder: Path, shapes: Sequence[Shape] = (SHAPE,)) -> None:
    """Write NUM_CLIPS clips, their annotation, and a text encoder to ``folder``, which must not exist.

    shapes: each clip gets a random one, by its number.
    A given version of PyAV writes the same files each time. The folder is written aside and renamed, so if it exists it
    is complete.
    """
    digits = read_digits()
    entries = []
    with written_aside(folder) as aside:
        (aside / "videos").mkdir(parents=True)
        for number, (image, digit) in enumerate(zip(digits.images[:NUM_CLIPS], digits.labels)):
            shape = shapes[philox((0, 4), (0, 0, number, 0)).integers(len(shapes))]
            caption, direction, offset = _draw(number, NAMES[digit], shape)
            path = f"videos/{number:04d}.mp4"
            write_video(aside / path, moving(image, direction, offset, shape), FPS)
            entries.append(
                {
                    "path": path,
                    "cap": caption,
                    "num_frames": shape[0],
                    "fps": FPS,
                    "resolution": {"height": shape[1], "width": shape[2]},
                    "label": int(digit),
                }
            )
        (aside / "annotation.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        write_tokenizer(aside / "tokenizer", CAPTIONS)
        write_text_encoder(aside / "text_encoder", aside / "tokenizer")


def _draw(number: int, name: str, shape: Shape = SHAPE) -> tuple[str, str, int]:
    """Draw caption and direction of a clip of the digit ``name``, and the row or column that it moves in."""
    directions = [
        direction for direction, step in DIRECTIONS.items()
        if f"a {name} moves {direction}" not in HELD_OUT and np.dot(np.abs(step), _travel(shape))
    ]  # fmt: skip
    generator = philox((0, 0), (0, 0, number, 0))
    direction = directions[generator.integers(len(directions))]
    across = _travel(shape)[DIRECTIONS[direction][0] != 0]
    return f"a {name} moves {direction}", direction, min(int(generator.choice(OFFSETS)), across)


def _travel(shape: Shape) -> tuple[int, int]:
    """Return how many pixels a digit can move, in rows and columns."""
    return shape[1] - 8 * ZOOM, shape[2] - 8 * ZOOM


def moving(image: np.ndarray, direction: str, offset: int, shape: Shape = SHAPE) -> np.ndarray:
    """Return frames (F, H, W, 3) uint8 of a moving digit (8, 8), levels 0 ... 16, drawn four times as large.

    offset: 0 ... 16, its row for left and right, its column for up and down.
    """
    digit = np.round(np.kron(image, np.ones((ZOOM, ZOOM))) * (255 / 16)).astype(np.uint8)
    step, size = DIRECTIONS[direction], len(digit)
    frames = _light(shape).copy()
    for number, frame in enumerate(frames):
        along = number / (len(frames) - 1)
        row, column = (_offset_along(sign, along, offset, travel) for sign, travel in zip(step, _travel(shape)))
        region = frame[row : row + size, column : column + size]
        np.maximum(region, digit[:, :, None], out=region)
    return frames


@cache
def _light(shape: Shape) -> np.ndarray:
    """Return the empty canvas (F, H, W, 3) uint8: brighter to the right, downwards and with time."""
    along_f, along_h, along_w = (np.linspace(0, LIGHT, size) for size in shape)
    levels = along_f[:, None, None] + along_h[:, None] + along_w  # (F, H, W)
    return np.repeat(np.round(levels).astype(np.uint8)[..., None], 3, 3)


def _offset_along(sign: int, along: float, offset: int, travel: int) -> int:
    """Return a digit's offset on one axis after the fraction ``along`` of its ``travel``; sign: -1, 0 or 1."""
    if sign == 0:
        return offset
    return round(along * travel if sign > 0 else (1 - along) * travel)


MOVING_DIGITS = BuiltinData(write_moving_digits)
MOVING_DIGITS_BUCKETS = BuiltinData(partial(write_moving_digits, shapes=SHAPES))
