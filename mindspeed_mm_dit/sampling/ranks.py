"""The samples of one command drawn by several ranks, batch by batch, and brought together on the first.

The batches are those of one rank, so the samples are the same to the last bit, however many ranks there are. They pass
through files beside the output; nothing else is shared.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.sampling.generate import SampleSettings, batches_of, generate
from mindspeed_mm_dit.sampling.request import Asked


def share(count: int, batch_size: int) -> list[np.ndarray]:
    """Return the numbers of the samples that this rank draws, a batch each."""
    return batches_of(count, batch_size)[runtime.rank() :: runtime.world_size()]


def generate_spread(
    folder: Path, model: tuple[Any, ModelConfig], asked: Asked, settings: SampleSettings
) -> np.ndarray | None:
    """Draw what is asked for on all ranks; return it on the first, as ``generate`` does, and None on others.

    folder: a new one, on a disk that all ranks share; it is gone afterwards. Every rank must call this. On a terminal
    a bar shows how far the first has come.

    Raises:
        DataError: a part of another rank is not there.
    """
    own = share(len(asked), settings.batch_size)
    with tqdm(
        total=settings.steps * sum(map(len, own)), desc="sampling", unit="sample-step",
        disable=runtime.rank() > 0 or not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        if runtime.world_size() == 1:
            return generate(*model, asked, settings, bar.update)
        if runtime.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        runtime.barrier()
        for numbers in own:
            np.save(_part(folder, int(numbers[0])), generate(*model, asked.at(numbers), settings, bar.update))
    runtime.barrier()
    return _joined(folder, len(asked), settings.batch_size) if runtime.rank() == 0 else None


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
