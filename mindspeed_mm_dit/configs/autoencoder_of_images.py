"""Section ``ae`` for diffusers' image autoencoders, and what their config.json says about the latents.

AutoencoderKL has a posterior to draw latents from; the others are deterministic: each image has one latent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm_dit.configs.autoencoder import (
    SCALE,
    LatentScale,
    PretrainedAutoencoderConfig,
    Shape,
    Told,
    check_scale,
    check_statistics,
    divided,
    read_facts,
)
from mindspeed_mm_dit.configs.limits import check_path, require_positive
from mindspeed_mm_dit.errors import ConfigError

_PARAMETERS = 83_653_863
"""Number of parameters of Stable Diffusion's autoencoder (8x, 4 channels)."""
_WIDTH, _LIVE = 128, 4
"""Its widest feature map has the image's size and this many channels; this many such maps are alive at once."""


class ImageAutoencoderConfig(PretrainedAutoencoderConfig):
    """Base of the image autoencoders."""

    scaling_factor: float
    shift_factor: float

    def __post_init__(self) -> None:
        check_path("ae.from_pretrained", self.from_pretrained)
        require_positive(self, "ae", "latent_channels", "downsample_factor")
        check_scale(self.scaling_factor, self.shift_factor)

    def latent_shape(self, size: Shape) -> Shape:
        return self.latent_channels, *divided(size, self.downsample_factor)

    def sample_size(self, latent: Shape) -> Shape:
        return tuple(side * self.downsample_factor for side in latent[1:])


@dataclass(frozen=True)
class AutoencoderKLConfig(ImageAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_kl": diffusers' AutoencoderKL, frozen."""

    from_pretrained: str
    """Local diffusers folder (config.json and weights), or one .safetensors/.bin/.pt/.ckpt file of it."""
    scaling_factor: float = 0.18215
    """Latents are multiplied by this before diffusion, to have about unit variance. If left out, it is read from the
    autoencoder's config.json, like the two sizes below."""
    latent_channels: int = 4
    downsample_factor: int = 8
    sample_posterior: bool = True
    """Train on a draw from the posterior (as published) or, if false, on its mean."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    model_id: str = "autoencoder_kl"
    shift_factor: float = 0.0
    """Subtracted from the latents before they are multiplied, as in SD3 and FLUX. If left out, it is read from
    config.json."""
    latents_mean: tuple[float, ...] | None = None
    """Mean of each channel, subtracted instead of ``shift_factor``, as in VA-VAE and Playground v2.5. If left out, it
    is read from config.json."""
    latents_std: tuple[float, ...] | None = None
    """Standard deviation of each channel; latents are divided by it. If left out, it is read from config.json."""

    diffusers_class, weight_name = "AutoencoderKL", "decoder.conv_in.weight"
    looked_up = ("latent_channels", "downsample_factor", *SCALE)
    example = "stabilityai/sd-vae-ft-ema"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_statistics(self.latents_mean, self.latents_std, self.latent_channels)
        if self.latents_mean and self.shift_factor:
            raise ConfigError("ae.latents_mean, shift_factor", "both would be taken away", "keep one of the two")

    @property
    def samples_posterior(self) -> bool:
        return self.sample_posterior

    def scale(self) -> LatentScale:
        return LatentScale(self.latents_mean or self.shift_factor, self.scaling_factor, self.latents_std or 1.0)

    def weight_bytes(self) -> int:
        """Return the bytes of Stable Diffusion's autoencoder."""
        return _PARAMETERS * self._element_bytes

    def workspace_bytes(self, size: Shape) -> int:
        """Return the bytes of the widest feature maps of one image."""
        return _LIVE * _WIDTH * math.prod(size) * self._element_bytes

    @property
    def _element_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    @classmethod
    def told_by(cls, path: Path, where: str) -> dict[str, Told]:
        return read_facts(LatentFacts, path, where, cls.diffusers_class).settings()


@dataclass(frozen=True)
class LatentFacts:
    """The keys of diffusers' config.json that describe the latents; null if it does not have them."""

    block_out_channels: tuple[int, ...] | None = None
    """Width of each level; each level after the first halves height and width."""
    encoder_block_out_channels: tuple[int, ...] | None = None
    """The same of the autoencoders without a posterior."""
    latent_channels: int | None = None
    """Channels of a latent."""
    scaling_factor: float | None = None
    """Latents are multiplied by this before diffusion, to have about unit variance."""
    shift_factor: float | None = None
    """Subtracted from the latents before that."""
    latents_mean: tuple[float, ...] | None = None
    """Mean of each channel, subtracted instead of ``shift_factor``."""
    latents_std: tuple[float, ...] | None = None
    """Standard deviation of each channel, which latents are divided by."""

    def settings(self) -> dict[str, Told]:
        """Return the settings of section ``ae`` that config.json has, by their names in model.json."""
        widths = self.encoder_block_out_channels or self.block_out_channels
        told = {"downsample_factor": 2 ** (len(widths) - 1) if widths else None}
        told |= {name: getattr(self, name) for name in ("latent_channels", *SCALE)}
        return {name: value for name, value in told.items() if value is not None}


@dataclass(frozen=True)
class DeterministicAutoencoderConfig(ImageAutoencoderConfig):
    """Base of the autoencoders without a posterior."""

    from_pretrained: str
    """Local diffusers folder: weights, and config.json, which supplies the settings below that are left out."""
    scaling_factor: float = 1.0
    """Latents are multiplied by this before diffusion."""
    latent_channels: int = 4
    downsample_factor: int = 8
    shift_factor: float = 0.0
    """Subtracted from the latents before they are multiplied."""
    dtype: Literal["fp32", "bf16"] = "fp32"

    samples_posterior = False
    frameworks = ("pytorch",)
    looked_up = ("scaling_factor", "latent_channels", "downsample_factor", "shift_factor")

    def scale(self) -> LatentScale:
        return LatentScale(self.shift_factor, self.scaling_factor)

    @classmethod
    def told_by(cls, path: Path, where: str) -> dict[str, Told]:
        """Return the settings in config.json, with diffusers' defaults for those it does not have."""
        told = read_facts(LatentFacts, path, where, cls.diffusers_class).settings()
        return {name: told.get(name, getattr(cls, name)) for name in cls.looked_up}


@dataclass(frozen=True)
class AutoencoderTinyConfig(DeterministicAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_tiny": TAESD and similar small substitutes for larger ones."""

    model_id: Literal["autoencoder_tiny"] = "autoencoder_tiny"

    diffusers_class, weight_name, example = "AutoencoderTiny", "decoder.layers.0.weight", "madebyollin/taesd"


@dataclass(frozen=True)
class AutoencoderDCConfig(DeterministicAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_dc": the deep-compression autoencoder (Chen et al. 2024).

    Its latents are 32 times smaller in height and width.
    """

    latent_channels: int = 32
    downsample_factor: int = 32
    model_id: Literal["autoencoder_dc"] = "autoencoder_dc"

    diffusers_class, weight_name = "AutoencoderDC", "encoder.conv_in.weight"
    example = "mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers"
