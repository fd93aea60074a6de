"""Section ``ae`` of model.json for Wan's video autoencoder, and the keys of its config.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mindspeed_mm_dit.configs.autoencoder import (
    LatentScale,
    PretrainedAutoencoderConfig,
    Shape,
    config_file,
    divided,
    read_facts,
)
from mindspeed_mm_dit.configs.limits import check_between, check_path
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class TilingParam:
    """Section ``tiling_param``: how large frames are split into overlapping tiles, in pixels, multiples of 8."""

    tile_sample_min_height: int = 256
    """Height of a tile, in pixels; frames up to this height are not split."""
    tile_sample_min_width: int = 256
    """Width of a tile, in pixels; frames up to this width are not split."""
    tile_sample_stride_height: int = 192
    """Pixels from the top of one tile to the top of the next; where tiles overlap they are blended. At least 1, at most
    the height of a tile."""
    tile_sample_stride_width: int = 192
    """Pixels from the left of one tile to the left of the next. At least 1, at most the width of a tile."""

    def __post_init__(self) -> None:
        for side in ("height", "width"):
            tile, stride = getattr(self, f"tile_sample_min_{side}"), getattr(self, f"tile_sample_stride_{side}")
            if not 1 <= stride <= tile:
                raise ConfigError(
                    f"ae.tiling_param.tile_sample_stride_{side} = {stride}",
                    f"must be at least 1 and at most tile_sample_min_{side} = {tile}, or tiles leave gaps",
                    "MindSpeed-MM's examples have 192 of 256",
                )


@dataclass(frozen=True)
class WanVAEConfig(PretrainedAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "wan_video_vae": diffusers' AutoencoderKLWan, frozen."""

    from_pretrained: str
    """Local diffusers folder: config.json and weights."""
    latent_channels: int = 16
    spatial_factor: int = 8
    """Height of a frame divided by height of its latent."""
    temporal_factor: int = 4
    """Frames per latent frame; the first latent frame encodes a single frame."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    do_sample: bool = False
    """Train on a sample of the posterior or, if false, on its mean, as Wan does."""
    enable_tiling: bool = False
    """Encode and decode large frames in tiles. This needs less memory and changes the result slightly."""
    tiling_param: dict | None = field(default=None, hash=False)
    """Keys of :class:`TilingParam`; null for its defaults."""
    norm_latents: Literal[True] = True
    """Normalise the latents; MindSpeed-MM's key, which must be true here."""
    norm_mode: Literal["channel_specified_shift_scale"] = "channel_specified_shift_scale"
    """Normalise by the mean and standard deviation of each channel, from the autoencoder's config.json."""
    model_id: Literal["wan_video_vae"] = "wan_video_vae"
    """MindSpeed-MM's name for it."""

    pixel_axes = (3,)
    frameworks = ("pytorch",)
    diffusers_class, weight_name = "AutoencoderKLWan", "decoder.conv_in.weight"
    looked_up = ("latent_channels", "spatial_factor", "temporal_factor")
    example = "the vae/ of Wan-AI/Wan2.1-T2V-1.3B-Diffusers"

    def __post_init__(self) -> None:
        check_path("ae.from_pretrained", self.from_pretrained)
        for name in ("latent_channels", "spatial_factor", "temporal_factor"):
            check_between(f"ae.{name}", getattr(self, name), 1, 4096)
        self.tiling()

    @property
    def samples_posterior(self) -> bool:
        return self.do_sample

    def tiling(self) -> TilingParam:
        """Return the tiling settings; raises ConfigError for invalid ones."""
        return from_mapping(TilingParam, self.tiling_param or {}, "ae: tiling_param")

    def latent_shape(self, size: Shape) -> Shape:
        """Return the shape (C, f, h, w) of the latents of a video (F, H, W): F frames of H x W pixels.

        Raises:
            ConfigError: the autoencoder would drop frames, or height or width is not a multiple of its factor.
        """
        frames = size[0]
        if left := (frames - 1) % self.temporal_factor:
            raise ConfigError(
                f"dataset_param.num_frames = {frames}",
                f"the autoencoder encodes one frame, then {self.temporal_factor} at a time, and would drop the last "
                f"{left}",
                f"use {frames - left} or {frames - left + self.temporal_factor}",
            )
        f = (frames - 1) // self.temporal_factor + 1
        return self.latent_channels, f, *divided(size, self.spatial_factor)

    def sample_size(self, latent: Shape) -> Shape:
        _, frames, height, width = latent
        return 1 + (frames - 1) * self.temporal_factor, height * self.spatial_factor, width * self.spatial_factor

    @property
    def downsample_factor(self) -> int:  # type: ignore[override]
        """Height of a frame divided by height of its latent."""
        return self.spatial_factor

    def scale(self) -> LatentScale:
        """Return the scaling by mean and standard deviation of each channel, from the autoencoder's config.json."""
        facts = read_latent_facts(self)
        return LatentScale(shift=facts.latents_mean, std=facts.latents_std)

    def identity(self) -> str:
        """Return the digest of its files, its precision and its tiles."""
        tiles = f", tiles {tuple(dataclasses.asdict(self.tiling()).values())}" if self.enable_tiling else ""
        return f"{super().identity()}{tiles}"

    @classmethod
    def settings_from_config(cls, path: Path, where: str) -> dict[str, int | float]:
        """Return channels and factors from config.json; raises ConfigError if its statistics are damaged."""
        return _read(path, where, cls.diffusers_class).settings()


