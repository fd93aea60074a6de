"""The frames that a clip begins and ends with: the clip's frames in training, images that a user names in sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import FirstFrame, ImageCondition
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionBatch, ConditionKind

KEPT = "frames_kept"
"""Name of the mask of samples that keep their frames, (B,) float32: 1, or 0 for one trained on its text alone."""
IMAGES = ("first_image", "last_image")
"""Names of the arrays of images, (B, 3 or 1, H, W) uint8, in a batch of requested samples."""


class NoCollator:
    """Adds no frames: they come with the clips of the batch, and are encoded from there."""

    def __init__(self, condition: ImageCondition, inputs: ConditionBatch) -> None:
        self._words = "its first frame" if isinstance(condition, FirstFrame) else "CLIP's features of it"
        self._dropout, self._inputs = condition.dropout, inputs

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return ``KEPT``, with dropout."""
        return {KEPT: 1 - self._drops(sample_indices).astype(np.float32)} if self._dropout else {}

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return the name of each clip's condition, and whether it is dropped."""
        return [(self._words, lost) for lost in self._drops(sample_indices).tolist()]

    def _drops(self, sample_indices: np.ndarray) -> np.ndarray:
        return self._inputs.drops(sample_indices, self._dropout)


def initial_images(read: Arrays, with_last: bool) -> Arrays:
    """Return the initial images of the one sample that was ``read``, by name, or what a cache has of them."""
    pixels = read.get("pixels")
    clip_images = {} if pixels is None else dict(zip(IMAGES, (pixels[:, :, 0], pixels[:, :, -1])[: 1 + with_last]))
    arrays = clip_images | {
        name: array for name, array in read.items() if name in (*IMAGES, "frame_mean", "image_embeds")
    }
    return {name: array[0] for name, array in arrays.items()}


def _frame_arrays(condition: ImageCondition, values: Sequence[Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return images by name, or for samples that begin with none the network's input, zeros."""
    if isinstance(values[0], Mapping):
        return {name: np.stack([value[name] for value in values]) for name in values[0]}
    if values[0] is None:
        return {name: np.repeat(array, len(values), 0) for name, array in condition.meta_arrays().items()}
    return {name: np.stack(images) for name, images in zip(IMAGES, zip(*values))}


def _frames_kind(encode: Any) -> ConditionKind:
    return ConditionKind(
        NoCollator, _frame_arrays, unconditional=lambda condition, instead, tokenizers: {}, encode=encode
    )


FRAMES = _frames_kind(lambda condition, batch, model: (model.frames(condition, batch),))
IMAGE_TOKENS = _frames_kind(lambda condition, batch, model: (model.image_features(condition, batch),))
