"""Autoencoders between images or videos and latents, one record each. They are frozen and never part of a checkpoint.

States of an image: pixels (uint8, 0 to 255), images (float, -1 to 1), latents (scaled to unit variance).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.autoencoder import (
    AutoencoderConfig,
    AutoencoderDCConfig,
    AutoencoderKLConfig,
    AutoencoderTinyConfig,
    Flux2VAEConfig,
    PixelConfig,
    QwenImageVAEConfig,
    WanVAEConfig,
)
from mindspeed_mm_dit.framework import active
from mindspeed_mm_dit.framework.contract import later

Tensor = Any


def to_images(pixels: Tensor) -> Tensor:
    """Pixels (B, C, ...) uint8 -> images (B, C, ...) float32 in [-1, 1]."""
    return framework.ops.to_float32(pixels) / 127.5 - 1.0


def to_pixels(images: np.ndarray) -> np.ndarray:
    """Images (B, C, ...) float, about in [-1, 1] -> pixels of the same shape, uint8; values outside are clipped."""
    return np.clip(images * 127.5 + 128.0, 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class AutoencoderKind:
    """A kind of autoencoder, selected by ``model_id`` in section ``ae`` of model.json."""

    config: type[AutoencoderConfig]
    """Frozen dataclass of the section."""
    build: Callable[[Any], Autoencoder]
    """(config) -> the autoencoder with its weights loaded; imports the framework only when called."""


class Autoencoder(ABC):
    """Interface of an autoencoder for the composite and the samplers. Its module is not a submodule of theirs."""

    def __init__(self, config: Any) -> None:
        self.config, self._scaling = config, Scaling(config)

    def encode(self, images: Tensor, posterior_noise: Tensor | None = None) -> Tensor:
        """Images or videos (B, 3 or 1, ...) in [-1, 1] -> scaled latents (B, C, ...).

        Samples the posterior with ``posterior_noise``, of the latents' shape; without it, uses the mean.
        """
        mean, std = self.moments(images)
        return draw_latents(mean, std, posterior_noise, self.scaled)

    def scaled(self, raw: Tensor) -> Tensor:
        """Raw latents (B, C, ...) -> scaled ones."""
        return self._scaling.scaled(raw)

    def raw(self, scaled: Tensor) -> Tensor:
        """Scaled latents (B, C, ...) -> raw ones."""
        return self._scaling.raw(scaled)

    @abstractmethod
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Images or videos (B, 3 or 1, ...) in [-1, 1] -> mean and std of their raw latents, (B, C, ...) float32.

        The std is None if there is no posterior to sample from.
        """

    @abstractmethod
    def decode(self, scaled_latents: Tensor) -> Tensor:
        """Scaled latents (B, C, ...) -> images or videos (B, 3 or 1, ...) float32, about in [-1, 1]."""


class Scaling:
    """(raw - shift) * scale / std and back. ``tensor`` converts constants (1, C, 1, ...); by default to tensors."""

    def __init__(self, config: AutoencoderConfig, tensor: Callable[[np.ndarray], Any] | None = None) -> None:
        def prepared(numbers: float | tuple[float, ...]) -> Any:
            if not isinstance(numbers, tuple):
                return numbers

            axes = (1,) * max(config.pixel_axes)
            return (tensor or framework.ops.tensor)(np.array(numbers, np.float32).reshape(1, -1, *axes))

        scale = config.scale()
        self._shift, self._scale, self._std = (prepared(numbers) for numbers in (scale.shift, scale.scale, scale.std))

    def scaled(self, raw: Tensor) -> Tensor:
        """Raw latents (B, C, ...) -> scaled ones."""
        shifted = raw if _is(self._shift, 0) else raw - self._shift
        multiplied = shifted if _is(self._scale, 1) else shifted * self._scale
        return multiplied if _is(self._std, 1) else multiplied / self._std

    def raw(self, scaled: Tensor) -> Tensor:
        """Scaled latents (B, C, ...) -> raw ones."""
        multiplied = scaled if _is(self._std, 1) else scaled * self._std
        divided = multiplied if _is(self._scale, 1) else multiplied / self._scale
        return divided if _is(self._shift, 0) else divided + self._shift


def _is(numbers: Any, neutral: float) -> bool:
    """Return whether ``numbers`` is the single number ``neutral``, which changes nothing."""
    return isinstance(numbers, (int, float)) and numbers == neutral


def draw_latents(
    mean: Tensor, std: Tensor | None, posterior_noise: Tensor | None, scaled: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return scaled latents (B, C, ...): a sample of the posterior, or its mean without ``posterior_noise``."""
    if posterior_noise is None:
        return scaled(mean)
    return scaled(mean + std * posterior_noise)


class NoAutoencoder(Autoencoder):
    """Placeholder if all latents come from a cache: has the config, but no weights in memory."""

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("latents come from a cache")

    def decode(self, scaled_latents: Tensor) -> Tensor:
        raise AssertionError("nothing is decoded in this run")


class PixelAutoencoder(Autoencoder):
    """No autoencoder: the images or frames themselves are the latents."""

    def moments(self, images: Tensor) -> tuple[Tensor, None]:
        return images, None

    def decode(self, scaled_latents: Tensor) -> Tensor:
        return scaled_latents


_DIFFUSERS = later("mindspeed_mm_dit.models.diffusers_autoencoders")
_PORTABLE = later("mindspeed_mm_dit.models.autoencoder_kl.autoencoder")


PIXEL = AutoencoderKind(PixelConfig, PixelAutoencoder)
AUTOENCODER_KL = AutoencoderKind(
    AutoencoderKLConfig, lambda config: (_DIFFUSERS if active() == "pytorch" else _PORTABLE).AutoencoderKL(config)
)
FLUX2_VAE = AutoencoderKind(Flux2VAEConfig, lambda config: _PORTABLE.AutoencoderKLFlux2(config))
WAN_VIDEO_VAE = AutoencoderKind(WanVAEConfig, lambda config: _DIFFUSERS.AutoencoderKLWan(config))
QWEN_IMAGE_VAE = AutoencoderKind(QwenImageVAEConfig, lambda config: _DIFFUSERS.AutoencoderKLQwenImage(config))
AUTOENCODER_TINY = AutoencoderKind(AutoencoderTinyConfig, lambda config: _DIFFUSERS.DiffusersAutoencoder(config))
AUTOENCODER_DC = AutoencoderKind(AutoencoderDCConfig, lambda config: _DIFFUSERS.DiffusersAutoencoder(config))