@dataclass(frozen=True)
class QwenImageVAEConfig(WanVAEConfig):
    """Section ``ae`` with ``model_id`` "qwen_image_vae": diffusers' AutoencoderKLQwenImage, frozen; an image is a video
    of one frame."""

    model_id: Literal["qwen_image_vae"] = "qwen_image_vae"  # type: ignore[assignment]

    pixel_axes = (2,)
    diffusers_class = "AutoencoderKLQwenImage"
    example = "the vae/ of Qwen/Qwen-Image"

    def latent_shape(self, size: Shape) -> Shape:
        """Return the shape (C, h, w) of the latents of an image (H, W).

        Raises ConfigError if height or width is not a multiple of its factor.
        """
        return self.latent_channels, *divided(size, self.spatial_factor)

    def sample_size(self, latent: Shape) -> Shape:
        return tuple(side * self.spatial_factor for side in latent[1:])


@dataclass(frozen=True)
class WanLatentFacts:
    """The keys of diffusers' config.json that describe the latents, with diffusers' defaults."""

    latents_mean: tuple[float, ...]
    """Mean of each channel over the autoencoder's training data."""
    latents_std: tuple[float, ...]
    """Standard deviation of each channel."""
    z_dim: int = 16
    """Channels of a latent."""
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    """Width of each level; each level after the first halves height and width."""
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    """For each level after the first, whether it halves the number of frames too."""
    patch_size: int | None = None
    """Height and width of the patches that become channels before the first level."""

    def settings(self) -> dict[str, int | float]:
        """Return the settings of section ``ae`` in config.json. (diffusers ignores its ``scale_factor_*``.)"""
        spatial = 2 ** (len(self.dim_mult) - 1) * (self.patch_size or 1)
        temporal = 2 ** sum(self.temperal_downsample[: len(self.dim_mult) - 1])
        return {"latent_channels": self.z_dim, "spatial_factor": spatial, "temporal_factor": temporal}


def read_latent_facts(config: WanVAEConfig) -> WanLatentFacts:
    """Read the autoencoder's config.json; no weights are read.

    Raises:
        ConfigError: it is missing, belongs to another autoencoder, or contradicts model.json.
    """
    facts = _read(config_file(config.from_pretrained), "ae", config.diffusers_class)
    config.spelled_out(dataclasses.asdict(config))
    return facts


def _read(path: Path, where: str, diffusers_class: str) -> WanLatentFacts:
    facts = read_facts(WanLatentFacts, path, where, diffusers_class)
    if not len(facts.latents_mean) == len(facts.latents_std) == facts.z_dim or min(facts.latents_std) <= 0:
        raise ConfigError(
            f"{path}: latents_mean, latents_std",
            f"must be {facts.z_dim} numbers each, and the latter positive",
            "copy the autoencoder again",
        )
    return facts
