"""Write samples as arrays, pictures, an HTML page, videos or a folder of images, depending on the output's ending."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mindspeed_mm_dit.configs.files import error_text
from mindspeed_mm_dit.configs.limits import check_between, expand_path, number
from mindspeed_mm_dit.configs.run import check_output_file, check_output_folder
from mindspeed_mm_dit.data.video_file import pyav, write_video
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.pages import write
from mindspeed_mm_dit.sampling.pictures import ENDINGS, check_size, draw_grid, font_for, stacked, to_pil_image
from mindspeed_mm_dit.sampling.request import naming_arguments


def draw_samples(samples: np.ndarray, titles: Sequence[str], per_title: int | None = None) -> Image.Image:
    """Lay out images (N, H, W, C) in rows by title, or videos (N, F, H, W, C) as strips of their frames; uint8."""
    return draw_grid(samples, titles, per_title) if samples.ndim == 4 else draw_strips(samples, titles)


def draw_sizes(parts: Sequence[np.ndarray], titles: Sequence[str], per_title: int | None = None) -> Image.Image:
    """Lay out samples with ``titles`` in one or several sizes; each of ``parts`` as for ``draw_samples``.

    Images with distinct titles are shown side by side in all sizes; others are stacked, size by size.
    """
    if all(samples.ndim == 4 for samples in parts) and len(set(titles)) == len(titles):
        return draw_grid([image for samples in parts for image in samples], [*titles] * len(parts))
    return stacked([draw_samples(samples, titles, per_title) for samples in parts])


def png_of(image: np.ndarray) -> bytes:
    """Return an image (H, W, 3 or 1) uint8 as a PNG."""
    png = io.BytesIO()
    to_pil_image(image).save(png, "PNG")
    return png.getvalue()


def save_each(folder: Path, images: np.ndarray, labels: np.ndarray | None, titles: Sequence[str]) -> None:
    """Write images (N, H, W, 3 or 1) uint8 as ``NUMBER_LABEL.png``: 000012_7.png is image 12, of class 7.

    Without labels, an image is ``NUMBER.png``, and its title is in ``NUMBER.txt``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for index, (image, title) in enumerate(zip(images, titles)):
        name = f"{index:06d}" if labels is None else f"{index:06d}_{labels[index]}"
        (folder / f"{name}.png").write_bytes(png_of(image))
        if labels is None:
            (folder / f"{name}.txt").write_text(title + "\n", encoding="utf-8")


MAX_PICTURES = 2000
"""Most images on one page; at 256 x 256 pixels they take some 300 MB."""
SIDE_PIXELS = 96
"""Smaller images are shown enlarged to at least this."""


