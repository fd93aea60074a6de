"""The embedded clips: scikit-learn's handwritten digits, each moving over a dark canvas, with a caption.

    annotation.json            path, cap, num_frames, fps and resolution of each clip, and the digit as its label
    videos/0000.mp4 ...        48 x 48 pixels, 9 frames, 8 a second
    tokenizer/, text_encoder/  an encoder of the captions (``small_text_encoder``)

"a seven moves left": the digit starts at the right edge, in a row drawn for it, and goes two pixels a frame. Of a few
captions there is no clip: what a network makes of them shows whether it learns digits and directions apart.

The canvas is a little brighter to the right, downwards and with time. Wan's positions are relative: over a black canvas
left and right, before and after look alike to a network, which then learns the axis of a motion and not its sign.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.data.builtin import read_digits, written_aside
from mindspeed_mm_dit.data.draws import philox
from mindspeed_mm_dit.data.small_text_encoder import write_text_encoder, write_tokenizer
from mindspeed_mm_dit.data.video_file import write_video

NUM_CLIPS = 1000
CANVAS, NUM_FRAMES, FPS = 48, 9, 8
"""Pixels of height and width; frames of a clip; frames a second."""
ZOOM, STEP = 4, 2
"""Pixels of one of the digits' own; pixels from one frame to the next: in NUM_FRAMES a digit crosses the canvas."""
PATH = CANVAS - 8 * ZOOM
"""Pixels from the first place of a digit to its last."""
LIGHT = 20
"""Levels of 255 that the canvas gains along each of frames, rows and columns; all three are less than ink is."""
PLACES = (0, PATH)
"""Rows that a digit moves left or right in, columns for up and down: few, so that little data teach them."""
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Steps (rows, columns) of each word."""
CAPTIONS = tuple(f"a {name} moves {direction}" for name in NAMES for direction in DIRECTIONS)
"""Every caption that there is."""
HELD_OUT = ("a zero moves left", "a three moves right", "a five moves up", "a eight moves down")
"""Captions of which no clip is written, though each of their words is in others."""


def write_moving_digits(folder: Path) -> None:
    """Write NUM_CLIPS clips, their annotation, and an encoder of the captions to ``folder``, which is not there.

    The same files each time, by one version of PyAV. Written aside and renamed, so a folder that is there is whole.
    """
    digits = read_digits()
    entries = []
    with written_aside(folder) as aside:
        (aside / "videos").mkdir(parents=True)
        for number, (image, digit) in enumerate(zip(digits.images[:NUM_CLIPS], digits.labels)):
            caption, direction, place = _draw(number, NAMES[digit])
            path = f"videos/{number:04d}.mp4"
            write_video(aside / path, moving(image, direction, place), FPS)
            entries.append(
                {
                    "path": path,
                    "cap": caption,
                    "num_frames": NUM_FRAMES,
                    "fps": FPS,
                    "resolution": {"height": CANVAS, "width": CANVAS},
                    "label": int(digit),
                }
            )
        (aside / "annotation.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        write_tokenizer(aside / "tokenizer", CAPTIONS)
        write_text_encoder(aside / "text_encoder", aside / "tokenizer")


def _draw(number: int, name: str) -> tuple[str, str, int]:
    """Return caption and direction of a clip of the digit ``name``, and the row or column that it moves in."""
    directions = [direction for direction in DIRECTIONS if f"a {name} moves {direction}" not in HELD_OUT]
    generator = philox((0, 0), (0, 0, number, 0))
    direction = directions[generator.integers(len(directions))]
    return f"a {name} moves {direction}", direction, int(generator.choice(PLACES))


def moving(image: np.ndarray, direction: str, place: int) -> np.ndarray:
    """Return frames (F, 48, 48, 3) uint8 of a digit (8, 8), levels 0 ... 16, drawn four times as large.

    place: 0 ... 16, its row for left and right, its column for up and down.
    """
    digit = np.round(np.kron(image, np.ones((ZOOM, ZOOM))) * (255 / 16)).astype(np.uint8)
    step, size = DIRECTIONS[direction], len(digit)
    frames = _light()
    for number, frame in enumerate(frames):
        row, column = (_place_along(way, number, place) for way in step)
        there = frame[row : row + size, column : column + size]
        np.maximum(there, digit[:, :, None], out=there)
    return frames


def _light() -> np.ndarray:
    """Return the empty canvas (F, 48, 48, 3) uint8: brighter to the right, downwards and with time."""
    along_f, along_h, along_w = (np.linspace(0, LIGHT, size) for size in (NUM_FRAMES, CANVAS, CANVAS))
    levels = along_f[:, None, None] + along_h[:, None] + along_w  # (F, 48, 48)
    return np.repeat(np.round(levels).astype(np.uint8)[..., None], 3, 3)


def _place_along(way: int, frame: int, place: int) -> int:
    """Return where along one axis a digit begins that moves ``way`` (-1, 0, 1) there."""
    if way == 0:
        return place
    return STEP * frame if way > 0 else PATH - STEP * frame
