"""Autoencoders between images and latents; they are frozen, and never part of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mindspeed_mm_dit.configs.model import AutoencoderKLConfig, PixelConfig

Tensor = Any


class Autoencoder(Protocol):
    """What the composite and the samplers ask of an autoencoder."""

    def encode(self, images: Tensor, posterior_noise: Tensor | None) -> Tensor:
        """Images (B, 3 or 1, H, W) in [-1, 1] -> scaled latents (B, C, h, w)."""

    def decode(self, scaled_latents: Tensor) -> Tensor:
        """Scaled latents (B, C, h, w) -> images (B, 3 or 1, H, W), about in [-1, 1]."""


class VariationalAutoencoder(Autoencoder, Protocol):
    """An autoencoder whose latents can be cached."""

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W) in [-1, 1] -> mean and std of their latents, (B, C, h, w) float32, unscaled."""


def draw_latents(mean: Tensor, std: Tensor | None, posterior_noise: Tensor | None, scaling_factor: float) -> Tensor:
    """Scaled latents (B, C, h, w): a draw from the posterior, or without ``posterior_noise`` its mean."""
    if posterior_noise is None:
        return mean * scaling_factor
    return (mean + std * posterior_noise) * scaling_factor


class NoAutoencoder:
    """Stands where all latents come from a cache: its config is known, its weights are not in memory."""

    def __init__(self, config: AutoencoderKLConfig | PixelConfig) -> None:
        self.config = config


class PixelAutoencoder:
    """No autoencoder: the images are the latents."""

    def __init__(self, config: PixelConfig) -> None:
        self.config = config

    def encode(self, images: Tensor, posterior_noise: Tensor | None = None) -> Tensor:
        """Return ``images``."""
        return images

    def decode(self, scaled_latents: Tensor) -> Tensor:
        """Return ``scaled_latents``."""
        return scaled_latents
