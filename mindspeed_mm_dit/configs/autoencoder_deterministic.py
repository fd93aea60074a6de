"""Section ``ae`` with an autoencoder of diffusers that has no posterior: an image has one latent, and none is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm_dit.configs.autoencoder import (
    LatentScale,
    PretrainedAutoencoderConfig,
    Shape,
    check_scale,
    divided,
    read_facts,
)
from mindspeed_mm_dit.configs.limits import check_path, require_positive


@dataclass(frozen=True)
class DeterministicAutoencoderConfig(PretrainedAutoencoderConfig):
    """What both have in common."""

    from_pretrained: str
    """Local diffusers folder: config.json, which also says what is left out below, and weights."""
    scaling_factor: float = 1.0
    """Latents are multiplied by this before diffusion."""
    latent_channels: int = 4
    """Channels of a latent."""
    downsample_factor: int = 8
    """Height of an image over height of its latent."""
    shift_factor: float = 0.0
    """Taken away from the latents before they are multiplied."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the autoencoder runs."""

    samples_posterior = False
    frameworks = ("pytorch",)
    looked_up = ("scaling_factor", "latent_channels", "downsample_factor", "shift_factor")

    def __post_init__(self) -> None:
        check_path("ae.from_pretrained", self.from_pretrained)
        require_positive(self, "ae", "latent_channels", "downsample_factor")
        check_scale(self.scaling_factor, self.shift_factor)

    def latent_shape(self, size: Shape) -> Shape:
        return self.latent_channels, *divided(size, self.downsample_factor)

    def sample_size(self, latent: Shape) -> Shape:
        return tuple(side * self.downsample_factor for side in latent[1:])

    def scale(self) -> LatentScale:
        return LatentScale(self.shift_factor, self.scaling_factor)

    @classmethod
    def told_by(cls, path: Path, where: str) -> dict[str, int | float]:
        """Return what config.json says, with diffusers' defaults where it is silent."""
        facts = read_facts(_Facts, path, where, cls.diffusers_class)
        widths, channels = facts.encoder_block_out_channels, facts.latent_channels
        return {
            "downsample_factor": cls.downsample_factor if widths is None else 2 ** (len(widths) - 1),
            "latent_channels": cls.latent_channels if channels is None else channels,
            "scaling_factor": facts.scaling_factor,
            "shift_factor": facts.shift_factor,
        }


@dataclass(frozen=True)
class _Facts:
    """The keys of diffusers' config.json that decide what latents are; null where the class has its own default."""

    encoder_block_out_channels: tuple[int, ...] | None = None
    """Width of each level; each level after the first halves height and width."""
    latent_channels: int | None = None
    """Channels of a latent."""
    scaling_factor: float = 1.0
    """Latents are multiplied by this before diffusion."""
    shift_factor: float = 0.0
    """Subtracted from the latents before that."""


@dataclass(frozen=True)
class AutoencoderTinyConfig(DeterministicAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_tiny": TAESD and its like, small stand-ins for larger ones."""

    model_id: Literal["autoencoder_tiny"] = "autoencoder_tiny"
    """Key in AE_MODEL_MAPPINGS."""

    diffusers_class, weight_name, example = "AutoencoderTiny", "decoder.layers.0.weight", "madebyollin/taesd"


@dataclass(frozen=True)
class AutoencoderDCConfig(DeterministicAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_dc": the deep-compression autoencoder (Chen et al. 2024), 32 times
    smaller in height and width."""

    latent_channels: int = 32
    """Channels of a latent."""
    downsample_factor: int = 32
    """Height of an image over height of its latent."""
    model_id: Literal["autoencoder_dc"] = "autoencoder_dc"
    """Key in AE_MODEL_MAPPINGS."""

    diffusers_class, weight_name = "AutoencoderDC", "encoder.conv_in.weight"
    example = "mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers"
