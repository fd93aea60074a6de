"""The frames that a clip begins and ends with, as a network takes them: their mask and their latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import FirstFrame
from mindspeed_mm_dit.data.conditions.frames import IMAGES
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.pixels import to_images

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


def given_frames(condition: FirstFrame, batch: Mapping[str, Tensor], model: Any) -> Tensor:
    """Return mask and latents (B, M + C, F, H, W) of the frames that a batch gives.

    batch: images that were asked for, ``first_image`` and perhaps ``last_image`` (B, 3 or 1, H, W) uint8; or clips,
    whose own frames are taken, as pixels or, for the first frame alone, as moments from a cache.
    """
    if "frames" in batch:
        return batch["frames"]
    images, frames = [batch[name] for name in IMAGES if name in batch], condition.shape[1]
    if not images and condition.mask_channels == 1:
        moments = ("pixels", "latent_mean", "latent_std", "posterior_noise")
        size = batch["latent_mean"].shape[1:] if "latent_mean" in batch else _latent_shape(model, batch["pixels"])
        latents = model.latents({name: batch[name][:, :, :1] for name in moments if name in batch})
        return with_mask(condition, latents, size[1])
    if images:
        count = model.ae.config.sample_size(condition.shape)[0]
    else:
        pixels = batch["pixels"]
        images, count = [pixels[:, :, 0], pixels[:, :, -1]][: 1 + condition.with_last], pixels.shape[2]
        frames = _latent_shape(model, pixels)[1]
    alone = condition.mask_channels == 1
    return with_mask(condition, latents_of(model.ae, [to_images(own) for own in images], 1 if alone else count), frames)


def _latent_shape(model: Any, pixels: Tensor) -> tuple[int, ...]:
    shape: tuple[int, ...] = model.ae.config.latent_shape(tuple(pixels.shape[2:]))
    return shape


def in_place(x: Tensor, frames: Tensor) -> Tensor:
    """Return latents ``x`` (B, C, F, H, W) with given ``frames`` (B, 1 + C, F, H, W) in their place."""
    mask = frames[:, :1]  # (B, 1, F, H, W)
    return mask * frames[:, 1:] + (1 - mask) * x