def write_gallery(
    path: Path,
    pngs: Sequence[bytes],
    size: Sequence[int],
    classes: Sequence[str],
    seed: int,
    settings: Mapping[str, str],
) -> None:
    """Write a page of images: PNGs of ``size`` (H, W), in the order in which they were generated, grouped by class.

    classes: a caption of each image. settings: other settings that determine the images, by name.
    """
    groups: dict[str, list[tuple[int, bytes]]] = {}
    for index, (png, caption) in enumerate(zip(pngs, classes)):
        groups.setdefault(caption, []).append((index, png))
    width = size[1] * max(1, -(-SIDE_PIXELS // min(size)))
    write(path, "gallery.html", title="Samples", groups=groups, width=width, seed=seed, settings=settings)


FPS = 16.0
"""Frames per second of written videos: Wan's."""
MAX_FPS = {".gif": 50}
"""A GIF counts in hundredths of a second, and frames shorter than two of them are shown ten times as long."""
ANIMATIONS = (".mp4", ".gif")
CLIP_ENDINGS = (*ANIMATIONS, ".png", ".npz")
"""Endings of the files that ``save_clips`` writes, in upper or lower case."""
GAP_PIXELS, CELL_PIXELS, CAPTION_PIXELS = 2, 48, 18
ANIMATION_PIXELS = 192
"""Smaller animations are enlarged, pixel by pixel, to at least this height."""
MAX_VIDEO_PIXELS = 1 << 28
"""Most pixels in a picture of strips."""


def check_clips_file(path: Path, count: int, size: tuple[int, int, int]) -> None:
    """Raise ConfigError if ``count`` videos of ``size`` (F, H, W) cannot be written to ``path``.

    Raises PlatformError if PyAV is needed and missing.
    """
    ending, (frames, height, width) = path.suffix.lower(), size
    if ending not in CLIP_ENDINGS:
        raise ConfigError(f"--output = {path} must end in one of {', '.join(CLIP_ENDINGS)}.")
    if ending == ".mp4":
        pyav()
        if height % 2 or width % 2:
            raise ConfigError(
                f"--output = {path} is MPEG-4, which needs even height and width, and a frame is {height} x {width}. "
                "Use .gif, .png or .npz."
            )
    if ending == ".png" and count * frames * height * width > MAX_VIDEO_PIXELS:
        raise ConfigError(
            f"--output = {path} would be too large, with all frames of {count} videos in one picture. Use .mp4, .gif "
            "or .npz."
        )


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
    text, font = font_for(caption)
    if font.getlength(text) <= width - 4:
        return text, font
    while text and font.getlength(text + "...") > width - 4:
        text = text[:-1]
    return text + "...", font


def _write_gif(path: Path, frames: np.ndarray, fps: float) -> None:
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(path, save_all=True, append_images=others, duration=round(1000 / fps), loop=0)


PAGE = ".html"


@dataclass(frozen=True, repr=False)
class GeneratedSamples(Sequence[Any]):
    """Generated samples: a sequence of PIL images or, from a video model, of lists of frames."""

    arrays: np.ndarray
    """(N, H, W, 3 or 1) uint8, or for videos (N, F, H, W, 3 or 1)."""
    titles: tuple[str, ...]
    """What each sample should show: the name of its class, or its prompt."""
    labels: np.ndarray | None
    """(N,) int64; None if no classes were requested."""
    seed: int
    """The seed that they were generated with."""
    path: np.ndarray | None = None
    """(N, points, H, W, 3 or 1) uint8, or for videos (N, points, F, ...): states of the trajectory from noise, the last
    of which are the samples; None if ``path`` was not requested."""

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, number: Any) -> Any:
        """Return sample ``number``, or a list of them for a slice."""
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        sample = self.arrays[number]
        return to_pil_image(sample) if sample.ndim == 3 else [to_pil_image(frame) for frame in sample]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def grid(self) -> Image.Image:
        """Return one picture of all samples: a row for each class or prompt, or a strip of frames for each video."""
        return draw_samples(self.arrays, self.titles)

    @naming_arguments()
    def save(self, path: str | Path, fps: float = FPS) -> str:
        """Write the samples as ``mm-dit sample --output PATH`` does, and return the names of the files.

        path: ``.png``, ``.jpg``, ``.npz``, ``.html``, or ``FOLDER/``; videos: ``.mp4``, ``.gif``, ``.png``, ``.npz``.
        """
        output = Output(expand_path("path", path), number("fps", fps, 0.1, 1000))
        output.check(self.titles, self.arrays.shape[1:-1])
        return output.save(self, {})

    def __repr__(self) -> str:
        titles = ", ".join(dict.fromkeys(self.titles))
        return f"<{len(self)} samples of {' x '.join(map(str, self.arrays.shape[1:-1]))}, seed {self.seed}: {titles}>"

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        return png_of(np.asarray(self.grid()))


@dataclass(frozen=True)
class Output:
    """The output that --output names."""

    name: str
    """The value of --output."""
    fps: float
    """Frames per second of videos."""

    @property
    def path(self) -> Path:
        """The file or folder."""
        return Path(self.name)

    @property
    def ending(self) -> str:
        """Ending of the file, in lower case; "/" for a folder."""
        return "/" if self.name.endswith(("/", os.sep)) else self.path.suffix.lower()

    def check(self, titles: Sequence[str], size: tuple[int, ...]) -> None:
        """Refuse an output that could not be written, before time is spent on samples.

        titles: of all samples; size: (H, W) of an image or (F, H, W) of a video.
        """
        (self._check_images if len(size) == 2 else self._check_videos)(titles, size)
        if self.ending != "/":
            check_output_file("--output", self.path)

    def _check_images(self, titles: Sequence[str], size: tuple[int, ...]) -> None:
        if self.ending == "/":
            check_output_folder("--output", self.path, make=False)
            if self.path.is_dir() and any(self.path.iterdir()):
                raise ConfigError(f"--output = {self.name} is not empty. Name a new folder, or empty it.")
            return
        if self.ending not in (*ENDINGS, PAGE):
            hint = f"Use one of {', '.join((*ENDINGS, PAGE))}, or {self.path}/ for single pictures."
            if self.ending in ANIMATIONS:
                raise ConfigError(f"--output = {self.name} is a video, and this model generates images. {hint}")
            raise ConfigError(f"--output = {self.name} has an unknown ending. {hint}")
        check_size("--output", self.path, titles, (size[0], size[1]))
        if self.ending == PAGE and len(titles) > MAX_PICTURES:
            raise ConfigError(
                f"--output = {self.name} would be a page of {len(titles):,} pictures, and a page has at most "
                f"{MAX_PICTURES:,}. Request fewer, or name a folder, ending in /, for one file per image."
            )

    def _check_videos(self, titles: Sequence[str], size: tuple[int, ...]) -> None:
        check_between("--fps", self.fps, 0.1, MAX_FPS.get(self.ending, 1000))
        frames, height, width = size
        check_clips_file(self.path, len(titles), (frames, height, width))

    def save(self, samples: GeneratedSamples, settings: Mapping[str, str]) -> str:
        """Write ``samples`` and return the names of the files; ``settings``: what determines them, to show on a page.

        The files are moved to the output folder when all of them are complete. Raises PlatformError if that fails.
        """
        folder = self.path if self.ending == "/" else self.path.parent
        partial = Path(os.path.realpath(folder)) / f".{self.path.name}.partial"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            written = Output(f"{partial}{os.sep}" if self.ending == "/" else str(partial / self.path.name), self.fps)
            files = written._write(samples, settings)
            for file in sorted(partial.iterdir()):
                os.replace(file, os.path.realpath(folder / file.name))
        except OSError as error:
            raise PlatformError(
                f"--output = {self.name} cannot be written: {error_text(error)}. Free space on its disk, or name "
                "another output."
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        first, *others = [str(folder / file.name) for file in files] or [self.name]
        return f"{first} ... {Path(others[-1]).name}" if others else first

    def _write(self, samples: GeneratedSamples, settings: Mapping[str, str]) -> list[Path]:
        """Write the files; return them if their names differ from the output's."""
        images, labels, titles = samples.arrays, samples.labels, list(samples.titles)
        if images.ndim == 5:
            return save_clips(self.path, images, titles, self.fps)
        if self.ending == "/":
            save_each(self.path, images, labels, titles)
        elif self.ending == PAGE:
            if labels is not None:
                titles = [title if title == str(label) else f"{label} {title}" for label, title in zip(labels, titles)]
            write_gallery(self.path, list(map(png_of, images)), images.shape[1:3], titles, samples.seed, settings)
        elif self.ending == ".npz":
            with open(self.path, "wb") as file:  # given a name, NumPy would append .npz to .NPZ
                np.savez(file, images, np.array(titles) if labels is None else labels)
        else:
            draw_grid(images, titles).save(self.path)
        return []
