"""Autoencoders between images, or videos, and latents; they are frozen, and never part of a checkpoint.

Raw latents are what an encoder gives, scaled latents what a model learns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import AutoencoderConfig

Tensor = Any


@dataclass(frozen=True)
class AutoencoderKind:
    """A kind of autoencoder, as section ``ae`` of model.json chooses it by ``model_id``."""

    config: type[AutoencoderConfig]
    """Frozen dataclass of the section: what the autoencoder is on paper."""
    build: Callable[[Any], Autoencoder]
    """(config) -> the autoencoder, its weights loaded; a framework is imported here, and not before."""


class Autoencoder(ABC):
    """Encodes and decodes; what the composite and the samplers ask of one. It holds its module outside of theirs."""

    def __init__(self, config: Any) -> None:
        self.config, self._scaling = config, Scaling(config)

    def encode(self, images: Tensor, posterior_noise: Tensor | None = None) -> Tensor:
        """Images or videos (B, 3 or 1, ...) in [-1, 1] -> scaled latents (B, C, ...).

        With ``posterior_noise``, of the shape of the latents, a draw from the posterior, without it its mean.
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

        The second is None where latents are not drawn.
        """

    @abstractmethod
    def decode(self, scaled_latents: Tensor) -> Tensor:
        """Scaled latents (B, C, ...) -> images or videos (B, 3 or 1, ...) float32, about in [-1, 1]."""


class Scaling:
    """(raw - shift) * scale / std and back, on tensors, or on what else ``tensor`` makes of an array (1, C, 1, ...)."""

    def __init__(self, config: AutoencoderConfig, tensor: Callable[[np.ndarray], Any] | None = None) -> None:
        def prepared(numbers: float | tuple[float, ...]) -> Any:
            if not isinstance(numbers, tuple):
                return numbers
            from mindspeed_mm_dit.framework import ops

            axes = (1,) * max(config.pixel_axes)
            return (tensor or ops.tensor)(np.array(numbers, np.float32).reshape(1, -1, *axes))

        said = config.scale()
        self._shift, self._scale, self._std = (prepared(numbers) for numbers in (said.shift, said.scale, said.std))

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
    """Return whether ``numbers`` is the one number that changes nothing."""
    return isinstance(numbers, (int, float)) and numbers == neutral


def draw_latents(
    mean: Tensor, std: Tensor | None, posterior_noise: Tensor | None, scaled: Callable[[Tensor], Tensor]
) -> Tensor:
    """Scaled latents (B, C, ...): a draw from the posterior, or without ``posterior_noise`` its mean."""
    if posterior_noise is None:
        return scaled(mean)
    return scaled(mean + std * posterior_noise)


class NoAutoencoder(Autoencoder):
    """Stands where all latents come from a cache: its config is known, its weights are not in memory."""

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("latents come from a cache")

    def decode(self, scaled_latents: Tensor) -> Tensor:
        raise AssertionError("nothing is decoded in this run")


class PixelAutoencoder(Autoencoder):
    """No autoencoder: the images, or the frames, are the latents."""

    def moments(self, images: Tensor) -> tuple[Tensor, None]:
        return images, None

    def decode(self, scaled_latents: Tensor) -> Tensor:
        return scaled_latents
