"""Write samples as arrays, one picture, a page, videos, or a folder of images, depending on the output's ending."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_mm_dit.configs.files import reason_of
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.outputs import check_output_file, check_output_folder
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.sampling.grid import ENDINGS, check_size, draw_grid
from mindspeed_mm_dit.sampling.image_files import MOST_PICTURES, png_of, save_each, write_gallery
from mindspeed_mm_dit.sampling.video_files import ANIMATIONS, MOST_FPS, check_clips_file, save_clips

if TYPE_CHECKING:
    from collections.abc import Sequence


PAGE = ".html"


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
                raise ConfigError(f"--output = {self.name}", "is not empty", "name a new folder, or empty it")
            return
        if self.ending not in (*ENDINGS, PAGE):
            is_video, suffix = self.ending in ANIMATIONS, self.path.suffix
            raise ConfigError(
                f"--output = {self.name}",
                "is a video, and this model generates images" if is_video else f"unknown ending {suffix!r}",
                f"use one of {', '.join((*ENDINGS, PAGE))}, or {self.path}/ for single pictures",
            )
        check_size("--output", self.path, titles, (size[0], size[1]))
        if self.ending == PAGE:
            _check_page(self.name, len(titles))

    def _check_videos(self, titles: Sequence[str], size: tuple[int, ...]) -> None:
        check_between("--fps", self.fps, 0.1, MOST_FPS.get(self.ending, 1000))
        frames, height, width = size
        check_clips_file(self.path, len(titles), (frames, height, width))

    def save(
        self,
        samples: np.ndarray,
        labels: np.ndarray | None,
        titles: Sequence[str],
        seed: int,
        settings: Mapping[str, str],
    ) -> str:
        """Write images (N, H, W, C) or videos (N, F, H, W, C), uint8, and return the names of the files.

        labels: (N,), if classes were requested. seed, settings: what determines the samples, to show on a page.
        The files are moved to the output folder when all of them are complete. Raises PlatformError if that fails.
        """
        folder = self.path if self.ending == "/" else self.path.parent
        partial = Path(os.path.realpath(folder)) / f".{self.path.name}.partial"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            written = Output(f"{partial}{os.sep}" if self.ending == "/" else str(partial / self.path.name), self.fps)
            files = written._write(samples, labels, titles, seed, settings)
            for file in sorted(partial.iterdir()):
                os.replace(file, os.path.realpath(folder / file.name))
        except OSError as error:
            cure = "free space on its disk, or name another output"
            raise PlatformError(f"--output = {self.name}", f"cannot be written: {reason_of(error)}", cure) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        first, *others = [str(folder / file.name) for file in files] or [self.name]
        return f"{first} ... {Path(others[-1]).name}" if others else first

    def _write(
        self,
        samples: np.ndarray,
        labels: np.ndarray | None,
        titles: Sequence[str],
        seed: int,
        settings: Mapping[str, str],
    ) -> list[Path]:
        """Write the files; return them if their names differ from the output's."""
        if samples.ndim == 5:
            return save_clips(self.path, samples, titles, self.fps)
        if self.ending == "/":
            save_each(self.path, samples, labels, titles)
        elif self.ending == PAGE:
            captions = (
                titles if labels is None else [_label_and_title(label, title) for label, title in zip(labels, titles)]
            )
            write_gallery(self.path, list(map(png_of, samples)), samples.shape[1:3], captions, seed, settings)
        elif self.ending == ".npz":
            with open(self.path, "wb") as file:  # given a name, NumPy would append .npz to .NPZ
                np.savez(file, samples, np.array(titles) if labels is None else labels)
        else:
            draw_grid(samples, titles).save(self.path)
        return []


def _check_page(output: str, num_images: int) -> None:
    """Raise ConfigError for more images than a browser can show on one page."""
    if num_images > MOST_PICTURES:
        reason = f"{num_images:,} pictures are too many for one page: the limit is {MOST_PICTURES:,}"
        cure = "request fewer, or name a folder, ending in /, for one file per image"
        raise ConfigError(f"--output = {output}", reason, cure)


def _label_and_title(label: int, title: str) -> str:
    return title if title == str(label) else f"{label} {title}"
