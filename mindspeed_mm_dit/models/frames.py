"""The frames that a clip begins and ends with, as a network takes them: their mask and their latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import FirstFrame
from mindspeed_mm_dit.framework import ops

Tensor = Any


def latents_of(autoencoder: Any, images: Sequence[Tensor], frames: int) -> Tensor:
    """Return the scaled latents (B, C, f, h, w) of a clip of ``frames`` frames that is grey but for the given ones.

    images: the first frame and perhaps the last, each (B, 3, H, W) in [-1, 1].
    """
    first, *last = (image[:, :, None] for image in images)
    (B, C, _, H, W), missing = first.shape, frames - len(images)
    grey = [ops.tensor(np.zeros((B, C, missing, H, W), np.float32))] if missing else []
    return autoencoder.scaled(autoencoder.moments(ops.cat([first, *grey, *last], 2))[0])


def with_mask(condition: FirstFrame, latents: Tensor, frames: int) -> Tensor:
    """Return mask and latents (B, M + C, F, H, W) of given frames; latents (B, C, f, H, W), zeros after the f-th."""
    B, C, f, H, W = latents.shape
    mask = condition.mask(frames)[None, :, :, None, None]  # (1, M, F, 1, 1)
    mask = ops.broadcast_to(ops.tensor(mask), (B, mask.shape[1], frames, H, W))
    rest = [ops.tensor(np.zeros((B, C, frames - f, H, W), np.float32))] if frames > f else []
    return ops.cat([mask, ops.cat([latents, *rest], 2)], 1)
