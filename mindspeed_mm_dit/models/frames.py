"""Conditioning frames: the first and last frame of a clip as a network takes them, as a mask and latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import FirstFrame, ImageTokens
from mindspeed_mm_dit.data.conditions import FRAMES_KEPT, IMAGES
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.autoencoder import to_images

Tensor = Any


def grey_clip_latents(autoencoder: Any, images: Sequence[Tensor], frames: int) -> Tensor:
    """Return the raw latents (B, C, f, h, w) of a clip of ``frames`` frames that is grey except for ``images``.

    images: the first frame and optionally the last, each (B, 3, H, W) in [-1, 1].
    """
    first, *last = (image[:, :, None] for image in images)
    (B, C, _, H, W), missing = first.shape, frames - len(images)
    grey = [ops.tensor(np.zeros((B, C, missing, H, W), np.float32))] if missing else []
    mean: Tensor = autoencoder.moments(ops.cat([first, *grey, *last], 2))[0]
    return mean


def with_mask(condition: FirstFrame, latents: Tensor, frames: int) -> Tensor:
    """Return mask and latents (B, M + C, F, H, W) of frames with ``latents`` (B, C, f, H, W); zeros after the f-th.

    All are zeros if there is a single frame: an image in a data set of clips is the target, not a condition.
    """
    B, C, f, H, W = latents.shape
    if frames == 1:
        return ops.tensor(np.zeros((B, condition.mask_channels + C, 1, H, W), np.float32))
    mask = condition.mask(frames)[None, :, :, None, None]  # (1, M, F, 1, 1)
    mask = ops.broadcast_to(ops.tensor(mask), (B, mask.shape[1], frames, H, W))
    rest = [ops.tensor(np.zeros((B, C, frames - f, H, W), np.float32))] if frames > f else []
    return ops.cat([mask, ops.cat([latents, *rest], 2)], 1)


def frame_conditions(condition: FirstFrame, batch: Mapping[str, Tensor], model: Any) -> Tensor:
    """Return mask and latents (B, M + C, F, H, W) of a batch's conditioning frames, zeros where they are dropped.

    batch: requested images or those of the data set, ``first_image`` and optionally ``last_image`` (B, 3 or 1, H, W);
    clips, as pixels; or from a cache ``frame_mean`` (B, C, F, H, W), or the moments of clips whose first frame is the
    condition.
    """
    frames = batch["frames"] if "frames" in batch else _encode_frames(condition, batch, model)
    return ops.reshape(batch[FRAMES_KEPT], (-1, 1, 1, 1, 1)) * frames if FRAMES_KEPT in batch else frames


def _encode_frames(condition: FirstFrame, batch: Mapping[str, Tensor], model: Any) -> Tensor:
    alone, named = condition.mask_channels == 1, [name for name in IMAGES if name in batch]
    if "frame_mean" in batch:
        mean = batch["frame_mean"]
        return with_mask(condition, model.ae.scaled(mean[:, :, :1] if alone else mean), mean.shape[2])
    pixels = batch.get("pixels")
    size = condition.shape[1:] if pixels is None else model.ae.config.latent_shape(tuple(pixels.shape[2:]))[1:]
    if alone and not named:
        moments = ("pixels", "latent_mean", "latent_std", "posterior_noise")
        latents = model.latents({name: batch[name][:, :, :1] for name in moments if name in batch})
        return with_mask(condition, latents, batch["latent_mean"].shape[2] if "latent_mean" in batch else size[0])
    return with_mask(condition, model.ae.scaled(frame_latents(condition, batch, model.ae)), size[0])


def frame_latents(condition: FirstFrame, batch: Mapping[str, Tensor], autoencoder: Any) -> Tensor:
    """Return the raw latents (B, C, f, h, w) of conditioning frames: in an otherwise grey clip, or of one frame alone.

    batch: as in :func:`frame_conditions`, images or clips.
    """
    images = conditioning_images(batch, condition.with_last)
    if condition.mask_channels == 1:
        return grey_clip_latents(autoencoder, images, 1)
    pixels = batch.get("pixels")
    frames = autoencoder.config.sample_size(condition.shape)[0] if pixels is None else pixels.shape[2]
    return grey_clip_latents(autoencoder, images[:frames], frames)


def conditioning_images(batch: Mapping[str, Tensor], with_last: bool) -> list[Tensor]:
    """Return a batch's conditioning frames, each (B, 3 or 1, H, W) in [-1, 1]: images by name, or frames of clips."""
    positions = {name: position for name, position in zip(IMAGES, (0, -1) if with_last else (0,))}
    return [to_images(batch[n] if n in batch else batch["pixels"][:, :, position]) for n, position in positions.items()]


def frame_features(condition: ImageTokens, batch: Mapping[str, Tensor], encoder: Callable[[], Any]) -> Tensor:
    """Return CLIP's features (B, L, width) of the conditioning frames, from a cache or by ``encoder()``."""
    features = batch.get("image_embeds")
    if features is None:
        features = ops.cat([encoder()(image) for image in conditioning_images(batch, condition.with_last)], 1)
    clips = next((batch[name] for name in ("pixels", "latent_mean") if name in batch), None)
    return features if clips is None or clips.shape[2] > 1 else features * 0


def insert_frames(x: Tensor, frames: Tensor) -> Tensor:
    """Return latents ``x`` (B, C, F, H, W) with the conditioning ``frames`` (B, 1 + C, F, H, W) inserted."""
    mask = frames[:, :1]  # (B, 1, F, H, W)
    return mask * frames[:, 1:] + (1 - mask) * x
