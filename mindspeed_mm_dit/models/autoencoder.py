"""Autoencoders between images, or videos, and latents; they are frozen, and never part of a checkpoint.

Raw latents are what an encoder gives, scaled latents what a model learns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig, read_latent_facts

Tensor = Any


class Autoencoder(Protocol):
    """What the composite and the samplers ask of an autoencoder."""

    scaled: Callable[[Tensor], Tensor]
    """Raw latents (B, C, ...) -> scaled ones."""

    def encode(self, images: Tensor, posterior_noise: Tensor | None) -> Tensor:
        """Images (B, 3 or 1, H, W) in [-1, 1] -> scaled latents (B, C, h, w)."""

    def decode(self, scaled_latents: Tensor) -> Tensor:
        """Scaled latents (B, C, h, w) -> images (B, 3 or 1, H, W), about in [-1, 1]."""


class VariationalAutoencoder(Autoencoder, Protocol):
    """An autoencoder whose latents can be cached."""

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) in [-1, 1] -> mean and std of their latents, (B, C, h, w) float32, unscaled."""


def draw_latents(
    mean: Tensor, std: Tensor | None, posterior_noise: Tensor | None, scaled: Callable[[Tensor], Tensor]
) -> Tensor:
    """Scaled latents (B, C, ...): a draw from the posterior, or without ``posterior_noise`` its mean."""
    if posterior_noise is None:
        return scaled(mean)
    return scaled(mean + std * posterior_noise)


def scaling_of(config: Any) -> Callable[[Tensor], Tensor]:
    """Return what makes raw latents those that a model learns, as section "ae" says.

    Wan's are (raw - mean) / std of each channel, with the numbers of the autoencoder's config.json; those of
    AutoencoderKL are multiplied by one number; pixels stay as they are.
    """
    if isinstance(config, WanVAEConfig):
        mean, std = statistics_of(config)
        return lambda raw: (raw - mean) / std
    factor = getattr(config, "scaling_factor", None)
    return (lambda raw: raw) if factor is None else (lambda raw: raw * factor)


def statistics_of(config: WanVAEConfig) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of raw latents, (1, C, 1, 1, 1) float32 each."""
    from mindspeed_mm_dit.framework import ops

    facts = read_latent_facts(config)
    mean, std = (
        ops.tensor(np.array(numbers, np.float32).reshape(1, -1, 1, 1, 1))
        for numbers in (facts.latents_mean, facts.latents_std)
    )
    return mean, std


class NoAutoencoder:
    """Stands where all latents come from a cache: its config is known, its weights are not in memory."""

    def __init__(self, config: Any) -> None:
        self.config, self.scaled = config, scaling_of(config)


class PixelAutoencoder:
    """No autoencoder: the images, or the frames, are the latents."""

    def __init__(self, config: Any) -> None:
        self.config, self.scaled = config, scaling_of(config)

    def encode(self, images: Tensor, posterior_noise: Tensor | None = None) -> Tensor:
        """Return ``images``."""
        return images

    def moments(self, images: Tensor) -> tuple[Tensor, None]:
        """Return ``images``, and no standard deviation."""
        return images, None

    def decode(self, scaled_latents: Tensor) -> Tensor:
        """Return ``scaled_latents``."""
        return scaled_latents
