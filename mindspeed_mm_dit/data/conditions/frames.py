"""The frames that a clip begins and ends with: its own while a network trains, images that a user names in samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import FirstFrame, ImageCondition
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionKind, Fed

IMAGES = ("first_image", "last_image")
"""Names of the arrays of images, (B, 3 or 1, H, W) uint8, in a batch of samples that are asked for."""


class OwnFrames:
    """Feeds nothing: the frames are those of the clips of the batch or lie beside them, and are encoded there."""

    def __init__(self, condition: ImageCondition, fed: Fed) -> None:
        self._words = "its first frame" if isinstance(condition, FirstFrame) else "CLIP's features of it"

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return no arrays."""
        return {}

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return what is given of each clip."""
        return [(self._words, False)] * len(rows)


def _asked(condition: ImageCondition, values: Sequence[Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return images by name, or for samples that begin with none the network's input, zeros."""
    if values[0] is None:
        return {name: np.repeat(array, len(values), 0) for name, array in condition.hollow().items()}
    return {name: np.stack(images) for name, images in zip(IMAGES, zip(*values))}


def _kind(encode: Any) -> ConditionKind:
    return ConditionKind(OwnFrames, _asked, null=lambda condition, instead, tokenizers: {}, encode=encode)


FRAMES = _kind(lambda condition, batch, model: (model.frames(condition, batch),))
IMAGE_TOKENS = _kind(lambda condition, batch, model: (model.image_features(condition, batch),))
