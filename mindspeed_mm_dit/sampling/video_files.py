"""Save videos as video files, animations, strips of frames, or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mindspeed_mm_dit.data.video_file import pyav, write_video
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.sampling.fonts import drawable
from mindspeed_mm_dit.sampling.grid import to_pil_image

FPS = 16.0
"""Frames per second of written videos: Wan's."""
MOST_FPS = {".gif": 50}
"""A GIF counts in hundredths of a second, and frames shorter than two of them are shown ten times as long."""
ANIMATIONS = (".mp4", ".gif")
ENDINGS = (*ANIMATIONS, ".png", ".npz")
"""Endings of the files that ``save_clips`` writes, in upper or lower case."""
GAP_PIXELS, CELL_PIXELS, CAPTION_PIXELS = 2, 48, 18
ANIMATION_PIXELS = 192
"""Smaller animations are enlarged, pixel by pixel, to at least this height."""
MOST_PIXELS = 1 << 28
"""Most pixels in a picture of strips."""


def check_clips_file(path: Path, count: int, size: tuple[int, int, int]) -> None:
    """Raise ConfigError if ``count`` videos of ``size`` (F, H, W) cannot be written to ``path``.

    Raises PlatformError if PyAV is needed and missing.
    """
    ending, (frames, height, width) = path.suffix.lower(), size
    if ending not in ENDINGS:
        raise ConfigError(f"--output = {path}", f"unknown ending {path.suffix!r}", f"use one of {', '.join(ENDINGS)}")
    if ending == ".mp4":
        pyav()
        if height % 2 or width % 2:
            reason = f"MPEG-4 needs even height and width, and a frame is {height} x {width}"
            raise ConfigError(f"--output = {path}", reason, "use .gif, .png or .npz")
    if ending == ".png" and count * frames * height * width > MOST_PIXELS:
        raise ConfigError(f"--output = {path}", f"{count} videos make too large a picture", "use .mp4, .gif or .npz")


def save_clips(path: Path, clips: np.ndarray, titles: Sequence[str], fps: float) -> list[Path]:
    """Write videos (N, F, H, W, 3 or 1) uint8 and return the files.

    ``.npz``: arr_0 is the videos, arr_1 their titles. ``.png``: a row of frames for each, below its title. ``.mp4`` and
    ``.gif``: one file per video, numbered if there are several.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ending = path.suffix.lower()
    if ending == ".npz":
        with open(path, "wb") as stream:  # given a name, NumPy would append .npz to .NPZ
            np.savez(stream, clips, np.array(titles))
        return [path]
    if ending == ".png":
        draw_strips(clips, titles).save(path)
        return [path]
    paths = [path] if len(clips) == 1 else [path.with_stem(f"{path.stem}-{n:04d}") for n in range(len(clips))]
    for file, clip in zip(paths, clips):
        (write_video if ending == ".mp4" else _write_gif)(file, _enlarged(clip), fps)
    return paths


def _enlarged(clip: np.ndarray) -> np.ndarray:
    """Return the frames (F, H, W, 3) of a video (F, H, W, 3 or 1), enlarged enough to be looked at."""
    scale = max(1, -(-ANIMATION_PIXELS // clip.shape[1]))
    return np.broadcast_to(clip, (*clip.shape[:3], 3)).repeat(scale, 1).repeat(scale, 2)


def draw_strips(clips: np.ndarray, titles: Sequence[str], least: int = CELL_PIXELS) -> Image.Image:
    """Lay out videos (N, F, H, W, 3 or 1) uint8: frames of at least ``least`` pixels side by side, below each title."""
    _, frames, height, width = clips.shape[:4]
    scale = max(1, -(-least // height))
    step_x, step_y = width * scale + GAP_PIXELS, height * scale + GAP_PIXELS + CAPTION_PIXELS
    picture = Image.new("RGB", (frames * step_x, len(clips) * step_y), "white")
    pen = ImageDraw.Draw(picture)
    for row, (clip, title) in enumerate(zip(clips, titles)):
        text, font = _fit_caption(title, picture.width)
        pen.text((2, row * step_y), text, fill="black", font=font)
        for column, frame in enumerate(clip):
            cell = to_pil_image(frame).resize((width * scale, height * scale), Image.Resampling.NEAREST)
            picture.paste(cell, (column * step_x, row * step_y + CAPTION_PIXELS))
    return picture


def _fit_caption(caption: str, width: int) -> tuple[str, Any]:
    """Return ``caption``, cut to ``width`` pixels, and a font; question marks replace letters that no font has."""
    text, font = drawable(caption)
    if font.getlength(text) <= width - 4:
        return text, font
    while text and font.getlength(text + "...") > width - 4:
        text = text[:-1]
    return text + "...", font


def _write_gif(path: Path, frames: np.ndarray, fps: float) -> None:
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(path, save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
