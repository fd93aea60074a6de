"""Section ``ae`` for diffusers' image autoencoders, and the keys of their config.json that describe the latents.

AutoencoderKL has a posterior that latents are sampled from; the others are deterministic: each image has one latent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import (
    SCALE,
    ConfigValue,
    LatentScale,
    PretrainedAutoencoderConfig,
    Shape,
    check_scale,
    check_statistics,
    config_file,
    divided,
    read_facts,
)
from mindspeed_mm_dit.configs.files import UnusableFile, read_floats
from mindspeed_mm_dit.configs.limits import check_path, require_positive
from mindspeed_mm_dit.errors import CheckpointError, ConfigError

_PARAMETERS = 83_653_863
"""Number of parameters of Stable Diffusion's autoencoder (8x, 4 channels)."""
_WIDTH, _LIVE = 128, 4
"""Channels of its widest feature maps, which have the image's size, and how many of them are alive at once."""


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
    """Train on a sample of the posterior (as published) or, if false, on its mean."""
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
            raise ConfigError("ae.latents_mean, shift_factor", "both would be subtracted", "keep one of the two")

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
    def settings_from_config(cls, path: Path, where: str) -> dict[str, ConfigValue]:
        return read_facts(LatentFacts, path, where, cls.diffusers_class).settings()


@dataclass(frozen=True)
class LatentFacts:
    """The keys of diffusers' config.json that describe the latents; null if it does not have them."""

    block_out_channels: tuple[int, ...] | None = None
    """Width of each level; each level after the first halves height and width."""
    encoder_block_out_channels: tuple[int, ...] | None = None
    """The same, for autoencoders without a posterior."""
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

    def settings(self) -> dict[str, ConfigValue]:
        """Return the settings of section ``ae`` that config.json has, by their names in model.json."""
        widths = self.encoder_block_out_channels or self.block_out_channels
        settings = {"downsample_factor": 2 ** (len(widths) - 1) if widths else None}
        settings |= {name: getattr(self, name) for name in ("latent_channels", *SCALE)}
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class Flux2VAEConfig(ImageAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "flux2_vae": diffusers' AutoencoderKLFlux2, frozen.

    Latents are patches of 2 x 2, normalised by the mean and variance of each channel, which are among its weights.
    """

    from_pretrained: str
    """Local diffusers folder (config.json and weights), or its .safetensors file."""
    latent_channels: int = 128
    """Channels of a latent: four times those of the autoencoder. If left out, read from config.json, as is the next."""
    downsample_factor: int = 16
    """Height of an image divided by height of its latent."""
    sample_posterior: bool = False
    """Train on a sample of the posterior or, if false, on its mean, as diffusers' script does."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the autoencoder runs."""
    model_id: Literal["flux2_vae"] = "flux2_vae"
    """Kind of autoencoder."""

    scaling_factor, shift_factor = 1.0, 0.0
    diffusers_class, weight_name = "AutoencoderKLFlux2", "bn.running_mean"
    looked_up = ("latent_channels", "downsample_factor")
    example = "the vae/ of black-forest-labs/FLUX.2-dev"

    @property
    def samples_posterior(self) -> bool:
        return self.sample_posterior

    @classmethod
    def settings_from_config(cls, path: Path, where: str) -> dict[str, ConfigValue]:
        facts = read_facts(_Flux2Facts, path, where, cls.diffusers_class)
        return {"latent_channels": 4 * facts.latent_channels, "downsample_factor": 2 ** len(facts.block_out_channels)}

    def scale(self) -> LatentScale:
        """Return the scaling by the statistics among the weights; raises CheckpointError if they are damaged."""
        file = self.weight_file()
        facts = read_facts(_Flux2Facts, config_file(self.from_pretrained), "ae", self.diffusers_class)
        try:
            mean, variance = (read_floats(file, f"bn.running_{name}") for name in ("mean", "var"))
        except UnusableFile as problem:
            raise CheckpointError(
                f"ae.from_pretrained = {file}", str(problem), "copy or download the file again"
            ) from None
        std = np.sqrt(variance + np.float32(facts.batch_norm_eps))
        check_statistics(mean.tolist(), std.tolist(), self.latent_channels)
        return LatentScale(shift=tuple(mean.tolist()), std=tuple(std.tolist()))


@dataclass(frozen=True)
class _Flux2Facts:
    """The keys of diffusers' config.json that describe the latents, with diffusers' defaults."""

    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    """Width of each level; each level after the first halves height and width."""
    latent_channels: int = 32
    """Channels before latents are cut into patches."""
    batch_norm_eps: float = 1e-4
    """Added to the variance of each channel."""
    patch_size: tuple[Literal[2], Literal[2]] = (2, 2)
    """Height and width of a patch."""


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
    def settings_from_config(cls, path: Path, where: str) -> dict[str, ConfigValue]:
        """Return the settings in config.json, with diffusers' defaults for those it does not have."""
        settings = read_facts(LatentFacts, path, where, cls.diffusers_class).settings()
        return {name: settings.get(name, getattr(cls, name)) for name in cls.looked_up}


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
