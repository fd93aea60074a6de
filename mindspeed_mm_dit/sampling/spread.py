"""The images of one command drawn by several ranks, batch by batch, and brought together on the first.

The batches are those of one rank, so the images are the same to the last bit, however many ranks there are. They pass
through files beside the output; nothing else is shared.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.sampling.generate import SampleSettings, batches_of, generate


def share(count: int, batch_size: int) -> list[np.ndarray]:
    """Return the numbers of the images that this rank draws, a batch each."""
    return batches_of(count, batch_size)[runtime.rank() :: runtime.world_size()]


def generate_spread(
    folder: Path,
    model: tuple[Any, ModelConfig],
    labels: np.ndarray,
    settings: SampleSettings,
    on_step: Callable[[int], None] = lambda images: None,
) -> np.ndarray | None:
    """Draw one image per label on all ranks; return them on the first, (N, H, W, 3 or 1) uint8, and None on others.

    folder: a new one, on a disk that all ranks share; it is gone afterwards. Every rank must call this.

    Raises:
        DataError: a part of another rank is not there.
    """
    if runtime.world_size() == 1:
        return generate(*model, labels, settings, on_step)
    if runtime.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    runtime.barrier()
    for numbers in share(len(labels), settings.batch_size):
        first = int(numbers[0])
        np.save(_part(folder, first), generate(*model, labels[numbers], settings, on_step, first_number=first))
    runtime.barrier()
    return _joined(folder, len(labels), settings.batch_size) if runtime.rank() == 0 else None


def _part(folder: Path, first: int) -> Path:
    return folder / f"{first:09d}.npy"


def _joined(folder: Path, count: int, batch_size: int) -> np.ndarray:
    parts = [_part(folder, int(numbers[0])) for numbers in batches_of(count, batch_size)]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise DataError(str(missing[0]), "was drawn by another rank and is not here",
                        "use an --output on a disk that all machines share")  # fmt: skip
    images = np.concatenate([np.load(part, allow_pickle=False) for part in parts])
    shutil.rmtree(folder, ignore_errors=True)
    return images
