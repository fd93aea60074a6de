"""Where samples go: numbers, one picture, a page, or a folder of single pictures, by how the output is called."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm_dit.configs.outputs import check_output_file, check_output_folder
from mindspeed_mm_dit.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

PAGE = ".html"


def check_output(output: str) -> None:
    """Refuse an output that could not be written, before the time is spent."""
    from mindspeed_mm_dit.sampling.grid import ENDINGS

    path, endings = Path(output), (*ENDINGS, PAGE)
    if _is_folder(output):
        check_output_folder("--output", path, make=False)
        if path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"--output = {output}", "holds files, among which the pictures would be lost",
                              "name a new folder, or empty it")  # fmt: skip
        return
    if path.suffix.lower() not in endings:
        raise ConfigError(
            f"--output = {output}", f"unknown ending {path.suffix!r}",
            f"use one of {', '.join(endings)}, or {path}/ for single pictures",
        )  # fmt: skip
    check_output_file("--output", path)


def _is_folder(output: str) -> bool:
    return output.endswith(("/", os.sep))


def check_page(output: str, num_images: int) -> None:
    """Raise ConfigError for more pictures than a browser shows on one page."""
    from mindspeed_mm_dit.sampling.gallery import MOST_PICTURES

    if Path(output).suffix.lower() == PAGE and num_images > MOST_PICTURES and not _is_folder(output):
        raise ConfigError(
            f"--output = {output}", f"{num_images:,} pictures are too many for one page: it takes {MOST_PICTURES:,}",
            "draw fewer, or name a folder, ending in /, for single pictures",
        )  # fmt: skip


def save(
    output: str,
    images: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    seed: int,
    settings: Mapping[str, str],
) -> None:
    """Write images (N, H, W, 3 or 1) uint8 with their labels (N,) to ``output``.

    names: of the classes, by label; may be empty. seed, settings: what decides the images, for a page.
    """
    from mindspeed_mm_dit.sampling.gallery import write_gallery
    from mindspeed_mm_dit.sampling.grid import save_samples
    from mindspeed_mm_dit.sampling.pictures import png_of, save_each

    path = Path(output)
    if _is_folder(output):
        save_each(path, images, labels)
    elif path.suffix.lower() == PAGE:
        shown = [_called(label, names) for label in labels.tolist()]
        write_gallery(path, list(map(png_of, images)), images.shape[1], shown, seed, settings)
    else:
        save_samples(path, images, labels, names=names)


def _called(label: int, names: Sequence[str]) -> str:
    name = names[label] if label < len(names) else str(label)
    return str(label) if name == str(label) else f"{label} {name}"
