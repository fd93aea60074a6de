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
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.models.pretrained import KLArchitecture, read_autoencoder_kl, require_same_names

Tensor = Any


def to_images(pixels: Tensor) -> Tensor:
    """Pixels (B, C, ...) uint8 -> images (B, C, ...) float32 in [-1, 1]."""
    return framework.ops.to_float32(pixels) / 127.5 - 1.0


def to_pixels(images: np.ndarray) -> np.ndarray:
    """Images (B, C, ...) float, about in [-1, 1] -> pixels of the same shape, uint8; values outside are clipped."""
    return np.clip(images * 127.5 + 128.0, 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class AutoencoderSpec:
    """A kind of autoencoder, selected by ``model_id`` in section ``ae`` of model.json."""

    config: type[AutoencoderConfig]
    """Frozen dataclass of the section."""
    build: Callable[[Any], Autoencoder]
    """(config) -> the autoencoder with its weights loaded; imports the framework only when called."""


class Autoencoder(ABC):
    """Interface of an autoencoder for the composite and the samplers. Its module is not a submodule of theirs."""

    def __init__(self, config: Any) -> None:
        self.config, self._scaling = config, LatentScaling(config)

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


class LatentScaling:
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
        shifted = raw if _is_neutral(self._shift, 0) else raw - self._shift
        multiplied = shifted if _is_neutral(self._scale, 1) else shifted * self._scale
        return multiplied if _is_neutral(self._std, 1) else multiplied / self._std

    def raw(self, scaled: Tensor) -> Tensor:
        """Scaled latents (B, C, ...) -> raw ones."""
        multiplied = scaled if _is_neutral(self._std, 1) else scaled * self._std
        divided = multiplied if _is_neutral(self._scale, 1) else multiplied / self._scale
        return divided if _is_neutral(self._shift, 0) else divided + self._shift


def _is_neutral(numbers: Any, neutral: float) -> bool:
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


class AutoencoderKL(Autoencoder):
    """AutoencoderKL on the network of ours: where diffusers' does not run, and FLUX.2's."""

    def __init__(self, config: AutoencoderKLConfig | Flux2VAEConfig) -> None:
        super().__init__(config)
        architecture, weights = self._read()
        network = _KL.AutoencoderKLNetwork(architecture)
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        require_same_names(f"ae.from_pretrained = {config.from_pretrained}", shapes, weights)
        framework.runtime.load_arrays(network, weights)
        self.network = framework.runtime.prepare_frozen(network, config.dtype)
        framework.runtime.jit_forward(self.network.encoder)
        framework.runtime.jit_forward(self.network.decoder)

    def _read(self) -> tuple[KLArchitecture, dict[str, np.ndarray]]:
        return read_autoencoder_kl(self.config)

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with framework.ops.no_grad(), framework.runtime.autocast(False):  # (by ``ae.dtype``, not --bf16)
            moments = framework.ops.to_float32(self.network(images))  # (B, 2 C, h, w)
            mean, log_variance = framework.ops.chunk(moments, 2, 1)  # 2 x (B, C, h, w)
            return mean, framework.ops.exp(0.5 * framework.ops.clamp(log_variance, -30.0, 20.0))

    def decode(self, scaled_latents: Tensor) -> Tensor:
        with framework.ops.no_grad(), framework.runtime.autocast(False):
            return framework.ops.to_float32(self._decoded(self.raw(scaled_latents)))

    def _decoded(self, raw: Tensor) -> Tensor:
        return self.network.decode(raw)


class AutoencoderKLFlux2(AutoencoderKL):
    """FLUX.2's, which cuts latents into patches of 2 x 2; its config has their mean and std (``scale``)."""

    def _read(self) -> tuple[KLArchitecture, dict[str, np.ndarray]]:
        architecture, weights = super()._read()
        return architecture, {name: array for name, array in weights.items() if not name.startswith("bn.")}

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = super().moments(images)  # (B, C, H, W) each
        return _in_patches(mean), _in_patches(std)

    def _decoded(self, raw: Tensor) -> Tensor:
        return super()._decoded(_JOINT.unpack(_LAYERS.to_tokens(raw), *raw.shape[2:]))


def _in_patches(x: Tensor) -> Tensor:
    B, C, H, W = x.shape
    return framework.ops.reshape(framework.ops.permute(_JOINT.pack(x), (0, 2, 1)), (B, 4 * C, H // 2, W // 2))


_DIFFUSERS = lazy_module("mindspeed_mm_dit.models.pytorch_encoders")
_KL = lazy_module("mindspeed_mm_dit.models.autoencoder_kl")
_JOINT, _LAYERS = lazy_module("mindspeed_mm_dit.models.joint"), lazy_module("mindspeed_mm_dit.models.layers")


PIXEL = AutoencoderSpec(PixelConfig, PixelAutoencoder)
AUTOENCODER_KL = AutoencoderSpec(
    AutoencoderKLConfig, lambda config: (_DIFFUSERS.AutoencoderKL if active() == "pytorch" else AutoencoderKL)(config)
)
FLUX2_VAE = AutoencoderSpec(Flux2VAEConfig, AutoencoderKLFlux2)
WAN_VIDEO_VAE = AutoencoderSpec(WanVAEConfig, lambda config: _DIFFUSERS.AutoencoderKLWan(config))
QWEN_IMAGE_VAE = AutoencoderSpec(QwenImageVAEConfig, lambda config: _DIFFUSERS.AutoencoderKLQwenImage(config))
AUTOENCODER_TINY = AutoencoderSpec(AutoencoderTinyConfig, lambda config: _DIFFUSERS.DiffusersAutoencoder(config))
AUTOENCODER_DC = AutoencoderSpec(AutoencoderDCConfig, lambda config: _DIFFUSERS.DiffusersAutoencoder(config))
